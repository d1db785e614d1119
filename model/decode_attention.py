"""Attention of one token a row over the live part of its cache, with RoPE and the cache write, as one kernel, and one
that joins the parts it is split in."""

from dataclasses import replace
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model.tiles import Rows, Tile, call_kernel, over

NONE = -1e30
"""Score of a slot that may not be seen."""

JOIN = Tile(16, 16, warps=4, stages=1)
"""A program joins one row's queries of one key head, whatever their number."""


def _attention_kernel(*refs, rows: Rows, tile: Tile, splits: int, heads: int, dim: int, group: int):
    """One (row, key head, split): RoPE, the new key and value into the cache, softmax over the split's live slots."""
    qkv_ref, cos_ref, sin_ref, first_ref, slot_ref, keys_ref, values_ref = refs[:7]
    part_ref, lse_ref, new_keys_ref, new_values_ref = refs[7:]
    m, kv, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row = m + over(m, rows.real) * (rows.padded - rows.real)
    low, high = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    kv_heads, padded_group = keys_ref.shape[1], padded_heads(group)
    cos, sin = cos_ref[m, :], sin_ref[m, :]
    is_head = jnp.arange(padded_group) < group
    mine = pl.ds(kv * group, padded_group)
    q1 = qkv_ref[row, mine, low].astype(jnp.float32)
    q2 = qkv_ref[row, mine, high].astype(jnp.float32)
    k1 = qkv_ref[row, heads + kv, low].astype(jnp.float32)
    k2 = qkv_ref[row, heads + kv, high].astype(jnp.float32)
    value = qkv_ref[row, heads + kv_heads + kv, :]
    dtype = value.dtype
    q1, q2 = (q1 * cos[None] - q2 * sin[None]).astype(dtype), (q2 * cos[None] + q1 * sin[None]).astype(dtype)
    k1, k2 = (k1 * cos - k2 * sin).astype(dtype), (k2 * cos + k1 * sin).astype(dtype)
    first, slot = first_ref[m], slot_ref[0]

    @pl.when(split == 0)
    def _():
        new_keys_ref[m, kv, slot, low] = k1
        new_keys_ref[m, kv, slot, high] = k2
        new_values_ref[m, kv, slot, :] = value

    begin = over(first, tile.columns)
    blocks = over(slot + tile.columns - 1, tile.columns) - begin
    each = over(blocks + splits - 1, splits)
    start = begin + split * each
    stop = jnp.minimum(start + each, begin + blocks)

    def block(i, carry):
        total, top, weight = carry
        at = i * tile.columns + jnp.arange(tile.columns)
        seen = (at >= first) & (at < slot)
        here = pl.ds(i * tile.columns, tile.columns)
        k_low = plgpu.load(keys_ref.at[m, kv, here, low], mask=seen[:, None], other=0)
        k_high = plgpu.load(keys_ref.at[m, kv, here, high], mask=seen[:, None], other=0)
        v = plgpu.load(values_ref.at[m, kv, here, :], mask=seen[:, None], other=0)
        scores = (plgpu.dot(q1, k_low, trans_b=True) + plgpu.dot(q2, k_high, trans_b=True)) * dim**-0.5
        scores = jnp.where(seen[None], scores, NONE)
        new_top = jnp.maximum(top, scores.max(axis=1))
        kept = jnp.exp(top - new_top)
        weights = jnp.where(seen[None], jnp.exp(scores - new_top[:, None]), 0.0)
        total = total * kept[:, None] + plgpu.dot(weights.astype(dtype), v)
        return total, new_top, weight * kept + weights.sum(axis=1)

    shape = (padded_group,)
    zeros = jnp.zeros((padded_group, dim), jnp.float32), jnp.full(shape, NONE, jnp.float32), jnp.zeros(shape)
    total, top, weight = jax.lax.fori_loop(start, stop, block, zeros)
    # The token sees itself; its key and value are here, and counted by the first split alone.
    own = q1.astype(jnp.float32) * k1.astype(jnp.float32)[None] + q2.astype(jnp.float32) * k2.astype(jnp.float32)[None]
    own = jnp.where(split == 0, own.sum(axis=1) * dim**-0.5, NONE)
    new_top = jnp.maximum(top, own)
    kept = jnp.exp(top - new_top)
    share = jnp.where(split == 0, jnp.exp(own - new_top), 0.0)
    total = total * kept[:, None] + share[:, None] * value.astype(jnp.float32)[None]
    weight = jnp.maximum(weight * kept + share, 1e-30)
    part = (total / weight[:, None]).astype(part_ref.dtype)
    plgpu.store(part_ref.at[split, row, mine, :], part, mask=is_head[:, None])
    plgpu.store(lse_ref.at[split, row, mine], new_top + jnp.log(weight), mask=is_head)


