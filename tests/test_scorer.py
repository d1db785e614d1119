"""Log-probs made once, with their slopes: the gradient is a plain log-softmax's. (`score`: tests/test_reread.py.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout.distribution import Sampling
from rollout.scorer import _token_logp, selected_count


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("dtype, rtol", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_the_gradient_of_log_probs_by_their_slopes(dtype, rtol, top_k):
    """Under any weights of the tokens, 0 and negative ones among them, with a barred id and a temperature; truncated to
    all there are, too."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (6, 16)).astype(dtype)
    head = jax.random.normal(keys[1], (40, 16)).astype(dtype)
    target, count, weight = jnp.arange(6), jnp.int32(6), jnp.asarray([1.0, -2.0, 0.0, 0.3, 5.0, -0.1])
    allowed = jnp.arange(40) != 39

    def ours(hidden):
        return (weight * _token_logp(hidden, target, head, Sampling(0.7, top_k=top_k).arrays(), allowed, count)).sum()

    def plain(hidden):
        logits = jnp.where(allowed[None], hidden @ head.astype(jnp.float32).T / 0.7, -jnp.inf)
        return (weight * jax.nn.log_softmax(logits)[jnp.arange(6), target]).sum()

    got, expected = jax.grad(ours)(hidden), jax.grad(plain)(hidden.astype(jnp.float32))
    assert got.dtype == dtype and ours(hidden) == pytest.approx(float(plain(hidden.astype(jnp.float32))), rel=rtol)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=rtol, atol=rtol * float(jnp.abs(expected).max()))


def test_the_slope_of_a_truncated_and_of_a_barred_token():
    """top_k 2 of logits 3, 2, 1, 0 at temperature 0.5: on the support p = sigmoid(2), and only its states' slopes show.
    A barred token's log-prob can't move."""
    head, hidden = jnp.eye(4), jnp.asarray([[3.0, 2.0, 1.0, 0.0]] * 2)
    shape, allowed = Sampling(0.5, top_k=2).arrays(), jnp.asarray([True, True, True, False])

    def logp(hidden):
        return _token_logp(hidden, jnp.asarray([1, 3]), head, shape, allowed, jnp.int32(2))

    p = 1 / (1 + np.exp(-2.0))  # of token 0; token 1 has the rest
    assert logp(hidden)[0] == pytest.approx(np.log(1 - p), rel=1e-5)
    slopes = jax.jacobian(logp)(hidden)
    np.testing.assert_allclose(slopes[0, 0], [-2 * p, 2 * p, 0, 0], rtol=1e-5)
    np.testing.assert_array_equal(slopes[1], np.zeros((2, 4)))


def test_only_what_is_selected_is_computed(monkeypatch):
    """Chunks of 4 of 10 selected tokens: with a count of 5 there are two chunks, and zeros after them."""
    monkeypatch.setattr("rollout.scorer.LOGIT_CHUNK", 4)
    hidden, target = jax.random.normal(jax.random.key(0), (10, 8)), jnp.arange(10)
    head, shape = jax.random.normal(jax.random.key(1), (20, 8)), Sampling(1.0).arrays()

    def logp(count, hidden=hidden):
        return _token_logp(hidden, target, head, shape, jnp.ones(20, bool), jnp.int32(count))

    np.testing.assert_array_equal(logp(5), np.where(np.arange(10) < 8, logp(10), 0))
    slopes = jax.grad(lambda hidden: logp(5, hidden).sum())(hidden)
    full = jax.grad(lambda hidden: logp(10, hidden).sum())(hidden)
    np.testing.assert_array_equal(slopes, np.where(np.arange(10)[:, None] < 8, full, 0))
    assert int(selected_count(jnp.asarray([[[3, 0, 4, 0, 0], [2, 0, 0, 0, 0]]]))) == 3
