"""Live tracking, beside metrics.jsonl and off by default: TensorBoard, or a module that speaks wandb's language.

The names are those of metrics.jsonl. TensorBoard gets a directory a cell, so that cells lie over each other in one
chart; wandb (or trackio, which has the same three calls) one run, in which a cell's name stands before the metric's.
What can't be imported is an error before anything is loaded.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from rl.config import Config, ConfigError, to_json

Track = Literal["none", "tensorboard", "wandb", "trackio"]
PROJECT = "copies"
MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


class Tracker(Protocol):
    """Takes the lines of a step as they are written to metrics.jsonl, and seconds by phase."""

    def log(self, step: int, lines: Sequence[Mapping[str, Any]], timing: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def module_of(track: Track) -> ModuleType | None:
    """The module behind a choice, None for `none`. Raises ConfigError if it is not installed."""
    if track == "none":
        return None
    try:
        return importlib.import_module(MODULES[track])
    except ImportError as error:
        raise ConfigError(f"--track {track} needs the package {MODULES[track]}: pip install '.[tracking]'") from error


def start(track: Track, path: Path, config: Config) -> Tracker:
    """A tracker of the run in `path`."""
    module = module_of(track)
    if module is None:
        return Silent()
    if track == "tensorboard":
        return TensorBoard(module, path / "tensorboard")
    return Wandb(module, path, config)


class Silent:
    """Tracks nothing."""

    def log(self, step: int, lines: Sequence[Mapping[str, Any]], timing: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """Event files under `path`: one directory a cell, and `timing`."""

    def __init__(self, module: ModuleType, path: Path) -> None:
        self.module, self.path, self.writers = module, path, {}

    def log(self, step: int, lines: Sequence[Mapping[str, Any]], timing: Mapping[str, float]) -> None:
        for line in lines:
            self._write(line["cell"], step, scalars(line))
        self._write("timing", step, timing)

    def _write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        if name not in self.writers:
            self.writers[name] = self.module.SummaryWriter(str(self.path / name))
        for key, value in values.items():
            self.writers[name].add_scalar(key, value, step)

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


class Wandb:
    """`init`, `log` and `finish` of wandb, or of what has the same calls."""

    def __init__(self, module: ModuleType, path: Path, config: Config) -> None:
        self.module = module
        module.init(project=PROJECT, name=path.name, config=to_json(config))

    def log(self, step: int, lines: Sequence[Mapping[str, Any]], timing: Mapping[str, float]) -> None:
        values = {f"{line['cell']}/{name}": value for line in lines for name, value in scalars(line).items()}
        self.module.log({**values, **timing}, step=step)

    def close(self) -> None:
        self.module.finish()


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl; what was not measured, lists and names are left out."""
    numbers = {k: v for k, v in line.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    numbers.pop("step", None)
    return numbers
