"""`python -m rl.train`: train the cells of a study side by side, evaluate them, save everything.

The loop is in `train`: collect -> credit -> pack -> update -> log -> save. A run killed at any moment continues with
--resume and ends with the numbers of one never stopped. SIGTERM saves and exits 0.
"""

import argparse
import dataclasses
import errno
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import tyro
from rich.console import Console

from eval.evaluate import Evaluation
from eval.report import report_or_say
from eval.results import gather
from eval.suite import base_evaluations, play_missing, trained_evaluations
from model.checkpoint import CheckpointError
from model.config import ModelConfigError
from model.executables import keep_executables
from model.folded import pays
from model.tokenizer import TokenizerError
from model.weights import WeightsError
from rl import display, tracking
from rl.batch import Plan, pack
from rl.collect import Cell, Collected, credit_step, reliability
from rl.config import Config, ConfigError, check, differences
from rl.draw import play_step
from rl.metrics import Phases, step_metrics
from rl.presets import defaults
from rl.run_dir import RunDir, training_episodes
from rl.saving import restore, save, save_adapters
from rl.stop import Stopped, StopRequest
from rl.study import Study, prepare
from rl.upcoming import Upcoming
from rl.update import NonFiniteLoss
from rollout.policy import Policy, PromptTooLong
from tasks.grading import Grader

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG}
USER_ERRORS = (ConfigError, ModelConfigError, WeightsError, TokenizerError, CheckpointError, PromptTooLong)
"""What a user can mend: shown as one message, exit status 2."""


@dataclass(frozen=True)
class Command:
    """Train copies of one model to be useful to each other, and evaluate what they learned."""

    config: tyro.conf.OmitArgPrefixes[Config]
    study: str | None = None
    """A published study whole: talk_to_solve, talk_methods, message_board or board_writers. Sets task, arms, credit and
    seeds; the preset sets the sizes."""
    resume: Path | None = None
    """Continue the run in this directory exactly where its newest whole checkpoint left it."""


