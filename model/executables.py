"""Compile several programs at once, and keep what is compiled, so that a later process needn't.

XLA compiles outside Python's lock, so shapes take cores, not turns. Two things are kept in one folder. JAX's own cache
knows an executable by its lowered code, so a process that uses it still traces and lowers, which takes seconds a
program at 28 layers. In `programs/` the same executables lie whole under their programs' names (model.programs), and
are looked up before anything is traced. What has no name, or can't be serialised, has JAX's cache alone; so have the
small functions that JAX compiles by itself, such as those that draw random weights.

An edit gives every program another name, and leaves most of them the code that they had. So an executable lies there
under its code's name, and its programs' names lead to it. That JAX's cache has it is not enough: what a CPU takes from
there can't be serialised a second time, and that shows only when it is run.

The folder must be trusted: reading a kept program unpickles it and runs what it holds.
"""

import hashlib
import os
import pickle
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled, Lowered

from model.programs import ROOT, SOURCE, Program, code_name, source_digest
from model.weights import replace_file

EXECUTABLE = ".executable"
"""Ends the names of files that hold one; a file under a program's name holds such a file's name."""

_folder: Path | None = None
"""Where programs are kept; None: nowhere."""


class Built(NamedTuple):
    """An executable, and whether it was `loaded` whole from the folder, and not compiled."""

    executable: Compiled
    loaded: bool


def keep_executables(folder: Path) -> None:
    """Keep what is compiled from here on in `folder`, and take from there what an earlier process compiled.

    Several processes may share a folder: files appear whole.
    """
    global _folder
    _folder = folder.resolve() / "programs"
    _folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(_folder.parent))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def compile_together(wanted: Sequence[Program]) -> list[Built]:
    """Load or compile each of these programs, side by side."""
    files = [_file(program) for program in wanted]
    with ThreadPoolExecutor(max(1, min(len(wanted), os.cpu_count() or 1))) as pool:
        found = list(pool.map(_load, files))
        # Lowered in this thread: Python does one at a time anyway, and JAX's settings may be this thread's own.
        building = [
            None if have else pool.submit(_build, program.lower(), program.options, file)
            for program, file, have in zip(wanted, files, found, strict=True)
        ]
        return [Built(have, True) if have else future.result() for have, future in zip(found, building, strict=True)]


def _file(program: Program) -> Path | None:
    name = None if _folder is None else program.name()
    return None if name is None else _folder / name


def _build(lowered: Lowered, options: dict[str, Any] | None, file: Path | None) -> Built:
    """The executable, by the code's name or compiled; `file`, under the program's name, leads to it from now on."""
    if file is None:
        return Built(lowered.compile(compiler_options=options), False)
    by_code = file.with_name(code_name(lowered, options) + EXECUTABLE)
    if (have := _load(by_code)) is not None:
        _write(file, by_code.name.encode())
        return Built(have, True)
    hits = _cache_hits()
    compiled = lowered.compile(compiler_options=options)
    if _cache_hits() == hits and (content := _serialized(compiled)) is not None:
        _write(by_code, content)
        _write(file, by_code.name.encode())
    return Built(compiled, False)


def _serialized(compiled: Compiled) -> bytes | None:
    """What an executable's file holds: a sha256, and the pickle that it is of. None where there is no serialising."""
    try:
        content = pickle.dumps(serialize(compiled))
    except Exception:  # of many types, by backend
        return None
    return hashlib.sha256(content).digest() + content


def _write(file: Path, content: bytes) -> None:
    if source_digest(ROOT) != SOURCE:
        return  # edited since this process read it: names and code may not be of one text
    try:
        replace_file(file, lambda partial: partial.write_bytes(content))
    except OSError as error:
        warnings.warn(f"a compiled program can't be kept: {error}", stacklevel=2)


def _load(file: Path | None) -> Compiled | None:
    """The executable that a file leads to, or None; one that can't be read is removed, with a warning."""
    if file is None or not file.exists():
        return None
    device = jax.local_devices()[0]
    try:
        if file.suffix != EXECUTABLE:
            file = file.with_name(file.read_text())
        digest, content = (raw := file.read_bytes())[:32], raw[32:]
        if hashlib.sha256(content).digest() != digest:  # before a line of it is run
            raise ValueError("it is damaged")
        return deserialize_and_load(*pickle.loads(content), backend=device.client, execution_devices=[device])
    except Exception as error:  # the disk's, pickle's and the device's
        warnings.warn(f"{file} can't be used, so its program is compiled again: {error}", stacklevel=2)
        with suppress(OSError):
            file.unlink(missing_ok=True)
        return None


_hits = threading.local()


def _cache_hits() -> int:
    """How many executables this thread has taken from JAX's cache."""
    return getattr(_hits, "count", 0)


def _on_event(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _hits.count = _cache_hits() + 1


jax.monitoring.register_event_listener(_on_event)
