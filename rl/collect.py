"""Collect: a step's episodes, and what each of their turns is paid. Where replays and re-readings will live."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.batch import Row
from rl.credit import CREDITS, Credit, CreditSummary, Group, summarise
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
class Collected:
    """One cell's step: `episodes_PG`, their credit by problem, the rows to train and the diagnostics."""

    episodes_PG: list[list[Episode]]
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


def collect(
    policy: Policy,
    grader: Grader,
    cells: Sequence[Cell],
    problems_XP: Sequence[Sequence[Problem]],
    step: int,
    episodes_per_problem: int,
    sampling: Sampling,
) -> list[Collected]:
    """Play and grade every cell's problems, and pay every turn by the cell's credit rule."""
    plans_XE = [
        [
            EpisodePlan(cell.task, problem, episode, cell.seed, step, (1.0,) * len(cell.task.agents))
            for problem in problems
            for episode in range(episodes_per_problem)
        ]
        for cell, problems in zip(cells, problems_XP, strict=True)
    ]
    episodes_XE = play_graded(policy, grader, plans_XE, sampling)
    return [
        pay(cell, [episodes[i : i + episodes_per_problem] for i in range(0, len(episodes), episodes_per_problem)])
        for cell, episodes in zip(cells, episodes_XE, strict=True)
    ]


def pay(cell: Cell, episodes_PG: list[list[Episode]]) -> Collected:
    """Credit for one cell's groups, as rows in the order problem, episode, turn."""
    groups_P = [group_of(episodes, cell.task) for episodes in episodes_PG]
    credits_P = [CREDITS[cell.credit](group) for group in groups_P]
    rows = [
        Row(utterance, float(credit.advantage_GU[g, utterance.turn]), cell.task.turns[utterance.turn].max_tokens)
        for episodes, credit in zip(episodes_PG, credits_P, strict=True)
        for g, episode in enumerate(episodes)
        for utterance in episode.utterances
    ]
    return Collected(episodes_PG, credits_P, rows, summarise(groups_P, credits_P))


def group_of(episodes_G: Sequence[Episode], task: Task) -> Group:
    """The grades of one problem's episodes as arrays."""
    correct_GU = np.array([[np.nan if u.correct is None else u.correct for u in e.utterances] for e in episodes_G])
    return Group(correct_GU, task.reads_UU)
