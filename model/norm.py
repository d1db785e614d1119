"""RMS norm, and for many tokens on a GPU its gradient as one kernel (Pallas), where XLA makes two or three.

The pass does nothing but read, compute a little and write, so what it costs is how often it reads: a norm's gradient
and that of the residual beside it are added while a row is in registers.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model.attention import half_on_gpu
from model.tiles import Tile, call_kernel


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight, [M, D] in x's type, worked out in fp32 (Zhang and Sennrich, 2019)."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    # The order of transformers: round to the compute type, then multiply by the weight.
    return (x32 * jax.lax.rsqrt(variance + eps)).astype(x.dtype) * weight[None]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def norm_and_residual(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """(x's RMS norm, x), [M, D]; the weight is frozen: its gradient is not computed, and asking for it gives zeros."""
    return rms_norm(x, weight, eps), x


def _forward(x, weight, eps):
    return (rms_norm(x, weight, eps), x), (x, weight)


def _backward(eps, kept, gradients):
    gradient = norm_gradient if half_on_gpu(kept[0].dtype) else plain_norm_gradient
    return gradient(*kept, eps, *gradients), None


norm_and_residual.defvjp(_forward, _backward)


def plain_norm_gradient(x: jax.Array, weight: jax.Array, eps: float, dy: jax.Array, dx: jax.Array) -> jax.Array:
    """dx + the gradient of x where that of its norm is dy, [M, D], by JAX."""
    return dx + jax.vjp(lambda x: rms_norm(x, weight, eps), x)[1](dy)[0]


def norm_gradient(x: jax.Array, weight: jax.Array, eps: float, dy: jax.Array, dx: jax.Array) -> jax.Array:
    """The same by one kernel: a program a row, with a warp for every 2,048 columns."""
    tile = Tile(x.shape[1], 1, warps=1 << max(0, (x.shape[1] - 1).bit_length() - 11), stages=1)
    shape = jax.ShapeDtypeStruct.like(x)
    return call_kernel(partial(_kernel, eps=eps), (x.shape[0],), shape, tile, "norm_gradient")(x, weight, dy, dx)


def _kernel(x_ref, weight_ref, dy_ref, dx_ref, out_ref, *, eps: float):
    """One row."""
    row, width = pl.ds(pl.program_id(0), 1), x_ref.shape[1]
    # A kernel's arrays are powers of two long, so a row is taken in parts: 1,536 is 1,024 and 512.
    bits = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    parts = [pl.ds(sum(bits[:i]), size) for i, size in enumerate(bits)]
    read = lambda ref: [plgpu.load(ref.at[row, part]).astype(jnp.float32) for part in parts]  # noqa: E731
    xs, dys, dxs = read(x_ref), read(dy_ref), read(dx_ref)
    scaled = [dy * weight_ref[part].astype(jnp.float32)[None] for dy, part in zip(dys, parts)]
    inverse = jax.lax.rsqrt(sum((x * x).sum(axis=1) for x in xs) / width + eps)[:, None]
    mean = sum((dy * x).sum(axis=1) for dy, x in zip(scaled, xs))[:, None] / width
    for x, dy, dx, part in zip(xs, scaled, dxs, parts, strict=True):
        out = dx + inverse * (dy - x * (inverse * inverse * mean))
        plgpu.store(out_ref.at[row, part], out.astype(out_ref.dtype))
