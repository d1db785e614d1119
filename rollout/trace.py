"""Which kernels a device ran, of what kind, and when it ran none, from the Perfetto file that jax.profiler writes."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

KINDS = {
    "attention": ("flash", "attention", "fmha", "softmax", "cudnn"),  # of cuDNN nothing else is used
    "product": ("gemm", "gemv", "dot", "cutlass", "cublas", "nvjet", "matmul"),
    "copy": ("copy", "memcpy", "memset", "dynamic_update", "dynamic-update", "transpose", "concatenate"),
    "random": ("rng", "threefry", "random"),
    "reduction": ("reduce",),
}
"""Kinds of kernel, by what their names hold; the first that fits."""

PRODUCTS = ("qkv", "out", "down")
"""The decode step's own kernels that are products (model.fused), whose names tell nothing; a number may follow."""


class Kernel(NamedTuple):
    """One run of a kernel: `start` and `duration`, ms."""

    name: str
    start: float
    duration: float


class Gap(NamedTuple):
    """A time in which no kernel ran: `start` after the first kernel's and `duration`, ms, and between which kernels."""

    start: float
    duration: float
    after: str
    before: str


class Busy(NamedTuple):
    """From the first kernel's start to the last one's end, ms; how much of it kernels ran; the gaps, longest first."""

    span: float
    busy: float
    gaps: list[Gap]


def trace_kernels(call: Callable[[], Any], folder: Path) -> list[Kernel]:
    """The kernels of one `call`, as they began, from a Perfetto trace left in `folder`."""
    with jax.profiler.trace(str(folder), create_perfetto_trace=True):
        jax.block_until_ready(call())
    files = sorted(folder.rglob("perfetto_trace.json.gz"))
    return read_kernels(files[-1]) if files else []


def read_kernels(file: Path) -> list[Kernel]:
    """Kernels of the device's streams in a Perfetto file; none where the trace has no device (a CPU)."""
    with gzip.open(file) as opened:
        events = json.load(opened)["traceEvents"]
    devices = {e["pid"] for e in events if e.get("name") == "process_name" and "/device:" in e["args"]["name"]}
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and e["pid"] in devices and "Stream" in e["args"]["name"]
    }
    kernels = [
        Kernel(e["name"], e.get("ts", 0.0) / 1e3, e.get("dur", 0.0) / 1e3)
        for e in events
        if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def by_name(kernels: list[Kernel]) -> list[tuple[str, float, int]]:
    """(kernel, ms in all, count), the longest first."""
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for kernel in kernels:
        total[kernel.name][0] += kernel.duration
        total[kernel.name][1] += 1
    return sorted(((name, ms, int(count)) for name, (ms, count) in total.items()), key=lambda k: -k[1])


def busy(kernels: list[Kernel]) -> Busy:
    """How much of the time kernels ran, of kernels in the order in which they began. Streams may overlap."""
    gaps, ran, end, last = [], 0.0, kernels[0].start, kernels[0].name
    for kernel in kernels:
        stop = kernel.start + kernel.duration
        if kernel.start > end:
            gaps.append(Gap(end - kernels[0].start, kernel.start - end, last, kernel.name))
        ran += max(0.0, stop - max(end, kernel.start))
        if stop >= end:
            end, last = stop, kernel.name
    return Busy(end - kernels[0].start, ran, sorted(gaps, key=lambda gap: -gap.duration))


def summary(kernels: list[Kernel]) -> dict[str, Any]:
    """What a report keeps of a trace, of kernels in the order in which they began: `span_ms`, `busy_ms`,
    `short_gaps_ms` (gaps under 0.1 ms, in all), the 40 `longest_gaps` as dicts, and the 50 longest `kernels` as
    `by_name` has them."""
    span, ran, gaps = busy(kernels)
    short = sum(gap.duration for gap in gaps if gap.duration < 0.1)
    longest = [gap._asdict() for gap in gaps[:40]]
    found = {"span_ms": span, "busy_ms": ran, "short_gaps_ms": short, "longest_gaps": longest}
    return found | {"kernels": by_name(kernels)[:50]}


def kind_of(kernel: str) -> str:
    """What a kernel does, as far as its name tells."""
    name = kernel.lower()
    if name.rstrip("_0123456789") in PRODUCTS:
        return "product"
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "elementwise, other")
