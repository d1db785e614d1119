"""What `bench.peers` measures: the rows, and for each number the command that makes it and how its output is read.

A measurement is one subprocess; it gives one or more figures, each the entry of a row and a column. Nothing runs here.
"""

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A line of the table; `digits` behind the point; `floor` and `goal` as published for one H200, None: none."""

    name: str
    label: str
    digits: int
    floor: float | None
    goal: float | None


ROWS = (
    Row("decode_32", "decode, 32 rows, ms a step", 2, 0.94, 1.3),
    Row("decode_32_top_p", "the same, top_p 0.95", 2, 0.95, 1.4),
    Row("decode_128", "decode, 128 rows", 2, 1.59, 2.1),
    Row("prefill", "prefill 32 x 256, s", 3, 0.032, 0.045),
    Row("cells", "decode, 3 cells x 32 rows", 2, 1.42, 2.2),
    Row("gradient", "gradient 16 x 1,024, s", 3, 0.128, 0.20),
    Row("step", "talk_to_solve step, s", 2, 1.8, 2.8),
    Row("methods", "talk_methods, min", 1, None, 45),
    Row("startup_cold", "first update, cold, s", 1, None, 90),
    Row("startup_warm", "first update, warm, s", 1, None, 25),
    Row("busy", "kernels run in a traced step, %", 1, None, None),
)
CHECKS = "checks"
COLUMNS = {"ours": "ours", "hf": "HF + PEFT", "hf_compiled": "HF compiled", "tunix": "Tunix"}
"""`hf_compiled`: adapter merged, static cache, compiled."""


@dataclass(frozen=True)
class Figure:
    """One entry of the table: measured `values` in the row's unit, a `note` on how, and what was measured beside it."""

    row: str
    column: str
    values: list[float]
    note: str = ""
    beside: dict[str, Any] = field(default_factory=dict)


class Output(NamedTuple):
    """What a subprocess left: the JSON lines of its output, its report (its --out file), its start (wall clock, s)."""

    lines: list[dict[str, Any]]
    report: dict[str, Any]
    started: float


@dataclass(frozen=True)
class Measurement:
    """A command, how its output is read, and the (row, column) of each figure that it `gives`.

    `argv` follows the interpreter; {report}, {work} and {run} in it are filled in. `expected_s`: it isn't started with
    less time than this left; `limit_s`: it is stopped there. `runs`: processes, one after the other. `skip`: why it
    can't be run here. `fills`: its folder {work}/<fills>-{run} must be new. `after`: a measurement that must have
    gone well, and the folder in {work} that it left.
    """

    name: str
    gives: tuple[tuple[str, str], ...]
    argv: tuple[str, ...]
    read: Callable[[Output], list[Figure]]
    expected_s: int
    limit_s: int
    runs: int = 1
    skip: str | None = None
    fills: str | None = None
    after: tuple[str, str] | None = None


BESIDE = ("sampling_logp_gap", "sampling_logp_gap_max", "peak_gib", "bandwidth_share", "grad_norm", "kernels")


def read_report(row: str, key: str) -> Callable[[Output], list[Figure]]:
    """Our own: a `spread` under `key` of the report."""

    def read(output: Output) -> list[Figure]:
        beside = {name: output.report[name] for name in BESIDE if name in output.report}
        if row == "prefill":
            beside.pop("bandwidth_share")  # decode's
        return [Figure(row, "ours", output.report[key]["runs"], "", beside)]

    return read


def read_cold(output: Output) -> list[Figure]:
    """A process that starts with nothing compiled: its first update, and the steps after it."""
    return [*read_startup("startup_cold")(output), *read_steps(output)]


