"""Collect: which problems a step plays, what its rules need measured, and what each turn is paid.

The episodes themselves are drawn by rl.draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.batch import Row
from rl.credit import ChatOptions, Credit, CreditSummary, Group, Needs, correlation, summarise
from rl.prefix import continue_from
from rl.reread import NOTHING, Measured, Reading, correct_of, measure, shape_of, twice
from rl.rules import CREDITS
from rollout.distribution import Sampling
from rollout.episode import Episode
from rollout.policy import Policy
from rollout.setup import cell_name
from tasks.base import Problem, Task
from tasks.grading import Grader


@dataclass(frozen=True)
class Cell:
    """One training run of a study: an arm, a credit rule and a seed."""

    task: Task
    credit: str
    seed: int

    @property
    def name(self) -> str:
        return cell_name(self.task, self.credit, self.seed)


@dataclass(frozen=True)
class Settings:
    """How a step is collected: `episodes` a problem and round, `draws` of each re-reading or continuation, `chat`:
    choices of the chat rules."""

    episodes: int
    draws: int
    sampling: Sampling
    chat: ChatOptions = ChatOptions()


@dataclass(frozen=True)
class Collected:
    """One cell's step: `episodes_PG`, their groups and credit by problem, the rows to train and the diagnostics;
    `measured_tokens`: sampled to measure what the rule needs."""

    episodes_PG: list[list[Episode]]
    groups_P: list[Group]
    credits_P: list[Credit]
    rows: list[Row]
    summary: CreditSummary
    measured_tokens: int = 0


def problems_at(
    problems: Sequence[Problem], seed: int, data_seed: int, step: int, problems_per_step: int
) -> list[Problem]:
    """The problems of one step of one seed: pass after pass over all of them, each pass in its own order.

    A function of the step alone, so a resumed run neither skips nor repeats a problem.
    """
    chosen = []
    for index in range(step * problems_per_step, (step + 1) * problems_per_step):
        epoch, place = divmod(index, len(problems))
        order = np.random.default_rng([data_seed, seed, epoch]).permutation(len(problems))
        chosen.append(problems[order[place]])
    return chosen


def credit_step(
    policy: Policy,
    grader: Grader,
    cells: Sequence[Cell],
    episodes_XPG: list[list[list[Episode]]],
    progress: float,
    settings: Settings,
) -> list[Collected]:
    """Measure what the cells' rules need on other boards or from prefixes, and pay every turn."""
    readings_X = [
        reading_of(cell, episodes_PG, CREDITS[cell.credit].needs)
        for cell, episodes_PG in zip(cells, episodes_XPG, strict=True)
    ]
    boards_X = measure(policy, grader, readings_X, settings.draws, settings.sampling)
    prefixes_X = continue_from(policy, grader, _by_prefix(readings_X), settings.draws, 0, settings.sampling)
    return [
        pay(cell, episodes_PG, settings, progress, prefixes if boards is NOTHING else boards)
        for cell, episodes_PG, boards, prefixes in zip(cells, episodes_XPG, boards_X, prefixes_X, strict=True)
    ]


def _by_prefix(readings_X: Sequence[Reading]) -> list[Reading]:
    """The readings without the episodes of those that don't ask for prefixes."""
    return [r if r.needs is Needs.PREFIXES else r._replace(episodes=[]) for r in readings_X]


def reading_of(cell: Cell, episodes_PG: list[list[Episode]], needs: Needs) -> Reading:
    """What must be measured for a cell's rule on these episodes."""
    return Reading(cell.task, [episode for group in episodes_PG for episode in group], needs)


def pay(
    cell: Cell,
    episodes_PG: list[list[Episode]],
    settings: Settings,
    progress: float = 0.0,
    measured: Measured = NOTHING,
) -> Collected:
    """Credit for one cell's groups, as rows in the order problem, episode, turn; episodes not kept have none."""
    shared = shape_of(cell.task)._replace(progress=progress, first=settings.episodes, options=settings.chat)
    groups_P = groups_of(shared, episodes_PG, measured)
    credits_P = [CREDITS[cell.credit].pay(group) for group in groups_P]
    rows = [
        Row(utterance, float(credit.advantage_GU[g, utterance.turn]), cell.task.turns[utterance.turn].max_tokens)
        for episodes, credit in zip(episodes_PG, credits_P, strict=True)
        for g, episode in enumerate(episodes)
        if credit.kept[g]
        for utterance in episode.utterances
    ]
    trained_PG = [[sum(len(u.tokens) * u.trained for u in e.utterances) for e in group] for group in episodes_PG]
    summary = summarise(groups_P, credits_P, trained_PG)
    return Collected(episodes_PG, groups_P, credits_P, rows, summary, measured.tokens)


