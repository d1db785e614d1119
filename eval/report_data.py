"""A run directory read back into plain data, as files: rl, which wrote them, is not imported.

What a report needs and a directory lacks is either an error that says so (no run there, a damaged file) or a sentence
in `Run.missing`, so that no number is left out silently. No estimate is made here: intervals are read, not recomputed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMAS = (1, 2)
"""Forms of results.json that this module reads (eval/results.py says what they hold)."""

EPISODE_KEYS = ("problem", "question", "facts", "gold", "arm", "step", "episode", "adapter", "utterances")
"""What every saved episode has."""

METRIC_LABELS = {
    "pass_at_1": "team solves it",
    "both_right": "all right",
    "sends_own": "sends own facts",
    "uses_partner": "uses partner's",
    "both_agree": "both agree",
    "asks": "asks at first",
    "pass_at_k": "any reader right",
    "notes_right": "notes right",
    "vote": "vote of notes",
    "rescued": "rescued",
    "misled": "misled",
    "notes_boxed": "notes with an answer",
    "notes_send_own": "notes send own",
    "note_chars": "note length, characters",
    "truncated": "truncated",
}
"""Metrics of the summary tables, in their order. Others are listed under their own names."""


class ReportError(ValueError):
    """A directory that can't be reported on; the message says which file is at fault and what would do."""


@dataclass(frozen=True)
class Evaluated:
    """One held-out evaluation. `stage`: untrained, trained or with_untrained_partner; `credit` and `seed` are None for
    the untrained base. `metrics`: {name: {mean, low, high, n} or None where there was nothing to measure}."""

    stage: str
    arm: str
    credit: str | None
    seed: int | None
    metrics: Mapping[str, Mapping[str, float] | None]

    @property
    def label(self) -> str:
        """'channel_on, grpo, seed 17: trained'."""
        parts = [self.arm, self.credit, None if self.seed is None else f"seed {self.seed}"]
        return ", ".join(part for part in parts if part) + ": " + self.stage.replace("_", " ")


@dataclass(frozen=True)
class Run:
    """What a run directory holds. `results` is None for a run that isn't finished; `evaluations` are then those that
    were kept so far. `missing`: a sentence for each thing a whole run has and this one lacks."""

    path: Path
    config: dict[str, Any]
    results: dict[str, Any] | None
    evaluations: list[Evaluated]
    metrics: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    episodes: list[dict[str, Any]]
    missing: list[str] = field(default_factory=list)

    @property
    def arms(self) -> list[dict[str, Any]]:
        """Every (arm, credit rule) across its seeds (eval.arms)."""
        return self.results["arms"] if self.results else []


def read_run(path: Path) -> Run:
    """Read a run directory. Raises ReportError if there is no run, or a file of it is damaged."""
    if not path.is_dir():
        raise ReportError(f"{path} is not a directory: name a run directory, such as runs/talk")
    if not (path / "config.json").exists():
        raise ReportError(f"{path} holds no run: config.json is missing")
    missing: list[str] = []
    config = _object(path / "config.json")
    results = _results(path)
    metrics = list(_lines(path / "metrics.jsonl", missing, ("step", "cell")))
    timing = list(_lines(path / "timing.jsonl", missing, ("step",)))
    episodes = _episodes(path, missing)
    evaluations = _of_results(results) if results else _of_files(path)
    run = Run(path, config, results, evaluations, metrics, timing, episodes, missing)
    missing += _lacking(run)
    return run


def split_cell(name: str) -> tuple[str, str, int]:
    """('channel_on', 'grpo', 17) of 'channel_on-grpo-17'. Raises ReportError on a name of another form."""
    parts = name.rsplit("-", 2)
    if len(parts) != 3 or not parts[2].isdigit():
        raise ReportError(f"metrics.jsonl names a cell {name!r}; a cell's name is arm-credit-seed")
    return parts[0], parts[1], int(parts[2])


def by_rule(run: Run, metric: str) -> dict[tuple[str, str], dict[int, dict[int, float]]]:
    """{(arm, credit): {seed: {step: value}}} of one metric of metrics.jsonl; steps where it wasn't measured are out."""
    found: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
    for line in run.metrics:
        arm, credit, seed = split_cell(line["cell"])
        values = found.setdefault((arm, credit), {}).setdefault(seed, {})
        if line.get(metric) is not None:
            values[line["step"]] = line[metric]
    return found


def seconds_by_phase(run: Run) -> dict[str, float]:
    """Seconds by phase: of the process that finished the run, else the sum over the steps that were logged."""
    if run.results:
        return run.results["seconds"]
    total: dict[str, float] = {}
    for line in run.timing:
        for name, value in line.items():
            if name.startswith("time/") and name.endswith("_s"):
                phase = name.removeprefix("time/").removesuffix("_s")
                total[phase] = total.get(phase, 0.0) + value
    return total


