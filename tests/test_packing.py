"""Packed rows: integers show where each token came from, and a model can't tell them from padded ones."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.packing import packing_of, repack, unpack
from tests import tiny

PLACES = jnp.asarray([0, 1, 2, 4, 8, 9, 12, 12])
"""Rows [3, 4] of 3, 1 and 2 tokens, and two places for none."""


def test_there_and_back():
    """A token's state is 10 x row + column."""
    packing = packing_of(PLACES, 3, 4)
    x = jnp.asarray([0, 1, 2, 10, 20, 21, 99, 99])[:, None]
    rows = unpack(x, packing)
    np.testing.assert_array_equal(rows[..., 0], [[0, 1, 2, 0], [10, 0, 0, 0], [20, 21, 0, 0]])
    np.testing.assert_array_equal(repack(rows + 1, packing)[:, 0], [1, 2, 3, 11, 21, 22, 0, 0])


def test_gradients_go_back_to_where_they_came_from():
    packing = packing_of(PLACES, 3, 4)
    weight = jnp.arange(12.0).reshape(3, 4, 1)
    packed = jax.grad(lambda x: (weight * unpack(x, packing)).sum())(jnp.ones((8, 1)))
    np.testing.assert_array_equal(packed[:, 0], [0, 1, 2, 4, 8, 9, 0, 0])
    padded = jax.grad(lambda x: (jnp.arange(8.0)[:, None] * repack(x, packing)).sum())(jnp.ones((3, 4, 1)))
    np.testing.assert_array_equal(padded[..., 0], [[0, 1, 2, 0], [3, 0, 0, 0], [4, 5, 0, 0]])


def test_a_models_states_of_packed_rows():
    """Each token's position, what it sees and its row's adapter scale are those of the padded rows."""
    model = nnx.merge(*tiny.base())
    lora = jax.tree.map(lambda leaf: leaf[0], tiny.adapters([3]))
    tokens = jax.random.randint(jax.random.key(0), (3, 4), 0, tiny.CONFIG.vocab)
    where, scale = jnp.broadcast_to(jnp.arange(4)[None], (3, 4)), jnp.asarray([2.0, 0.0, 1.0])
    padded, _ = model.hidden(tokens, where, None, lora, scale)
    packed, _ = model.hidden(tokens, where, None, lora, scale, packing=packing_of(PLACES, 3, 4))
    assert packed.shape == (1, 8, tiny.CONFIG.width)
    expected = padded.reshape(12, -1)[PLACES[:6]]
    np.testing.assert_allclose(packed[0, :6], expected, rtol=1e-4, atol=1e-5)
