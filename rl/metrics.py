"""One step's numbers under their names, as written to metrics.jsonl and timing.jsonl.

Units are in the names. Nothing in `step_metrics` depends on the clock; `Phases` holds what does.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rl.batch import Plan
from rl.collect import Cell, Collected
from rl.update import StepStats


def step_metrics(
    step: int,
    cells: list[Cell],
    collected_X: list[Collected],
    plan: Plan,
    stats: StepStats,
    reliable_X: list[float | None],
) -> list[dict[str, Any]]:
    """A line a cell. Rates are over the step's episodes; None where there was nothing to measure."""
    lines = []
    for x, (cell, got) in enumerate(zip(cells, collected_X, strict=True)):
        said = [u for episodes in got.episodes_PG for e in episodes for u in e.utterances]
        logp = np.concatenate([u.logp for u in said]).astype(np.float64)
        seen = stats.tokens[x] > 0
        lines.append(
            {
                "step": step,
                "cell": cell.name,
                "reward": got.summary.reward,
                "credit/flat_group_frac": got.summary.flat_group_frac,
                "credit/flat_first_frac": got.summary.flat_first_frac,
                "credit/solved_token_frac": got.summary.solved_token_frac,
                "credit/sampled_tokens": got.measured_tokens,
                "rollout/episodes": sum(map(len, got.episodes_PG)),
                "credit/mean_abs_advantage_by_turn": [float(v) for v in got.summary.mean_abs_U],
                "credit/mean_abs_advantage_notes": mean_over(got.summary.mean_abs_U, cell.task.notes),
                "credit/mean_abs_advantage_answers": mean_over(got.summary.mean_abs_U, cell.task.answers),
                "credit/own_correct_correlation": got.summary.own_correlation,
                "credit/flat_notes_frac": got.summary.flat_notes_frac,
                "credit/split_half_reliability": reliable_X[x],
                "rollout/sampled_tokens": int(sum(len(u.tokens) for u in said)),
                "rollout/mean_reply_tokens": float(np.mean([len(u.tokens) for u in said])),
                "rollout/truncated_frac": float(np.mean([not u.finished for u in said])),
                "rollout/entropy_nats": float(-logp.mean()),
                "loss/loss": float(stats.loss[x]),
                "loss/trained_tokens": int(plan.trained_tokens_X[x]),
                "loss/live_rows": int(plan.live_rows_X[x]),
                "loss/clipped_frac": float(stats.clipped_frac[x]),
                "sampling_logp_gap": float(stats.gap_mean[x]) if seen else None,
                "sampling_logp_gap_max": float(stats.gap_max[x]) if seen else None,
                "optim/grad_norm": float(stats.grad_norm[x]),
            }
        )
    return lines


def mean_over(value_U: np.ndarray, turns: tuple[int, ...]) -> float | None:
    """The mean over some turns; None for none."""
    return float(value_U[list(turns)].mean()) if turns else None


class Phases:
    """Seconds by phase of a run. "a/b" is a part of "a", except "a/text_hidden": text work done for it meanwhile, while
    the device worked, which took no time of its own. "a/text" is all text work, hidden or not."""

    def __init__(self) -> None:
        self.total: dict[str, float] = {}
        self.step: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        self.total[name] = self.total.get(name, 0.0) + seconds
        self.step[name] = self.step.get(name, 0.0) + seconds

    def take_step(self) -> dict[str, float]:
        """This step's seconds, and start the next step's."""
        step, self.step = self.step, {}
        return {f"time/{name}_s": round(seconds, 4) for name, seconds in step.items()}
