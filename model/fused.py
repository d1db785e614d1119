"""One token a row, all cells at once, in few products a layer: the decode step's forward on a GPU.

A decode step reads every weight for a handful of rows, so its time is memory traffic plus what each kernel costs to
launch; the plain forward starts twenty small products a layer. Here linears that share an input are one product, and
the low-rank halves A of every cell stand beside the base's columns in it: x [W | A_1 ... A_X]. A row's own A is picked
by a mask that also holds its scale, and all B are one product more. The arithmetic is `Qwen2.hidden`'s up to rounding
(tested); many cells make the wide part too wide, so beyond MOST_CELLS the plain forward is used.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from model.config import ModelConfig
from model.lora import Lora, by_layer
from model.qwen2 import Cache, Qwen2, attend, rms_norm, rope_angles, rotate

MOST_CELLS = 16
"""Cells beyond which all cells' low-rank halves beside the base would cost more than they save."""

GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Linears that share an input."""


class Group(NamedTuple):
    """`weight` [in, out + X r]: the base's columns, then each cell's A of each linear (r of them a cell); `bias` [out]
    or None; `b` [X r, out]: their B, each in its own linear's columns."""

    weight: jax.Array
    bias: jax.Array | None
    b: jax.Array


class Layer(NamedTuple):
    """One layer's products and norms."""

    qkv: Group
    o: Group
    gate_up: Group
    down: Group
    norm_in: jax.Array
    norm_mid: jax.Array


class Fused(NamedTuple):
    """All that a decode step reads."""

    embed: jax.Array
    layers: list[Layer]
    norm: jax.Array


def fuse(model: Qwen2, lora: Lora) -> Fused:
    """Lay base and adapters (leading axis X) out for decoding: a copy of both, once a call and not once a token."""
    layers = []
    for block, adapter in zip(model.layers, by_layer(lora, axis=1), strict=True):
        linears = {**vars(block.self_attn), **vars(block.mlp)}
        groups = {}
        for name, members in GROUPS.items():
            groups[name] = _group([linears[m] for m in members], [adapter[m] for m in members])
        norms = block.input_layernorm.weight[...], block.post_attention_layernorm.weight[...]
        layers.append(Layer(**groups, norm_in=norms[0], norm_mid=norms[1]))
    return Fused(model.embed_tokens[...], layers, model.norm.weight[...])


def _group(linears: list[Any], adapters: list[dict[str, jax.Array]]) -> Group:
    dtype = linears[0].weight[...].dtype
    base = jnp.concatenate([linear.weight[...] for linear in linears], axis=1)
    cells, inputs, rank = adapters[0]["a"].shape
    # [X, in, n R] -> [in, X n R]
    a = jnp.concatenate([adapter["a"] for adapter in adapters], axis=2).astype(dtype)
    a = a.transpose(1, 0, 2).reshape(inputs, -1)
    rows, left = [], 0
    for adapter in adapters:
        width = adapter["b"].shape[2]
        rows.append(jnp.pad(adapter["b"].astype(dtype), ((0, 0), (0, 0), (left, base.shape[1] - left - width))))
        left += width
    b = jnp.concatenate(rows, axis=1).reshape(cells * rank * len(adapters), -1)  # [X, n R, out] -> [X n R, out]
    biases = [linear.bias[...] for linear in linears if linear.bias is not None]
    return Group(jnp.concatenate([base, a], axis=1), jnp.concatenate(biases) if biases else None, b)


def own_cell(scale_XB: jax.Array) -> jax.Array:
    """[X * B, X] fp32: each row's scale in its own cell's column, else 0."""
    cells, batch = scale_XB.shape
    return (jnp.eye(cells, dtype=jnp.float32)[:, None] * scale_XB[..., None]).reshape(cells * batch, cells)


def _apply(group: Group, x: jax.Array, own_MX: jax.Array) -> jax.Array:
    """[M, in] -> [M, out] in x's type."""
    outputs = group.b.shape[1]
    wide = jnp.dot(x, group.weight)
    low = wide[:, outputs:].reshape(x.shape[0], own_MX.shape[1], -1)
    low = (low.astype(jnp.float32) * own_MX[:, :, None]).astype(x.dtype).reshape(x.shape[0], -1)
    out = jnp.dot(low, group.b, preferred_element_type=jnp.float32) + wide[:, :outputs].astype(jnp.float32)
    if group.bias is not None:
        out = out + group.bias.astype(jnp.float32)[None]
    return out.astype(x.dtype)


def fused_hidden(
    config: ModelConfig,
    fused: Fused,
    token_M: jax.Array,
    position_M: jax.Array,
    mask_MS: jax.Array,
    own_MX: jax.Array,
    cache: Cache,
    slot: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Final hidden states [M, D] of one token a row, and the cache with it written at `slot`.

    M = X * B rows; `mask_MS` bool: may a row see a slot; `own_MX` from `own_cell`; cache leaves [M, K, S, C].
    """
    rows, c = token_M.shape[0], config
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    x = fused.embed[token_M]
    rope = rope_angles(position_M[:, None], c)
    out = []
    for layer, (cached_k, cached_v) in zip(fused.layers, cache, strict=True):
        qkv = _apply(layer.qkv, rms_norm(x, layer.norm_in, c.norm_eps), own_MX)
        q, k, v = jnp.split(qkv, (queries, queries + keys), axis=1)
        q = rotate(q.reshape(rows, 1, c.heads, c.head_dim), rope)
        k = rotate(k.reshape(rows, 1, c.kv_heads, c.head_dim), rope).transpose(0, 2, 1, 3)
        v = v.reshape(rows, c.kv_heads, 1, c.head_dim)
        cached_k = jax.lax.dynamic_update_slice_in_dim(cached_k, k, slot, axis=2)
        cached_v = jax.lax.dynamic_update_slice_in_dim(cached_v, v, slot, axis=2)
        seen = attend(q, cached_k, cached_v, mask_MS[:, None]).reshape(rows, queries)
        x = x + _apply(layer.o, seen, own_MX)
        gate, up = jnp.split(_apply(layer.gate_up, rms_norm(x, layer.norm_mid, c.norm_eps), own_MX), 2, axis=1)
        x = x + _apply(layer.down, jax.nn.silu(gate) * up, own_MX)
        out.append((cached_k, cached_v))
    return rms_norm(x, fused.norm, c.norm_eps), out
