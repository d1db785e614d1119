"""Executables that are kept: a second run takes them from the folder, and finds the same numbers."""

import subprocess
import sys

import pytest

from tests.conftest import REPO

SMALL = "--train-problems 8 --heldout-problems 4 --problems-per-step 2 --steps 1 --show-every 0 --no-evaluate"


@pytest.mark.slow
def test_a_second_run_compiles_nothing_anew(tmp_path):
    kept, held = tmp_path / "kept", []
    for name in ("one", "two"):
        command = [sys.executable, "-m", "rl.train", *SMALL.split(), "--compile-cache", kept, "--out", tmp_path / name]
        subprocess.run(command, cwd=REPO, check=True, capture_output=True)
        held.append({file.name for file in kept.iterdir() if not file.name.endswith("-atime")})
    assert held[0] and held[0] == held[1]
    assert (tmp_path / "one/metrics.jsonl").read_bytes() == (tmp_path / "two/metrics.jsonl").read_bytes()
