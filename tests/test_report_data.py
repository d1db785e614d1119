"""Reading a run directory: what is missing is named, what is damaged is an error, and no number is made."""

import json

import pytest

from eval.report_data import Evaluated, ReportError, by_rule, read_run, seconds_by_phase, split_cell
from tests.runs import ESTIMATE, chat, evaluated, write_run


def test_a_whole_run_lacks_nothing(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert run.missing == []
    assert [e.label for e in run.evaluations][:2] == ["channel_on: untrained", "channel_on, grpo, seed 17: trained"]
    assert [arm["arm"] for arm in run.arms] == ["channel_on", "channel_off"]
    assert seconds_by_phase(run)["collect"] == 12.0


def test_an_interrupted_run_is_read_as_far_as_it_goes(tmp_path):
    """Steps, evaluations and their episodes are taken from where a run keeps them before it is finished."""
    path = write_run(tmp_path / "run", [chat()], finished=False, steps=1)
    folder = path / "evaluations"
    folder.mkdir()
    for name in ("base-channel_on", "base-channel_on-again-1", "channel_on-grpo-17-with_untrained_partner"):
        (folder / f"{name}.json").write_text(json.dumps({"metrics": {"pass_at_1": ESTIMATE}, "problems": {}}))
        (folder / f"{name}.jsonl").write_text(json.dumps(evaluated(name)) + "\n")
    run = read_run(path)
    assert run.evaluations == [
        Evaluated("untrained", "channel_on", None, None, {"pass_at_1": ESTIMATE}),
        Evaluated("with_untrained_partner", "channel_on", "grpo", 17, {"pass_at_1": ESTIMATE}),
    ]
    assert "evaluation" not in run.episodes[0]
    assert {e["evaluation"] for e in run.episodes[1:]} == {file.stem for file in folder.iterdir()}
    assert "no results.json" in run.missing[0] and f"--resume {path}" in run.missing[0]
    cells = "channel_on-grpo-17, channel_on-grpo-18, channel_off-grpo-17, channel_off-grpo-18"
    assert f"metrics.jsonl has 1 of 2 steps of {cells}." in run.missing
    assert seconds_by_phase(run) == {"collect": 1.5, "collect/decode": 0.5}


def test_a_run_that_only_began_names_everything_it_lacks(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").write_text('{"task": "talk_to_solve", "steps": 2}')
    said = " ".join(read_run(path).missing)
    for name in ("results.json", "metrics.jsonl", "timing.jsonl", "episodes.jsonl", "evaluations"):
        assert name in said


def test_episodes_of_evaluations_are_not_read_twice(tmp_path):
    path = write_run(tmp_path / "run")
    (path / "evaluations").mkdir()
    (path / "evaluations" / "base-channel_on.jsonl").write_text(json.dumps(evaluated()) + "\n")
    assert len(read_run(path).episodes) == 2


def test_a_line_cut_while_it_was_written_is_left_out_and_said(tmp_path):
    path = write_run(tmp_path / "run")
    with open(path / "episodes.jsonl", "a") as file:
        file.write('{"cell": "chan')
    run = read_run(path)
    assert len(run.episodes) == 2
    assert run.missing == ["The last line of episodes.jsonl was cut while it was written; it is left out."]


def test_a_reply_may_hold_what_ends_a_line_elsewhere(tmp_path):
    path = write_run(tmp_path / "run")
    line = json.dumps(chat(("a\u2028b", "c\x85d", "e", "f")), ensure_ascii=False)
    (path / "episodes.jsonl").write_text(line + "\n", encoding="utf-8")
    assert read_run(path).episodes[0]["utterances"][0]["text"] == "a\u2028b"


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("config.json", "{", r"config\.json is damaged"),
        ("config.json", "[]", r"config\.json is damaged: it holds no JSON object"),
        ("timing.jsonl", '{"step": 0}\nhalf\n{"step": 2}\n', r"timing\.jsonl is damaged: line 2"),
        ("metrics.jsonl", '{"step": 0}\n', r"metrics\.jsonl is damaged: line 1 lacks cell"),
        ("episodes.jsonl", "3\n", r"episodes\.jsonl is damaged: line 1 holds no JSON object"),
        ("results.json", '{"schema": 99}', r"results\.json has schema 99; this version reads 1, 2"),
        ("results.json", '{"schema": 2, "task": "x", "base": {}}', r"it lacks cells, arms, seconds, compiles"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, text, message):
    path = write_run(tmp_path / "run")
    (path / name).write_text(text)
    with pytest.raises(ReportError, match=message):
        read_run(path)


def test_a_path_that_is_no_run(tmp_path):
    with pytest.raises(ReportError, match="is not a directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ReportError, match=r"holds no run: config\.json is missing"):
        read_run(tmp_path)


def test_old_episodes_say_what_they_lack(tmp_path):
    old = chat()
    for utterance in old["utterances"]:
        del utterance["note"], utterance["advantage"]
    missing = " ".join(read_run(write_run(tmp_path / "run", [old])).missing)
    assert "not tinted" in missing and "rescued and misled are not marked" in missing


def test_values_by_rule_and_seed(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert by_rule(run, "reward")["channel_off", "grpo"] == {17: {0: 0.0, 1: 0.1}, 18: {0: 0.0, 1: 0.1}}
    assert by_rule(run, "no such metric")["channel_on", "grpo"] == {17: {}, 18: {}}


def test_cells_names():
    assert split_cell("readers_and_writers-own_plus_readers-17") == ("readers_and_writers", "own_plus_readers", 17)
    with pytest.raises(ReportError, match="a cell's name is arm-credit-seed"):
        split_cell("nothing")
