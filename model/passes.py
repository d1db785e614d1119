"""Two passes back through a layer that XLA makes as two or three, each as one kernel (Pallas): for a GPU, many tokens.

Both do nothing but read, compute a little and write, so what they cost is how often they read. `norm_and_keep` is an
RMS norm beside its own input: its gradient and the residual's are added while a row is in registers. `turn` is RoPE on
queries and keys that lie side by side with values, as model.folded leaves them: its gradient goes back to that place.

Elsewhere (`fits`), and as what tests compare with, the same is left to JAX.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model.attention import half_on_gpu, rotate
from model.tiles import Tile, call_kernel, masked

NORM = Tile(1, 1, 1, 1)
"""Rows (`depth`) of a program, each whole; a warp for every 2,048 columns."""

TURN = Tile(1, 16, 4, 1)
"""Rows (`depth`) of a program, all heads of each."""


def fits(x: jax.Array) -> bool:
    """Do the kernels serve arrays of x's type here?"""
    return half_on_gpu(x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight, [M, D] in x's type, worked out in fp32."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    # The order of transformers: round to the compute type, then multiply by the weight.
    return (x32 * jax.lax.rsqrt(variance + eps)).astype(x.dtype) * weight[None]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def norm_and_keep(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """(x's RMS norm, x), [M, D]; the weight is frozen: its gradient is not computed, and asking for it gives zeros."""
    return rms_norm(x, weight, eps), x


def _norm_forward(x, weight, eps):
    return (rms_norm(x, weight, eps), x), (x, weight)


def _norm_backward(eps, kept, slopes):
    return norm_slope(*kept, eps, *slopes) if fits(kept[0]) else plain_norm_slope(*kept, eps, *slopes), None


norm_and_keep.defvjp(_norm_forward, _norm_backward)


def plain_norm_slope(x: jax.Array, weight: jax.Array, eps: float, dy: jax.Array, dx: jax.Array) -> jax.Array:
    """dx + the gradient of x where that of its norm is dy, by JAX."""
    return dx + jax.vjp(lambda x: rms_norm(x, weight, eps), x)[1](dy)[0]


def norm_slope(x: jax.Array, weight: jax.Array, eps: float, dy: jax.Array, dx: jax.Array) -> jax.Array:
    """The same by one kernel."""
    kernel, grid = partial(_norm_kernel, rows=NORM.depth, eps=eps), (pl.cdiv(x.shape[0], NORM.depth),)
    tile = replace(NORM, warps=1 << max(0, (x.shape[1] - 1).bit_length() - 11))
    return call_kernel(kernel, grid, jax.ShapeDtypeStruct.like(x), tile, "norm_slope")(x, weight, dy, dx)


def _norm_kernel(x_ref, weight_ref, dy_ref, dx_ref, out_ref, *, rows: int, eps: float):
    (count, width), start = x_ref.shape, pl.program_id(0) * rows
    here = ((start + jnp.arange(rows)) < count)[:, None]
    load, at = masked(here, count % rows == 0), pl.ds(start, rows)
    # A kernel's arrays are powers of two long, so a row is taken in parts: 1,536 is 1,024 and 512.
    bits = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    parts = [pl.ds(sum(bits[:i]), size) for i, size in enumerate(bits)]
    read = lambda ref: [plgpu.load(ref.at[at, part], **load).astype(jnp.float32) for part in parts]  # noqa: E731
    xs, dys, dxs = read(x_ref), read(dy_ref), read(dx_ref)
    slopes = [dy * weight_ref[part].astype(jnp.float32)[None] for dy, part in zip(dys, parts)]
    scale = jax.lax.rsqrt(sum((x * x).sum(axis=1) for x in xs) / width + eps)[:, None]
    mean = sum((slope * x).sum(axis=1) for slope, x in zip(slopes, xs))[:, None] / width
    for x, slope, dx, part in zip(xs, slopes, dxs, parts, strict=True):
        out = dx + scale * (slope - x * (scale * scale * mean))
        plgpu.store(out_ref.at[at, part], out.astype(out_ref.dtype), mask=here)


Rope = tuple[jax.Array, jax.Array]


def turned(qkv: jax.Array, rope: Rope, heads: tuple[int, int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, H, C] and keys [B, T, K, C] turned by RoPE, and values, from [B, T, H + 2 K, C]; rope: cos and sin
    [B, T, C/2] fp32, `heads` (H, K)."""
    q, k, v = jnp.split(qkv, [heads[0], sum(heads)], axis=2)
    return rotate(q, rope), rotate(k, rope), v


turn = jax.custom_vjp(turned, nondiff_argnums=(2,))
"""The same, with one pass back."""


def _turn_forward(qkv, rope, heads):
    return turned(qkv, rope, heads), rope


def _turn_backward(heads, rope, slopes):
    dim = slopes[0].shape[3]
    halves = dim & (dim - 1) == 0  # a kernel's arrays are powers of two long
    return turn_back(*slopes, rope) if halves and fits(slopes[0]) else plain_turn_back(*slopes, rope), None


turn.defvjp(_turn_forward, _turn_backward)


def plain_turn_back(dq: jax.Array, dk: jax.Array, dv: jax.Array, rope: Rope) -> jax.Array:
    """`turn`'s gradient [B, T, H + 2 K, C], by JAX: RoPE turns, and its gradient turns back."""
    back = rope[0], -rope[1]
    return jnp.concatenate([rotate(dq, back), rotate(dk, back), dv], axis=2)


def turn_back(dq: jax.Array, dk: jax.Array, dv: jax.Array, rope: Rope) -> jax.Array:
    """The same by one kernel."""
    batch, steps, _, dim = dq.shape
    total = dq.shape[2] + dk.shape[2] + dv.shape[2]
    parts = [x.reshape(batch * steps, *x.shape[2:]) for x in (dq, dk, dv, *rope)]
    shape, grid = jax.ShapeDtypeStruct((batch * steps, total, dim), dq.dtype), (pl.cdiv(batch * steps, TURN.depth),)
    out = call_kernel(partial(_turn_kernel, rows=TURN.depth), grid, shape, TURN, "turn_back")(*parts)
    return out.reshape(batch, steps, total, dim)


def _turn_kernel(dq_ref, dk_ref, dv_ref, cos_ref, sin_ref, out_ref, *, rows: int):
    (count, _, dim), start = out_ref.shape, pl.program_id(0) * rows
    here = ((start + jnp.arange(rows)) < count)[:, None]
    load, at = masked(here, count % rows == 0), pl.ds(start, rows)
    halves = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    cos, sin = (plgpu.load(ref.at[at, :], **load) for ref in (cos_ref, sin_ref))
    place = 0
    for ref, turns in ((dq_ref, True), (dk_ref, True), (dv_ref, False)):
        for head in range(ref.shape[1]):
            one, two = (plgpu.load(ref.at[at, np.int32(head), half], **load) for half in halves)
            if turns:
                one, two = one.astype(jnp.float32), two.astype(jnp.float32)
                one, two = one * cos + two * sin, two * cos - one * sin
            for half, x in zip(halves, (one, two), strict=True):
                plgpu.store(out_ref.at[at, np.int32(place), half], x.astype(out_ref.dtype), mask=here)
            place += 1
