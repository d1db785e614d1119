"""What readers make of other boards: re-readings and teacher-forced scores, for the rules that need them.

A re-reading is an episode whose notes are given and whose readers are shown other sets of them; it runs in the same
batched sampler as everything else. A set of notes is an integer, bit i for the i-th note.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl.board_credit import board_of, boards_needed
from rl.credit import Group, Needs
from rollout.distribution import Sampling
from rollout.episode import Episode, EpisodePlan
from rollout.play import play_graded
from rollout.policy import Policy
from rollout.scorer import Forced, score
from tasks.base import Task
from tasks.grading import Grader

REREAD = 1 << 16
"""Re-reading k of episode e is episode e + k * REREAD in a row's key, so it shares its luck with nothing else."""

TEMPLATE = "The answer is \\boxed{"
"""What stands before the gold when it is teacher-forced."""


class Reading(NamedTuple):
    """One cell's wish: its task, its episodes with their notes, and what its rule needs."""

    task: Task
    episodes: Sequence[Episode]
    needs: Needs


class Measured(NamedTuple):
    """What was measured of one cell's E episodes: `by_board_EUS` [E, U, 2^notes] and `before_EU` [E, U] as in
    rl.credit.Group, None where it wasn't; `tokens` sampled for it."""

    by_board_EUS: np.ndarray | None = None
    before_EU: np.ndarray | None = None
    tokens: int = 0


NOTHING = Measured()


def measure(
    policy: Policy,
    grader: Grader,
    readings_X: Sequence[Reading],
    draws: int,
    sampling: Sampling,
) -> list[Measured]:
    """Per cell, what each reader makes of the boards its rule asks about."""
    boards_X = [_boards(reading.task, reading.needs) for reading in readings_X]
    forced_X = [reading.needs is Needs.EVIDENCE for reading in readings_X]
    sampled = [[] if forced else boards for boards, forced in zip(boards_X, forced_X, strict=True)]
    weighed = [boards if forced else [] for boards, forced in zip(boards_X, forced_X, strict=True)]
    grades_X = read_again(policy, grader, readings_X, sampled, draws, 0, sampling)
    evidence_X = weigh_evidence(policy, readings_X, weighed)
    return [
        NOTHING if not boards else Measured(evidence) if forced else grades
        for boards, forced, grades, evidence in zip(boards_X, forced_X, grades_X, evidence_X, strict=True)
    ]


def twice(
    policy: Policy, grader: Grader, readings_X: Sequence[Reading], draws: int, sampling: Sampling
) -> list[list[tuple[np.ndarray, np.ndarray | None]]]:
    """Two independent readings of everything sampled that a rule's note credit is made of, from the same notes.

    Per half and cell: [E, U] readers' grades on their own boards, drawn afresh, and the grades on other boards that
    `measure` gives, or None. Evidence is not sampled, so it has nothing to draw again.
    """
    needs_X = [Needs.GRADES if r.needs is Needs.EVIDENCE else r.needs for r in readings_X]
    boards_X = [_boards(r.task, needs, own=True) for r, needs in zip(readings_X, needs_X, strict=True)]
    halves = []
    for part in (1, 2):
        read_X = read_again(policy, grader, readings_X, boards_X, draws, part, sampling)
        halves.append(
            [
                (_on_own_boards(r, read.by_board_EUS), None if needs is Needs.GRADES else read.by_board_EUS)
                for r, needs, read in zip(readings_X, needs_X, read_X, strict=True)
            ]
        )
    return halves


def read_again(
    policy: Policy,
    grader: Grader,
    readings_X: Sequence[Reading],
    boards_X: Sequence[list[tuple[int, ...]]],
    draws: int,
    part: int,
    sampling: Sampling,
) -> list[Measured]:
    """Per cell `by_board_EUS`: mean grade over `draws` readings. `boards_X[x]`: tuples of a board for each reader,
    each tuple one re-reading of all readers. `part` keeps the draws of different measurements apart."""
    plans_X, places_X = [], []
    for reading, boards in zip(readings_X, boards_X, strict=True):
        plans, places = [], []
        for e, episode in enumerate(reading.episodes):
            notes = {u: episode.utterances[u] for u in reading.task.notes}
            for k, board in enumerate(boards):
                task = showing(reading.task, board)
                for draw in range(draws):
                    number = 1 + (part * len(boards) + k) * draws + draw
                    plans.append(again(episode.plan, task, number, notes))
                    places.append((e, board))
        plans_X.append(plans)
        places_X.append(places)
    played_X = play_graded(policy, grader, plans_X, sampling)
    return [
        Measured(_mean_grades(reading, places, played), tokens=fresh_tokens(played))
        for reading, places, played in zip(readings_X, places_X, played_X, strict=True)
    ]


