"""Held-out evaluation: play every held-out problem, grade every answer, estimate every metric with its interval.

Several evaluations run as one: an `Evaluation` says who plays (which cell's adapter, and which agents use it), and all
of them share the sampler's batch. The untrained base is any cell with scale 0, so a base evaluation is spread over the
cells. Nothing here trains, and rl is not imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval import board, talk
from eval.arms import PROBLEM_METRICS
from eval.stats import Estimate, ratio_estimate
from rollout.distribution import Sampling
from rollout.episode import EVAL_STEP, Episode, EpisodePlan
from rollout.play import play_graded
from rollout.policy import Policy
from tasks.base import Problem, Task
from tasks.grading import Grader

EVAL_SEED = 0
"""All arms and cells are evaluated with the same draws; what differs is the policy."""


@dataclass(frozen=True)
class Evaluation:
    """`name` of the result; `task` the arm it is played in; `cell` whose adapter (None: nobody's, the untrained base);
    `adapter[agent]` 1.0 where an agent uses it; `repeat` re-draws the evaluation."""

    name: str
    task: Task
    cell: int | None
    adapter: tuple[float, ...]
    repeat: int = 0

    def __post_init__(self) -> None:
        if self.cell is None and any(self.adapter):
            raise ValueError(f"evaluation {self.name} is the base's, so it plays with nobody's adapter: {self.adapter}")


def evaluate(
    policy: Policy,
    grader: Grader,
    evaluations: Sequence[Evaluation],
    problems: Sequence[Problem],
    chats: int,
    sampling: Sampling,
) -> list[list[list[Episode]]]:
    """Play `chats` episodes of each problem for each evaluation: `episodes[evaluation][problem][chat]`, graded."""
    plans_X: list[list[EpisodePlan]] = [[] for _ in range(policy.cells)]
    places_X: list[list[tuple[int, int]]] = [[] for _ in range(policy.cells)]
    # Work with a cell of its own first, then the base's wherever there is least.
    order = sorted(range(len(evaluations)), key=lambda i: evaluations[i].cell is None)
    for index in order:
        item = evaluations[index]
        for p, problem in enumerate(problems):
            cell = item.cell if item.cell is not None else int(np.argmin([len(plans) for plans in plans_X]))
            for chat in range(chats):
                plans_X[cell].append(
                    EpisodePlan(item.task, problem, chat, EVAL_SEED, EVAL_STEP + item.repeat, item.adapter)
                )
                places_X[cell].append((index, p))
    out: list[list[list[Episode]]] = [[[] for _ in problems] for _ in evaluations]
    for places, episodes in zip(places_X, play_graded(policy, grader, plans_X, sampling), strict=True):
        for (index, p), episode in zip(places, episodes, strict=True):
            out[index][p].append(episode)
    return out


def summarise(episodes_PG: Sequence[Sequence[Episode]], grader: Grader) -> dict[str, Any]:
    """One evaluation's results: {metric: {mean, low, high, n} or None}."""
    if board.is_board(episodes_PG[0][0].plan.task):
        results = board.estimates(episodes_PG)
    else:
        results = talk.estimates(episodes_PG)
        if len(episodes_PG[0][0].plan.task.graded) > 1:
            results["agree_graded"] = _agree_graded(episodes_PG, grader)
    return {name: None if value is None else value._asdict() for name, value in results.items()}


def by_problem(episodes_PG: Sequence[Sequence[Episode]]) -> dict[str, dict[str, float | None]]:
    """{metric: {problem id: mean of its values, None where it has none}}: what arms are compared on."""
    metrics = board.METRICS if board.is_board(episodes_PG[0][0].plan.task) else talk.METRICS
    found: dict[str, dict[str, float | None]] = {}
    for name in PROBLEM_METRICS:
        if name in metrics:
            values_P = [[value for episode in group for value in metrics[name](episode)] for group in episodes_PG]
            ids = [group[0].problem_id for group in episodes_PG]
            found[name] = {i: float(np.mean(v)) if v else None for i, v in zip(ids, values_P, strict=True)}
    return found


def _agree_graded(episodes_PG: Sequence[Sequence[Episode]], grader: Grader) -> Estimate | None:
    """Both last messages boxed and equal in Math-Verify's eyes."""
    pairs_PG = [[talk.boxed_pair(episode) for episode in group] for group in episodes_PG]
    grades = iter(grader.grade([pair for pairs in pairs_PG for pair in pairs if pair is not None]))
    values_PG = [[0.0 if pair is None else next(grades) for pair in pairs] for pairs in pairs_PG]
    return ratio_estimate(np.array([sum(v) for v in values_PG]), np.array([len(v) for v in values_PG]))


def format_estimate(value: dict[str, Any] | None) -> str:
    """'0.40 [0.37, 0.43]', or '-' where there was nothing to measure."""
    if value is None:
        return "-"
    return f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
