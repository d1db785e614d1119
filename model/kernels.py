"""Hand-written kernels for decoding one token a row on a GPU (Pallas through Triton); with model.decode_attention.

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

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model.tiles import (
    Rows,
    Tile,
    call_kernel,
    finish,
    inverse_rms,
    load_rows,
    load_squares,
    load_update,
    masked,
    own_update,
    rows_of,
)


class Norm(NamedTuple):
    """The scale of an RMS norm whose weight is in W: `squares` [tiles, M] sum to each row's x^2."""

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
    return call_kernel(kernel, (tiles, rows.count // rows.tile, splits), shape, tile, name)(*inputs)


def _squares(rows: Rows, tiles: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((tiles, rows.count), jnp.float32)


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
    mine = rows_of(rows, pl.program_id(1))
    start = pl.program_id(0) * tile.columns
    columns = pl.ds(start, tile.columns)
    if bounds is not None:
        member = sum(((start >= bound).astype(jnp.int32) for bound in bounds), np.int32(0))

    def part_of_sum(step, carry):
        total, low = carry
        inputs = pl.ds(part * (depth // splits) + step * tile.depth, tile.depth)
        x = plgpu.load(x_ref.at[mine.at, inputs], **masked(mine.real[:, None], rows.full))
        inside = (start + jnp.arange(tile.columns) < outputs)[:, None]
        w = plgpu.load(w_ref.at[columns, inputs], **masked(inside, outputs % tile.columns == 0))
        total = total + plgpu.dot(x, w, trans_b=True)
        if bounds is not None:
            a = plgpu.load(a_ref.at[member, mine.low_at, inputs], **masked(mine.exists[:, None], rows.full))
            low = low + plgpu.dot(x, a, trans_b=True)
        return total, low

    # What is needed after the loop is asked for before it, and there when the loop ends.
    squares = None if eps is None else load_squares(squares_ref, mine)
    update = None if bounds is None else load_update(mine, scale_ref, b_ref.at[mine.low_at, columns])
    bias = bias_ref[columns] if has_bias else None
    residual = load_rows(residual_ref, mine, columns) if has_residual else None
    zeros = jnp.zeros((rows.tile, tile.columns), jnp.float32), jnp.zeros((rows.tile, rows.width), jnp.float32)
    if bounds is None:
        zeros = zeros[0], jnp.zeros((), jnp.float32)
    total, low = jax.lax.fori_loop(0, depth // splits // tile.depth, part_of_sum, zeros)
    if eps is not None:
        rms = inverse_rms(squares, depth, eps)
        total, low = total * rms, low * rms
    if bounds is not None:
        total = total + own_update(mine, low, *update)
    if has_bias:
        total = total + bias.astype(jnp.float32)[None]
    if splits > 1:
        plgpu.store(out_ref.at[part, mine.at, columns], total, mask=mine.real[:, None])
    elif has_residual:
        finish(mine, columns, total, residual, out_ref, next(take))
    else:
        plgpu.store(out_ref.at[mine.at, columns], total.astype(out_ref.dtype), mask=mine.real[:, None])


def _swiglu_kernel(wide_ref, squares_ref, b_ref, scale_ref, out_ref, *, rows: Rows, tile: Tile, width: int, eps):
    """One tile of silu(gate) * up, each with the rows' own updates."""
    mine, mlp = rows_of(rows, pl.program_id(1)), b_ref.shape[2]
    start = pl.program_id(0) * tile.columns
    squares, parts = load_squares(squares_ref, mine), []
    for linear in range(2):
        low_at = pl.ds(2 * mlp + linear * rows.slots * rows.rank + mine.low_at.start, rows.width)
        low = plgpu.load(wide_ref.at[mine.at, low_at], mask=mine.own, other=0)
        update = load_update(mine, scale_ref, b_ref.at[np.int32(linear), mine.low_at, pl.ds(start, tile.columns)])
        parts.append((load_rows(wide_ref, mine, pl.ds(linear * mlp + start, tile.columns)), low, update))
    rms = inverse_rms(squares, width, eps)
    gate, up = (
        base.astype(jnp.float32) * rms + own_update(mine, low.astype(jnp.float32) * rms, *update)
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
    return call_kernel(kernel, grid, shape, tile, "swiglu")(wide, norm.squares, b, scale)


def _join_kernel(parts_ref, residual_ref, b_ref, scale_ref, out_ref, squares_ref, *, rows: Rows, tile: Tile):
    """One tile of residual + the sum of a split product + the rows' own updates."""
    mine = rows_of(rows, pl.program_id(1))
    columns = pl.ds(pl.program_id(0) * tile.columns, tile.columns)
    low_at = pl.ds(residual_ref.shape[1] + mine.low_at.start, rows.width)
    total = jnp.zeros((rows.tile, tile.columns), jnp.float32)
    low = jnp.zeros((rows.tile, rows.width), jnp.float32)
    update = load_update(mine, scale_ref, b_ref.at[mine.low_at, columns])
    residual = load_rows(residual_ref, mine, columns)
    for split in range(parts_ref.shape[0]):  # unrolled, so that all loads are under way at once
        at = np.int32(split), mine.at
        part = plgpu.load(parts_ref.at[*at, columns], mask=mine.real[:, None], other=0)
        total = total + part.astype(jnp.float32)
        low = low + plgpu.load(parts_ref.at[*at, low_at], mask=mine.own, other=0).astype(jnp.float32)
    finish(mine, columns, total + own_update(mine, low, *update), residual, out_ref, squares_ref)


def join(rows: Rows, tile: Tile, parts, residual, b, scale):
    """(residual + the parts of a split product + the rows' own updates [M, D], squares): parts [splits, M, >= D + X' r]
    hold the base's columns and every cell's low-rank ones; b [X' r, D]."""
    small = replace(rows, most=max(16, min(rows.padded, 32)))
    tiles = residual.shape[1] // tile.columns
    shapes = jax.ShapeDtypeStruct.like(residual), _squares(rows, tiles)
    grid = tiles, pl.cdiv(rows.cells * rows.padded, small.tile)
    kernel = partial(_join_kernel, rows=small, tile=tile)
    return call_kernel(kernel, grid, shapes, tile, "join")(parts, residual, b, scale)