def weigh_evidence(
    policy: Policy, readings_X: Sequence[Reading], boards_X: Sequence[list[tuple[int, ...]]]
) -> list[np.ndarray]:
    """Per cell [E, U, 2^notes]: log p(gold and the closing brace | the reader's prompt with that board, TEMPLATE)."""
    asked_X, places_X = [], []
    for reading, boards in zip(readings_X, boards_X, strict=True):
        asked, places = [], []
        for e, episode in enumerate(reading.episodes):
            for board in boards:
                task = showing(reading.task, board)
                for reader, u in enumerate(task.answers):
                    asked.append((episode, task, u))
                    places.append((e, u, board[reader]))
        asked_X.append(asked)
        places_X.append(places)
    prompts = iter(policy.text.encode([_prompt(*one) for asked in asked_X for one in asked]))
    rows_X = [[_forced(policy, *one, next(prompts)) for one in asked] for asked in asked_X]
    out = []
    for reading, places, logps in zip(readings_X, places_X, score(policy, rows_X), strict=True):
        values = _empty(reading)
        for place, logp in zip(places, logps, strict=True):
            values[place] = float(np.sum(logp, dtype=np.float64))
        out.append(values)
    return out


def showing(task: Task, board: tuple[int, ...]) -> Task:
    """The task with its r-th reader shown the set of notes `board[r]`."""
    turns = list(task.turns)
    for reader, u in enumerate(task.answers):
        shown = tuple(v for i, v in enumerate(task.notes) if board[reader] >> i & 1)
        # In the order the reader would have met them, which is that of its own reads.
        order = [v for v in task.turns[u].reads if v in shown] + [v for v in shown if v not in task.turns[u].reads]
        turns[u] = dataclasses.replace(turns[u], reads=tuple(order))
    return dataclasses.replace(task, turns=tuple(turns))


def again(plan: EpisodePlan, task: Task, number: int, notes: dict) -> EpisodePlan:
    """The `number`-th re-reading of an episode's notes."""
    return dataclasses.replace(plan, task=task, episode=plan.episode + number * REREAD, given=notes)


def fresh_tokens(episodes: Sequence[Episode]) -> int:
    """Tokens that were sampled for these episodes; what was given to them cost nothing."""
    return sum(len(u.tokens) for e in episodes for u in e.utterances if u.turn not in e.plan.given)


def correct_of(episodes: Sequence[Episode]) -> np.ndarray:
    """[G, U]: the grades of these episodes' turns, NaN where a turn has none."""
    return np.array([[np.nan if u.correct is None else u.correct for u in e.utterances] for e in episodes])


def shape_of(task: Task, episodes: Sequence[Episode] = ()) -> Group:
    """Episodes of a task as a group; without any, one whose grades are still to be filled in."""
    return Group(
        correct_GU=correct_of(episodes) if episodes else np.zeros((1, len(task.turns))),
        reads_UU=task.reads_UU,
        notes_U=np.array([turn.note for turn in task.turns]),
        round_U=np.array([turn.round for turn in task.turns]),
    )


def _boards(task: Task, needs: Needs, own: bool = False) -> list[tuple[int, ...]]:
    """Tuples of a board for each reader that together cover what is needed of every reader (and its own, if `own`)."""
    group = shape_of(task)
    needed = []
    for u in task.answers:
        boards, full = boards_needed(group, u, needs), board_of(group, u)
        needed.append([full, *(b for b in boards if b != full)] if own else boards)
    most = max(map(len, needed))
    # A reader with fewer boards than another reads its last one again, and its mean is over more draws.
    return [tuple(boards[min(k, len(boards) - 1)] for boards in needed) for k in range(most)] if most else []


def _empty(reading: Reading) -> np.ndarray:
    return np.full((len(reading.episodes), len(reading.task.turns), 1 << len(reading.task.notes)), np.nan)


def _mean_grades(reading: Reading, places: list, played: Sequence[Episode]) -> np.ndarray:
    values, counts = np.nan_to_num(_empty(reading)), np.zeros(_empty(reading).shape)
    for (e, board), episode in zip(places, played, strict=True):
        for reader, u in enumerate(reading.task.answers):
            values[e, u, board[reader]] += episode.utterances[u].correct
            counts[e, u, board[reader]] += 1
    return np.where(counts > 0, values / np.maximum(counts, 1), np.nan)


def _on_own_boards(reading: Reading, values: np.ndarray) -> np.ndarray:
    group, own = shape_of(reading.task), np.full(values.shape[:2], np.nan)
    for u in reading.task.answers:
        own[:, u] = values[:, u, board_of(group, u)]
    return own


def _prompt(episode: Episode, task: Task, u: int) -> list[dict[str, str]]:
    """What reader u is told, for the chat template."""
    return task.render(episode.plan.problem, u, {v: episode.utterances[v].text for v in task.turns[u].reads})


def _forced(policy: Policy, episode: Episode, task: Task, u: int, prompt_tokens: list[int]) -> Forced:
    """Reader u's prompt, the template, and the gold with its closing brace."""
    plan, tokenizer = episode.plan, policy.tokenizer
    before = tokenizer.encode_text(TEMPLATE)
    whole = tokenizer.encode_text(f"{TEMPLATE}{plan.problem.answer}}}")
    # The template's last pieces may merge with the gold's first; what the two have in common is the prompt.
    common = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    name = f"problem {plan.problem.id}, evidence for turn {u}"
    return Forced(name, [*prompt_tokens, *whole[:common]], whole[common:], plan.adapter[task.turns[u].agent])
