"""Checkpoints that are whole or are not there: orbax for the arrays, a manifest of ours for everything.

root/step_00000010/
    arrays/         orbax, one entry a leaf, by the leaf's name ("opt_state.0.mu.3.q_proj.a")
    meta.json       what the caller must know besides arrays: config, data position, best so far
    manifest.json   each leaf's shape and dtype, each file's size and sha256, its own sha256; written last

Orbax alone reads a flipped data byte without complaint, hence the manifest. A checkpoint is written under
another name, flushed to the disk and then renamed, so that a process killed at any moment leaves the earlier
ones as they were. Left out: asynchronous saves, several hosts, and when to save (the caller's affair).
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from model import manifest

PyTree = Any

FORMAT = 1
NAME = re.compile(r"step_(\d{8})(\.old)?")
SPARE_BYTES = 1 << 20
"""Free space asked for beyond the arrays themselves: orbax's own files, meta and manifest."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none of those there can be used; the message says what to do."""


@dataclass(frozen=True)
class Restored:
    """What `restore` found; `skipped` has one line for each damaged checkpoint that was passed over."""

    step: int
    arrays: PyTree
    meta: dict[str, Any]
    skipped: list[str]


def save(root: Path, step: int, arrays: PyTree, meta: dict[str, Any], keep: int = 2) -> Path:
    """Write `root/step_XXXXXXXX` and keep the newest `keep` checkpoints up to this step.

    `arrays` is any tree of numpy and jax arrays; `meta` anything JSON holds (tuples come back as lists). One
    of the same step is replaced; those of later steps (the run fell back) stay until the run is there again.
    Raises CheckpointError when it can't be written: nothing partial remains, earlier ones are untouched.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: at least one checkpoint must be kept")
    leaves = {name: _host_array(name, leaf) for name, leaf in _named(arrays).items()}
    meta_bytes = json.dumps(meta, indent=1).encode()
    root = Path(root).absolute()
    final = root / f"step_{step:08d}"
    partial = root / f"{final.name}.tmp-{os.getpid()}"
    needed = sum(leaf.nbytes for leaf in leaves.values()) + len(meta_bytes) + SPARE_BYTES
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        free = shutil.disk_usage(root).free
        if free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _write(partial, step, leaves, meta_bytes)
        _publish(partial, final)
    except BaseException as error:
        _remove(partial, times=3)
        if not isinstance(error, Exception):  # an interrupt stays an interrupt
            raise
        raise CheckpointError(_explain(root, step, needed, error)) from error
    _prune(root, step, keep)
    return final


def restore(root: Path, template: PyTree) -> Restored:
    """Read the newest checkpoint under `root` whose every byte is as it was written.

    `template` has the tree's structure; its leaves are arrays or jax.ShapeDtypeStruct. A numpy leaf comes
    back as numpy, any other as a jax array, on the template's sharding if it has one. Raises
    FileNotFoundError when there is no checkpoint, CheckpointError when none is usable or a leaf is not as the
    template has it.
    """
    root = Path(root).absolute()
    candidates = _checkpoints(root)
    if not candidates:
        raise FileNotFoundError(f"there is no checkpoint in {root}")
    skipped = []
    for directory in candidates:
        try:
            written = manifest.verify(directory)
        except (manifest.Damage, OSError) as damage:
            skipped.append(f"checkpoint {directory} is damaged and was passed over: {damage}")
            continue
        # Not damage: an older checkpoint of the same run would not fit either.
        if written["format"] != FORMAT:
            raise CheckpointError(f"{directory} has format {written['format']}; this program reads {FORMAT}")
        _check_template(directory, written["leaves"], template)
        arrays = _read_arrays(directory / "arrays", written["leaves"], template)
        meta = json.loads((directory / "meta.json").read_bytes())
        return Restored(written["step"], arrays, meta, skipped)
    raise CheckpointError("no usable checkpoint is left:\n" + "\n".join(skipped))


def _named(tree: PyTree) -> dict[str, Any]:
    """{leaf's name: leaf}, in the tree's order."""
    flat, _ = jax.tree.flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
    if len(named) != len(flat):
        raise ValueError("two leaves of the tree have one name: rename a key that holds a '.'")
    return named


def _host_array(name: str, leaf: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        raise TypeError(f"{name} is a typed key: save jax.random.key_data of it")
    return np.asarray(jax.device_get(leaf))


def _describe(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": np.dtype(leaf.dtype).name}


def _write(partial: Path, step: int, leaves: dict[str, np.ndarray], meta_bytes: bytes) -> None:
    """Everything under the partial name, down to the disk; the manifest last."""
    partial.mkdir()
    (partial / "meta.json").write_bytes(meta_bytes)
    # Orbax refuses arrays of size 0; the manifest's shape and dtype say all there is to them.
    held = {name: leaf for name, leaf in leaves.items() if leaf.size}
    if held:
        with _orbax() as checkpointer:
            checkpointer.save(partial / "arrays", args=ocp.args.PyTreeSave(held))
    table = {name: _describe(leaf) for name, leaf in leaves.items()}
    manifest.write(partial, {"format": FORMAT, "step": step, "leaves": table})


@contextlib.contextmanager
def _orbax() -> Iterator[ocp.Checkpointer]:
    """A checkpointer that does not log: it tells every phase, and a full disk in pages of tracebacks."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            yield checkpointer
    finally:
        logger.setLevel(before)


def _publish(partial: Path, final: Path) -> None:
    """Rename into place; one of the same step waits as `.old`, which `restore` can read if we die here."""
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        _remove(old)
        final.rename(old)
    partial.rename(final)
    manifest.flush(final.parent)
    _remove(old)


def _check_template(directory: Path, saved: dict[str, Any], template: PyTree) -> None:
    """Raise CheckpointError naming the first leaves that differ between the checkpoint and the template."""
    wanted = {name: _describe(leaf) for name, leaf in _named(template).items()}
    faults = [f"{name} is missing" for name in wanted if name not in saved]
    faults += [f"{name} is not part of this run" for name in saved if name not in wanted]
    for name in wanted.keys() & saved.keys():
        if wanted[name] != saved[name]:
            have, want = ("{dtype}{shape}".format(**one) for one in (saved[name], wanted[name]))
            faults.append(f"{name} is {have} where {want} is expected")
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        told = "; ".join(sorted(faults)[:5])
        raise CheckpointError(f"checkpoint {directory} is of another model or optimiser: {told}{more}")


def _read_arrays(directory: Path, saved: dict[str, Any], template: PyTree) -> PyTree:
    held = {name: leaf for name, leaf in saved.items() if 0 not in leaf["shape"]}
    leaves: dict[str, np.ndarray] = {}
    if held:
        # To numpy first: orbax would ask for shardings, and 64-bit leaves would lose their upper half.
        kinds = dict.fromkeys(held, ocp.RestoreArgs(restore_type=np.ndarray))
        with _orbax() as checkpointer:
            leaves = checkpointer.restore(directory, args=ocp.args.PyTreeRestore(restore_args=kinds))

    def place(name: str, like: Any) -> Any:
        array = leaves[name] if name in held else np.zeros(like.shape, like.dtype)
        numpy_like = isinstance(like, np.ndarray | np.generic)
        return np.asarray(array) if numpy_like else jax.device_put(array, getattr(like, "sharding", None))

    placed = [place(name, like) for name, like in _named(template).items()]
    return jax.tree.unflatten(jax.tree.structure(template), placed)


def _checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, the one to try first at the front."""
    paths = [path for path in root.glob("step_*") if NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (path.name[:13], path.suffix != ".old"), reverse=True)


def _sweep(root: Path) -> None:
    """Remove what killed saves left; before a save, because it may be what fills the disk."""
    for path in root.glob("step_*"):
        replaced = path.suffix == ".old" and path.with_suffix("").exists()
        if replaced or path.suffix.startswith(".tmp-"):
            _remove(path)


def _prune(root: Path, step: int, keep: int) -> None:
    for path in [path for path in _checkpoints(root) if int(path.name[5:13]) <= step][keep:]:
        _remove(path)


def _remove(directory: Path, times: int = 1) -> None:
    """Remove a tree. A thread of a failed save may still be adding to it, or make it anew: until it is found gone
    `times` times in a row, for at most so many seconds."""
    gone = 0
    for _ in range(20 * times):
        shutil.rmtree(directory, ignore_errors=True)
        gone = 0 if directory.exists() else gone + 1
        if gone == times:
            return
        time.sleep(0.05)


def _explain(root: Path, step: int, needed: int, error: Exception) -> str:
    """What failed, where, how much room is needed, and what to do."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    # Tensorstore reports a full disk as a ValueError that ends in the system's message.
    signs = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    full = any(sign in str(one) for one in chain for sign in signs)
    earlier = _checkpoints(root) if root.is_dir() else []
    intact = f"The checkpoint {earlier[0].name} is untouched." if earlier else "There is no earlier checkpoint."
    if full:
        free = shutil.disk_usage(root).free
        reason = f"the disk is full: {needed / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB are free"
        advice = "Free some space, or move the run's directory to another disk; then continue with --resume."
    else:
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        advice = "See that the directory is there and can be written to; then continue with --resume."
    return f"step {step} could not be saved in {root}: {reason}. {intact} {advice}"
