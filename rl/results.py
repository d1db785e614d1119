"""What a run found: its evaluations, each played once and kept, and results.json.

results.json, schema 1: `task`, `config`, `base` {arm: metrics}, `cells` [{name, arm, credit, seed, steps, adapter,
diagnostics, cost, evaluations {trained, with_untrained_partner: metrics}}], `arms` (eval.arms: across seeds),
`sampling`, `data`, `versions`, `device`, `seconds` by phase, `compiles` {shape: seconds}. Metrics are {name: {mean,
low, high, n} or null}; intervals are 95%.
"""

import importlib.metadata
import json
import platform
from typing import Any

import numpy as np

from eval.arms import compare_arms
from eval.evaluate import Evaluation, by_problem, evaluate, summarise
from eval.stats import ratio_estimate
from rl.config import to_json
from rl.run_dir import RunDir
from rl.stop import StopRequest
from rl.study import Study
from tasks.base import Task
from tasks.grading import Grader

SCHEMA = 1
PACKAGES = "jax jaxlib flax optax orbax-checkpoint transformers tokenizers datasets math-verify numpy scipy".split()


def evaluate_base(study: Study, grader: Grader, run_dir: RunDir, stop: StopRequest) -> None:
    """The untrained base in every arm, as often as the config says, each time with fresh draws."""
    evaluations = [
        Evaluation(base_name(arm, repeat), task, None, (0.0,) * len(task.agents), repeat)
        for arm, task in study.tasks.items()
        for repeat in range(study.config.base_evaluations)
    ]
    play_unless_kept(study, grader, run_dir, stop, evaluations)


def base_name(arm: str, repeat: int) -> str:
    return f"base-{arm}" + (f"-again-{repeat}" if repeat else "")


def evaluate_trained(study: Study, grader: Grader, run_dir: RunDir, stop: StopRequest) -> None:
    """Every trained cell with itself, and as the first copy with the untrained base where a copy reads another."""
    evaluations = []
    for x, cell in enumerate(study.cells):
        agents = len(cell.task.agents)
        evaluations.append(Evaluation(f"{cell.name}-trained", cell.task, x, (1.0,) * agents))
        if reads_others(cell.task):
            adapter = (1.0,) + (0.0,) * (agents - 1)
            evaluations.append(Evaluation(f"{cell.name}-with_untrained_partner", cell.task, x, adapter))
    play_unless_kept(study, grader, run_dir, stop, evaluations)


def reads_others(task: Task) -> bool:
    """Is it a chat in which a turn is shown another copy's words."""
    chat = not task.notes
    return chat and any(task.turns[v].agent != turn.agent for turn in task.turns for v in turn.reads)


def play_unless_kept(
    study: Study, grader: Grader, run_dir: RunDir, stop: StopRequest, evaluations: list[Evaluation]
) -> None:
    """Play the evaluations together and keep each, unless the run directory holds all of them.

    If it was killed while it kept them, all are played again: a part of them would be sampled in other batches, and
    floating point would not give quite the same numbers.
    """
    stop.check(f"before evaluating; continue with --resume {run_dir.path}")
    if all(run_dir.load_evaluation(item.name) is not None for item in evaluations):
        return
    c = study.config
    played = evaluate(study.policy, grader, evaluations, study.problems.heldout, c.eval_episodes, study.eval_sampling)
    for item, episodes_PG in zip(evaluations, played, strict=True):
        flat = [episode for group in episodes_PG for episode in group]
        kept = {"metrics": summarise(episodes_PG, grader), "problems": by_problem(episodes_PG)}
        run_dir.save_evaluation(item.name, kept, flat)
    stop.check(f"evaluated and kept; continue with --resume {run_dir.path}")


def _base_values(study: Study, run_dir: RunDir) -> list[dict[str, Any]]:
    """The base's repeated evaluations in the first arm, a metric and problem."""
    arm = next(iter(study.tasks))
    return [
        run_dir.load_evaluation(base_name(arm, repeat))["problems"] for repeat in range(study.config.base_evaluations)
    ]


DIAGNOSTICS = (
    "reward",
    "credit/flat_first_frac",
    "credit/flat_group_frac",
    "credit/solved_token_frac",
    "credit/flat_notes_frac",
    "credit/mean_abs_advantage_notes",
    "credit/mean_abs_advantage_answers",
    "credit/own_correct_correlation",
    "credit/split_half_reliability",
)


