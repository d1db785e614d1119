"""How `bench.peers` reads what its subprocesses print and write: figures for the table. Nothing runs here."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


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


WARM_UP = 2
"""Steps of a process before those that are counted: in the first shapes are met, and at a program's second run XLA
builds its CUDA graphs, some 0.15 s for the four rounds of a talk step."""

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


def read_steps(output: Output, warm_up: int = WARM_UP) -> list[Figure]:
    """bench.full_shape's steps without the first ones."""
    steps = output.report["steps"][warm_up:]
    beside = {k: statistics.median(s[k] for s in steps) for k in steps[0] if k.endswith("_s") and k != "step_s"}
    beside |= {k: max(s[k] for s in steps) for k in ("sampling_logp_gap", "sampling_logp_gap_max")}
    return [Figure("step", "ours", [s["step_s"] for s in steps], "", beside | {"peak_gib": output.report["peak_gib"]})]


def read_methods(output: Output) -> list[Figure]:
    """Minutes of the published study's 80 steps, from each forced one but the first; the second takes half a minute,
    and of that its graphs a little."""
    (steps,) = read_steps(output, warm_up=1)
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
