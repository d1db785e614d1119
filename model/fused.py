"""One token a row, all cells at once: the decode step's forward on a GPU, seven or eight kernels a layer: XLA's
own for gate and up, and ours (model.kernels, model.decode_attention).

The plain forward starts twenty small kernels a layer and reads the whole cache. Here base and adapters are laid out
once a call as the kernels read them; what they compute is `Qwen2.hidden` up to rounding (tested). The plain forward
stays the reference, and serves CPUs, fp32 on a GPU, and shapes that don't divide into tiles (`fits`).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from model.attention import half_on_gpu
from model.config import ModelConfig
from model.decode_attention import attention, room_for_heads
from model.kernels import Norm, Update, join, product, swiglu
from model.lora import LayerLora, Lora, by_layer
from model.norm import rms_norm
from model.qwen2 import Block, Cache, Linear, Qwen2
from model.rope import rope_angles
from model.tiles import FEW, MANY, MOST_FEW, Rows, Tile, Tiles

MULTIPROCESSORS = 132
"""Of the GPU the tiles were measured on; attention is split until there are two programs for each."""

SHARED_BYTES = 227_000
"""Shared memory that the stages of a kernel's loads may take on a multiprocessor."""


class Layer(NamedTuple):
    """One layer. Weights are [out, in]; the norms' weights are in `qkv`, `gate_up` and their A. `gate_up` holds gate,
    up, and A of gate and up of every cell below each other, `gate_up_b` [2, X' r, F] their B; `down` the base and
    every cell's A."""

    qkv: jax.Array
    bias: jax.Array | None
    qkv_update: Update
    out: jax.Array
    out_update: Update
    gate_up: jax.Array
    gate_up_b: jax.Array
    down: jax.Array
    down_b: jax.Array


class Fused(NamedTuple):
    """All that a decode step reads."""

    embed: jax.Array
    layers: list[Layer]
    norm: jax.Array


@dataclass(frozen=True)
class Plan:
    """How the kernels share out a decode step of one shape."""

    rows: Rows
    tiles: Tiles
    splits: int


def fits(config: ModelConfig, dtype: Any) -> bool:
    """Do the kernels serve this model on this device: in half precision on a GPU, sizes that divide into tiles."""
    return half_on_gpu(dtype) and config.head_dim in (32, 64, 128) and config.width % 128 == 0 and config.mlp % 256 == 0


