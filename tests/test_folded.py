"""Folded linears are the plain ones: values and gradients, for wide and narrow outputs, scales of 0, several cells."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.config import ModelConfig
from model.folded import Base, folded_linears, widened_linears
from model.lora import LoraConfig, init_lora, lora_update
from model.qwen2 import Qwen2

RANK = 3
SHAPES = {"gate and up": (8, (20, 20)), "down": (20, (8,)), "o": (8, (8,)), "q, k, v": (8, (8, 4, 4))}


def drawn(inputs, outputs, bias, seed=0):
    """x, the linears, their adapters (B not zero), and a scale a row: some 0."""
    key = iter(jax.random.split(jax.random.key(seed), 99))
    normal = lambda *shape: jax.random.normal(next(key), shape)  # noqa: E731
    x = normal(6, inputs)
    bases = tuple(Base(normal(inputs, out), normal(out) if bias else None) for out in outputs)
    adapters = tuple({"a": normal(inputs, RANK), "b": normal(RANK, out)} for out in outputs)
    return x, bases, adapters, jnp.asarray([2.0, 0.0, 1.0, 2.0, 0.0, 0.5])


def plain(x, bases, adapters, scale):
    out = []
    for base, adapter in zip(bases, adapters, strict=True):
        y = x @ base.weight + (0 if base.bias is None else base.bias[None])
        out.append(y + lora_update(x, adapter, scale))
    return jnp.concatenate(out, axis=1)


def widened(x, bases, adapters, scale):
    """widened_linears, side by side."""
    return jnp.concatenate(widened_linears(x, bases, adapters, scale), axis=1)


def value_and_gradients(function, x, bases, adapters, scale):
    """The outputs, and the gradients of a sum of cubes with respect to x and the adapters."""
    loss = lambda x, adapters: (function(x, bases, adapters, scale) ** 3).sum()  # noqa: E731
    return function(x, bases, adapters, scale), jax.grad(loss, (0, 1))(x, adapters)


def assert_equal(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


CASES = [*product(SHAPES, [folded_linears], [False, True]), ("gate and up", widened, False)]


@pytest.mark.parametrize("name, function, bias", CASES)
def test_equals_the_plain_linears(name, function, bias):
    args = drawn(*SHAPES[name], bias)
    assert_equal(value_and_gradients(function, *args), value_and_gradients(plain, *args))


def test_one_linear_with_a_bias_and_one_without():
    x, (one, two), adapters, scale = drawn(*SHAPES["gate and up"], True)
    args = x, (one, two._replace(bias=None)), adapters, scale
    assert_equal(value_and_gradients(folded_linears, *args), value_and_gradients(plain, *args))


@pytest.mark.parametrize("name, function, bias", CASES)
def test_cells_side_by_side(name, function, bias):
    """vmapped over cells, each with its rows, adapters and scales; the base is one."""
    cells = [drawn(*SHAPES[name], bias, seed) for seed in (0, 1, 2)]
    bases = cells[0][1]
    x, adapters, scale = jax.tree.map(lambda *leaves: jnp.stack(leaves), *((c[0], c[2], c[3]) for c in cells))
    together = jax.vmap(lambda x, a, s: value_and_gradients(function, x, bases, a, s))(x, adapters, scale)
    for i, cell in enumerate(cells):
        alone = value_and_gradients(plain, cell[0], bases, *cell[2:])
        assert_equal(jax.tree.map(lambda leaf, i=i: leaf[i], together), alone)


@pytest.mark.parametrize("function", [folded_linears, widened])
def test_a_row_at_scale_zero_is_the_base_and_teaches_nothing(function):
    x, bases, adapters, _ = drawn(*SHAPES["gate and up"], False)
    y, (_, gradient) = value_and_gradients(function, x, bases, adapters, jnp.zeros(6))
    assert_equal(y, jnp.concatenate([x @ base.weight for base in bases], axis=1))
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("function, bias", [(folded_linears, True), (widened, False)])
def test_types(function, bias):
    """bf16 in, bf16 out; the adapters' gradients are fp32, summed in fp32."""
    x, bases, adapters, scale = drawn(*SHAPES["gate and up"], bias)
    x, bases = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (x, bases))
    y, (dx, gradient) = value_and_gradients(function, x, bases, adapters, scale)
    assert y.dtype == dx.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}


REMATS = [*product(("none", "products", "all"), (1, 99))]


@pytest.mark.parametrize(
    "remat, scan_from", [REMATS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in REMATS[1:])]
)
def test_the_whole_model(monkeypatch, remat, scan_from):
    """Hidden states and adapter gradients, whatever is kept, looped or unrolled."""
    monkeypatch.setattr("model.qwen2.SCAN_FROM", scan_from)
    config = ModelConfig(vocab=50, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=48)
    graph, base = nnx.split(Qwen2(config, nnx.Rngs(0)))
    lora = jax.tree.map(lambda x: x + 0.05, init_lora(jax.random.key(0), config, LoraConfig(RANK, 6.0)))
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, 50)
    where = jnp.tile(jnp.arange(7)[None], (2, 1))

    def run(folded, remat):
        def loss(lora):
            model, scale = nnx.merge(graph, base), jnp.asarray([2.0, 0.0])
            hidden, _ = model.hidden(tokens, where, None, lora, scale, remat=remat, folded=folded)
            return (hidden**3).sum(), hidden

        return jax.jit(jax.grad(loss, has_aux=True))(lora)

    assert_equal(run(True, remat), run(False, "none"))
