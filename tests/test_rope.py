"""The kernel of RoPE's gradient is JAX's own gradient, for whole programs and for one that is not full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import rope
from model.config import ModelConfig


@pytest.mark.parametrize("batch, steps, heads, dim", [(2, 8, (4, 2), 8), (1, 21, (3, 1), 8), (1, 4, (2, 1), 12)])
def test_the_gradient_of_queries_keys_and_values(monkeypatch, batch, steps, heads, dim):
    """Heads of 12 are left to JAX: a kernel's arrays are powers of two long."""
    monkeypatch.setattr(rope, "half_on_gpu", lambda dtype: True)
    config = ModelConfig(vocab=8, width=16, layers=1, heads=heads[0], kv_heads=heads[1], head_dim=dim, mlp=16)
    angles = rope.rope_angles(jnp.arange(batch * steps).reshape(batch, steps), config)
    qkv = jax.random.normal(jax.random.key(0), (batch, steps, heads[0] + 2 * heads[1], dim))
    if dim == 12:
        monkeypatch.delattr(rope, "rope_gradient")

    def value_and_gradient(function):
        loss = lambda qkv: sum((y**3).sum() for y in function(qkv, angles, heads))  # noqa: E731 - two lines, else
        return function(qkv, angles, heads), jax.grad(loss)(qkv)

    got, expected = (value_and_gradient(function) for function in (rope.folded_rotate_qkv, rope.rotate_qkv))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * float(jnp.abs(b).max()))
