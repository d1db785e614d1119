"""The kernels of the backward pass are JAX's own gradients: odd numbers of rows, a width that is no power of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import passes
from model.attention import rope_angles
from model.config import ModelConfig

EPS = 1e-6


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def assert_equal(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * float(jnp.abs(b).max()))


def kernels(monkeypatch):
    monkeypatch.setattr(passes, "fits", lambda x: True)


@pytest.mark.parametrize("rows, width", [(6, 64), (7, 112), (1, 24)])
def test_a_norms_gradient_and_the_residuals(monkeypatch, rows, width):
    """Of a layer's form, x + f(norm(x)): the kernel's is JAX's, for whole programs and for one that is half empty."""
    x, weight = normal(0, rows, width), 1 + 0.3 * normal(1, width)

    def loss(x, both):
        normed, x = both(x)
        return (jnp.tanh(x) + normed**3).sum()

    kernels(monkeypatch)
    got = jax.grad(loss)(x, lambda x: passes.norm_and_keep(x, weight, EPS))
    assert_equal(got, jax.grad(loss)(x, lambda x: (passes.rms_norm(x, weight, EPS), x)))


@pytest.mark.parametrize("batch, steps, heads, dim", [(2, 8, (4, 2), 8), (1, 21, (3, 1), 8), (1, 4, (2, 1), 12)])
def test_rope_turned_back(monkeypatch, batch, steps, heads, dim):
    """Heads of 12 are left to JAX: a kernel's arrays are powers of two long."""
    config = ModelConfig(vocab=8, width=16, layers=1, heads=heads[0], kv_heads=heads[1], head_dim=dim, mlp=16)
    rope = rope_angles(jnp.arange(batch * steps).reshape(batch, steps), config)
    qkv = normal(0, batch, steps, heads[0] + 2 * heads[1], dim)
    if dim == 12:
        monkeypatch.delattr(passes, "turn_back")

    def loss(qkv, turn):
        return sum((y**3).sum() for y in turn(qkv, rope, heads))

    kernels(monkeypatch)
    assert_equal(passes.turn(qkv, rope, heads), passes.turned(qkv, rope, heads))
    assert_equal(jax.grad(loss)(qkv, passes.turn), jax.grad(loss)(qkv, passes.turned))


def test_cells_side_by_side(monkeypatch):
    """vmapped over cells: each has its own rows."""
    kernels(monkeypatch)
    (x, dy, dx), weight = (normal(seed, 3, 5, 48) for seed in (0, 1, 2)), normal(3, 48)
    got = jax.vmap(lambda x, dy, dx: passes.norm_slope(x, weight, EPS, dy, dx))(x, dy, dx)
    for i in range(3):
        assert_equal(got[i], passes.plain_norm_slope(x[i], weight, EPS, dy[i], dx[i]))