def _object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{file} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ReportError(f"{file} is damaged: it holds no JSON object")
    return value


def _lines(file: Path, missing: list[str], needs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A log's lines, if there is one. A last line without its end is left out, and said; another broken line, or one
    without a key that it `needs`, is an error."""
    if not file.exists():
        return
    # As bytes: a reply may hold U+2028, which ends a line for str.splitlines and not for JSON.
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                missing.append(f"The last line of {file.name} was cut while it was written; it is left out.")
                return
            try:
                value = json.loads(line.decode(errors="replace"))
            except ValueError as error:
                raise ReportError(f"{file} is damaged: line {number}: {error}") from error
            if not isinstance(value, dict):
                raise ReportError(f"{file} is damaged: line {number} holds no JSON object")
            if lacking := [key for key in needs if key not in value]:
                raise ReportError(f"{file} is damaged: line {number} lacks {', '.join(lacking)}")
            yield value


def _results(path: Path) -> dict[str, Any] | None:
    file = path / "results.json"
    if not file.exists():
        return None
    results = _object(file)
    if results.get("schema") not in SCHEMAS:
        known = ", ".join(map(str, SCHEMAS))
        raise ReportError(f"{file} has schema {results.get('schema')!r}; this version reads {known}")
    lacking = [key for key in ("task", "base", "cells", "arms", "seconds", "compiles") if key not in results]
    if lacking:
        raise ReportError(f"{file} is damaged: it lacks {', '.join(lacking)}")
    return results


def _of_results(results: Mapping[str, Any]) -> list[Evaluated]:
    found = [Evaluated("untrained", arm, None, None, metrics) for arm, metrics in results["base"].items()]
    for cell in results["cells"]:
        for stage, metrics in cell["evaluations"].items():
            found.append(Evaluated(stage, cell["arm"], cell["credit"], cell["seed"], metrics))
    return found


def _of_files(path: Path) -> list[Evaluated]:
    """The evaluations that an unfinished run has kept: base-ARM and ARM-CREDIT-SEED-STAGE; repeats are not shown."""
    found = []
    for file in sorted((path / "evaluations").glob("*.json")):
        metrics = _object(file).get("metrics")
        if metrics is None:
            raise ReportError(f"{file} is damaged: it lacks metrics")
        if file.stem.startswith("base-"):
            if "-again-" not in file.stem:
                found.append(Evaluated("untrained", file.stem.removeprefix("base-"), None, None, metrics))
            continue
        cell, _, stage = file.stem.rpartition("-")
        found.append(Evaluated(stage, *split_cell(cell), metrics))
    return found


def _episodes(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """The saved episodes, and those of evaluations that a run has kept and not yet put into episodes.jsonl. Without
    ids and log-probs, which are most of the bytes and in no report."""
    found = [_without_ids(episode) for episode in _lines(path / "episodes.jsonl", missing, EPISODE_KEYS)]
    gathered = {episode.get("evaluation") for episode in found}
    for file in sorted((path / "evaluations").glob("*.jsonl")):
        if file.stem not in gathered:
            found += map(_without_ids, _lines(file, missing, EPISODE_KEYS))
    return found


def _without_ids(episode: dict[str, Any]) -> dict[str, Any]:
    for utterance in episode["utterances"]:
        utterance.pop("tokens", None)
        utterance.pop("logp", None)
    return episode


def _lacking(run: Run) -> Iterator[str]:
    """A sentence for each thing that a whole run has and this one lacks."""
    steps = run.config.get("steps")
    if run.results is None:
        yield (
            "The run is not finished: there is no results.json, so no verdict. "
            f"Continue it with: python -m rl.train --resume {run.path}"
        )
    if not run.metrics:
        yield "metrics.jsonl has no lines: no step was finished, so there are no learning curves."
    steps_of: dict[str, set[int]] = {}
    for line in run.metrics:
        steps_of.setdefault(line["cell"], set()).add(line["step"])
    for count in sorted({len(have) for have in steps_of.values()} - {steps}):
        cells = [cell for cell, have in steps_of.items() if len(have) == count]
        yield f"metrics.jsonl has {count} of {steps} steps of {', '.join(cells)}."
    if not run.timing:
        yield "timing.jsonl has no lines: seconds by phase of each step are not known."
    if not run.evaluations:
        why = "" if run.config.get("evaluate", True) else " (it was run with --no-evaluate)"
        yield f"There are no held-out evaluations{why}."
    if not run.episodes:
        yield "episodes.jsonl has no lines: there are no episodes to look at."
    trained = [u for e in run.episodes if "cell" in e for u in e["utterances"]]
    if trained and any("advantage" not in u or "pieces" not in u for u in trained):
        yield "Some training episodes were saved without advantages or tokens' text, so their tokens are not tinted."
    if any("note" not in u for e in run.episodes for u in e["utterances"]):
        yield "Some episodes were saved without saying which turns are notes, so rescued and misled are not marked."
