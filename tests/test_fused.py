"""The fused decode forward is the plain one: same samples, same log-probs, every cell with its own adapter."""

import numpy as np
import pytest

from rollout.distribution import Sampling
from rollout.episode import RowId
from rollout.policy import Request
from tests import tiny


def requests(cells, rows):
    """Prompts of different lengths; every third row is the untrained base's."""
    return [
        [
            Request(f"{x}.{b}", [tiny.START, *range(40, 43 + b)], 9, 0.0 if b % 3 == 2 else 1.0, RowId(x, 0, b, 0, 0))
            for b in range(rows)
        ]
        for x in range(cells)
    ]


@pytest.mark.parametrize(
    "cells, sampling",
    [(3, Sampling(0.9, top_p=0.9)), pytest.param(1, Sampling(0.9), marks=pytest.mark.slow)],
)
def test_fused_and_plain_draw_the_same(cells, sampling):
    adapters = tiny.adapters(range(cells))
    plain = tiny.policy(adapters, rows=(4,), fused=False, compile_afresh=True).sample(requests(cells, 4), sampling)
    fused = tiny.policy(adapters, rows=(4,), fused=True, compile_afresh=True).sample(requests(cells, 4), sampling)
    for x in range(cells):
        for one, other in zip(plain[x], fused[x], strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logp, other.logp, atol=2e-5)
    assert any((a.tokens.tolist() != b.tokens.tolist()) for a, b in zip(fused[0], fused[-1])) or cells == 1
