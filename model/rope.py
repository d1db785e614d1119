"""Rotary position embedding (Su et al., 2021), and for many tokens on a GPU its gradient as one kernel (Pallas)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model.attention import half_on_gpu
from model.config import ModelConfig
from model.tiles import Tile, call_kernel, masked

Rope = tuple[jax.Array, jax.Array]
"""cos and sin, [B, T, C/2] fp32."""

TILE = Tile(1, 16, warps=4, stages=1)
"""Rows (`depth`) of a program, all heads of each; measured on an H200."""


def rope_angles(positions_BT: jax.Array, config: ModelConfig) -> Rope:
    """cos and sin, [B, T, C/2] fp32 (the half-split layout of Hugging Face)."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BT.astype(jnp.float32)[..., None] * frequency[None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Apply RoPE to [B, T, heads, C]: the first half of C pairs with the second."""
    cos, sin = (r[:, :, None] for r in rope)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotate_qkv(qkv: jax.Array, rope: Rope, heads: tuple[int, int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [B, T, H, C] and keys [B, T, K, C], and values, of [B, T, H + 2 K, C]; `heads` is (H, K)."""
    q, k, v = jnp.split(qkv, [heads[0], sum(heads)], axis=2)
    return rotate(q, rope), rotate(k, rope), v


folded_rotate_qkv = jax.custom_vjp(rotate_qkv, nondiff_argnums=(2,))
"""The same, whose gradient is one pass back to where q, k and v lie side by side, as model.folded leaves them."""


def _forward(qkv, rope, heads):
    return rotate_qkv(qkv, rope, heads), rope


def _backward(heads, rope, gradients):
    dq, dim = gradients[0], gradients[0].shape[3]
    halves = dim & (dim - 1) == 0  # a kernel's arrays are powers of two long
    gradient = rope_gradient if halves and half_on_gpu(dq.dtype) else plain_rope_gradient
    return gradient(*gradients, rope), None


folded_rotate_qkv.defvjp(_forward, _backward)


def plain_rope_gradient(dq: jax.Array, dk: jax.Array, dv: jax.Array, rope: Rope) -> jax.Array:
    """`rotate_qkv`'s gradient [B, T, H + 2 K, C], by JAX: the same rotation the other way."""
    back = rope[0], -rope[1]
    return jnp.concatenate([rotate(dq, back), rotate(dk, back), dv], axis=2)


def rope_gradient(dq: jax.Array, dk: jax.Array, dv: jax.Array, rope: Rope) -> jax.Array:
    """The same by one kernel."""
    batch, steps, _, dim = dq.shape
    total = dq.shape[2] + dk.shape[2] + dv.shape[2]
    parts = [x.reshape(batch * steps, *x.shape[2:]) for x in (dq, dk, dv, *rope)]
    shape, grid = jax.ShapeDtypeStruct((batch * steps, total, dim), dq.dtype), (pl.cdiv(batch * steps, TILE.depth),)
    out = call_kernel(partial(_kernel, rows=TILE.depth), grid, shape, TILE, "rope_gradient")(*parts)
    return out.reshape(batch, steps, total, dim)


def _kernel(dq_ref, dk_ref, dv_ref, cos_ref, sin_ref, out_ref, *, rows: int):
    """Some rows, every head."""
    (count, _, dim), start = out_ref.shape, pl.program_id(0) * rows
    here = ((start + jnp.arange(rows)) < count)[:, None]
    load, at = masked(here, count % rows == 0), pl.ds(start, rows)
    halves = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    cos, sin = (plgpu.load(ref.at[at, :], **load) for ref in (cos_ref, sin_ref))
    place = 0
    for ref, rotated in ((dq_ref, True), (dk_ref, True), (dv_ref, False)):
        for head in range(ref.shape[1]):
            one, two = (plgpu.load(ref.at[at, np.int32(head), half], **load) for half in halves)
            if rotated:
                one, two = one.astype(jnp.float32), two.astype(jnp.float32)
                one, two = one * cos + two * sin, two * cos - one * sin
            for half, x in zip(halves, (one, two), strict=True):
                plgpu.store(out_ref.at[at, np.int32(place), half], x.astype(out_ref.dtype), mask=here)
            place += 1
