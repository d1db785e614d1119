"""`rl.train` from its command line: everything that a user can get wrong.

Every error is one message on stderr and status 2, before anything is compiled; a run that could not be set up leaves no
directory in the way of the next try.
"""

import dataclasses
import json

import pytest
from safetensors.numpy import load_file, save_file

from rl import train
from rl.config import Config
from tests.runs import SMALL, builtin_copy


@pytest.fixture
def refused(monkeypatch, capsys):
    """refused(*argv) runs a command that must be refused before anything expensive, and returns its message."""

    def too_late(*_):
        raise AssertionError("this should have been refused before anything was played or trained")

    monkeypatch.setattr(train.Grader, "warm", lambda grader: None)
    for name in ("evaluate", "train"):
        monkeypatch.setattr(train, name, too_late)

    def run(*argv):
        try:
            status = train.main([str(part) for part in argv])
        except SystemExit as stop:  # the flag parser's own
            status = stop.code
        out, err = capsys.readouterr()
        assert status == 2 and out == "" and "Traceback" not in err
        message = " ".join("".join(c for c in err if c not in "│╭╮╰╯─").split())
        assert message and (message.startswith("error: ") == (err.count("\n") == 1))
        return message

    return run


def test_unknown_flags_and_values(refused):
    assert "Unrecognized options: --stepz" in (message := refused("--stepz", "3")) and "--steps" in message
    assert "talk_to_solve" in refused("--task", "chess")
    assert refused("--arms", "loud") == (
        "error: --arms 'loud' is unknown to task talk_to_solve; choose from channel_on, channel_off"
    )
    message = refused("--credit", "bribery")
    assert "--credit 'bribery' is unknown" in message and "grpo" in message
    assert "--steps" in refused("--steps", "many") and "--steps is 0" in refused("--steps", "0")
    assert "--eval-temperature is 0.0" in refused("--eval-temperature", "0")
    assert "--lr is inf" in refused("--lr", "inf")
    assert "--seeds" in refused("--seeds", "17", "17")


def test_help_lists_every_setting_with_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    assert stop.value.code == 0
    text = " ".join("".join(c for c in capsys.readouterr().out if c not in "│╭╮╰╯─").split())
    for field in dataclasses.fields(Config):
        flag = "--" + field.name.replace("_", "-")
        entry = text.partition(f"{flag} ")[2] or text.partition(f"{flag}, ")[2]
        value = getattr(Config(), field.name)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        assert f"default: {shown}" in entry, flag


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; this stack runs qwen2, llama"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn' is not supported"),
        ({"intermediate_size": 64}, "has shape"),
    ],
)
def test_models_that_cannot_be_run(tmp_path, refused, changes, says):
    out = tmp_path / "run"
    assert says in refused(*SMALL, "--model", builtin_copy(tmp_path, **changes), "--out", out)
    assert not out.exists()


def test_model_directories_that_are_not_whole(tmp_path, refused):
    copy = builtin_copy(tmp_path)
    file = copy / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    assert "missing: model.norm.weight" in refused(*SMALL, "--model", copy)
    file.unlink()
    assert f"{copy} has neither model.safetensors nor" in refused(*SMALL, "--model", copy)
    (copy / "config.json").unlink()
    assert f"{copy} has no config.json" in refused(*SMALL, "--model", copy)
    assert "there is no directory" in refused(*SMALL, "--model", copy / "typo")


def write_rows(directory, split, rows):
    directory.mkdir(exist_ok=True)
    (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_data_that_cannot_be_used(tmp_path, refused):
    good = [
        {"question": f"Tom has {n} eggs. Ann has {n + 1} eggs. How many eggs?", "answer": f"#### {2 * n + 1}"}
        for n in range(20)
    ]
    data, out = tmp_path / "data", tmp_path / "run"
    write_rows(data, "train", [*good[:3], {"question": "Tom has 1. Ann has 2. How many?", "answer": "three"}])
    write_rows(data, "test", good[15:])
    argv = (*SMALL, "--data", data, "--out", out)
    assert f"{data / 'train.jsonl'}, row 4: no gold after ####" in refused(*argv)
    write_rows(data, "train", good[:3])
    message = refused(*argv)
    assert "3 usable training problems" in message and "not the 8 asked for" in message
    (data / "train.jsonl").write_text('{"question": \n')
    assert "train.jsonl" in refused(*argv)
    (data / "train.jsonl").unlink()
    assert "is a directory without train.jsonl" in refused(*argv)
    assert "neither a file, nor a directory" in refused(*SMALL, "--data", tmp_path / "nowhere")
    assert not out.exists()


def test_prompts_longer_than_the_cache(tmp_path, refused):
    message = refused(*SMALL, "--max-prompt-tokens", "40", "--out", tmp_path / "run")
    assert "--data stories" in message and "too long" in message and "--max-prompt-tokens" in message
    assert "raise --max-prompt-tokens" in message


def test_directories_and_resumes(tmp_path, refused):
    out, empty = tmp_path / "run", tmp_path / "empty"
    empty.mkdir()
    assert f"--resume {empty}: there is no run there" in refused("--resume", empty)
    assert "there is no run there" in refused("--resume", tmp_path / "nowhere")
    train.RunDir.create(out, Config(steps=7))
    kept = sorted(out.iterdir())
    message = refused(*SMALL, "--out", out)
    assert f"{out} holds another run" in message and f"--resume {out}" in message
    message = refused("--resume", out, "--steps", "9", "--lr", "0.5")
    assert "--steps: the run has 7, given 9" in message and "--lr: the run has 0.001, given 0.5" in message
    assert sorted(out.iterdir()) == kept
    (empty / "notes.txt").write_text("mine")
    assert f"{empty} holds other files" in refused(*SMALL, "--out", empty)
    (out / "config.json").write_text("{")
    assert "config.json is damaged" in refused("--resume", out)
