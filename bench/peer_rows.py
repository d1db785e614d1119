"""What `bench.peers` measures: the rows, and for each number the command that makes it (bench.peer_read reads it).

A measurement is one subprocess; it gives one or more figures, each the entry of a row and a column. Nothing runs here.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from bench.peer_read import (
    WARM_UP,
    Figure,
    Output,
    read_busy,
    read_cold,
    read_hf_decode,
    read_hf_step,
    read_methods,
    read_report,
    read_startup,
    read_tunix_decode,
    read_tunix_gradient,
    read_tunix_prefill,
)


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
HF_STEP = "hf step"
COLUMNS = {"ours": "ours", "hf": "HF + PEFT", "hf_compiled": "HF compiled", "tunix": "Tunix"}
"""`hf_compiled`: adapter merged, static cache, compiled."""


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


class Places(NamedTuple):
    """Where things are: each None where there is none."""

    peers: Path | None
    wheels: Path | None
    tokenizer: str | None
    data: str | None


def measurements(places: Places, repeats: int, long_repeats: int, tiny: bool) -> list[Measurement]:
    """Everything, in the order in which it is run: a row's peers stand beside ours, but for the one that takes longest,
    which comes last, where little time is left."""
    ours, peers = _ours(places, repeats, long_repeats, tiny), _peers(places, repeats, long_repeats, tiny)
    order = {row.name: place for place, row in enumerate(ROWS)} | {CHECKS: -1}
    return sorted([*ours, *peers], key=lambda m: (m.name == HF_STEP, min(order[row] for row, _ in m.gives)))


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
    steps = WARM_UP + -(-repeats // long_repeats)  # each cold start's, and those after WARM_UP are the row `step`
    whole = (*step, str(steps), *cached, "{work}/cache-{run}")
    cold = _own("startup_cold", whole, read_cold, 110, 240, no_data)
    first = (*step, "1", *cached, "{work}/cache-0")
    warm = _own("startup_warm", first, read_startup("startup_warm"), 35, 240, no_data)
    traced = (*step, str(WARM_UP), *cached, "{work}/cache-0", "--trace", "{work}/trace-{run}")
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
        Measurement(HF_STEP, hf_step, (hf,), read_hf_step, 130, 300, long_repeats, no_hf),
    ]
