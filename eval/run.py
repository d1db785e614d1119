"""`python -m eval.run RUN`: evaluate what a run directory holds, and write its results.json again.

Every adapter in it and the untrained base are played on the held-out problems, as the end of training does. With
`--reuse` only the evaluations that are missing are played. `--selftest` checks the evaluation itself, offline.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from eval.evaluate import format_estimate
from eval.kept import Kept
from eval.results import data_facts, gather, versions
from eval.selftest import selftest
from eval.suite import Subject, base_evaluations, play_missing, trained_evaluations
from model import weights
from model.tokenizer import TokenizerError
from model.weights import WeightsError
from rollout.policy import PromptTooLong
from rollout.setup import (
    ConfigError,
    PlaySettings,
    build_tasks,
    cell_name,
    cells_of,
    eval_sampling,
    load_adapters,
    load_base,
    load_task_problems,
    load_tokenizer,
    make_policy,
    read_settings,
)
from tasks.base import Task
from tasks.grading import Grader


def subjects_of(c: PlaySettings, tasks: dict[str, Task]) -> list[Subject]:
    """The cells of a run, as its settings name them."""
    return [
        Subject(cell_name(task, credit, seed), credit, seed, task, x)
        for x, (task, credit, seed) in enumerate(cells_of(c, tasks))
    ]


def adapters_of(run: Path, subjects: list[Subject]) -> list[Path]:
    """Every subject's adapter directory. ConfigError names those that are missing."""
    missing = [s.name for s in subjects if not (run / "adapters" / s.name / "adapter_config.json").exists()]
    if missing:
        raise ConfigError(
            f"{run} has no adapter of {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}: finish its "
            f"training with python -m rl.train --resume {run}"
        )
    return [run / "adapters" / s.name for s in subjects]


def evaluate_run(run: Path, reuse: bool, say: Console) -> dict[str, Any]:
    """Play what is asked for, and return the new results. Raises ConfigError where the run can't be evaluated."""
    started = time.perf_counter()
    c = read_settings(run)
    tasks = build_tasks(c)
    subjects = subjects_of(c, tasks)
    tokenizer, directory = load_tokenizer(c)
    problems = load_task_problems(c, tokenizer, list(tasks.values()))
    base = load_base(c, directory, tokenizer)
    lora, config = load_adapters(adapters_of(run, subjects), base[0])
    policy = make_policy(c, base, lora, config.scale, tokenizer, list(tasks.values()))
    kept = Kept(run)
    evaluations = [*base_evaluations(c, tasks), *trained_evaluations(subjects)]
    if not reuse:
        kept.forget(item.name for item in evaluations)
    with Grader() as grader:
        grader.warm()
        played = play_missing(c, policy, grader, kept, evaluations, problems.heldout, together=False)
    say.print(f"played {len(played)} of {len(evaluations)} evaluations; the others were kept", markup=False)
    fingerprint = weights.fingerprint(directory) if directory else "random"
    facts = facts_of(run, c, data_facts(problems, tokenizer, fingerprint))
    facts["seconds"] = {**facts["seconds"], "eval.run": time.perf_counter() - started}
    facts["compiles"] = {
        **facts["compiles"],
        **{f"sample {'x'.join(map(str, key))}": seconds for key, seconds in policy.compiles.items()},
    }
    return gather(run, c, tasks, subjects, problems, facts)


def facts_of(run: Path, c: PlaySettings, data: dict[str, Any]) -> dict[str, Any]:
    """What the last results.json says of the training; of a run that has none yet, what can be said."""
    file = run / "results.json"
    saved = json.loads(file.read_text()) if file.exists() else {}
    first = jax.devices()[0]
    sampling = {
        "train": {"temperature": c.temperature, "top_p": c.top_p, "top_k": c.top_k, "repetition_penalty": 1.0},
        "evaluation": vars(eval_sampling(c)),
    }
    return {
        "config": json.loads((run / "config.json").read_text()),
        "steps": saved["cells"][0]["steps"] if saved.get("cells") else c.steps,
        "sampling": sampling,
        "data": data,
        "versions": versions(),
        "device": saved.get("device", f"{len(jax.devices())} x {first.device_kind} ({first.platform})"),
        "seconds": saved.get("seconds", {}),
        "compiles": saved.get("compiles", {}),
    }


def summary(results: dict[str, Any]) -> str:
    """A line an evaluation, for a terminal; training's own table shows more."""
    lines = [
        f"{'base ' + arm:48} {format_estimate(metrics['pass_at_1'])}  n {metrics['pass_at_1']['n']:,}"
        for arm, metrics in results["base"].items()
    ]
    for cell in results["cells"]:
        for name, metrics in cell["evaluations"].items():
            label = f"{cell['name']}, {name.replace('_', ' ')}"
            lines.append(f"{label:48} {format_estimate(metrics['pass_at_1'])}  n {metrics['pass_at_1']['n']:,}")
    checks = [f"check {name}: {found['verdict']}" for name, found in results["checks"].items()]
    return "\n".join([*lines, *checks])


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, 1 if the self-test found something wrong, 2 for a user's error."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", type=Path, help="a run directory")
    parser.add_argument("--reuse", action="store_true", help="play only the evaluations that are missing")
    parser.add_argument("--selftest", action="store_true", help="check grading, statistics and sampling, in seconds")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    console = Console(highlight=False)
    if args.selftest:
        failures = selftest(lambda line: console.print(line, markup=False))
        return 1 if failures else 0
    if args.run is None:
        parser.error("name a run directory, or give --selftest")
    try:
        results = evaluate_run(args.run, args.reuse, console)
    except (ConfigError, WeightsError, TokenizerError, PromptTooLong) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    console.print(summary(results), markup=False, soft_wrap=True)
    console.print(f"saved: {args.run}/results.json", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
