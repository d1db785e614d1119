"""Compile several lowered functions at once. XLA compiles outside Python's lock, so shapes take cores, not turns."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from jax.stages import Compiled, Lowered

LARGE_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}
"""For prefill and training: cuBLAS is at its best there, and not trying Triton's tilings saves most of the time."""


def compile_together(lowered: Sequence[tuple[Lowered, bool]]) -> list[Compiled]:
    """Compile each (function, whether its products are large), side by side."""
    gpu = jax.default_backend() == "gpu"

    def one(item: tuple[Lowered, bool]) -> Compiled:
        function, large = item
        return function.compile(compiler_options=LARGE_PRODUCTS if gpu and large else None)

    with ThreadPoolExecutor(min(len(lowered), os.cpu_count() or 1)) as pool:
        return list(pool.map(one, lowered))


def keep_executables(folder: Path) -> None:
    """Keep what is compiled from here on in `folder`, and take from there what an earlier process compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