def read_steps(output: Output) -> list[Figure]:
    """bench.full_shape's steps without the first, in which shapes are met for the first time."""
    steps = output.report["steps"][1:]
    beside = {k: statistics.median(s[k] for s in steps) for k in steps[0] if k.endswith("_s") and k != "step_s"}
    beside |= {k: max(s[k] for s in steps) for k in ("sampling_logp_gap", "sampling_logp_gap_max")}
    return [Figure("step", "ours", [s["step_s"] for s in steps], "", beside | {"peak_gib": output.report["peak_gib"]})]


def read_methods(output: Output) -> list[Figure]:
    """Minutes of the published study's 80 steps, from each forced one but the first."""
    (steps,) = read_steps(output)
    note = f"80 x a step of {statistics.median(steps.values):.1f} s"
    return [replace(steps, row="methods", values=[80 * s / 60 for s in steps.values], note=note)]


def read_busy(output: Output) -> list[Figure]:
    """bench.full_shape's traced step: the share of it, from its first kernel to its last, in which kernels ran."""
    traced = output.report["traced"]
    span, ran = traced["span_ms"] / 1e3, traced["busy_ms"] / 1e3
    gaps = ", ".join(f"{gap['duration']:.0f}" for gap in traced["longest_gaps"][:6])
    note = f"{ran:.2f} of {span:.2f} s, slowed by the profiler; the longest gaps {gaps} ms"
    beside = {name: value for name, value in traced["step"].items() if name.endswith("_s")}
    return [Figure("busy", "ours", [100 * ran / span], note, beside | {"kernels": traced["kernels"]})]


def read_startup(row: str) -> Callable[[Output], list[Figure]]:
    """From the process's start to the end of its first update."""

    def read(output: Output) -> list[Figure]:
        first = output.report["steps"][0]
        beside = {"setup_s": output.report["setup_s"], "compile_s": first["compile_s"], "step_s": first["step_s"]}
        return [Figure(row, "ours", [first["ended_at"] - output.started], "", beside)]

    return read


def lines_with(lines: Sequence[dict[str, Any]], want: dict[str, Any]) -> list[dict[str, Any]]:
    """Those whose fields are as wanted."""
    return [line for line in lines if all(line.get(k) == v for k, v in want.items())]


def read_hf_decode(output: Output) -> list[Figure]:
    """hf_peft_step.py --only-gen: whole `generate` calls over their tokens, on its own prompts of 250.

    Longer ones would only weigh their prefill more, which it can't tell apart; so this is at its best.
    """
    figures = []
    for column, how in (("hf", "adapter unmerged"), ("hf_compiled", "merged, compiled static cache")):
        found = [line["ms_per_step"] for line in lines_with(output.lines, {"stage": "decode", "how": how})]
        if found:
            figures.append(Figure("decode_32", column, found, "prompt 250, prefill included, no log-probs"))
    return figures


def read_hf_step(output: Output) -> list[Figure]:
    """hf_peft_step.py: a whole step; its training pass's tokens a second stand for 16 x 1,024 tokens."""
    figures = []
    for line in lines_with(output.lines, {"stage": "train"}):
        figures.append(Figure("gradient", "hf", [16 * 1024 / line["tokens_per_s"]], "from the step's tokens/s"))
    phases = {
        line["stage"] + "_s": line["seconds"] for line in output.lines if line.get("stage") in ("rollout", "train")
    }
    for line in lines_with(output.lines, {"stage": "step"}):
        figures.append(Figure("step", "hf", [line["seconds"]], "", phases))
    return figures


def read_tunix_decode(row: str) -> Callable[[Output], list[Figure]]:
    """tunix_bench.py: each whole call less the median one-token call, over the steps between."""

    def read(output: Output) -> list[Figure]:
        (first,) = lines_with(output.lines, {"stage": "sample", "part": "prefill"})
        (full,) = lines_with(output.lines, {"stage": "sample", "part": "full"})
        (summary,) = lines_with(output.lines, {"stage": "sample", "part": "summary"})
        prefill = statistics.median(first["all_s"])
        values = [1e3 * (seconds - prefill) / (summary["gen"] - 1) for seconds in full["all_s"]]
        return [Figure(row, "tunix", values, "", {"peak_gib": summary["peak_gib"]})]

    return read


