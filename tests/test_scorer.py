"""Log-probs made once, with their slopes: the gradient is a plain log-softmax's. (`score`: tests/test_reread.py.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout.distribution import Sampling
from rollout.scorer import _token_logp


@pytest.mark.parametrize("dtype, rtol", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_the_gradient_of_log_probs_by_their_slopes(dtype, rtol):
    """Under any weights of the tokens, 0 and negative ones among them, with a barred id and a temperature."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (6, 16)).astype(dtype)
    head = jax.random.normal(keys[1], (40, 16)).astype(dtype)
    target, weight = jnp.arange(6), jnp.asarray([1.0, -2.0, 0.0, 0.3, 5.0, -0.1])
    allowed = jnp.arange(40) != 39

    def ours(hidden):
        return (weight * _token_logp(hidden, target, head, Sampling(0.7).arrays(), allowed)).sum()

    def plain(hidden):
        logits = jnp.where(allowed[None], hidden @ head.astype(jnp.float32).T / 0.7, -jnp.inf)
        return (weight * jax.nn.log_softmax(logits)[jnp.arange(6), target]).sum()

    got, expected = jax.grad(ours)(hidden), jax.grad(plain)(hidden.astype(jnp.float32))
    assert got.dtype == dtype and ours(hidden) == pytest.approx(float(plain(hidden.astype(jnp.float32))), rel=rtol)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=rtol, atol=rtol * float(jnp.abs(expected).max()))
