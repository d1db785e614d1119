"""Seven hand-written kernels a layer for decoding one token a row on a GPU (Pallas, lowered through Triton).

A decode step is bound by memory, and a kernel of a few microseconds by how soon its loads are under way. So each kernel
here does all that its operands allow, and its loop holds nothing but loads and products: a norm's weight is part of the
weights, its scale is applied to the sums (whoever wrote x has left the squares), and each row's own low-rank update,
bias, residual are added at the end. Products that are too narrow to fill the chip are split along their sum.

Rows are laid out [X * P]: X cells of P rows, P a power of two of at least 16 (a tensor core's tile), of which the first
B are real. Rows of several cells share a tile, so the low-rank halves of those cells stand side by side and each row
keeps only its own cell's columns. Weights are [out, in], which a narrow tile reads in long runs. Arrays are padded to
whole tiles, so that no index leaves them; what is padding isn't read. Sums are fp32.

On anything but a GPU the kernels run in Pallas' interpreter: slow, for tests.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

NONE = -1e30
"""Score of a slot that may not be seen."""


@dataclass(frozen=True)
class Tile:
    """A kernel's share of the work: `columns` of the output, `depth` of the sum at a time, warps and load stages."""

    columns: int
    depth: int
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True)
class Tiles:
    """What each kernel takes at a time; measured on an H200 (bench.kernels --tune). `down_splits` parts of the down
    product's sum; `splits` parts of an attention, 0: enough to give half the multiprocessors one; `rows` the most a tile
    has. Where a tile is None, XLA's own product is used."""

    qkv: Tile = Tile(16, 128, 2, 6)
    out: Tile = Tile(16, 256, 2, 5)
    gate_up: Tile | None = None
    swiglu: Tile = Tile(64, 64, 4, 1)
    down: Tile | None = Tile(64, 128, 4, 5)
    join: Tile = Tile(32, 32, 4, 1)
    slots: Tile = Tile(64, 64, 4, 4)
    down_splits: int = 5
    splits: int = 0
    rows: int = 128