def padded_heads(group: int) -> int:
    """A key head's queries in a whole tile."""
    return max(16, 1 << (group - 1).bit_length())


def _join_kernel(part_ref, lse_ref, out_ref, *, rows: Rows, group: int):
    """One (row, key head): its splits joined, each weighing as much as its share of the softmax."""
    m, kv = pl.program_id(0), pl.program_id(1)
    row, padded_group = m + over(m, rows.real) * (rows.padded - rows.real), padded_heads(group)
    mine, is_head = pl.ds(kv * group, padded_group), jnp.arange(padded_group) < group
    splits = [np.int32(split) for split in range(part_ref.shape[0])]
    lse = [plgpu.load(lse_ref.at[split, row, mine], mask=is_head, other=0.0) for split in splits]
    parts = [plgpu.load(part_ref.at[split, row, mine, :], mask=is_head[:, None], other=0) for split in splits]
    top = reduce(jnp.maximum, lse)
    shares = [jnp.exp(one - top) for one in lse]
    total = sum(share[:, None] * part.astype(jnp.float32) for share, part in zip(shares, parts))
    joined = (total / sum(shares)[:, None]).astype(out_ref.dtype)
    plgpu.store(out_ref.at[row, mine, :], joined, mask=is_head[:, None])


def attention(rows: Rows, tile: Tile, splits: int, heads: int, qkv, rope, first, slot, cache):
    """RoPE, cache write and attention of one token a row over its live slots.

    qkv [M, heads' C]: H queries, K keys, K values, and room up to `room_for_heads`; rope: cos and sin [X B, C/2] fp32;
    `first` [X B] int32 the first live slot of each row; `slot` [1] int32, where the token goes; cache: keys and values
    [X B, K, S, C], written in place.
    Returns ([M, >= H C] of which the first H C columns are real, cache); rows that are padding are left as they are.
    """
    keys, values = cache
    real, kv_heads, slots, dim = keys.shape
    if jax.default_backend() != "gpu":  # a masked load may leave its array, but the interpreter would move it
        tile = replace(tile, columns=min(tile.columns, slots & -slots))
    group = heads // kv_heads
    sizes = {"rows": rows, "tile": tile, "splits": splits, "heads": heads, "dim": dim, "group": group}
    lse = jax.ShapeDtypeStruct((splits, rows.count, heads - group + padded_heads(group)), jnp.float32)
    part = jax.ShapeDtypeStruct((*lse.shape, dim), qkv.dtype)
    shapes = part, lse, jax.ShapeDtypeStruct.like(keys), jax.ShapeDtypeStruct.like(values)
    call = call_kernel(
        partial(_attention_kernel, **sizes), (real, kv_heads, splits), shapes, tile, "attention", {5: 2, 6: 3}
    )
    part, lse, keys, values = call(qkv.reshape(rows.count, -1, dim), *rope, first, slot, keys, values)
    if splits == 1:
        return part.reshape(rows.count, -1), (keys, values)
    kernel, shape = partial(_join_kernel, rows=rows, group=group), jax.ShapeDtypeStruct(part.shape[1:], part.dtype)
    seen = call_kernel(kernel, (real, kv_heads), shape, JOIN, "attention_join")(part, lse)
    return seen.reshape(rows.count, -1), (keys, values)


def room_for_heads(heads: int, kv_heads: int) -> int:
    """Heads that the array of queries, keys and values has room for: a tile of queries may not leave it."""
    group = heads // kv_heads
    return max(heads + 2 * kv_heads, heads - group + padded_heads(group))