def read_tunix_prefill(output: Output) -> list[Figure]:
    """tunix_bench.py's one-token call."""
    (first,) = lines_with(output.lines, {"stage": "sample", "part": "prefill"})
    return [Figure("prefill", "tunix", first["all_s"], "a one-token call, host work included")]


def read_tunix_gradient(output: Output) -> list[Figure]:
    """tunix_bench.py --train lora, which prints the best of its repeats only: a process a value."""
    (line,) = lines_with(output.lines, {"stage": "train", "part": "loss_and_grad"})
    beside = {"peak_gib": line["peak_gib"]}
    return [Figure("gradient", "tunix", [line["best_s"]], "each the best of its process's repeats", beside)]


class Places(NamedTuple):
    """Where things are: each None where there is none."""

    peers: Path | None
    wheels: Path | None
    tokenizer: str | None
    data: str | None


def measurements(places: Places, repeats: int, long_repeats: int, tiny: bool) -> list[Measurement]:
    """Everything, in the order in which it is run: a row's peers stand beside ours."""
    ours, peers = _ours(places, repeats, long_repeats, tiny), _peers(places, repeats, long_repeats, tiny)
    order = {row.name: place for place, row in enumerate(ROWS)} | {CHECKS: -1}
    return sorted([*ours, *peers], key=lambda m: min(order[row] for row, _ in m.gives))


