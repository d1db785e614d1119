"""LoRA: an adapter of B = 0 or scale 0 is the base, an adapter equals its merged weights, rows and cells stay apart."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.config import ModelConfig
from model.lora import LINEARS, LoraConfig, by_layer, init_lora, linear_shapes, lora_update, parameters
from model.qwen2 import Qwen2

TINY = ModelConfig(vocab=50, width=16, layers=2, heads=4, kv_heads=2, head_dim=6, mlp=24)
SETTINGS = LoraConfig(rank=3, alpha=6.0)
TOKENS = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def filled_lora(seed: int):
    """An adapter whose B is not zero."""
    lora = init_lora(jax.random.key(seed), TINY, SETTINGS)
    return jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(seed + 1), leaf.shape), lora)


def states(model: Qwen2, lora=None, scales=(0.0, 0.0)) -> jax.Array:
    graphdef, params = nnx.split(model)
    return _states(graphdef, params, lora, jnp.asarray(scales))


@partial(jax.jit, static_argnums=0)
def _states(graphdef, params, lora, scale_B):
    where = jnp.broadcast_to(jnp.arange(5)[None], (2, 5))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((5, 5), bool))[None], (2, 5, 5))
    return nnx.merge(graphdef, params).hidden(TOKENS, where, mask, lora, scale_B)[0]


@pytest.fixture(scope="module")
def model() -> Qwen2:
    return Qwen2(TINY, nnx.Rngs(0), jnp.float32)


def test_init(model):
    """A is uniform in ±1/sqrt(inputs) and differs everywhere; B is zero, so the base is unchanged."""
    lora = init_lora(jax.random.key(0), TINY, SETTINGS)
    seen = set()
    for adapters in by_layer(lora):
        for name, (inputs, outputs) in linear_shapes(TINY).items():
            a, b = adapters[name]["a"], adapters[name]["b"]
            assert a.shape == (inputs, 3) and b.shape == (3, outputs) and a.dtype == b.dtype == jnp.float32
            assert 0.7 * inputs**-0.5 < jnp.abs(a).max() <= inputs**-0.5 and not b.any()
            seen.add(float(a[0, 0]))
    assert len(seen) == TINY.layers * len(LINEARS)
    np.testing.assert_allclose(states(model, lora, (2.0, 2.0)), states(model), atol=1e-6)


def test_scale_is_each_rows_own(model):
    """Row 0 at scale 0 is the untrained base beside an adapted row 1; swapping the scales swaps the roles."""
    lora, base = filled_lora(0), states(model)
    mixed, swapped, both = (states(model, lora, scales) for scales in [(0.0, 2.0), (2.0, 0.0), (2.0, 2.0)])
    np.testing.assert_allclose(mixed[0], base[0], atol=1e-6)
    np.testing.assert_allclose(swapped[1], base[1], atol=1e-6)
    np.testing.assert_allclose(mixed[1], both[1], atol=1e-6)
    assert jnp.abs(mixed[1] - base[1]).max() > 0.1


def test_adapter_equals_merged_weights(model):
    lora = filled_lora(0)
    graphdef, params = nnx.split(model)
    merged = nnx.merge(graphdef, jax.tree.map(jnp.copy, params))
    for layer, block in enumerate(merged.layers):
        for name in LINEARS:
            linear = getattr(block.self_attn if name[0] in "qkvo" else block.mlp, name)
            linear.weight[...] += SETTINGS.scale * lora[name]["a"][layer] @ lora[name]["b"][layer]
    np.testing.assert_allclose(states(model, lora, (2.0, 2.0)), states(merged), atol=1e-5)


def test_cells_under_vmap_equal_cells_alone(model):
    cells = [filled_lora(0), filled_lora(7)]
    lora_X = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cells)
    together = jax.vmap(lambda lora: states(model, lora, (2.0, 2.0)))(lora_X)
    for one, lora in zip(together, cells, strict=True):
        np.testing.assert_allclose(one, states(model, lora, (2.0, 2.0)), atol=1e-5)


def test_update_by_hand():
    """x = [1, 2], A = [[1], [10]], B = [[3, 4]]: x A = 21, so the update is scale * [63, 84]."""
    adapter = {"a": jnp.asarray([[1.0], [10.0]]), "b": jnp.asarray([[3.0, 4.0]])}
    got = lora_update(jnp.asarray([[1.0, 2.0]] * 2), adapter, jnp.asarray([0.5, 2.0]))
    np.testing.assert_array_equal(got, [[31.5, 42.0], [126.0, 168.0]])


def test_no_gradient_at_scale_zero(model):
    """A row played by the untrained base teaches the adapter nothing, exactly."""
    gradient = jax.grad(lambda lora: jnp.sum(states(model, lora, (0.0, 0.0)) ** 3))(filled_lora(0))
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))


def test_counts_and_types():
    lora = init_lora(jax.random.key(0), TINY, SETTINGS)
    assert parameters(TINY, SETTINGS) == sum(leaf.size for leaf in jax.tree.leaves(lora))
    assert LoraConfig().scale == 2.0
    update = lora_update(jnp.ones((2, 16), jnp.bfloat16), by_layer(lora)[0]["q_proj"], jnp.ones(2))
    assert update.dtype == jnp.bfloat16
