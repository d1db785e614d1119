"""Which kernels a device ran, and of what kind, from the Perfetto file that jax.profiler writes."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

KINDS = {
    "product": ("gemm", "gemv", "dot", "cutlass", "cublas", "nvjet", "matmul"),
    "attention": ("flash", "attention", "fmha", "softmax"),
    "copy": ("copy", "memcpy", "memset", "dynamic_update", "dynamic-update", "transpose", "concatenate"),
    "random": ("rng", "threefry", "random"),
    "reduction": ("reduce",),
}
"""Kinds of kernel, by what their names hold; the first that fits."""


def trace_kernels(call: Callable[[], Any], folder: Path) -> list[tuple[str, float, int]]:
    """(kernel, ms in all, count) of one `call`, the longest first, from a Perfetto trace left in `folder`."""
    with jax.profiler.trace(str(folder), create_perfetto_trace=True):
        jax.block_until_ready(call())
    files = sorted(folder.rglob("perfetto_trace.json.gz"))
    return read_kernels(files[-1]) if files else []


def read_kernels(file: Path) -> list[tuple[str, float, int]]:
    """Kernels of the device's streams in a Perfetto file; none where the trace has no device (a CPU)."""
    with gzip.open(file) as opened:
        events = json.load(opened)["traceEvents"]
    devices = {e["pid"] for e in events if e.get("name") == "process_name" and "/device:" in e["args"]["name"]}
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and e["pid"] in devices and "Stream" in e["args"]["name"]
    }
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            total[event["name"]][0] += event.get("dur", 0.0) / 1e3
            total[event["name"]][1] += 1
    return sorted(((name, ms, int(count)) for name, (ms, count) in total.items()), key=lambda k: -k[1])


def kind_of(kernel: str) -> str:
    """What a kernel does, as far as its name tells."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "elementwise, other")
