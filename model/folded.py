"""Linears that share an input, with their adapters, without extra passes over wide arrays: for large batches on a GPU.

y = x W + s (x A) B, written as it stands, makes B's product a second array as wide as y, to be read and added. Here a
linear that widens gets [x | s x A] [[W], [B]], one product whose sum is in fp32. In the backward pass linears that
don't widen share one, dx = [dy, ... | s dy B', ...] [[W'], ..., [A'], ...]; where a dy is wider than x, a plain
addition costs less than the copies. All linears of one input share a product x A, and one x' (s dy B') for their A's
gradients. The backward pass is written out, since the automatic one would multiply fp32 by bf16, which a GPU does in
fp32 after making fp32 copies. The base is frozen: its gradient is not computed, and asking for it gives zeros.

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
def folded_linears(
    x: jax.Array, bases: tuple[Base, ...], adapters: tuple[Adapter, ...], scale: jax.Array
) -> tuple[jax.Array, ...]:
    """Every linear's y = x W + bias + scale (x A) B, [M, out] in x's type, from one x [M, in].

    `adapters` are fp32, {"a": [in, R], "b": [R, out]}, cast to x's type, of one rank; `scale` [M] fp32: each row's own.
    """
    return _forward(x, bases, adapters, scale)[0]


def _forward(x, bases, adapters, scale):
    a = _side_by_side(adapters, x.dtype)
    low = jnp.dot(x, a, preferred_element_type=jnp.float32) * scale[:, None]
    low = checkpoint_name(low.astype(x.dtype), "low")
    ranks = jnp.split(low, len(bases), axis=1)
    wide = jnp.concatenate([x, low], axis=1) if any(_widens(base) for base in bases) else None
    out = []
    for place, (base, adapter) in enumerate(zip(bases, adapters, strict=True)):
        b = adapter["b"].astype(x.dtype)
        if _widens(base):
            # The other linears' columns of `low` meet rows of zeros.
            rank = b.shape[0]
            before, after = place * rank, (len(bases) - 1 - place) * rank
            y = jnp.dot(wide, jnp.concatenate([base.weight, jnp.pad(b, ((before, after), (0, 0)))]))
            out.append(y if base.bias is None else y + base.bias[None])
        else:
            y = jnp.dot(x, base.weight)
            out.append((y if base.bias is None else y + base.bias[None]) + jnp.dot(ranks[place], b))
    return tuple(out), (x, low, bases, adapters, scale)


def _backward(kept, dys):
    x, low, bases, adapters, scale = kept
    dlows, dbs = [], []
    for ranks, adapter, dy in zip(jnp.split(low, len(bases), axis=1), adapters, dys, strict=True):
        dbs.append(_dot(ranks, dy, 0, 0, jnp.float32))
        dlow = _dot(dy, adapter["b"].astype(x.dtype), 1, 1, jnp.float32) * scale[:, None]
        dlows.append(dlow.astype(x.dtype))
    dlow = jnp.concatenate(dlows, axis=1)
    das = jnp.split(_dot(x, dlow, 0, 0, jnp.float32), len(bases), axis=1)
    a = _side_by_side(adapters, x.dtype)
    if not any(_widens(base) for base in bases):
        weights = [base.weight for base in bases]
        dx = _dot(jnp.concatenate([*dys, dlow], axis=1), jnp.concatenate([*weights, a], axis=1), 1, 1)
    else:
        dx = _dot(dlow, a, 1, 1)
        for base, dy in zip(bases, dys, strict=True):
            dx = dx + _dot(dy, base.weight, 1, 1)
    return dx, None, tuple({"a": da, "b": db} for da, db in zip(das, dbs, strict=True)), None


folded_linears.defvjp(_forward, _backward)


def _widens(base: Base) -> bool:
    return base.weight.shape[1] > base.weight.shape[0]


def _side_by_side(adapters: tuple[Adapter, ...], dtype: jnp.dtype) -> jax.Array:
    """All A, [in, n R]."""
    return jnp.concatenate([adapter["a"] for adapter in adapters], axis=1).astype(dtype)


def _dot(
    left: jax.Array, right: jax.Array, over_left: int, over_right: int, dtype: jnp.dtype | None = None
) -> jax.Array:
    """The product that sums over axis `over_left` of `left` and `over_right` of `right`."""
    axes = (((over_left,), (over_right,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=dtype)