def plan_of(config: ModelConfig, cells: int, batch: int, rank: int, tiles: Tiles | None = None) -> Plan:
    """The plan for X cells of B rows; `tiles` None: by how many rows they are. Small shapes get smaller tiles."""
    if tiles is None:
        tiles = FEW if cells * batch <= MOST_FEW else MANY
    rows = Rows(cells, batch, max(16, _ceil2(batch)), max(16, _ceil2(rank)), tiles.rows)

    def shrink(tile: Tile | None, columns: int, depth: int, low: int = 0) -> Tile | None:
        if tile is None:
            return None
        columns, depth = min(tile.columns, _part2(columns)), min(tile.depth, _part2(depth))
        while 2 * (rows.tile + columns + low) * depth * tile.stages > SHARED_BYTES:
            depth //= 2
        return replace(tile, columns=columns, depth=depth)

    keys = config.kv_heads * config.head_dim
    splits = tiles.down_splits if config.mlp % (tiles.down_splits * 128) == 0 else 1 + (config.mlp % 256 == 0)
    tiles = replace(
        tiles,
        qkv=shrink(tiles.qkv, keys, config.width, rows.width),
        out=shrink(tiles.out, config.width, config.heads * config.head_dim, rows.width),
        swiglu=shrink(tiles.swiglu, config.mlp, config.mlp),
        down=shrink(tiles.down, config.width, config.mlp // splits),
        join=shrink(tiles.join, config.width, config.width),
        down_splits=splits,
    )
    splits = tiles.splits or max(1, min(4, 2 * MULTIPROCESSORS // (cells * batch * config.kv_heads)))
    return Plan(rows, tiles, splits)


def _ceil2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _part2(n: int) -> int:
    """The largest power of two that divides n."""
    return n & -n


def _tall(weights: jax.Array, tile: Tile | None) -> jax.Array:
    """Weights [N, in], padded with rows of zeros to whole tiles."""
    return jnp.pad(weights, ((0, -weights.shape[0] % (tile.columns if tile else 1)), (0, 0)))


def _normed(weights: jax.Array, norm: jax.Array) -> jax.Array:
    """A norm's weight [in] made part of [..., in]: one rounding, in place of that of the normed x."""
    norm = norm.astype(jnp.float32).reshape((1,) * (weights.ndim - 1) + norm.shape)
    return (weights.astype(jnp.float32) * norm).astype(weights.dtype)


def fuse(model: Qwen2, lora: Lora, scale_XB: jax.Array, plan: Plan) -> Fused:
    """Lay base and adapters (leading axis X) out for decoding: a copy of both, once a call and not once a token."""
    rows = plan.rows
    scale = jnp.pad(scale_XB, ((0, rows.slots - rows.cells), (0, rows.padded - rows.real))).reshape(-1)
    pairs = zip(model.layers, by_layer(lora, axis=1), strict=True)
    layers = [_laid_out(block, adapter, scale, plan) for block, adapter in pairs]
    return Fused(model.embed_tokens[...], layers, model.norm.weight[...])


def _laid_out(block: Block, adapter: LayerLora, scale: jax.Array, plan: Plan) -> Layer:
    attn, mlp, rows = block.self_attn, block.mlp, plan.rows
    norm_in, norm_mid = block.input_layernorm.weight[...], block.post_attention_layernorm.weight[...]
    dtype = norm_in.dtype

    def base(*linears: Linear) -> list[jax.Array]:
        return [linear.weight[...].T for linear in linears]

    def low_a(*names: str) -> jax.Array:
        """[L, X' r, in]."""
        a = jnp.stack([adapter[name]["a"] for name in names]).astype(dtype)
        a = jnp.pad(a, ((0, 0), (0, rows.slots - rows.cells), (0, 0), (0, rows.rank - a.shape[3])))
        return a.transpose(0, 1, 3, 2).reshape(len(names), -1, a.shape[2])

    def low_b(name: str) -> jax.Array:
        """[X' r, out]."""
        b = adapter[name]["b"].astype(dtype)
        b = jnp.pad(b, ((0, rows.slots - rows.cells), (0, rows.rank - b.shape[1]), (0, 0)))
        return b.reshape(-1, b.shape[2])

    qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    biases = [getattr(attn, name).bias for name in qkv]
    qkv_b = jnp.concatenate([low_b(name) for name in qkv], axis=1)
    wide = jnp.concatenate([*base(mlp.gate_proj, mlp.up_proj), *low_a(*gate_up)])
    return Layer(
        qkv=_normed(jnp.concatenate(base(attn.q_proj, attn.k_proj, attn.v_proj)), norm_in),
        bias=None if biases[0] is None else jnp.concatenate([b[...] for b in biases]),
        qkv_update=Update(_normed(low_a(*qkv), norm_in), qkv_b, scale),
        out=base(attn.o_proj)[0],
        out_update=Update(low_a("o_proj"), low_b("o_proj"), scale),
        gate_up=_normed(wide, norm_mid),
        gate_up_b=jnp.stack([low_b(name) for name in gate_up]),
        down=_tall(jnp.concatenate([*base(mlp.down_proj), *low_a("down_proj")]), plan.tiles.down),
        down_b=low_b("down_proj"),
    )


def fused_hidden(
    config: ModelConfig,
    plan: Plan,
    fused: Fused,
    token_XB: jax.Array,
    first_XB: jax.Array,
    cache: Cache,
    slot: jax.Array,
    pad_XB: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Final hidden states [X, B, D] of one token a row, and the cache with it written at `slot`.

    `first_XB` is the first slot a row sees (its padding ends there; `slot` for a row whose sample nobody wants),
    `pad_XB` where its positions count from; cache leaves [X B, K, S, C].
    """
    rows, c = plan.rows, config
    missing = ((0, rows.slots - rows.cells), (0, rows.padded - rows.real), (0, 0))
    x = jnp.pad(fused.embed[token_XB], missing).reshape(rows.count, c.width)
    rope = tuple(r.reshape(-1, c.head_dim // 2) for r in rope_angles((slot - pad_XB).reshape(-1, 1), c))
    first, at = first_XB.reshape(-1).astype(jnp.int32), slot.reshape(1).astype(jnp.int32)
    state = x, jnp.square(x.astype(jnp.float32)).sum(axis=1)[None]
    out = []
    for layer, layer_cache in zip(fused.layers, cache, strict=True):
        state, layer_cache = _layer(c, plan, layer, state, rope, first, at, layer_cache)
        out.append(layer_cache)
    hidden = rms_norm(state[0], fused.norm, c.norm_eps).reshape(rows.slots, rows.padded, c.width)
    return hidden[: rows.cells, : rows.real], out


@partial(jax.jit, static_argnums=(0, 1))  # so that one layer is traced and lowered, and not all of them
def _layer(c: ModelConfig, plan: Plan, layer: Layer, state, rope, first, at, layer_cache):
    qkv = project(c, plan, layer, *state)
    state, layer_cache = attend(c, plan, layer, state[0], qkv, rope, first, at, layer_cache)
    return feed_forward(c, plan, layer, *state), layer_cache


def project(c: ModelConfig, plan: Plan, layer: Layer, x: jax.Array, squares: jax.Array) -> jax.Array:
    """x [M, D] and the sums of its squares [tiles, M] -> queries, keys and values [M, heads' C], before RoPE."""
    outputs, room = (c.heads + 2 * c.kv_heads) * c.head_dim, room_for_heads(c.heads, c.kv_heads) * c.head_dim
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    parts = {"bias": layer.bias, "update": layer.qkv_update._replace(bounds=(queries, queries + keys)), "room": room}
    norm = Norm(squares, c.norm_eps)
    return product(plan.rows, plan.tiles.qkv, "qkv", x, layer.qkv, outputs, norm=norm, **parts)


def attend(c: ModelConfig, plan: Plan, layer: Layer, x, qkv, rope, first, at, layer_cache):
    """((x + attention of qkv [M, D], its squares), the layer's cache); rope, first and at as in kernels.attention."""
    seen, layer_cache = attention(plan.rows, plan.tiles.slots, plan.splits, c.heads, qkv, rope, first, at, layer_cache)
    tiles = plan.tiles.out
    return product(plan.rows, tiles, "out", seen, layer.out, c.width, update=layer.out_update, residual=x), layer_cache


def feed_forward(c: ModelConfig, plan: Plan, layer: Layer, x, squares) -> tuple[jax.Array, jax.Array]:
    """(x + the MLP's output [M, D], its squares)."""
    rows, tiles, low = plan.rows, plan.tiles, plan.rows.slots * plan.rows.rank
    wide = _dot(x, layer.gate_up)  # wide enough for XLA's product to be the fastest there is
    scale = layer.out_update.scale
    h = swiglu(rows, tiles.swiglu, wide, Norm(squares, c.norm_eps), c.width, layer.gate_up_b, scale)
    if tiles.down is None:
        parts = _dot(h, layer.down)
    else:
        parts = product(rows, tiles.down, "down", h, layer.down, c.width + low, splits=tiles.down_splits)
    return join(rows, tiles.join, parts if parts.ndim == 3 else parts[None], x, layer.down_b, scale)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """x W^T by XLA, [M, N] in x's type."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
