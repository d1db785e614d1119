"""Folded linears are the plain ones: values and gradients, biases, residuals, scales of 0, several cells."""

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
    """x, the linears, their adapters (B not zero), a scale a row: some 0, and a residual."""
    key = iter(jax.random.split(jax.random.key(seed), 99))
    normal = lambda *shape: jax.random.normal(next(key), shape)  # noqa: E731
    x = normal(6, inputs)
    bases = tuple(Base(normal(inputs, out), normal(out) if bias else None) for out in outputs)
    adapters = tuple({"a": normal(inputs, RANK), "b": normal(RANK, out)} for out in outputs)
    return x, bases, adapters, jnp.asarray([2.0, 0.0, 1.0, 2.0, 0.0, 0.5]), normal(6, sum(outputs))


def plain(x, bases, adapters, scale, residual=0.0):
    out = []
    for base, adapter in zip(bases, adapters, strict=True):
        y = x @ base.weight + (0 if base.bias is None else base.bias[None])
        out.append(y + lora_update(x, adapter, scale))
    return jnp.concatenate(out, axis=1) + residual


def widened(x, bases, adapters, scale, residual=0.0):
    """widened_linears with plain's arguments and result."""
    return jnp.concatenate(widened_linears(x, bases, adapters, scale), axis=1) + residual


def value_and_gradients(function, x, bases, adapters, scale, *residual):
    """The outputs, and the gradients of a sum of cubes with respect to x, the adapters and the residual."""

    def loss(x, adapters, residual):
        return (function(x, bases, adapters, scale, *residual) ** 3).sum()

    return function(x, bases, adapters, scale, *residual), jax.grad(loss, (0, 1, 2))(x, adapters, residual)


def assert_equal(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("bias, residual", [*product([False, True], repeat=2)])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_plain_linears(name, bias, residual):
    args = drawn(*SHAPES[name], bias)
    args = args if residual else args[:-1]
    assert_equal(value_and_gradients(folded_linears, *args), value_and_gradients(plain, *args))


def test_equals_the_plain_linears_where_they_widen():
    args = drawn(*SHAPES["gate and up"], False)
    assert_equal(value_and_gradients(widened, *args), value_and_gradients(plain, *args))


@pytest.mark.parametrize("name, function", [*((name, folded_linears) for name in SHAPES), ("gate and up", widened)])
def test_cells_side_by_side(name, function):
    """vmapped over cells, each with its rows, adapters, scales and residuals; the base is one."""
    cells = [drawn(*SHAPES[name], function is folded_linears, seed) for seed in (0, 1, 2)]
    bases = cells[0][1]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *((cell[0], *cell[2:]) for cell in cells))
    together = jax.vmap(lambda x, *rest: value_and_gradients(function, x, bases, *rest))(*stacked)
    for i, cell in enumerate(cells):
        alone = value_and_gradients(plain, cell[0], bases, *cell[2:])
        assert_equal(jax.tree.map(lambda leaf, i=i: leaf[i], together), alone)


@pytest.mark.parametrize("function", [folded_linears, widened])
def test_a_row_at_scale_zero_is_the_base_and_teaches_nothing(function):
    x, bases, adapters, _, _ = drawn(*SHAPES["gate and up"], False)
    y, (_, gradient, _) = value_and_gradients(function, x, bases, adapters, jnp.zeros(6))
    assert_equal(y, jnp.concatenate([x @ base.weight for base in bases], axis=1))
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("function", [folded_linears, widened])
def test_types(function):
    """bf16 in, bf16 out; the adapters' gradients are fp32, summed in fp32."""
    x, bases, adapters, scale, residual = drawn(*SHAPES["gate and up"], False)
    x, bases, residual = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (x, bases, residual))
    y, (dx, gradient, _) = value_and_gradients(function, x, bases, adapters, scale, residual)
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
