"""What a training pass keeps: as many bytes as the formula says, no product computed twice, equal gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.config import ModelConfig
from model.lora import LoraConfig, init_lora
from model.qwen2 import Qwen2
from model.remat import saved_bytes

CONFIG = ModelConfig(vocab=50, width=16, layers=3, heads=4, kv_heads=2, head_dim=4, mlp=48)
RANK = 2


@pytest.fixture(scope="module")
def parts():
    graph, base = nnx.split(Qwen2(CONFIG, nnx.Rngs(0)))
    lora = jax.tree.map(lambda x: x + 0.05, init_lora(jax.random.key(0), CONFIG, LoraConfig(RANK, 4.0)))
    return graph, base, lora


def hidden(graph, base, remat, tokens, lora):
    where = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    scale = jnp.ones(tokens.shape[0])
    return nnx.merge(graph, base).hidden(tokens, where, None, lora, scale, remat=remat)[0]


def kept_bytes(graph, base, lora, remat, rows):
    """Bytes of jax.vjp's residuals for `rows` rows of 8 tokens."""
    run = lambda tokens, lora: jax.vjp(partial(hidden, graph, base, remat, tokens), lora)[1]  # noqa: E731
    kept = jax.eval_shape(run, jax.ShapeDtypeStruct((rows, 8), jnp.int32), lora)
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


@pytest.mark.parametrize("scan_from", [1, 99])
@pytest.mark.parametrize("remat", ["products", "all"])
def test_the_formula_is_what_is_kept(parts, monkeypatch, remat, scan_from):
    """A token's share of the residuals. Plain attention keeps no statistics, and its output is computed again; beside
    the layers, RoPE's angles and the final norm's input are kept."""
    monkeypatch.setattr("model.qwen2.SCAN_FROM", scan_from)
    a_token = (kept_bytes(*parts, remat, 6) - kept_bytes(*parts, remat, 4)) / 16
    expected = saved_bytes(CONFIG, jnp.float32, RANK, remat)
    if remat == "products":
        expected -= CONFIG.layers * 4 * CONFIG.heads * (CONFIG.head_dim + 1)
    around = a_token - expected
    assert 0 <= around <= 4 * (2 * CONFIG.width + 8), (a_token, expected)


def test_products_keeps_more_than_all_and_less_than_none(parts):
    kept = [kept_bytes(*parts, remat, 4) for remat in ("all", "products", "none")]
    assert kept == sorted(kept) and kept[0] < 0.5 * kept[1] and kept[1] < 0.6 * kept[2]


def test_products_computes_no_product_twice(parts):
    """Counted in the gradient's HLO, attention's two apart: `all` repeats a layer's 7 x 3, `products` none."""
    graph, base, lora = parts
    tokens = jnp.zeros((2, 8), jnp.int32)

    def count(remat):
        grad = jax.jit(jax.grad(lambda lora: (hidden(graph, base, remat, tokens, lora) ** 2).sum()))
        return grad.lower(lora).as_text().count("stablehlo.dot_general")

    none, products, everything = (count(remat) for remat in ("none", "products", "all"))
    assert products - none <= 2 * CONFIG.layers < everything - none, (none, products, everything)