def diagnostics(run_dir: RunDir, cell: str) -> dict[str, Any]:
    """Means of a cell's credit diagnostics over the steps at which each was measured, with 95% intervals over steps.

    Steps of one run depend on each other, so these intervals say how steady a number was, not how another run would be.
    """
    lines = [json.loads(line) for line in (run_dir.path / "metrics.jsonl").read_text().splitlines()]
    found = {}
    for name in DIAGNOSTICS:
        values = np.array([line[name] for line in lines if line["cell"] == cell and line[name] is not None])
        estimate = ratio_estimate(values, np.ones(len(values)))
        found[name] = None if estimate is None else estimate._asdict()
    return found


def cost_by_cell(run_dir: RunDir, cells: list[str]) -> dict[str, dict[str, float]]:
    """What training each cell took: `episodes` and `sampled_tokens` drawn (those of measuring its credit included),
    `trained_tokens`, and `seconds`, compilation, saving and evaluation left out.

    Cells run in the same batches, so seconds are shared out: a step's sampling by the tokens a cell drew, its credit
    by the tokens sampled for that, its update by the rows that had a gradient. A cell alone would take more.
    """
    cost = {name: {"episodes": 0, "sampled_tokens": 0, "trained_tokens": 0, "seconds": 0.0} for name in cells}
    lines = [json.loads(line) for line in (run_dir.path / "metrics.jsonl").read_text().splitlines()]
    timing = [json.loads(line) for line in (run_dir.path / "timing.jsonl").read_text().splitlines()]
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        by_step.setdefault(line["step"], []).append(line)
    for time in timing:
        step = by_step[time["step"]]
        collect = time["time/collect_s"] - time.get("time/collect/compile_s", 0.0)
        parts = ((collect, "rollout/sampled_tokens"), (time["time/credit_s"], "credit/sampled_tokens"))
        for seconds, share in (*parts, (time["time/update_s"], "loss/live_rows")):
            total = sum(line[share] for line in step)
            for line in step:
                cost[line["cell"]]["seconds"] += seconds * (line[share] / total if total else 1 / len(step))
        for line in step:
            cost[line["cell"]]["episodes"] += line["rollout/episodes"]
            cost[line["cell"]]["sampled_tokens"] += line["rollout/sampled_tokens"] + line["credit/sampled_tokens"]
            cost[line["cell"]]["trained_tokens"] += line["loss/trained_tokens"]
    return cost


def write_results(study: Study, run_dir: RunDir, seconds: dict[str, float], device: str) -> dict[str, Any]:
    """Gather everything into results.json and return it."""
    c = study.config
    compiles = {"x".join(map(str, k)): s for k, s in study.policy.compiles.items()}
    compiles = {f"sample {k}": s for k, s in compiles.items()} | study.learner.compiles
    base, cells, trained, with_base = {}, [], [], []
    costs = cost_by_cell(run_dir, [cell.name for cell in study.cells])
    if c.evaluate:
        base = {arm: run_dir.load_evaluation(base_name(arm, 0))["metrics"] for arm in study.tasks}
    for cell in study.cells:
        found = {name: run_dir.load_evaluation(f"{cell.name}-{name}") for name in ("trained", "with_untrained_partner")}
        trained.append(found["trained"]["problems"] if found["trained"] else None)
        with_base.append(found["with_untrained_partner"]["problems"] if found["with_untrained_partner"] else None)
        cells.append(
            {
                "name": cell.name,
                "arm": cell.task.arm,
                "credit": cell.credit,
                "seed": cell.seed,
                "steps": int(study.state.step),
                "adapter": f"adapters/{cell.name}",
                "diagnostics": diagnostics(run_dir, cell.name),
                "cost": costs[cell.name],
                "evaluations": {name: kept["metrics"] for name, kept in found.items() if kept is not None},
            }
        )
    results = {
        "schema": SCHEMA,
        "task": c.task,
        "config": to_json(c),
        "base": base,
        "cells": cells,
        "arms": compare_arms(cells, trained, _base_values(study, run_dir), with_base) if c.evaluate else [],
        "sampling": {"train": vars(study.train_sampling), "evaluation": vars(study.eval_sampling)},
        "data": {
            "fingerprint": study.problems.fingerprint,
            "train": len(study.problems.train),
            "heldout": len(study.problems.heldout),
            "dropped": study.problems.dropped,
            "tokenizer": study.tokenizer.fingerprint,
            "base_model": study.base_fingerprint,
        },
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in PACKAGES}},
        "device": device,
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "compiles": {k: round(v, 3) for k, v in compiles.items()},
    }
    run_dir.write_json("results.json", results)
    return results
