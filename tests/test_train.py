"""`rl.train` from its command line: a whole small run, and what can stop one. (What is refused: test_refusals.py.)"""

import json
import subprocess

import jax
import numpy as np
import pytest
from jax._src import compilation_cache
from safetensors.numpy import load_file, save_file

from eval import report
from model import checkpoint, peft, weights
from rl import train
from rl.update import Learner
from rollout.setup import BUILTIN
from tests.runs import SMALL, builtin_copy


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


@pytest.mark.slow
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
@pytest.mark.parametrize("when", [pytest.param("save", marks=pytest.mark.slow), "log"])
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
