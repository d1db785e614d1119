"""The kernel of a norm's gradient is JAX's own gradient, of widths that are no power of two too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import norm

EPS = 1e-6


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def assert_equal(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("rows, width", [(6, 64), (7, 112), (1, 24)])
def test_a_norms_gradient_and_the_residuals(monkeypatch, rows, width):
    """Of a layer's form, x + f(norm(x))."""
    monkeypatch.setattr(norm, "half_on_gpu", lambda dtype: True)
    x, weight = normal(0, rows, width), 1 + 0.3 * normal(1, width)

    def loss(x, both):
        normed, x = both(x)
        return (jnp.tanh(x) + normed**3).sum()

    got = jax.grad(loss)(x, lambda x: norm.norm_and_residual(x, weight, EPS))
    assert_equal(got, jax.grad(loss)(x, lambda x: (norm.rms_norm(x, weight, EPS), x)))


def test_cells_side_by_side():
    """vmapped over cells: each has its own rows."""
    (x, dy, dx), weight = (normal(seed, 3, 5, 48) for seed in (0, 1, 2)), normal(3, 48)
    got = jax.vmap(lambda x, dy, dx: norm.norm_gradient(x, weight, EPS, dy, dx))(x, dy, dx)
    for i in range(3):
        assert_equal(got[i], norm.plain_norm_gradient(x[i], weight, EPS, dy[i], dx[i]))
