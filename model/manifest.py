"""A manifest of a directory: every byte of every file, the manifest's own included, is as it was written.

Meant against damage (a flipped bit, a truncated copy, a lost file), not against forgery: it isn't signed.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "manifest.json"


class Damage(Exception):
    """What is wrong with a directory; names the file."""


def write(directory: Path, body: dict[str, Any]) -> None:
    """Write `manifest.json` holding `body` and each file's size and sha256; flush all of it to the disk."""
    files = {name: _fingerprint(path) for name, path in _files(directory)}
    (directory / NAME).write_bytes(_seal({**body, "files": files}))
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            flush(Path(parent, name))
        flush(Path(parent))


def verify(directory: Path) -> dict[str, Any]:
    """The manifest, once every byte was compared with it. Raises Damage naming the file."""
    try:
        raw = (directory / NAME).read_bytes()
    except FileNotFoundError:
        raise Damage("manifest.json is missing") from None
    try:
        manifest = json.loads(raw)
        body = {name: value for name, value in manifest.items() if name != "sha256"}
    except (ValueError, AttributeError):
        raise Damage("manifest.json is not JSON any more") from None
    if raw != _seal(body):
        raise Damage("manifest.json does not match its own sha256")
    found = dict(_files(directory))
    for name in sorted(found.keys() | body["files"].keys()):
        if name not in found:
            raise Damage(f"{name} is missing")
        if name not in body["files"]:
            raise Damage(f"{name} is not in the manifest")
        written, size = body["files"][name], found[name].stat().st_size
        if size != written["bytes"]:
            raise Damage(f"{name} has {size} bytes where {written['bytes']} were written")
        if _fingerprint(found[name]) != written:
            raise Damage(f"{name} does not match its sha256")
    return body


def flush(path: Path) -> None:
    """fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _seal(body: dict[str, Any]) -> bytes:
    """The manifest's one spelling; the last field is the sha256 of the rest, so any changed byte shows."""
    text = json.dumps(body, indent=1, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return (text.removesuffix("\n}") + f',\n "sha256": "{digest}"\n}}\n').encode()


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
    """(relative path, path) of every file below, sorted; without the manifest, which can't list itself."""
    paths = (Path(parent, name) for parent, _, names in os.walk(directory) for name in names)
    for name, path in sorted((path.relative_to(directory).as_posix(), path) for path in paths):
        if name != NAME:
            yield name, path
