"""The timed gradient is training's own: rows packed whole, every reply token trained, and a dead one refused."""

import argparse
import json
import math
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from bench import gradient
from rl.batch import pack
from tests import tiny


def test_rows_fill_their_batch():
    args = argparse.Namespace(rows=4, prompt_tokens=8, new_tokens=24)
    rows = gradient.rows_of(args, vocab=50)
    (batch,) = pack([rows], 4, (32,)).batches
    assert batch.tokens.shape == (1, 4, 32) and batch.tokens.max() < 50
    assert batch.loss_mask.sum() == 4 * 24 and not batch.loss_mask[..., :8].any()
    assert sorted(set(batch.advantage[batch.loss_mask].tolist())) == [-1.0, 1.0]
    assert np.allclose(batch.old_logp[batch.loss_mask], -math.log(50))


def test_what_is_measured():
    args = argparse.Namespace(
        cells=1, rows=2, prompt_tokens=8, new_tokens=8, repeats=2, temperature=0.9, remat=None, rank=4
    )
    found = gradient.measure(tiny.policy(tiny.adapters([1])), args)
    assert found["tokens"] == 16 and list(found["compiles_s"]) == ["gradient 1x2x16 for 64"]
    assert len(found["gradient_s"]["runs"]) == 2 and 0 < found["grad_norm"] < math.inf


@pytest.mark.parametrize("norm, status", [(0.5, 0), (0.0, 1), (math.nan, 1), (math.inf, 1)])
def test_a_gradient_that_is_none_is_refused(norm, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gradient, "make_policy", lambda args: None)
    monkeypatch.setattr(gradient, "measure", lambda policy, args: {"grad_norm": norm, "rows": args.rows})
    assert gradient.main(["--rows", "3", "--out", str(tmp_path / "g.json")]) == status
    assert json.loads((tmp_path / "g.json").read_text())["rows"] == 3
    assert capsys.readouterr().out.startswith("{")


@pytest.mark.slow
def test_gradients_are_checked_against_fp32s(monkeypatch):
    """Padded and packed are right; a packed row that lacks a token is found out."""
    check = partial(gradient.check_gradient, tiny.CONFIG, jnp.float32, cells=1, rank=4, longest=48)
    for record in check():
        assert record["ok"] and record["max_err"] < 1e-4, record

    def forgetful(*args, packed, **settings):
        plan = pack(*args, packed=packed, **settings)
        if packed:
            plan.batches[0].places[0, 0] = plan.batches[0].tokens[0].size
        return plan

    monkeypatch.setattr(gradient, "pack", forgetful)
    assert [record["ok"] for record in check()] == [True, False]
