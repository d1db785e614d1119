"""Tracking: the same names as metrics.jsonl, in real event files and in a stand-in for wandb."""

import sys
from types import ModuleType

import pytest

from rl import tracking
from rl.config import Config, ConfigError

LINES = [
    {"step": 3, "cell": "a", "reward": 0.5, "loss/live_rows": 7, "credit/x": None, "by_turn": [1, 2]},
    {"step": 3, "cell": "b", "reward": 0.25, "loss/live_rows": 9, "credit/x": None, "by_turn": [1, 2]},
]
TIMING = {"time/collect_s": 1.5}


def test_only_numbers_that_were_measured():
    assert tracking.scalars(LINES[0]) == {"reward": 0.5, "loss/live_rows": 7}


def test_tensorboard_files_hold_what_was_logged(tmp_path):
    pytest.importorskip("tensorboardX", reason="NOT TESTED: tensorboardX is not installed")
    from tensorboardX.proto.event_pb2 import Event

    tracker = tracking.start("tensorboard", tmp_path, Config())
    tracker.log(3, LINES, TIMING)
    tracker.close()
    found = {}
    for folder in sorted((tmp_path / "tensorboard").iterdir()):
        (file,) = folder.iterdir()
        data = file.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            for value in event.summary.value:
                found[folder.name, value.tag, event.step] = value.simple_value
            data = data[16 + size :]
    assert found == {
        ("a", "reward", 3): 0.5,
        ("a", "loss/live_rows", 3): 7,
        ("b", "reward", 3): 0.25,
        ("b", "loss/live_rows", 3): 9,
        ("timing", "time/collect_s", 3): 1.5,
    }


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_what_speaks_wandbs_language(name, tmp_path, monkeypatch):
    calls = []
    module = ModuleType(name)
    module.init = lambda **given: calls.append(("init", given["project"], given["name"], given["config"]["task"]))
    module.log = lambda values, step: calls.append(("log", values, step))
    module.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, name, module)
    tracker = tracking.start(name, tmp_path / "run", Config())
    tracker.log(3, LINES, TIMING)
    tracker.close()
    values = {
        "a/reward": 0.5,
        "a/loss/live_rows": 7,
        "b/reward": 0.25,
        "b/loss/live_rows": 9,
        "time/collect_s": 1.5,
    }
    assert calls == [("init", "copies", "run", "talk_to_solve"), ("log", values, 3), ("finish",)]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="--track wandb needs the package wandb"):
        tracking.module_of("wandb")
    tracking.start("none", tmp_path, Config()).log(0, LINES, TIMING)
