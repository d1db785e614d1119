"""Evaluations are whole or not there."""

import json

import pytest

from eval.kept import Kept, write_json
from tasks.talk import talk_task
from tests import tiny

TASK = talk_task("channel_on")


def chat(text, number=0):
    return tiny.episode(TASK, tiny.problem(), ("a", "b", text, text), (1.0, 0.0), number=number)


def test_an_evaluation_is_kept_or_is_not_there(tmp_path):
    kept = Kept(tmp_path)
    assert kept.load("base-channel_on") is None
    summary = {"pass_at_1": {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 8}, "sends_own": None}
    kept.save("base-channel_on", summary, [chat("x"), chat("y", 1)])
    assert kept.load("base-channel_on") == summary
    lines = [json.loads(line) for line in (kept.folder / "base-channel_on.jsonl").read_text().splitlines()]
    assert [(line["evaluation"], line["episode"], line["utterances"][2]["text"]) for line in lines] == [
        ("base-channel_on", 0, "x"),
        ("base-channel_on", 1, "y"),
    ]
    assert not list(tmp_path.rglob("*.tmp"))


def test_episodes_without_their_result_do_not_count(tmp_path):
    """A run killed between the two files plays the evaluation again."""
    kept = Kept(tmp_path)
    kept.save("one", {}, [chat("x")])
    kept.save("two", {}, [chat("x")])
    kept.forget(["one", "never there"])
    assert kept.load("one") is None and kept.load("two") == {}


def test_graded_answers_are_read_back(tmp_path):
    kept = Kept(tmp_path)
    kept.save("one", {}, [chat("x"), chat("y", 1)])
    assert kept.answers("one") == [("p", "x", 1.0), ("p", "x", 0.0), ("p", "y", 1.0), ("p", "y", 0.0)]
    assert kept.answers("another") == []


def test_a_number_that_is_not_finite_is_never_written(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
