"""What a rollout is made of: plans that go in, utterances and episodes that come out.

Sampled ids are kept as sampled. `text` is only for the next prompt, for grading and for people; nothing here or
later tokenizes a reply a second time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from tasks.base import Problem, Task


class RowId(NamedTuple):
    """What a row's random key is made of, so that a sample depends on nothing else.

    `seed` of the cell, `step` of training (or EVAL_STEP + repeat), `problem` (a stable 32-bit hash of its id),
    `episode` within the problem's group, `turn` of the schedule.
    """

    seed: int
    step: int
    problem: int
    episode: int
    turn: int


EVAL_STEP = 1 << 30
"""Steps from here on are evaluations, so that they never share a key with training."""


@dataclass(frozen=True)
class Utterance:
    """What was sampled in one turn.

    `prompt_tokens` [L] and `tokens` [T] int32 ids; `tokens` ends with the end-of-turn token if it was sampled within
    the cap (`finished`). `logp` [T] fp32: log-probability of each token under the distribution it was drawn from.
    `trained`: False for turns that are only played and for an untrained partner's. `correct`: the grade in [0, 1] of
    a graded turn, else None.
    """

    turn: int
    prompt_tokens: np.ndarray
    tokens: np.ndarray
    logp: np.ndarray
    text: str
    finished: bool
    trained: bool
    correct: float | None = None


@dataclass(frozen=True)
class EpisodePlan:
    """One episode to be played. `adapter[agent]`: 1.0 plays with the cell's adapter, 0.0 as the untrained base.

    `given`: utterances by turn that were said before and are not sampled again (a re-reading of the same notes).
    `cells[agent]`: whose adapter an agent plays with; None: all play with that of the cell the plan stands under.
    """

    task: Task
    problem: Problem
    episode: int
    seed: int
    step: int
    adapter: tuple[float, ...]
    given: Mapping[int, Utterance] = field(default_factory=dict)
    cells: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Episode:
    """All turns of one play of one problem, by the copies of one cell."""

    plan: EpisodePlan
    cell: int
    utterances: tuple[Utterance, ...]

    @property
    def problem_id(self) -> str:
        return self.plan.problem.id

    @property
    def correct(self) -> tuple[float, ...]:
        """Grades of the graded turns, in schedule order."""
        return tuple(u.correct for u in self.utterances if u.correct is not None)

    def graded(self, correct_by_turn: dict[int, float]) -> "Episode":
        """This episode with grades filled in."""
        utterances = tuple(
            replace(u, correct=correct_by_turn[u.turn]) if u.turn in correct_by_turn else u for u in self.utterances
        )
        return replace(self, utterances=utterances)
