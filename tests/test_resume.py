"""A run that was killed, stopped or damaged, and continued, against one that never was: equal bytes.

Runs are processes of their own. They share JAX's compilation cache, which the first one fills: reading an executable
from it gives the same bits as compiling it (`test_the_compilation_cache_changes_nothing`).
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollout.setup import BUILTIN
from tests.conftest import REPO

SIZES = (
    "--train-problems 12 --heldout-problems 4 --problems-per-step 2 --episodes-per-problem 2 --rank 4 --show-every 0"
)
SHAPES = "--prompt-buckets 160 --train-buckets 192 --micro-rows 16"
TWO_CELLS = "--arms channel_on channel_off --steps 36 --checkpoint-every 2 --episodes-every 3 --lr 3e-3"
KILLS = "setup save training save training save training save evaluation keeping".split()


@dataclass
class Runs:
    """Starts runs of one configuration, with a copy of the built-in model, so that nobody changes it meanwhile."""

    folder: Path
    argv: list[str]
    cached: bool = True

    def start(self, out: Path) -> subprocess.Popen:
        resumes = (out / "config.json").exists()
        argv = ["--resume", out] if resumes else [*self.argv, "--model", self.folder / "model", "--out", out]
        env = dict(os.environ)
        if self.cached:
            env |= {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "jax")}
            env |= {
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        return subprocess.Popen(
            [sys.executable, "-m", "rl.train", *map(str, argv)],
            cwd=REPO,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, out: Path) -> str:
        """Run to the end; returns what was printed."""
        return ended(self.start(out))

    def signalled(self, out: Path, number: int, moment: str, clock: random.Random) -> tuple[bool, str]:
        """Send a signal at `moment`; (whether the run was still going, what it printed)."""
        process = self.start(out)
        met = MOMENTS[moment](process, out, clock)
        going = met and process.poll() is None
        os.kill(process.pid, number)
        printed = process.communicate(timeout=120)[0]
        if number == signal.SIGKILL:
            assert not going or process.returncode == -signal.SIGKILL
            assert_no_orphans(process.pid)
        else:
            assert process.returncode == 0, printed
        return going, printed


def ended(process: subprocess.Popen) -> str:
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    return printed


def assert_no_orphans(group: int) -> None:
    """The grader's workers must notice that their parent is gone."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    raise AssertionError("workers of a killed run were still there after 20 s")


def until(process: subprocess.Popen, condition) -> bool:
    """Wait, without missing a moment of milliseconds; False if the run ended first."""
    deadline = time.monotonic() + 200
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


def at_setup(process, out, clock):
    return until(process, (out / "config.json").exists) and time.sleep(clock.uniform(0, 2)) is None


def at_training(process, out, clock):
    log = out / "metrics.jsonl"
    size = lambda: log.stat().st_size if log.exists() else 0  # noqa: E731 - used twice below
    # A resumed run first cuts its log back to the checkpoint; what counts is the first line after that.
    before = size()
    until(process, lambda: before == 0 or size() != before)
    low = size()
    return until(process, lambda: size() > low) and time.sleep(clock.uniform(0, 0.3)) is None


def at_save(process, out, clock):
    """Within the second save, so that each such kill leaves the run two steps further on."""
    seen = set()

    def second():
        seen.update(n for n in os.listdir(out / "checkpoints") if ".tmp-" in n and n.endswith(str(process.pid)))
        return len(seen) == 2

    return until(process, (out / "checkpoints").exists) and until(process, second)


def at_evaluation(process, out, clock):
    adapter = out / "adapters/channel_on-grpo-17/adapter_config.json"
    return until(process, adapter.exists) and time.sleep(clock.uniform(0, 0.4)) is None


def at_keeping(process, out, clock):
    return until(process, lambda: any((out / "evaluations").glob("*-trained.json*")))


MOMENTS = {
    "setup": at_setup,
    "training": at_training,
    "save": at_save,
    "evaluation": at_evaluation,
    "keeping": at_keeping,
}


def contents(out: Path) -> dict[str, object]:
    """Everything a run found that does not depend on the clock or on where it is."""
    results = json.loads((out / "results.json").read_text())
    del results["seconds"], results["compiles"], results["config"]["out"]
    for cell in results["cells"]:
        del cell["cost"]["seconds"]
    found = {"results.json": results}
    for pattern in ("metrics.jsonl", "episodes.jsonl", "adapters/*/*", "evaluations/*"):
        found |= {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.glob(pattern))}
    steps = [json.loads(line)["step"] for line in (out / "timing.jsonl").read_text().splitlines()]
    return found | {"timed steps": steps}