def parse(argv: list[str]) -> tuple[Config, bool]:
    """The config, and whether it resumes a run. An unknown flag or value exits with a list of the valid ones."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="tiny")
    first.add_argument("--task")
    first.add_argument("--study")
    first.add_argument("--resume", type=Path)
    known, _ = first.parse_known_args(argv)
    if known.resume is None:
        default = defaults(known.preset, known.task, known.study)
        return tyro.cli(Command, args=argv, default=Command(default), prog="python -m rl.train").config, False
    _, saved = RunDir.open(known.resume)
    saved = dataclasses.replace(saved, out=known.resume)
    given = tyro.cli(Command, args=argv, default=Command(saved), prog="python -m rl.train").config
    changed = differences(saved, given)
    if changed:
        raise ConfigError("a resumed run can't change its settings: " + "; ".join(changed))
    return given, True


def run(config: Config, resuming: bool, console: Console) -> None:
    """A whole run: set up, evaluate the base, train, evaluate the cells, write results."""
    started = time.perf_counter()
    phases = Phases()
    path = config.out or Path("runs") / f"{config.task}-{time.strftime('%Y%m%d-%H%M%S')}"
    tracking.module_of(config.track)
    if config.compile_cache:
        keep_executables(config.compile_cache)
    if not resuming:
        RunDir.refuse_used(path)
    with StopRequest() as stop, Grader() as grader:
        grader.warm()
        with phases("setup"):
            study = prepare(config)
        # Only now, so that a run that can't be set up leaves no directory in the way of its next try.
        run_dir = RunDir(path) if resuming else RunDir.create(path, config)
        resumed_at = restore(study, run_dir, console) if resuming else 0
        console.print(display.header(study, device(), str(path)))
        if config.evaluate:
            console.print(f"evaluating the untrained base on {len(study.problems.heldout):,} held-out problems")
            with phases("evaluate base"):
                evaluate(study, grader, run_dir, stop, base_evaluations(config, study.tasks))
        try:
            train(study, grader, run_dir, stop, phases, console, resumed_at)
        except (Stopped, NonFiniteLoss):
            save_adapters(study, run_dir)
            raise
        save_adapters(study, run_dir)
        training_bytes = run_dir.sizes()["episodes.jsonl"]
        if config.evaluate:
            console.print(f"evaluating {len(study.cells)} trained cells")
            with phases("evaluate trained"):
                evaluate(study, grader, run_dir, stop, trained_evaluations(study.subjects))
        phases.add("compile", study.policy.seconds["compile"] + study.learner.seconds["compile"])
        phases.add("total", time.perf_counter() - started)
        facts = study.facts(phases.total, device())
        results = gather(path, config, study.tasks, study.subjects, study.problems, facts)
        run_dir.gather_episodes(training_bytes)
    if config.evaluate:
        console.print(display.results_table(results))
        if len(results["arms"]) > 1:
            console.print(display.arms_table(results["arms"]))
            if (notes := display.notes_table(results["arms"])) is not None:
                console.print(notes)
    console.print(display.seconds_table(results["seconds"], results["compiles"]))
    console.print(f"saved: {path}/results.json, adapters/, metrics.jsonl, episodes.jsonl, checkpoints/", markup=False)
    console.print(report_or_say(path), markup=False, soft_wrap=True)


def evaluate(study: Study, grader: Grader, run_dir: RunDir, stop: StopRequest, evaluations: list[Evaluation]) -> None:
    """Play and keep these evaluations, unless the run directory holds all of them."""
    play_missing(
        study.config,
        study.policy,
        grader,
        run_dir.kept,
        evaluations,
        study.problems.heldout,
        checkpoint=lambda: stop.check(f"what was evaluated is kept; continue with --resume {run_dir.path}"),
    )


def train(
    study: Study,
    grader: Grader,
    run_dir: RunDir,
    stop: StopRequest,
    phases: Phases,
    console: Console,
    first_step: int,
) -> None:
    """The loop. Every step is a function of the state and the step number, so that a resumed run repeats it exactly."""
    c, cells = study.config, study.cells
    watcher = Watcher(console, c, first_step)
    ahead = Upcoming(study.policy.text, cells, study.problems.train, c.data_seed, c.problems_per_step)
    with watcher.bar, closing(tracking.start(c.track, run_dir.path, c)) as tracker, ahead:
        ahead.start(first_step)
        for step in range(first_step, c.steps):
            before = seconds_of(study.policy)
            with phases("collect"):
                problems_XP = ahead.take()
                episodes_XPG = play_step(study.policy, grader, cells, problems_XP, step, study.settings)
            for name, now in seconds_of(study.policy).items():
                # What is hidden is measured as a difference; where nothing is, it may come out just below 0.
                phases.add(f"collect/{name}", max(0.0, now - before[name]))
            with phases("credit"):
                progress = step / c.steps
                collected_X = credit_step(study.policy, grader, cells, episodes_XPG, progress, study.settings)
            reliable_X = [None] * len(cells)
            if c.reliability_every and step % c.reliability_every == 0:
                with phases("reliability"):
                    reliable_X = reliability(study.policy, grader, cells, collected_X, study.settings)
            with phases("pack"):
                plan = pack_step(study, step, collected_X)
            try:
                with phases("update"):
                    ahead.start(step + 1)
                    refuse_non_finite(step, cells, collected_X)
                    study.state, stats = study.learner.update(study.state, plan.batches)
            except NonFiniteLoss:
                save(study, run_dir)
                raise
            study.policy.lora = study.state.lora
            lines = step_metrics(step, cells, collected_X, plan, stats, reliable_X)
            run_dir.append("metrics.jsonl", lines)
            if step % c.episodes_every == 0:
                run_dir.append("episodes.jsonl", training_episodes(cells, collected_X, study.tokenizer.decode))
            due = (step + 1) % c.checkpoint_every == 0 or step + 1 == c.steps or stop.asked
            timing = phases.take_step()
            # Here, not in metrics.jsonl: a resumed process counts from 0.
            failures = {f"grading/{name}": count for name, count in sorted(grader.failures.items())}
            run_dir.append("timing.jsonl", [{"step": step, **timing, **failures}])
            if due:
                with phases("save"):
                    save(study, run_dir)
            tracker.log(step, lines, timing)
            watcher.saw(step, lines, timing, collected_X[0].episodes_PG[0][0])
            if stop.asked and step + 1 < c.steps:
                raise Stopped(f"saved after step {step + 1} of {c.steps}; continue with --resume {run_dir.path}")


def seconds_of(policy: Policy) -> dict[str, float]:
    """Seconds so far: prefill, decode, compile, text, and text_hidden, the part of it that nobody waited for."""
    return policy.seconds | policy.text.seconds


def pack_step(study: Study, step: int, collected_X: list[Collected]) -> Plan:
    """The step's micro-batches, by the run's settings."""
    c = study.config
    return pack(
        [got.rows for got in collected_X],
        c.micro_rows,
        study.train_buckets,
        c.normalisation,
        c.normalisation_chunks,
        [(cell.seed, step) for cell in study.cells],
        slots=study.slots,
        packed=pays(),
    )


def refuse_non_finite(step: int, cells: list[Cell], collected_X: list[Collected]) -> None:
    """Raise NonFiniteLoss where a reply was drawn from NaN: such replies are all wrong, their groups flat, and a
    flat step computes no loss that would show it."""
    for cell, got in zip(cells, collected_X, strict=True):
        said = (u for episodes in got.episodes_PG for episode in episodes for u in episode.utterances)
        if not all(np.isfinite(u.logp).all() for u in said):
            raise NonFiniteLoss(
                f"step {step}: {cell.name} sampled with log-probs that are not finite; the update was not applied"
            )


def device() -> str:
    """The device in words."""
    found = jax.devices()
    return f"{len(found)} x {found[0].device_kind} ({found[0].platform}), jax {jax.__version__}"


class Watcher:
    """Shows the run as it goes: a live bar on a terminal, plain lines elsewhere, a whole chat every k steps."""

    def __init__(self, console: Console, config: Config, first_step: int) -> None:
        self.console, self.config = console, config
        self.bar = display.progress()
        self.bar.live.console = console
        self.bar.disable = not console.is_terminal
        self.line = self.bar.add_task("train", total=config.steps, completed=first_step, status="compiling")
        self.started = time.perf_counter()
        self.first_step = first_step

    def saw(self, step: int, lines: list[dict], timing: dict[str, float], episode) -> None:
        """One step is done."""
        mean = lambda name: sum(line[name] for line in lines) / len(lines)  # noqa: E731 - used twice below
        seconds = sum(timing.get(f"time/{name}_s", 0.0) for name in ("collect", "credit", "pack", "update"))
        tokens = sum(line["rollout/sampled_tokens"] for line in lines)
        status = display.status(mean("reward"), mean("credit/flat_group_frac"), tokens / max(seconds, 1e-9))
        self.bar.update(self.line, completed=step + 1, status=status)
        every = self.config.show_every
        if not self.console.is_terminal and (step % (every or 10) == 0 or step + 1 == self.config.steps):
            done = step + 1 - self.first_step
            left = (time.perf_counter() - self.started) / done * (self.config.steps - step - 1)
            self.console.print(f"step {step + 1}/{self.config.steps}  {status}  {left:.0f} s left", markup=False)
        if every and step % every == 0:
            self.console.print(display.chat(episode, f"step {step + 1}, {lines[0]['cell']}"))


def main(argv: list[str] | None = None) -> int:
    """Run from a command line; the return value is the exit status: 0, 2 a user's error, 3 a non-finite loss."""
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        config, resuming = parse(sys.argv[1:] if argv is None else argv)
        check(config)
        run(config, resuming, console)
    except Stopped as stopped:
        console.print(f"stopped: {stopped}", markup=False, soft_wrap=True)
    except (*USER_ERRORS, NonFiniteLoss) as error:
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 3 if isinstance(error, NonFiniteLoss) else 2
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        message = f"error: {error}; what was saved is whole: mend the disk or its permissions, then use --resume"
        errors.print(message, style="red", markup=False, soft_wrap=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
