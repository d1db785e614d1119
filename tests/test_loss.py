"""The loss by hand, its gradient by finite differences, and how a step's rows are weighted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.loss import NORMALISATIONS, policy_gradient_loss, row_weights


def f32(*values):
    return jnp.asarray(values, jnp.float32)


def loss(logp, old, advantage, mask, weight):
    return policy_gradient_loss(f32(*logp), f32(*old), f32(*advantage), jnp.asarray(mask), f32(*weight), 0.2, 0.28)


LN2 = float(np.log(2))


@pytest.mark.parametrize(
    "logp, old, advantage, mask, weight, expected",
    [
        # On-policy the ratio is 1: minus the weighted sum of advantages.
        ([-1, -2, -3], [-1, -2, -3], [1, 2, -3], [1, 1, 1], [1, 1, 1], 0),
        ([-1, -2, -3], [-1, -2, -3], [1, 2, -3], [1, 1, 0], [0.5, 0.5, 0.5], -1.5),
        # ratio 2, A > 0: clipped at 1.28; A < 0: not clipped (the pessimistic side).
        ([0.0], [-LN2], [1], [1], [1], -1.28),
        ([0.0], [-LN2], [-1], [1], [1], 2),
        # ratio 1/2, A > 0: not clipped; A < 0: clipped at 0.8.
        ([-LN2], [0.0], [1], [1], [1], -0.5),
        ([-LN2], [0.0], [-1], [1], [1], 0.8),
        # All masked: zero.
        ([-1, -2], [-5, -5], [1, 1], [0, 0], [1, 1], 0),
    ],
)
def test_hand_worked(logp, old, advantage, mask, weight, expected):
    value, stats = loss(logp, old, advantage, [bool(m) for m in mask], weight)
    assert float(value) == pytest.approx(expected, abs=1e-6)
    assert float(stats.tokens) == sum(mask)


def test_masked_positions_may_hold_anything():
    """inf, NaN and absurd values behind the mask change neither value nor gradient."""

    def value(logp):
        return policy_gradient_loss(
            logp,
            f32(-1, -np.inf, np.nan, 0),
            f32(2, np.nan, np.inf, 1e30),
            jnp.asarray([True, False, False, False]),
            f32(1, np.inf, np.nan, 1),
            0.2,
            0.28,
        )[0]

    logp = f32(-1, 500, -500, 1e30)
    assert float(value(logp)) == -2
    np.testing.assert_array_equal(jax.grad(value)(logp), [-2, 0, 0, 0])


def test_gradient_is_a_finite_difference():
    rng = np.random.default_rng(0)
    old = rng.normal(-2, 1, 40)
    logp = old + rng.normal(0, 0.3, 40)
    advantage, weight, mask = rng.normal(size=40), rng.uniform(0, 1, 40), rng.uniform(size=40) < 0.7

    def value64(logp):
        """The definition again, in float64 numpy."""
        ratio = np.exp(logp - old)
        surrogate = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
        return -(weight * mask * surrogate).sum()

    grad = jax.grad(
        lambda x: policy_gradient_loss(x, f32(*old), f32(*advantage), jnp.asarray(mask), f32(*weight), 0.2, 0.28)[0]
    )(f32(*logp))
    for i in range(40):
        step = np.zeros(40)
        step[i] = 1e-6
        difference = (value64(logp + step) - value64(logp - step)) / 2e-6
        assert float(grad[i]) == pytest.approx(difference, abs=1e-4)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("tokens", [1 / 8, 1 / 8]),
        ("sequence", [1 / 4, 1 / 12]),
        ("constant", [1 / 16, 1 / 16]),
        ("microbatch", [1 / 4, 1 / 12]),
    ],
)
def test_row_weights_by_hand(name, expected):
    got = row_weights(np.array([2, 6]), name, np.array([8, 8]), chunks=2)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("name", NORMALISATIONS)
def test_untrained_rows_count_nothing(name):
    """A frozen partner's rows (no trained token) are in no denominator; a step with none trained gives zeros."""
    with_frozen = row_weights(np.array([2, 0, 6]), name, np.array([8, 8, 8]), chunks=2)
    without = row_weights(np.array([2, 6]), name, np.array([8, 8]), chunks=2)
    np.testing.assert_array_equal(with_frozen, [without[0], 0, without[1]])
    np.testing.assert_array_equal(row_weights(np.zeros(3, int), name, np.full(3, 8)), np.zeros(3))


@pytest.mark.parametrize("name", ["tokens", "sequence", "microbatch"])
def test_weights_of_all_trained_tokens_sum_to_one(name):
    counts = np.random.default_rng(1).integers(1, 30, 37)
    weight = row_weights(counts, name, np.full(37, 30), chunks=5, seed=(17, 3))
    assert (weight * counts).sum() == pytest.approx(1, rel=1e-5)


def test_microbatch_chunks_are_permuted_by_the_seed():
    counts = np.arange(1, 13)
    a, again, b = (row_weights(counts, "microbatch", np.full(12, 12), 4, seed) for seed in ((1, 0), (1, 0), (1, 1)))
    np.testing.assert_array_equal(a, again)
    assert (a != b).any()
