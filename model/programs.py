"""Programs: what is to be compiled, and names for them that change whenever the executable could.

A program is a function that stands at the top of one of our modules, what is bound to it, and its arguments. So all
that tracing can read is in plain sight: the name is a hash of where the function stands, of the values bound, of the
arguments' types and places, and of what surrounds them all (`surroundings`). A closure or another value that can't be
named exactly has no name, and what has no name isn't kept (model.executables). Left out: constants and functions that
somebody replaces in a module while it runs, but for `model.folded.FOLD`.
"""

import hashlib
import io
import os
import pickle
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
from jax.stages import Lowered

from model import folded

TRACED = ("model", "rollout", "rl")
"""Our packages of which any line may be traced."""

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes")
"""Theirs. Their versions are in every name, with those of jax's plugins and of NVIDIA's libraries."""

PLAIN = ("builtins", "functools", "collections", "copyreg", "enum")
"""Where else a value in a name may come from."""

VARIABLES = ("XLA_", "LIBTPU_", "TF_", "TRITON_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "MOSAIC_", "LD_LIBRARY_PATH")
"""Environment variables, by their beginnings, that compilers and the libraries under them read; JAX_* are in
jax.config."""

LARGE_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}
"""For prefill and training: cuBLAS is at its best there, and not trying Triton's tilings saves most of the time."""


@dataclass(frozen=True)
class Program:
    """`function` of `args`, to be compiled: a function at the top of a module, or a functools.partial of one, whose
    bound values are static.

    An argument is a tree of arrays, or a Program, which stands for its result's types. `donate`: places of arguments
    whose memory the result may take. `large`: its products are large, as in prefill and training.
    """

    function: Callable
    args: tuple
    donate: tuple[int, ...] = ()
    large: bool = False

    @property
    def options(self) -> dict[str, Any] | None:
        """The compiler's."""
        return LARGE_PRODUCTS if self.large and jax.default_backend() == "gpu" else None

    def lower(self) -> Lowered:
        args = (jax.eval_shape(arg.function, *arg.args) if isinstance(arg, Program) else arg for arg in self.args)
        return jax.jit(self.function, donate_argnums=self.donate).lower(*args)

    def name(self) -> str | None:
        """64 hexadecimal digits that no program with another executable has; None: it can't be named exactly."""
        if len(jax.local_devices()) != 1 or jax.process_count() != 1:
            return None  # which devices a program is for would have to be part of it
        around = surroundings()
        try:
            return hashlib.sha256(_bytes((self._parts(), around))).hexdigest()
        except Exception:  # of many types: what pickle says of closures, live objects and odd trees
            return None

    def _parts(self) -> tuple:
        args = tuple(arg._parts() if isinstance(arg, Program) else _types(arg) for arg in self.args)
        return self.function, args, self.donate, self.options


def code_name(lowered: Lowered, options: dict[str, Any] | None) -> str:
    """A name of what a program was lowered to: other source may give the same."""
    around = {name: value for name, value in surroundings().items() if name not in ("source", "folded")}
    trees = str((lowered.args_info, lowered.in_tree, lowered.out_tree))
    return hashlib.sha256(_bytes((lowered.as_text(), trees, options, around))).hexdigest()


def _types(tree: Any) -> tuple:
    """The tree's form, and each leaf's type (weak or not), layout and place."""
    leaves, form = jax.tree.flatten(tree)
    return form, [(str(jax.typeof(leaf)), repr(getattr(leaf, "format", None))) for leaf in leaves]


class _Pickler(pickle.Pickler):
    """Refuses functions and classes whose code is in no name, and arrays; closures pickle refuses by itself."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, jax.Array):
            raise pickle.PicklingError("an array is an argument of a program, and not a part of it")
        if isinstance(thing, (type, FunctionType)):
            package = thing.__module__.partition(".")[0]
            if package not in TRACED + LIBRARIES + PLAIN:
                raise pickle.PicklingError(f"{thing} is from {package}, whose code is not in a program's name")
        return NotImplemented


def _bytes(value: Any) -> bytes:
    """Bytes from which an equal value could be made again: values that differ have other bytes."""
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def surroundings() -> dict[str, Any]:
    """All that an executable depends on beside its program: code, versions, device, settings."""
    settings = jax.config.values  # of this thread: `with jax.default_matmul_precision(...)` is in it
    return {
        "source": SOURCE,
        "folded": folded.FOLD,
        "versions": _versions(),
        "device": _device(),
        # Those that say where executables are kept say nothing of what they do.
        "settings": [(name, repr(settings[name])) for name in sorted(settings) if "cache" not in name],
        "variables": sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES)),
    }


def source_digest(root: Path) -> str:
    """sha256 of every line of the packages in `root` that may be traced."""
    digest = hashlib.sha256()
    for path in sorted(path for package in TRACED for path in (root / package).rglob("*.py")):
        code = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(code)}\0".encode())
        digest.update(code)
    return digest.hexdigest()


ROOT = Path(__file__).resolve().parents[1]
SOURCE = source_digest(ROOT)
"""Read as the code itself is, at the start: later it may be edited."""


@cache
def _versions() -> Mapping[str, str]:
    names = tuple(name.replace("_", "-") for name in LIBRARIES)
    found = {"python": sys.version}
    for one in metadata.distributions():
        name = (one.name or "").lower().replace("_", "-")
        if name in names or name.startswith(("jax-", "nvidia-")):
            found[name] = one.version
    return dict(sorted(found.items()))


@cache
def _device() -> tuple:
    """The device, and the CPU that works for it or is it: its instructions are in what is compiled for a CPU."""
    device = jax.local_devices()[0]
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        cpu = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU "))]
    except OSError:
        cpu = [platform.node()]
    return device.platform, device.client.platform_version, device.device_kind, cpu, os.cpu_count()