@dataclass(frozen=True)
class Rows:
    """How rows lie: `cells` X, `real` B and `padded` P rows a cell, `rank` r of the low-rank halves, tiles of at most
    `most` rows."""

    cells: int
    real: int
    padded: int
    rank: int
    most: int = 128

    @property
    def tile(self) -> int:
        """Rows of a tile: a power of two; some whole cells, or a part of one."""
        return min(self.most, 1 << (self.cells * self.padded - 1).bit_length())

    @property
    def count(self) -> int:
        """M: all rows, in whole tiles."""
        return -(-self.cells * self.padded // self.tile) * self.tile

    @property
    def full(self) -> bool:
        """Is no row of any tile padding?"""
        return self.cells * self.real == self.count

    @property
    def slots(self) -> int:
        """X': the cells there is room for in M rows."""
        return self.count // self.padded

    @property
    def width(self) -> int:
        """Low-rank columns that the rows of one tile may own."""
        return max(1, self.tile // self.padded) * self.rank


class _Tile(NamedTuple):
    """A program's rows: where they are in M, which are real [T], which low-rank columns are each row's own [T, R], where
    these columns are in X' r, and which belong to a cell that exists [R]."""

    at: Any
    real: Any
    own: Any
    low_at: Any
    exists: Any


def _rows_of(rows: Rows, index) -> _Tile:
    tile = rows.tile
    at = index * tile + jnp.arange(tile)
    cell = _over(at, rows.padded)
    real = (cell < rows.cells) & (at - cell * rows.padded < rows.real)
    first = _over(index * tile, rows.padded)
    column_cell = first + _over(jnp.arange(rows.width), rows.rank)
    own = (column_cell[None] == cell[:, None]) & real[:, None]
    low_at = pl.ds(first * rows.rank, rows.width)
    return _Tile(pl.ds(index * tile, tile), real, own, low_at, column_cell < rows.cells)


def _over(n, by: int):
    """n // by of what isn't negative, in the one operation it takes."""
    return jax.lax.div(n, jnp.full_like(n, by))


def _product_kernel(*refs, rows: Rows, tile: Tile, outputs: int, splits: int, eps, bounds, has_bias, has_residual):
    """One tile of one split of x W^T, and what `product` says around it."""
    x_ref, w_ref, *rest = refs
    take = iter(rest)
    squares_ref = next(take) if eps is not None else None
    bias_ref = next(take) if has_bias else None
    a_ref, b_ref, scale_ref = (next(take), next(take), next(take)) if bounds is not None else (None, None, None)
    residual_ref = next(take) if has_residual else None
    out_ref = next(take)
    depth = w_ref.shape[1]
    part = pl.program_id(2)
    mine = _rows_of(rows, pl.program_id(1))
    start = pl.program_id(0) * tile.columns
    columns = pl.ds(start, tile.columns)
    if bounds is not None:
        member = sum(((start >= bound).astype(jnp.int32) for bound in bounds), np.int32(0))

    def part_of_sum(step, carry):
        total, low = carry
        inputs = pl.ds(part * (depth // splits) + step * tile.depth, tile.depth)
        x = plgpu.load(x_ref.at[mine.at, inputs], **_masked(mine.real[:, None], rows.full))
        inside = (start + jnp.arange(tile.columns) < outputs)[:, None]
        w = plgpu.load(w_ref.at[columns, inputs], **_masked(inside, outputs % tile.columns == 0))
        total = total + plgpu.dot(x, w, trans_b=True)
        if bounds is not None:
            a = plgpu.load(a_ref.at[member, mine.low_at, inputs], **_masked(mine.exists[:, None], rows.full))
            low = low + plgpu.dot(x, a, trans_b=True)
        return total, low

    # What is needed after the loop is asked for before it, and there when the loop ends.
    squares = None if eps is None else _load_squares(squares_ref, mine)
    update = None if bounds is None else _load_update(mine, scale_ref, b_ref.at[mine.low_at, columns])
    bias = bias_ref[columns] if has_bias else None
    residual = _load_rows(residual_ref, mine, columns) if has_residual else None
    zeros = jnp.zeros((rows.tile, tile.columns), jnp.float32), jnp.zeros((rows.tile, rows.width), jnp.float32)
    if bounds is None:
        zeros = zeros[0], jnp.zeros((), jnp.float32)
    total, low = jax.lax.fori_loop(0, depth // splits // tile.depth, part_of_sum, zeros)
    if eps is not None:
        rms = _rms(squares, depth, eps)
        total, low = total * rms, low * rms
    if bounds is not None:
        total = total + _update(mine, low, *update)
    if has_bias:
        total = total + bias.astype(jnp.float32)[None]
    if splits > 1:
        plgpu.store(out_ref.at[part, mine.at, columns], total, mask=mine.real[:, None])
    elif has_residual:
        _finish(mine, columns, total, residual, out_ref, next(take))
    else:
        plgpu.store(out_ref.at[mine.at, columns], total.astype(out_ref.dtype), mask=mine.real[:, None])


def _masked(mask, whole: bool) -> dict:
    """Arguments of a load: where `mask` is false it reads 0 and touches nothing; `whole`: the mask is true throughout."""
    return {} if whole else {"mask": mask, "other": 0}


def _load_squares(squares_ref, mine: _Tile):
    """[tiles', T]: what the tiles that wrote x left, to be summed."""
    tiles = squares_ref.shape[0]
    some = 1 << (tiles - 1).bit_length()
    mask = (jnp.arange(some) < tiles)[:, None] & mine.real[None]
    return plgpu.load(squares_ref.at[pl.ds(0, some), mine.at], mask=mask, other=0.0)


def _rms(squares, width: int, eps: float):
    """[T, 1], 1 / rms of each row."""
    return jax.lax.rsqrt(squares.sum(axis=0) / width + eps)[:, None]


def _load_rows(ref, mine: _Tile, columns):
    return plgpu.load(ref.at[mine.at, columns], mask=mine.real[:, None], other=0)


def _load_update(mine: _Tile, scale_ref, b_ref):
    """(each row's scale [T], B [R, columns])."""
    scale = plgpu.load(scale_ref.at[mine.at], mask=mine.real, other=0.0)
    return scale, plgpu.load(b_ref, mask=mine.exists[:, None], other=0)


def _update(mine: _Tile, low, scale, b):
    """scale * (own columns of low) B, [T, columns] fp32."""
    return plgpu.dot(jnp.where(mine.own, low * scale[:, None], 0.0).astype(b.dtype), b)


def _finish(mine: _Tile, columns, total, residual, out_ref, squares_ref):
    """Write residual + total, and the sums of its squares for the norm to come."""
    x = (total + residual.astype(jnp.float32)).astype(out_ref.dtype)
    plgpu.store(out_ref.at[mine.at, columns], x, mask=mine.real[:, None])
    x32 = jnp.where(mine.real[:, None], x.astype(jnp.float32), 0.0)
    plgpu.store(squares_ref.at[pl.program_id(0), mine.at], (x32 * x32).sum(axis=1))


def _call(kernel, grid, out_shape, tile: Tile, name: str, aliases: dict[int, int] | None = None):
    gpu = jax.default_backend() == "gpu"

    def named(*refs):
        kernel(*refs)

    named.__name__ = name  # what a trace calls it
    return pl.pallas_call(
        named,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=not gpu,
        name=name,
    )


class Norm(NamedTuple):
    """The scale of an RMS norm whose weight is in W: `squares` [tiles, M] sum to each row's x^2; a power of two of
    tiles."""

    squares: jax.Array
    eps: float


class Update(NamedTuple):
    """Rows' own low-rank updates: a [L, X' r, in], b [X' r, out], scale [M] fp32; the L linears' columns begin at 0 and
    at `bounds`."""

    a: jax.Array
    b: jax.Array
    scale: jax.Array
    bounds: tuple[int, ...] = ()


def product(
    rows: Rows,
    tile: Tile,
    name: str,
    x: jax.Array,
    w: jax.Array,
    outputs: int,
    *,
    norm: Norm | None = None,
    bias: jax.Array | None = None,
    update: Update | None = None,
    residual: jax.Array | None = None,
    splits: int = 1,
    room: int = 0,
) -> Any:
    """x W^T: x [M, >= in], w [N, in] -> [M, N or `room`] in x's type, of whose columns the first `outputs` are real.

    `norm` scales the rows, `update` and `bias` are added; with `residual` [M, N] the result is (residual + y, squares
    [tiles, M] fp32 for the next norm). With `splits` > 1 the sum is left in parts, [splits, M, N] fp32, and nothing may
    be added. `name` is for traces.
    """
    inputs = [x, w]
    if norm is not None:
        inputs.append(norm.squares)
    if bias is not None:
        inputs.append(bias)
    if update is not None:
        inputs += update[:3]
    shape = jax.ShapeDtypeStruct((rows.count, room or w.shape[0]), x.dtype)
    if splits > 1:
        shape = jax.ShapeDtypeStruct((splits, *shape.shape), jnp.float32)
    tiles = pl.cdiv(outputs, tile.columns)
    if residual is not None:
        inputs.append(residual)
        shape = shape, _squares(rows, tiles)
    kernel = partial(
        _product_kernel,
        rows=rows,
        tile=tile,
        outputs=outputs,
        splits=splits,
        eps=None if norm is None else norm.eps,
        bounds=None if update is None else update.bounds,
        has_bias=bias is not None,
        has_residual=residual is not None,
    )
    return _call(kernel, (tiles, rows.count // rows.tile, splits), shape, tile, name)(*inputs)


def _squares(rows: Rows, tiles: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((tiles, rows.count), jnp.float32)


def _attention_kernel(*refs, rows: Rows, tile: Tile, splits: int, heads: int, dim: int, group: int):
    """One (row, key head, split): RoPE, the new key and value into the cache, softmax over the split's live slots."""
    qkv_ref, cos_ref, sin_ref, first_ref, slot_ref, keys_ref, values_ref = refs[:7]
    part_ref, lse_ref, new_keys_ref, new_values_ref = refs[7:]
    m, kv, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row = m + _over(m, rows.real) * (rows.padded - rows.real)
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

    begin = _over(first, tile.columns)
    blocks = _over(slot + tile.columns - 1, tile.columns) - begin
    each = _over(blocks + splits - 1, splits)
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
    call = _call(
        partial(_attention_kernel, **sizes), (real, kv_heads, splits), shapes, tile, "attention", {5: 2, 6: 3}
    )
    part, lse, keys, values = call(qkv.reshape(rows.count, -1, dim), *rope, first, slot, keys, values)
    return _joined(part, lse).reshape(rows.count, -1), (keys, values)


def _joined(part: jax.Array, lse: jax.Array) -> jax.Array:
    """The splits of an attention joined: each weighs as much as its share of the softmax."""
    if part.shape[0] == 1:
        return part[0]
    share = jnp.exp(lse - lse.max(axis=0, keepdims=True))
    share = share / share.sum(axis=0, keepdims=True)
    return (part.astype(jnp.float32) * share[..., None]).sum(axis=0).astype(part.dtype)


def room_for_heads(heads: int, kv_heads: int) -> int:
    """Heads that the array of queries, keys and values has room for: a tile of queries may not leave it."""
    group = heads // kv_heads
    return max(heads + 2 * kv_heads, heads - group + padded_heads(group))


def _swiglu_kernel(wide_ref, squares_ref, b_ref, scale_ref, out_ref, *, rows: Rows, tile: Tile, width: int, eps):
    """One tile of silu(gate) * up, each with the rows' own updates."""
    mine, mlp = _rows_of(rows, pl.program_id(1)), b_ref.shape[2]
    start = pl.program_id(0) * tile.columns
    squares, parts = _load_squares(squares_ref, mine), []
    for linear in range(2):
        low_at = pl.ds(2 * mlp + linear * rows.slots * rows.rank + mine.low_at.start, rows.width)
        low = plgpu.load(wide_ref.at[mine.at, low_at], mask=mine.own, other=0)
        update = _load_update(mine, scale_ref, b_ref.at[np.int32(linear), mine.low_at, pl.ds(start, tile.columns)])
        parts.append((_load_rows(wide_ref, mine, pl.ds(linear * mlp + start, tile.columns)), low, update))
    rms = _rms(squares, width, eps)
    gate, up = (
        base.astype(jnp.float32) * rms + _update(mine, low.astype(jnp.float32) * rms, *update)
        for base, low, update in parts
    )
    y = gate / (1 + jnp.exp(-gate)) * up
    plgpu.store(out_ref.at[mine.at, pl.ds(start, tile.columns)], y.astype(out_ref.dtype), mask=mine.real[:, None])


def swiglu(rows: Rows, tile: Tile, wide, norm: Norm, width: int, b, scale):
    """silu(gate) * up, [M, F]: wide [M, >= 2 F + 2 X' r] is x W^T with gate, up, and the low-rank halves of gate and of
    up for every cell, still to be scaled by the norm of x, which has `width` columns; b [2, X' r, F]; scale [M]."""
    mlp = b.shape[2]
    grid = mlp // tile.columns, rows.count // rows.tile
    shape = jax.ShapeDtypeStruct((rows.count, mlp), wide.dtype)
    kernel = partial(_swiglu_kernel, rows=rows, tile=tile, width=width, eps=norm.eps)
    return _call(kernel, grid, shape, tile, "swiglu")(wide, norm.squares, b, scale)


def _join_kernel(parts_ref, residual_ref, b_ref, scale_ref, out_ref, squares_ref, *, rows: Rows, tile: Tile):
    """One tile of residual + the sum of a split product + the rows' own updates."""
    mine = _rows_of(rows, pl.program_id(1))
    columns = pl.ds(pl.program_id(0) * tile.columns, tile.columns)
    low_at = pl.ds(residual_ref.shape[1] + mine.low_at.start, rows.width)
    total = jnp.zeros((rows.tile, tile.columns), jnp.float32)
    low = jnp.zeros((rows.tile, rows.width), jnp.float32)
    update = _load_update(mine, scale_ref, b_ref.at[mine.low_at, columns])
    residual = _load_rows(residual_ref, mine, columns)
    for split in range(parts_ref.shape[0]):  # unrolled, so that all loads are under way at once
        at = np.int32(split), mine.at
        part = plgpu.load(parts_ref.at[*at, columns], mask=mine.real[:, None], other=0)
        total = total + part.astype(jnp.float32)
        low = low + plgpu.load(parts_ref.at[*at, low_at], mask=mine.own, other=0).astype(jnp.float32)
    _finish(mine, columns, total + _update(mine, low, *update), residual, out_ref, squares_ref)


def join(rows: Rows, tile: Tile, parts, residual, b, scale):
    """(residual + the parts of a split product + the rows' own updates [M, D], squares): parts [splits, M, >= D + X' r]
    hold the base's columns and every cell's low-rank ones; b [X' r, D]."""
    small = replace(rows, most=max(16, min(rows.padded, 32)))
    tiles = residual.shape[1] // tile.columns
    shapes = jax.ShapeDtypeStruct.like(residual), _squares(rows, tiles)
    grid = tiles, pl.cdiv(rows.cells * rows.padded, small.tile)
    return _call(partial(_join_kernel, rows=small, tile=tile), grid, shapes, tile, "join")(parts, residual, b, scale)
