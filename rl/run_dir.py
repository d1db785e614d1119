"""The run directory: its files, and how a resumed run puts them back to where its checkpoint was taken.

config.json         the resolved config
metrics.jsonl       one line a step and cell; nothing in it depends on the clock, so equal runs have equal bytes
timing.jsonl        one line a step: seconds by phase, grader's failures so far
episodes.jsonl      episodes of every k-th step, and, at the end, of every evaluation
evaluations/        one finished evaluation a file, so that none is played twice
checkpoints/        model.checkpoint's
adapters/<cell>/    PEFT adapters
results.json        what was found
report.html         the same to look at, with figures/ (python -m eval.report)
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.kept import Kept, episode_json, write_json
from model.tokenizer import pieces
from rl.collect import Cell, Collected
from rl.config import Config, ConfigError, from_json, to_json

LOGS = ("metrics.jsonl", "timing.jsonl", "episodes.jsonl")


class RunDir:
    """Paths and append-only logs of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.adapters = path / "adapters"
        self.kept = Kept(path)

    @classmethod
    def create(cls, path: Path, config: Config) -> "RunDir":
        """Make a new run directory. Raises ConfigError if it holds anything."""
        cls.refuse_used(path)
        run = cls(path)
        path.mkdir(parents=True, exist_ok=True)
        # First, because it makes this a run that can be continued, should the process be killed right here.
        write_json(path / "config.json", to_json(config))
        run.make_folders()
        return run

    @staticmethod
    def refuse_used(path: Path) -> None:
        """Raise ConfigError if `path` holds anything: a new run takes an empty directory."""
        if path.exists() and (not path.is_dir() or any(file.name != "config.json.tmp" for file in path.iterdir())):
            held = "another run" if (path / "config.json").exists() else "other files"
            raise ConfigError(f"{path} holds {held}; continue a run with --resume {path}, or choose another --out")

    def make_folders(self) -> None:
        for folder in (self.checkpoints, self.adapters, self.kept.folder):
            folder.mkdir(exist_ok=True)

    @classmethod
    def open(cls, path: Path) -> tuple["RunDir", Config]:
        """An existing run and its config. Raises ConfigError if there is none."""
        file = path / "config.json"
        if not file.exists():
            raise ConfigError(f"--resume {path}: there is no run there ({file} is missing)")
        try:
            raw = json.loads(file.read_text())
        except ValueError as error:
            raise ConfigError(f"{file} is damaged: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{file} is damaged: it holds no JSON object")
        run = cls(path)
        run.make_folders()
        return run, from_json(raw)

    def append(self, log: str, lines: Iterable[dict[str, Any]]) -> None:
        """Append JSON lines to a log, all of them in one write."""
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with open(self.path / log, "ab") as file:
            file.write(text.encode())

    def sizes(self) -> dict[str, int]:
        """Bytes of each log, after flushing them to the disk: what a checkpoint remembers."""
        sizes = {}
        for log in LOGS:
            with open(self.path / log, "ab") as file:
                os.fsync(file.fileno())
                sizes[log] = file.tell()
        return sizes

    def rewind(self, sizes: dict[str, int]) -> None:
        """Cut the logs back to `sizes`. Raises ConfigError if one has lost bytes since."""
        for log in LOGS:
            file, size = self.path / log, sizes.get(log, 0)
            have = file.stat().st_size if file.exists() else 0
            if have < size:
                raise ConfigError(f"{file} has {have} bytes and its checkpoint remembers {size}: the file was changed")
            if file.exists():
                os.truncate(file, size)

    def gather_episodes(self, training_bytes: int) -> None:
        """Put every evaluation's episodes behind the training episodes in episodes.jsonl."""
        target = self.path / "episodes.jsonl"
        os.truncate(target, training_bytes)
        with open(target, "ab") as out:
            for part in sorted(self.kept.folder.glob("*.jsonl")):
                out.write(part.read_bytes())


def training_episodes(
    cells: Sequence[Cell], collected_X: Sequence[Collected], decode: Callable[[Sequence[int]], str]
) -> Iterator[dict[str, Any]]:
    """A step's episodes as they are written: `episode_json`, and for each utterance what it was paid above its baseline
    (`advantage`) and its text cut where its tokens meet (`pieces`). `kept`: False if the rule left the episode out of
    the batch."""
    for cell, got in zip(cells, collected_X, strict=True):
        for episodes, credit in zip(got.episodes_PG, got.credits_P, strict=True):
            for episode, kept, advantage_U in zip(episodes, credit.kept, np.asarray(credit.advantage_GU), strict=True):
                saved = episode_json(episode)
                for said in saved["utterances"]:
                    said["advantage"] = round(float(advantage_U[said["turn"]]), 6)
                    said["pieces"] = pieces(decode, said["tokens"])
                yield {"cell": cell.name, "kept": bool(kept), **saved}