def _ours(places: Places, repeats: int, long_repeats: int, tiny: bool) -> list[Measurement]:
    preset, lengths, rows = ("tiny", (64, 32), (2, 4)) if tiny else ("qwen2.5-1.5b", (640, 384), (32, 128))
    sizes = ("--preset", preset, "--repeats", str(repeats), "--out", "{report}")
    profile = ("-m", "rollout.profile", *sizes, "--new-tokens", str(lengths[1]))
    long = ("--prompt-tokens", str(lengths[0]))
    short = ("--prompt-tokens", "32" if tiny else "256", "--rows", str(rows[0]), "--no-trace")
    decode = {
        "decode_32": (*long, "--rows", str(rows[0])),
        "decode_32_top_p": (*long, "--rows", str(rows[0]), "--top-p", "0.95", "--no-trace"),
        "decode_128": (*long, "--rows", str(rows[1]), "--no-trace"),
        "cells": (*long, "--rows", str(rows[0]), "--cells", "3", "--no-trace"),
    }
    out = [
        _own(row, (*profile, *flags), read_report(row, "decode_ms_per_step"), 35, 150) for row, flags in decode.items()
    ]
    out.append(_own("prefill", (*profile, *short, "--new-tokens", "32"), read_report("prefill", "prefill_s"), 25, 120))
    gradient = ("-m", "bench.gradient", *sizes, *long, "--new-tokens", str(lengths[1]), "--rows", "2" if tiny else "16")
    out.append(_own("gradient", gradient, read_report("gradient", "gradient_s"), 35, 150))
    step = ("-m", "bench.full_shape", "--preset", preset, "--out", "{report}", *_data_flags(places, tiny), "--steps")
    no_data = None if tiny or (places.tokenizer and places.data) else "it needs --tokenizer and --data"
    rules = ("--credit", "grpo", "reinforce_ada", "raft", "mixed_partners", "--seeds", "17", "18", "19")
    rules += () if tiny else ("--micro-rows", "4")  # many cells' last micro-batches, each of which may be half empty
    cached = ("--seeds", "17", "--compile-cache")
    steps = 1 + -(-repeats // long_repeats)  # but for each cold start's first, they are the row `step`
    whole = (*step, str(steps), *cached, "{work}/cache-{run}")
    cold = _own("startup_cold", whole, read_cold, 110, 240, no_data)
    first = (*step, "1", *cached, "{work}/cache-0")
    warm = _own("startup_warm", first, read_startup("startup_warm"), 35, 240, no_data)
    traced = (*step, "1", *cached, "{work}/cache-0", "--trace", "{work}/trace-{run}")
    no_kernels = "tiny shapes are a CPU's, whose trace shows no kernels" if tiny else no_data
    busy = _own("busy", traced, read_busy, 70, 240, no_kernels)
    return [
        *out,
        _own("methods", (*step, str(repeats + 1), *rules), read_methods, 260, 480, no_data),
        replace(cold, gives=(*cold.gives, ("step", "ours")), runs=long_repeats, fills="cache"),
        replace(warm, runs=repeats, after=(cold.name, "cache-0")),
        replace(busy, after=(cold.name, "cache-0"), fills="trace"),
        Measurement(
            "checks",
            ((CHECKS, "ours"),),
            ("-m", "bench.kernels", "--check"),
            lambda output: [],
            110,
            240,
            skip=None if importlib.util.find_spec("bench.kernels") else "absent: there is no bench.kernels",
        ),
    ]


def _own(row, argv, read, expected_s, limit_s, skip=None) -> Measurement:
    return Measurement(f"{row} ours", ((row, "ours"),), argv, read, expected_s, limit_s, skip=skip)


def _data_flags(places: Places, tiny: bool) -> tuple[str, ...]:
    """bench/NOTES.md's, so that its numbers and these are of one shape."""
    if tiny:
        return ("--data", "stories", "--max-prompt-tokens", "160")
    flags = "--max-prompt-tokens 1024 --prompt-buckets 192 352 576 1024 --train-buckets 512 896 1408".split()
    return ("--tokenizer", str(places.tokenizer), "--data", str(places.data), *flags)


def _peers(places: Places, repeats: int, long_repeats: int, tiny: bool) -> list[Measurement]:
    no_peers = None if places.peers else "no --peers"
    no_wheels = no_peers or (None if places.wheels else "no --tunix-wheels")
    no_hf = no_peers or ("hf_peft_step.py has no --tiny" if tiny else None)
    tunix = (f"{places.peers}/tunix_bench.py", "--wheels", str(places.wheels), "--repeat", str(repeats))
    tunix += ("--tiny",) if tiny else ()
    rows, many = ("2", "4") if tiny else ("32", "128")
    lengths = ("--prompt", "32", "--gen", "16") if tiny else ("--prompt", "640", "--gen", "384")
    long = (*lengths, *(() if tiny else ("--cache", "1024")))
    hf = f"{places.peers}/hf_peft_step.py"
    train = ("--no-sample", "--train", "lora", "--remat", "--train-rows", "2" if tiny else "16", *lengths)
    decode = {
        "decode_32": (*long, "--batch", rows),
        "decode_32_top_p": (*long, "--batch", rows, "--top-p", "0.95"),
        "decode_128": (*long, "--batch", many),
    }

    def of_tunix(row, flags, read, expected_s):
        return Measurement(f"{row} tunix", ((row, "tunix"),), (*tunix, *flags), read, expected_s, 240, skip=no_wheels)

    prefill = ("--prompt", "32" if tiny else "256", "--gen", "2", "--batch", rows)
    hf_decode, hf_step = (("decode_32", "hf"), ("decode_32", "hf_compiled")), (("step", "hf"), ("gradient", "hf"))
    return [
        *(of_tunix(row, flags, read_tunix_decode(row), 60) for row, flags in decode.items()),
        of_tunix("prefill", prefill, read_tunix_prefill, 50),
        replace(of_tunix("gradient", train, read_tunix_gradient, 75), runs=long_repeats),
        Measurement("hf decode", hf_decode, (hf, "--only-gen"), read_hf_decode, 110, 300, long_repeats, no_hf),
        Measurement("hf step", hf_step, (hf,), read_hf_step, 130, 300, long_repeats, no_hf),
    ]