def groups_of(shared: Group, episodes_PG: list[list[Episode]], measured: Measured = NOTHING) -> list[Group]:
    """The grades of each problem's episodes as arrays, and what was measured of them; the rest is `shared`."""
    groups, start = [], 0
    for episodes in episodes_PG:
        part = slice(start, start + len(episodes))
        groups.append(
            shared._replace(
                correct_GU=correct_of(episodes),
                by_board_GUS=None if measured.by_board_EUS is None else measured.by_board_EUS[part],
                before_GU=None if measured.before_EU is None else measured.before_EU[part],
            )
        )
        start += len(episodes)
    return groups


def reliability(
    policy: Policy, grader: Grader, cells: Sequence[Cell], collected_X: Sequence[Collected], settings: Settings
) -> list[float | None]:
    """Split-half reliability of each cell's note credit, or of its turns' credit by prefixes: the correlation, over the
    step, of the credit from two independent re-readings of the same notes (continuations of the same prefixes).

    0 means that the rule is noise. None: other chat rules, rules that pay notes nothing, or credit that doesn't vary.
    Costs two readings of every board and twice the rule's own re-readings or continuations.
    """
    rules_X = [CREDITS[cell.credit] for cell in cells]
    readings_X = [
        reading_of(cell, got.episodes_PG, rule.needs)
        for cell, got, rule in zip(cells, collected_X, rules_X, strict=True)
    ]
    asked_X = [bool(cell.task.notes) and rule.varies for cell, rule in zip(cells, rules_X, strict=True)]
    noted_X = [r if asked else r._replace(episodes=[]) for r, asked in zip(readings_X, asked_X, strict=True)]
    halves: list[list[np.ndarray | None]] = [[None] * len(cells), [None] * len(cells)]
    if any(asked_X):
        for half, read_X in zip(halves, twice(policy, grader, noted_X, settings.draws, settings.sampling), strict=True):
            for x, asked in enumerate(asked_X):
                if asked:
                    half[x] = note_credit(cells[x], collected_X[x].groups_P, *read_X[x])
    by_prefix_X = _by_prefix(readings_X)
    if any(r.episodes for r in by_prefix_X):
        for part, half in enumerate(halves, start=1):
            read_X = continue_from(policy, grader, by_prefix_X, settings.draws, part, settings.sampling)
            for x, read in enumerate(read_X):
                if read.before_EU is not None:
                    half[x] = turn_credit(cells[x], collected_X[x].groups_P, read)
    return [None if a is None or b is None else correlation(a, b) for a, b in zip(*halves, strict=True)]


def turn_credit(cell: Cell, groups_P: Sequence[Group], measured: Measured) -> np.ndarray:
    """The advantages of all turns, flat, if prefixes had been worth what was `measured`."""
    out, start = [], 0
    for group in groups_P:
        again = group._replace(before_GU=measured.before_EU[start : start + len(group.correct_GU)])
        out.append(CREDITS[cell.credit].pay(again).advantage_GU.reshape(-1))
        start += len(group.correct_GU)
    return np.concatenate(out)


def note_credit(cell: Cell, groups_P: Sequence[Group], own_EU: np.ndarray, measured: np.ndarray | None) -> np.ndarray:
    """The advantages of all notes, flat, if the readers' grades had been `own_EU` [E, U] and those on other boards
    `measured` [E, U, 2^notes]; NaN and None keep the episode's own."""
    out, start = [], 0
    for group in groups_P:
        size = len(group.correct_GU)
        part = slice(start, start + size)
        again_GU = np.where(np.isnan(own_EU[part]), group.correct_GU, own_EU[part])
        by_board = group.by_board_GUS if measured is None else measured[part]
        again = group._replace(correct_GU=again_GU, by_board_GUS=by_board)
        out.append(CREDITS[cell.credit].pay(again).advantage_GU[:, group.notes_U].reshape(-1))
        start += size
    return np.concatenate(out)
