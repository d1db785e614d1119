"""A layer's linears with their adapters for large batches on a GPU, without extra passes over wide arrays.

y = x W + s (x A) B, written as it stands, makes B's product a second array as wide as y, to be read and added. Linears
that widen get [x | s x A] [[W], [B]] instead, one product whose sum is in fp32. Others are one product, x [W1 | W2],
that starts from what is to be added to it, B's product and the bias, which cuBLAS does on the way. (Not the residual:
adding twice to what is larger rounds it twice.) All linears of one input share a product x A, and in the backward pass
one for s dy B', one for their A's gradients and a dx. It is written out, since the automatic one would multiply fp32 by
bf16, which a GPU does in fp32 after making fp32 copies. The base is frozen: its gradient is not computed, and asking
for it gives zeros.

Copying W beside B costs as much as passing over some 3,000 rows, so it isn't for decoding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


class Base(NamedTuple):
    """A frozen linear: `weight` [in, out], `bias` [out] or None."""

    weight: jax.Array
    bias: jax.Array | None


Adapter = dict[str, jax.Array]


FOLD = True
"""False: never, for comparisons."""


def pays() -> bool:
    """On a GPU; a CPU's products are too slow for the passes between them to matter."""
    return FOLD and jax.default_backend() == "gpu"


@jax.custom_vjp
def folded_linears(x: jax.Array, bases: tuple[Base, ...], adapters: tuple[Adapter, ...], scale: jax.Array) -> jax.Array:
    """Every linear's y = x W + bias + scale (x A) B from one x [M, in], side by side: [M, sum of outs] in x's type.

    `adapters` are fp32, {"a": [in, R], "b": [R, out]}, cast to x's type, of one rank; `scale` [M] fp32: each row's own.
    """
    return _forward(x, bases, adapters, scale)[0]


def _forward(x, bases, adapters, scale):
    low = _low(x, adapters, scale)
    # XLA lets a product start from what is added to it if the product stands first.
    y = jnp.dot(low, _diagonal(adapters, x.dtype))
    if any(base.bias is not None for base in bases):
        zeros = [jnp.zeros(base.weight.shape[1], x.dtype) for base in bases]
        y = y + jnp.concatenate([z if base.bias is None else base.bias for z, base in zip(zeros, bases)])[None]
    return jnp.dot(x, _weights(bases)) + y, (x, low, bases, adapters, scale)


def _backward(kept, dy):
    x, low, bases, adapters, scale = kept
    db = _dot(low, dy, 0, 0, jnp.float32)
    dlow = _scaled(_dot(dy, _diagonal(adapters, x.dtype), 1, 1, jnp.float32), scale, x.dtype)
    w, a = _weights(bases), _side_by_side(adapters, x.dtype)
    if x.shape[1] > dy.shape[1]:  # then dlow A' is wider than what is copied here
        dx = _dot(jnp.concatenate([dy, dlow], axis=1), jnp.concatenate([w, a], axis=1), 1, 1)
    else:
        dx = _dot(dy, w, 1, 1) + _dot(dlow, a, 1, 1)
    dbs, row, column = [], 0, 0
    for adapter in adapters:
        rank, out = adapter["b"].shape
        dbs.append(db[row : row + rank, column : column + out])
        row, column = row + rank, column + out
    return dx, None, _gradients(x, dlow, dbs), None


folded_linears.defvjp(_forward, _backward)


@jax.custom_vjp
def widened_linears(
    x: jax.Array, bases: tuple[Base, ...], adapters: tuple[Adapter, ...], scale: jax.Array
) -> tuple[jax.Array, ...]:
    """The same for linears that widen and have no bias, apart: each [M, out]."""
    return _widened_forward(x, bases, adapters, scale)[0]


def _widened_forward(x, bases, adapters, scale):
    assert all(base.bias is None for base in bases), "a linear that widens has no bias here"
    low, out = _low(x, adapters, scale), []
    wide = jnp.concatenate([x, low], axis=1)
    for place, (base, adapter) in enumerate(zip(bases, adapters, strict=True)):
        # The other linears' columns of `low` meet rows of zeros.
        rank = adapter["b"].shape[0]
        b = jnp.pad(adapter["b"], ((place * rank, (len(bases) - 1 - place) * rank), (0, 0)))
        out.append(jnp.dot(wide, jnp.concatenate([base.weight, b.astype(x.dtype)])))
    return tuple(out), (x, low, bases, adapters, scale)


def _widened_backward(kept, dys):
    x, low, bases, adapters, scale = kept
    dbs = [_dot(part, dy, 0, 0, jnp.float32) for part, dy in zip(jnp.split(low, len(bases), axis=1), dys, strict=True)]
    dlows = [
        _dot(dy, adapter["b"].astype(x.dtype), 1, 1, jnp.float32) for adapter, dy in zip(adapters, dys, strict=True)
    ]
    dlow = _scaled(jnp.concatenate(dlows, axis=1), scale, x.dtype)
    dx = _dot(dlow, _side_by_side(adapters, x.dtype), 1, 1)
    for base, dy in zip(bases, dys, strict=True):
        dx = _dot(dy, base.weight, 1, 1) + dx
    return dx, None, _gradients(x, dlow, dbs), None


widened_linears.defvjp(_widened_forward, _widened_backward)


def _gradients(x: jax.Array, dlow: jax.Array, dbs: list[jax.Array]) -> tuple[Adapter, ...]:
    """The adapters' gradients, fp32."""
    das = jnp.split(_dot(x, dlow, 0, 0, jnp.float32), len(dbs), axis=1)
    return tuple({"a": da, "b": db} for da, db in zip(das, dbs, strict=True))


def _low(x: jax.Array, adapters: tuple[Adapter, ...], scale: jax.Array) -> jax.Array:
    """x A of every adapter, scaled, in x's type: [M, n R]."""
    low = jnp.dot(x, _side_by_side(adapters, x.dtype), preferred_element_type=jnp.float32)
    return checkpoint_name(_scaled(low, scale, x.dtype), "low")


def _scaled(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return (x * scale[:, None]).astype(dtype)


def _weights(bases: tuple[Base, ...]) -> jax.Array:
    """All W, [in, sum of outs]."""
    return jnp.concatenate([base.weight for base in bases], axis=1)


def _side_by_side(adapters: tuple[Adapter, ...], dtype: jnp.dtype) -> jax.Array:
    """All A, [in, n R]."""
    return jnp.concatenate([adapter["a"] for adapter in adapters], axis=1).astype(dtype)


def _diagonal(adapters: tuple[Adapter, ...], dtype: jnp.dtype) -> jax.Array:
    """All B, [n R, sum of outs]: each half meets its own, and zeros elsewhere."""
    return jax.scipy.linalg.block_diag(*(adapter["b"] for adapter in adapters)).astype(dtype)


def _dot(
    left: jax.Array, right: jax.Array, over_left: int, over_right: int, dtype: jnp.dtype | None = None
) -> jax.Array:
    """The product that sums over axis `over_left` of `left` and `over_right` of `right`."""
    axes = (((over_left,), (over_right,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=dtype)
