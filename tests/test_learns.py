"""The built-in default learns what it is there to show: with the channel on the copies come to solve problems together,
without it they can't. One study of six cells; minutes on two cores."""

import json

import pytest

from rl import train


@pytest.mark.slow
def test_the_builtin_default_learns_to_talk(tmp_path):
    argv = "--task talk_to_solve --arms channel_on channel_off --seeds 17 18 19 --show-every 0".split()
    assert train.main([*argv, "--out", str(tmp_path / "run")]) == 0
    results = json.loads((tmp_path / "run/results.json").read_text())
    rate = {cell["name"]: cell["evaluations"]["trained"]["pass_at_1"]["mean"] for cell in results["cells"]}
    base = {arm: metrics["pass_at_1"]["mean"] for arm, metrics in results["base"].items()}
    assert len(rate) == 6 and results["config"]["steps"] == 50 and results["data"]["heldout"] == 300
    assert all(value >= 0.85 for name, value in rate.items() if name.startswith("channel_on")), rate
    assert all(value <= 0.05 for name, value in rate.items() if name.startswith("channel_off")), rate
    assert 0.10 <= base["channel_on"] <= 0.25 and base["channel_off"] <= 0.05, base
