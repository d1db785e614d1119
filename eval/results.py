"""What a run found, gathered from its directory into results.json.

results.json, schema 2:
`schema`, `task`, `config`; `base` {arm: metrics}; `cells` [{name, arm, credit, seed, steps, adapter, diagnostics, cost,
evaluations {trained, with_untrained_partner: metrics}}]; `arms` (eval.arms: rules across seeds, their diagnostics too,
and against the first);
`checks` (eval.checks, each with a `verdict`); `sampling` {train, evaluation}; `data` (counts, fingerprints, what was
left out); `versions`, `device`; `seconds` by phase (`compile` is also loading what an earlier run kept); `compiles`
{shape: seconds}, without what was loaded. Metrics are {name: {mean, low, high, n} or null}; intervals are 95%. Schema 1
had no checks, costs or spreads.
"""

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval import checks
from eval.arms import compare_arms
from eval.kept import Kept, write_json
from eval.stats import ratio_estimate
from eval.suite import SILENT, TRAINED, WITH_BASE, Subject, base_name
from model.tokenizer import ChatTokenizer
from rollout.setup import PlaySettings
from tasks.base import Task
from tasks.registry import Problems

SCHEMA = 2
PACKAGES = "jax jaxlib flax optax orbax-checkpoint transformers tokenizers datasets math-verify numpy scipy".split()


DIAGNOSTICS = (
    "credit/split_half_reliability",
    "credit/own_correct_correlation",
    "reward",
    "credit/flat_first_frac",
    "credit/flat_group_frac",
    "credit/solved_token_frac",
    "credit/flat_notes_frac",
    "credit/mean_abs_advantage_notes",
    "credit/mean_abs_advantage_answers",
)


def diagnostics(run: Path, cell: str) -> dict[str, Any]:
    """Means of a cell's credit diagnostics over the steps at which each was measured, with 95% intervals over steps.

    Steps of one run depend on each other, so these intervals say how steady a number was, not how another run would be.
    """
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {}
    for name in DIAGNOSTICS:
        values = np.array([line[name] for line in lines if line["cell"] == cell and line[name] is not None])
        estimate = ratio_estimate(values, np.ones(len(values)))
        found[name] = None if estimate is None else estimate._asdict()
    return found


def cost_by_cell(run: Path, cells: list[str]) -> dict[str, dict[str, float]]:
    """What training each cell took: `episodes` and `sampled_tokens` drawn (those of measuring its credit included),
    `trained_tokens`, and `seconds`, compilation, saving and evaluation left out.

    Cells run in the same batches, so seconds are shared out: a step's sampling by the tokens a cell drew, its credit
    by the tokens sampled for that, its update by the rows that had a gradient. A cell alone would take more.
    """
    cost = {name: {"episodes": 0, "sampled_tokens": 0, "trained_tokens": 0, "seconds": 0.0} for name in cells}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timing = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
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


def versions() -> dict[str, str]:
    """What computed this."""
    return {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in PACKAGES}}


def data_facts(problems: Problems, tokenizer: ChatTokenizer, base_model: str) -> dict[str, Any]:
    """What was trained and evaluated on; `base_model` is its fingerprint."""
    return {
        "fingerprint": problems.fingerprint,
        "train": len(problems.train),
        "heldout": len(problems.heldout),
        "dropped": problems.dropped,
        "tokenizer": tokenizer.fingerprint,
        "base_model": base_model,
    }


def gather(
    run: Path,
    c: PlaySettings,
    tasks: Mapping[str, Task],
    subjects: Sequence[Subject],
    problems: Problems,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """results.json of a run directory, written and returned.

    `facts` are what the directory doesn't tell: `config` as JSON, `steps` done, `sampling`, `data`, `device`,
    `versions`, `seconds`, `compiles`.
    """
    kept = Kept(run)
    costs = cost_by_cell(run, [subject.name for subject in subjects])
    cells, problems_of = [], {TRAINED: [], WITH_BASE: []}
    for subject in subjects:
        found = {name: kept.load(f"{subject.name}-{name}") for name in (TRAINED, WITH_BASE)}
        for name, values in problems_of.items():
            values.append(found[name]["problems"] if found[name] else None)
        cells.append(
            {
                "name": subject.name,
                "arm": subject.task.arm,
                "credit": subject.credit,
                "seed": subject.seed,
                "steps": facts["steps"],
                "adapter": f"adapters/{subject.name}",
                "diagnostics": diagnostics(run, subject.name),
                "cost": costs[subject.name],
                "evaluations": {name: one["metrics"] for name, one in found.items() if one is not None},
            }
        )
    base = {arm: one["metrics"] for arm in tasks if (one := kept.load(base_name(arm))) is not None}
    evaluated = bool(base) and None not in problems_of[TRAINED]
    repeats = _repeats(kept, next(iter(tasks)), c.base_evaluations)
    results = {
        "schema": SCHEMA,
        "task": c.task,
        "config": facts["config"],
        "base": base,
        "cells": cells,
        "arms": compare_arms(cells, problems_of[TRAINED], repeats, problems_of[WITH_BASE]) if evaluated else [],
        "checks": run_checks(kept, c, tasks, cells, problems, repeats, facts["config"]) if evaluated else {},
        **{name: facts[name] for name in ("sampling", "data", "versions", "device")},
        **{name: {k: round(v, 3) for k, v in facts[name].items()} for name in ("seconds", "compiles")},
    }
    write_json(run / "results.json", results)
    return results


def _repeats(kept: Kept, arm: str, count: int) -> list[dict[str, Any]]:
    """The base's repeated evaluations in one arm: {metric: {problem: value}} each."""
    found = [kept.load(base_name(arm, repeat)) for repeat in range(count)]
    return [one["problems"] for one in found if one is not None]


def run_checks(
    kept: Kept,
    c: PlaySettings,
    tasks: Mapping[str, Task],
    cells: Sequence[Mapping[str, Any]],
    problems: Problems,
    repeats: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Every check of eval.checks that this run has what it takes for. Lengths and hacks are by cell."""
    arm = next(iter(tasks))
    found: dict[str, Any] = {
        "overlap": checks.overlap(problems.train, problems.heldout),
        "evaluation_noise": checks.evaluation_noise([values["pass_at_1"] for values in repeats]),
        "pinned": checks.pinned(config),
    }
    silent = kept.load(base_name(SILENT))
    if silent is not None:
        on = next((one for a in tasks if a != SILENT and (one := kept.load(base_name(a)))), None)
        pair = [one["metrics"]["pass_at_1"] if one else None for one in (on, silent)]
        found["talk_needed"] = checks.talk_needed(*pair)
    for cell in cells:
        before = kept.load(base_name(cell["arm"]))["metrics"]
        found[f"lengths {cell['name']}"] = checks.lengths(before, cell["evaluations"][TRAINED])
        found[f"reward_hacks {cell['name']}"] = checks.reward_hacks(kept.answers(f"{cell['name']}-{TRAINED}"))
    found[f"reward_hacks base {arm}"] = checks.reward_hacks(kept.answers(base_name(arm)))
    return found