def assert_same(out: Path, reference: Path) -> None:
    one, other = contents(out), contents(reference)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
    assert not list(out.rglob("*.tmp*"))


def runs_in(folder: Path, *options: str) -> Runs:
    shutil.copytree(BUILTIN, folder / "model")
    return Runs(folder, " ".join((SIZES, SHAPES, *options)).split())


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """(runs, the directory of one that was never stopped)."""
    folder = tmp_path_factory.mktemp("resume")
    runs = runs_in(folder, TWO_CELLS)
    runs.finish(folder / "reference")
    log = (folder / "reference/metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["optim/grad_norm"] > 0 for line in log) >= 5  # something is learnt, or all this is idle
    return runs, folder / "reference"


@pytest.mark.slow
def test_killed_during_a_save_and_continued(tmp_path):
    """The quick one: the killed run had logged a step that its checkpoint lacks; it's repeated to the bit."""
    runs, out = runs_in(tmp_path, "--steps 3 --checkpoint-every 1 --no-evaluate"), tmp_path / "run"
    assert runs.signalled(out, signal.SIGKILL, "save", random.Random(0))[0]
    logged = (out / "metrics.jsonl").read_bytes()
    assert logged.count(b"\n") == 2
    assert "resumed after step 1 of 3" in runs.finish(out)
    log = (out / "metrics.jsonl").read_bytes()
    assert log.count(b"\n") == 3 and log.startswith(logged)


@pytest.mark.slow
def test_killed_at_ten_moments(study, tmp_path):
    runs, reference = study
    clock, killed = random.Random(0), []
    for moment in KILLS:
        going, _ = runs.signalled(tmp_path / "run", signal.SIGKILL, moment, clock)
        killed += [moment] * going
    assert len(killed) == 10, killed
    runs.finish(tmp_path / "run")
    assert_same(tmp_path / "run", reference)


@pytest.mark.slow
def test_the_compilation_cache_changes_nothing(study, tmp_path):
    runs, reference = study
    Runs(runs.folder, runs.argv, cached=False).finish(tmp_path / "run")
    assert_same(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["setup", "training", "evaluation"])
def test_stopped_politely(study, tmp_path, moment):
    """SIGTERM: what is under way is finished and saved, status 0, and how to continue is said."""
    runs, reference = study
    going, printed = runs.signalled(tmp_path / "run", signal.SIGTERM, moment, random.Random(0))
    assert going and "stopped: " in printed and f"continue with --resume {tmp_path / 'run'}" in printed
    assert not (tmp_path / "run/results.json").exists()
    runs.finish(tmp_path / "run")
    assert_same(tmp_path / "run", reference)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, truncate])
def test_the_newest_checkpoint_is_damaged(study, tmp_path, damage):
    runs, reference = study
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    (out / "results.json").unlink()
    shutil.rmtree(out / "adapters")
    for file in (out / "evaluations").glob("channel_*"):
        file.unlink()
    newest = out / "checkpoints/step_00000036"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    damage(largest)
    printed = runs.finish(out)
    assert f"warning: checkpoint {newest} is damaged" in printed and largest.name in printed
    assert "resumed after step 34 of 36" in printed
    assert_same(out, reference)


@pytest.mark.slow
def test_a_finished_run_is_only_reported_again(study, tmp_path):
    runs, reference = study
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    untouched = {path: path.stat().st_mtime_ns for name in ("evaluations", "checkpoints") for path in out.glob(name)}
    (out / "results.json").unlink()
    printed = runs.finish(out)
    assert "resumed after step 36 of 36" in printed and "0 shapes compiled" in printed
    assert untouched == {path: path.stat().st_mtime_ns for path in untouched}
    assert_same(out, reference)


@pytest.mark.slow
def test_another_base_under_the_same_name_is_refused(study, tmp_path):
    runs, reference = study
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    weights = runs.folder / "model/model.safetensors"
    kept = weights.read_bytes()
    try:
        flip(weights)
        process = runs.start(out)
        printed = process.communicate(timeout=120)[0]
    finally:
        weights.write_bytes(kept)
    assert process.returncode == 2 and "base model changed since the run" in printed, printed
