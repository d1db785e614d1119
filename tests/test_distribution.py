"""The sampling distribution against hand-worked tables and a sort-based definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout import distribution
from rollout.distribution import BARRED, Sampling, draw, online_logsumexp, penalise, shaped_logits, token_logp

ALL = jnp.ones(4, bool)


def probabilities(p, sampling, allowed=ALL, fixed=True):
    logits = jnp.log(jnp.asarray([p], jnp.float32))
    return np.asarray(jax.nn.softmax(shaped_logits(logits, sampling.arrays(fixed), allowed)))[0]


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(
    "sampling, expected",
    [
        (Sampling(1.0), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (Sampling(1.0, top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(1.0, top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(1.0, top_p=0.01), [1, 0, 0, 0]),
        (Sampling(1.0, top_k=3), [4 / 9, 3 / 9, 2 / 9, 0]),
        # top_k first, as transformers does: of (4/9, 3/9, 2/9) two hold 0.7 and 7/9 reaches it.
        (Sampling(1.0, top_p=0.7, top_k=3), [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_hand_worked(sampling, expected, fixed):
    """Whether what is on is compiled in or asked as it runs."""
    np.testing.assert_allclose(probabilities([0.4, 0.3, 0.2, 0.1], sampling, fixed=fixed), expected, atol=1e-6)


def test_a_tail_too_small_to_count_stays_where_top_p_is_off():
    """A thousand ids of 1e-10 each: a sum in fp32 doesn't notice them, and asked as it runs top_p is 1."""
    logits, everything = jnp.log(jnp.asarray([[1.0, *[1e-10] * 1000]])), jnp.ones(1001, bool)
    for fixed in (True, False):
        assert (shaped_logits(logits, Sampling(1.0, 1.0, 1001).arrays(fixed), everything) > BARRED).all()


def test_barred_ids_have_no_probability():
    got = probabilities([0.4, 0.3, 0.2, 0.1], Sampling(1.0), jnp.asarray([False, True, True, True]))
    np.testing.assert_allclose(got, [0, 3 / 6, 2 / 6, 1 / 6], atol=1e-6)


@pytest.mark.parametrize("bits", [1, 3, 5])
@pytest.mark.parametrize("top_p, top_k", [(0.9, 0), (0.5, 0), (1.0, 7), (0.8, 50), (0.999, 0)])
def test_the_support_is_that_of_a_full_sort(top_p, top_k, bits, monkeypatch):
    """However many bits of the floor a reading of the array settles (a CPU one, a GPU three)."""
    monkeypatch.setattr(distribution, "_bits_at_once", lambda: bits)
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(20, 333)).astype(np.float32) * 3
    got = shaped_logits(jnp.asarray(logits), Sampling(1.0, top_p, top_k).arrays(), jnp.ones(333, bool)) > -1e29
    for row, kept in zip(logits.astype(np.float64), np.asarray(got), strict=True):
        order = np.argsort(-row)
        p = np.exp(row[order] - row.max())
        p = p[: top_k or None] / p[: top_k or None].sum()
        count = int(np.searchsorted(np.cumsum(p), top_p)) + 1 if top_p < 1 else len(p)
        assert set(np.flatnonzero(kept)) == set(order[:count])


def test_a_sampled_token_at_the_edge_stays_in_the_support():
    logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]], jnp.float32))
    shaped = shaped_logits(logits, Sampling(1.0, top_p=0.65).arrays(), ALL, keep_M=jnp.asarray([3]))
    np.testing.assert_allclose(np.exp(token_logp(shaped, jnp.asarray([3]))), [1 / 8], atol=1e-6)


def test_penalty_by_hand():
    got = penalise(jnp.asarray([[2.0, -2.0, 1.0]]), jnp.asarray([[True, True, False]]), jnp.float32(2))
    np.testing.assert_allclose(got, [[1.0, -4.0, 1.0]])


@pytest.mark.parametrize("bad", [{"temperature": 0}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}])
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)


@pytest.mark.parametrize("flat, block", [(10, 4), (9, 4), (9, 5), (9, 16)])
def test_draws_follow_the_distribution(flat, block, monkeypatch):
    """20,000 rows of ten ids, all at once or in blocks, the last of them half empty or one alone: each frequency within
    five standard errors, what is barred never, and log-probabilities of the same distribution."""
    monkeypatch.setattr(distribution, "FLAT", flat)
    monkeypatch.setattr(distribution, "BLOCK", block)
    p = np.array([4, 3, 0, 1, 8, 1, 1, 2, 0, 4]) / 24
    logits = jnp.log(jnp.asarray([p + (p == 0)], jnp.float32))
    shaped_MV = jnp.repeat(shaped_logits(logits, Sampling(1.0).arrays(), jnp.asarray(p > 0)), 20_000, axis=0)
    tokens, logp = draw(shaped_MV, jax.random.split(jax.random.key(0), 20_000))
    counts = np.bincount(tokens, minlength=10)
    assert (np.abs(counts / 2e4 - p) <= 5 * np.sqrt(p * (1 - p) / 2e4)).all()
    np.testing.assert_allclose(logp, np.log(p[tokens]), atol=1e-6)


def test_a_draw_of_a_large_vocabulary_is_a_rows_own():
    """By its key, not by its place or its neighbours, and an id far behind as well as one in front."""
    logits = jnp.full((3, 50_000), BARRED).at[:, jnp.asarray([7, 20_000, 49_999])].set(jnp.asarray([1.0, 2.0, 1.5]))
    keys = jax.random.split(jax.random.key(1), 40)
    alone = [draw(logits[:1], keys[i : i + 1]) for i in range(3)]
    tokens, logp = draw(logits, keys[:3])
    assert [int(token[0]) for token, _ in alone] == tokens.tolist()
    np.testing.assert_array_equal(logp, [one[0] for _, one in alone])
    assert set(draw(jnp.repeat(logits[:1], 40, axis=0), keys)[0].tolist()) == {7, 20_000, 49_999}


def test_online_logsumexp():
    """Equal to logsumexp where numbers are far apart, barred, or all the same."""
    apart, barred = [[0.0, 700.0, -700.0, 1.0], [-200.0, -201.0, -1e4, 0.0]], [[BARRED, BARRED, 3.0, 2.5], [BARRED] * 4]
    x_MV = jnp.asarray([*apart, *barred, [88.0] * 4], jnp.float32)
    np.testing.assert_allclose(online_logsumexp(x_MV), jax.nn.logsumexp(x_MV, axis=-1), rtol=1e-6)
