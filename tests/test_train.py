"""`rl.train` from its command line: a whole small run, and everything that a user can get wrong.

Every error is one message on stderr and status 2, before anything is compiled; a run that could not be set up leaves no
directory in the way of the next try.
"""

import dataclasses
import json
import shutil
import subprocess

import jax
import numpy as np
import pytest
from jax._src import compilation_cache
from safetensors.numpy import load_file, save_file

from eval import report
from model import checkpoint, peft, weights
from rl import train
from rl.config import Config
from rl.update import Learner
from rollout.setup import BUILTIN

SIZES = "--train-problems 8 --heldout-problems 2 --problems-per-step 2 --episodes-per-problem 2 --rank 4 --show-every 0"
# One shape of each kind, so that little is compiled.
SHAPES = "--prompt-buckets 160 --train-buckets 192 --micro-rows 16"
SMALL = [*SIZES.split(), *SHAPES.split(), *"--arms channel_on channel_off --steps 2 --checkpoint-every 1".split()]


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """The runs of this file have the same shapes: each is compiled once."""
    changed = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in changed}
    for values in (changed, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is changed:
            yield


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


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


METRICS = (
    "step cell reward credit/flat_group_frac credit/flat_first_frac credit/solved_token_frac credit/sampled_tokens "
    "rollout/episodes credit/mean_abs_advantage_by_turn credit/mean_abs_advantage_notes "
    "credit/mean_abs_advantage_answers credit/own_correct_correlation "
    "credit/flat_notes_frac credit/split_half_reliability "
    "rollout/sampled_tokens rollout/mean_reply_tokens rollout/truncated_frac rollout/entropy_nats loss/loss "
    "loss/trained_tokens loss/live_rows loss/clipped_frac sampling_logp_gap sampling_logp_gap_max optim/grad_norm"
).split()


def test_a_small_run_from_end_to_end(tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main([*SMALL, "--episodes-every", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "team solves it" in printed.out and "seconds by phase" in printed.out and printed.err == ""
    assert f"report: {out / 'report.html'}" in printed.out and (out / "report.html").exists()
    cells = ["channel_on-grpo-17", "channel_off-grpo-17"]

    assert json.loads((out / "config.json").read_text())["steps"] == 2
    metrics = lines_of(out / "metrics.jsonl")
    assert [(line["step"], line["cell"]) for line in metrics] == [(s, c) for s in (0, 1) for c in cells]
    assert all(list(line) == METRICS for line in metrics)
    timing = lines_of(out / "timing.jsonl")
    assert [line["step"] for line in timing] == [0, 1]
    assert all(0 <= line["time/collect/text_hidden_s"] < line["time/collect/text_s"] for line in timing)

    episodes = lines_of(out / "episodes.jsonl")
    trained = [e for e in episodes if "cell" in e]
    assert len(trained) == 2 * 2 * 4 and all(len(e["utterances"]) == 4 for e in episodes)
    # 2 arms untrained, three times; 2 cells trained, and one cell's partner untrained: 2 problems x 2 chats each
    assert len(episodes) - len(trained) == 9 * 4
    # The last messages are graded, the first are not.
    assert all([u["correct"] is None for u in e["utterances"]] == [True, True, False, False] for e in episodes)

    results = json.loads((out / "results.json").read_text())
    assert results["schema"] == 2 and [c["name"] for c in results["cells"]] == cells
    on, off = (cell["evaluations"] for cell in results["cells"])
    assert set(on) == {"trained", "with_untrained_partner"} and set(off) == {"trained"}
    for evaluation in (*results["base"].values(), *on.values(), *off.values()):
        assert evaluation["pass_at_1"]["n"] == 8  # 2 problems x 2 chats x 2 answers
        for estimate in evaluation.values():
            assert estimate is None or {"mean", "low", "high", "n"} <= set(estimate)
            assert estimate is None or estimate["low"] <= estimate["mean"] <= estimate["high"]

    model_config = weights.load_config(BUILTIN)
    for cell in cells:
        lora, settings = peft.load_adapter(out / "adapters" / cell, model_config)
        assert (settings.rank, settings.alpha) == (4, 64.0)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(lora))
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["step_00000001", "step_00000002"]


def test_a_report_that_cannot_be_drawn_loses_no_results(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setattr(report, "draw_all", lambda run: 1 / 0)
    assert train.main([*SMALL, "--no-evaluate", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "error: no report (division by zero)" in printed.out and "ZeroDivisionError" in printed.err
    assert json.loads((out / "results.json").read_text())["schema"] == 2 and not (out / "report.html").exists()


def test_a_loss_that_is_not_finite(tmp_path, capsys, monkeypatch):
    """The run stops before the update is applied, and saves; with the cause gone it continues."""
    out, whole = tmp_path / "run", Learner._totals

    def broken(learner, sums, grads, cells):
        stats, norm = whole(learner, sums, grads, cells)
        return stats._replace(loss=np.full_like(stats.loss, np.nan)), norm

    real = Learner.update
    monkeypatch.setattr(Learner, "_totals", lambda *a: broken(*a) if failing[0] else whole(*a))
    monkeypatch.setattr(
        Learner, "update", lambda self, state, b: (failing.insert(0, state.step == 1), real(self, state, b))[1]
    )
    failing = [False]
    argv = [*SMALL, "--no-evaluate", "--checkpoint-every", "2", "--out", str(out)]
    assert train.main(argv) == 3
    message = capsys.readouterr().err
    assert message.startswith("error: step 1: loss [nan, nan]") and "the update was not applied" in message
    saved = [path.name for path in (out / "checkpoints").iterdir()]
    assert saved == ["step_00000001"] and len(lines_of(out / "metrics.jsonl")) == 2
    for folder in (out / "adapters").iterdir():
        assert all(np.isfinite(v).all() for v in load_file(folder / "adapter_model.safetensors").values())
    monkeypatch.undo()
    assert train.main(["--resume", str(out)]) == 0
    assert len(lines_of(out / "metrics.jsonl")) == 4


def test_a_model_that_gives_nan(tmp_path, capsys):
    """A reply drawn from NaN is wrong, so every group is flat and no loss is computed; it's noticed all the same."""
    copy, out = builtin_copy(tmp_path), tmp_path / "run"
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * np.nan}, copy / "model.safetensors")
    assert train.main([*SMALL, "--no-evaluate", "--model", str(copy), "--out", str(out)]) == 3
    assert "error: step 0: channel_on-grpo-17 sampled with log-probs that are not" in capsys.readouterr().err
    assert not (out / "metrics.jsonl").read_text()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_00000000"]


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 12 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"NOT TESTED: a small disk cannot be mounted here ({done.stderr.strip()})")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk):
    with open(disk / "ballast", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


# Orbax closes its event loop while tensorstore still reports other leaves' failures to it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("when", ["save", "log"])
def test_a_full_disk(tiny_disk, capsys, monkeypatch, when):
    out, save, append = tiny_disk / "run", checkpoint.save, train.RunDir.append

    def full_save(root, step, arrays, meta):
        if step == 2:
            fill(tiny_disk)
        return save(root, step, arrays, meta)

    def full_append(run_dir, log, lines):
        if (out / "checkpoints/step_00000001").exists():
            fill(tiny_disk)
            lines = [{"padding": "x" * 5000}]  # more than the rest of the file's last page
        append(run_dir, log, lines)

    with monkeypatch.context() as patch:
        patch.setattr(*((checkpoint, "save", full_save) if when == "save" else (train.RunDir, "append", full_append)))
        assert train.main([*SMALL, "--no-evaluate", "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and "--resume" in message
    assert ("the disk is full" if when == "save" else "No space left on device") in message
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_00000001"]
    (tiny_disk / "ballast").unlink()
    assert train.main(["--resume", str(out)]) == 0
    assert [line["step"] for line in lines_of(out / "metrics.jsonl")] == [0, 0, 1, 1]


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


def builtin_copy(tmp_path, **changes):
    """A copy of the built-in model, with fields of its config.json changed."""
    copy = tmp_path / "model"
    shutil.copytree(BUILTIN, copy)
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | changes))
    return copy


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
