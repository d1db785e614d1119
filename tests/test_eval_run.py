"""`eval.run`: what training's own evaluation says, again from the saved adapters; and what it refuses."""

import json
import shutil

import pytest

from eval import run as eval_run
from rl import train

pytestmark = pytest.mark.slow

SMALL = (
    "--train-problems 8 --heldout-problems 4 --problems-per-step 2 --show-every 0 --seeds 1 2 --steps 2 --lr 3e-3 "
    "--base-evaluations 2"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("eval_run") / "run"
    assert train.main([*SMALL.split(), "--out", str(path)]) == 0
    return path


def evaluations(results):
    return {
        "base": {arm: metrics["pass_at_1"] for arm, metrics in results["base"].items()},
        **{cell["name"]: cell["evaluations"] for cell in results["cells"]},
    }


def test_reuse_plays_only_what_is_missing_and_finds_the_same(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    before = json.loads((run / "results.json").read_text())
    (run / "evaluations/channel_on-grpo-2-trained.json").unlink()
    (run / "results.json").unlink()
    assert eval_run.main([str(run), "--reuse"]) == 0
    printed = capsys.readouterr().out
    assert "played 1 of 7 evaluations" in printed and "check overlap: none" in printed
    after = json.loads((run / "results.json").read_text())
    assert evaluations(after) == evaluations(before) and after["arms"] == before["arms"]
    assert set(after["checks"]) == set(before["checks"]) >= {"overlap", "evaluation_noise", "pinned", "talk_needed"}
    assert "lengths channel_on-grpo-1" in after["checks"] and "reward_hacks channel_on-grpo-2" in after["checks"]


def test_without_reuse_everything_is_played_again_and_training_is_kept(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    before = json.loads((run / "results.json").read_text())
    assert eval_run.main([str(run)]) == 0
    assert "played 7 of 7" in capsys.readouterr().out
    after = json.loads((run / "results.json").read_text())
    assert evaluations(after) == evaluations(before)
    for name in ("config", "sampling", "data", "versions", "device"):
        assert after[name] == before[name]
    assert after["seconds"]["update"] == before["seconds"]["update"] and after["seconds"]["eval.run"] > 0
    assert [cell["cost"] for cell in after["cells"]] == [cell["cost"] for cell in before["cells"]]


def test_what_cannot_be_evaluated(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "adapters/channel_on-grpo-2")
    assert eval_run.main([str(run)]) == 2
    assert "no adapter of channel_on-grpo-2: finish its training with" in capsys.readouterr().err
    assert (run / "evaluations/channel_on-grpo-1-trained.json").exists()  # nothing already computed is lost
    assert eval_run.main([str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_the_selftest_passes_and_says_what_fails(capsys, monkeypatch):
    assert eval_run.main(["--selftest"]) == 0
    assert capsys.readouterr().out.count(" ok ") == 4

    def broken():
        raise AssertionError("two equal arms came out different")

    monkeypatch.setattr("eval.selftest.TESTS", {"statistics": broken})
    assert eval_run.main(["--selftest"]) == 1
    assert "statistics   FAILED: two equal arms came out different" in capsys.readouterr().out
