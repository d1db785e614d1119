"""Collect: a step's episodes, what its rules need measured, and what each turn is paid."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.batch import Row
from rl.credit import Credit, CreditSummary, Group, Needs, correlation, summarise
from rl.reread import Reading, measure, shape_of, twice
from rl.rules import CREDITS
from rollout.distribution import Sampling
from rollout.episode import Episode, EpisodePlan
from rollout.play import play_graded
from rollout.policy import Policy
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
        return f"{self.task.arm}-{self.credit}-{self.seed}"


@dataclass(frozen=True)
class Settings:
    """How a step is collected: `episodes` a problem, `draws` of each re-reading, `rows_at_once` that are scored."""

    episodes: int
    draws: int
    rows_at_once: int
    sampling: Sampling


@dataclass(frozen=True)
class Collected:
    """One cell's step: `episodes_PG`, their groups and credit by problem, the rows to train and the diagnostics."""

    episodes_PG: list[list[Episode]]
    groups_P: list[Group]
    credits_P: list[Credit]
    rows: list[Row]
    summary: CreditSummary


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


def play_step(
    policy: Policy,
    grader: Grader,
    cells: Sequence[Cell],
    problems_XP: Sequence[Sequence[Problem]],
    step: int,
    settings: Settings,
) -> list[list[list[Episode]]]:
    """Play and grade every cell's problems: `episodes[cell][problem][episode]`."""
    size = settings.episodes
    plans_XE = [
        [
            EpisodePlan(cell.task, problem, episode, cell.seed, step, (1.0,) * len(cell.task.agents))
            for problem in problems
            for episode in range(size)
        ]
        for cell, problems in zip(cells, problems_XP, strict=True)
    ]
    episodes_XE = play_graded(policy, grader, plans_XE, settings.sampling)
    return [[episodes[i : i + size] for i in range(0, len(episodes), size)] for episodes in episodes_XE]


def credit_step(
    policy: Policy,
    grader: Grader,
    cells: Sequence[Cell],
    episodes_XPG: list[list[list[Episode]]],
    progress: float,
    settings: Settings,
) -> list[Collected]:
    """Measure what the cells' rules need on other boards, and pay every turn."""
    readings_X = [
        reading_of(cell, episodes_PG, CREDITS[cell.credit].needs)
        for cell, episodes_PG in zip(cells, episodes_XPG, strict=True)
    ]
    measured_X = measure(policy, grader, readings_X, settings.draws, settings.sampling, settings.rows_at_once)
    return [
        pay(cell, episodes_PG, progress, measured)
        for cell, episodes_PG, measured in zip(cells, episodes_XPG, measured_X, strict=True)
    ]


def reading_of(cell: Cell, episodes_PG: list[list[Episode]], needs: Needs) -> Reading:
    """What must be measured for a cell's rule on these episodes."""
    return Reading(cell.task, [episode for group in episodes_PG for episode in group], needs)


def pay(
    cell: Cell, episodes_PG: list[list[Episode]], progress: float = 0.0, measured: np.ndarray | None = None
) -> Collected:
    """Credit for one cell's groups, as rows in the order problem, episode, turn.

    `measured` [P * G, U, 2^notes]: see rl.reread.
    """
    groups_P = groups_of(cell.task, episodes_PG, progress, measured)
    credits_P = [CREDITS[cell.credit].pay(group) for group in groups_P]
    rows = [
        Row(utterance, float(credit.advantage_GU[g, utterance.turn]), cell.task.turns[utterance.turn].max_tokens)
        for episodes, credit in zip(episodes_PG, credits_P, strict=True)
        for g, episode in enumerate(episodes)
        for utterance in episode.utterances
    ]
    return Collected(episodes_PG, groups_P, credits_P, rows, summarise(groups_P, credits_P))


def groups_of(
    task: Task, episodes_PG: list[list[Episode]], progress: float, measured: np.ndarray | None
) -> list[Group]:
    """The grades of each problem's episodes as arrays, and what was measured of them."""
    groups, start, shape = [], 0, shape_of(task)
    for episodes in episodes_PG:
        correct_GU = np.array([[np.nan if u.correct is None else u.correct for u in e.utterances] for e in episodes])
        by_board = None if measured is None else measured[start : start + len(episodes)]
        groups.append(shape._replace(correct_GU=correct_GU, progress=progress, by_board_GUS=by_board))
        start += len(episodes)
    return groups


def reliability(
    policy: Policy, grader: Grader, cells: Sequence[Cell], collected_X: Sequence[Collected], settings: Settings
) -> list[float | None]:
    """Split-half reliability of each cell's note credit: the correlation, over all notes of the step, of the credit
    from two independent re-readings of the same notes. 0 means that the rule is noise. None: chats, rules that pay
    notes nothing, or credit that doesn't vary. Costs two readings of every board and twice the rule's own re-readings.
    """
    asked_X = [CREDITS[cell.credit].boards and CREDITS[cell.credit].varies for cell in cells]
    if not any(asked_X):
        return [None] * len(cells)
    readings_X = [
        reading_of(cell, got.episodes_PG if asked else [], CREDITS[cell.credit].needs)
        for cell, got, asked in zip(cells, collected_X, asked_X, strict=True)
    ]
    halves = twice(policy, grader, readings_X, settings.draws, settings.sampling)
    found: list[float | None] = []
    for x, (cell, got) in enumerate(zip(cells, collected_X, strict=True)):
        credit = [note_credit(cell, got.groups_P, *half[x]) for half in halves] if asked_X[x] else None
        found.append(None if credit is None else correlation(*credit))
    return found


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
