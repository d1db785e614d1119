"""The distribution a token is drawn from: one definition, used by the sampler and by the loss.

Log-probabilities that leave out the temperature or the truncated support are those of another policy, and the ratio
of such a policy is biased; so both sides call `shaped_logits`. Truncation needs no sort: the floor of the nucleus is
found by bisection on the bits of a float, which is exact.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

BARRED = -1e30
"""Logit of a token outside the support: exp gives exactly 0 in fp32, and no inf - inf arises."""


@dataclass(frozen=True)
class Sampling:
    """`temperature` > 0; `top_p` in (0, 1], 1 is off; `top_k` tokens, 0 is off; `repetition_penalty`, 1 is off."""

    temperature: float = 0.9
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or a count of tokens")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0")

    @property
    def truncates(self) -> bool:
        """Does it bar a token for being improbable?"""
        return self.top_p < 1 or self.top_k > 0

    def arrays(self, fixed: bool = False) -> "Shape":
        """The settings as traced scalars, so that changing them compiles nothing. `fixed`: a truncation that is off is
        left out, so that what is compiled needn't ask; it serves only settings that truncate, or only such that don't.
        """
        truncation = (jnp.float32(self.top_p), jnp.int32(self.top_k)) if self.truncates or not fixed else (None, None)
        return Shape(jnp.float32(self.temperature), *truncation, jnp.float32(self.repetition_penalty))


class Shape(NamedTuple):
    """`Sampling` as scalar arrays; `top_p` and `top_k` are None where nothing is ever truncated."""

    temperature: jax.Array
    top_p: jax.Array | None
    top_k: jax.Array | None
    repetition_penalty: jax.Array


def penalise(logits_MV: jax.Array, seen_MV: jax.Array, penalty: jax.Array) -> jax.Array:
    """Repetition penalty (Keskar et al., 2019): seen tokens' logits over it if positive, times it if negative."""
    return jnp.where(seen_MV, jnp.where(logits_MV > 0, logits_MV / penalty, logits_MV * penalty), logits_MV)


def shaped_logits(
    logits_MV: jax.Array, shape: Shape, allowed_V: jax.Array, keep_M: jax.Array | None = None
) -> jax.Array:
    """Logits whose softmax is the sampling distribution, [M, V] fp32.

    Order: undecodable ids barred, temperature, top_k, top_p. `keep_M` (ids) are never barred by truncation: the loss
    passes the sampled tokens, whose place at the edge of the support may differ by rounding.
    """
    logits_MV = jnp.where(allowed_V[None], logits_MV / shape.temperature, BARRED)
    if shape.top_p is None:
        return logits_MV
    truncating = (shape.top_p < 1) | (shape.top_k > 0)

    def truncate(logits_MV: jax.Array) -> jax.Array:
        fixed_MV = jax.lax.stop_gradient(logits_MV)
        keep_MV = _support(jax.nn.softmax(fixed_MV, axis=-1), shape)
        if keep_M is not None:
            keep_MV |= jnp.arange(logits_MV.shape[1])[None] == keep_M[:, None]
        return jnp.where(keep_MV, logits_MV, BARRED)

    return jax.lax.cond(truncating, truncate, lambda x: x, logits_MV)


def _support(probs_MV: jax.Array, shape: Shape) -> jax.Array:
    """[M, V] bool: the top_k most probable tokens, and of those the smallest set with `top_p` of their mass."""
    count = jnp.where(shape.top_k > 0, shape.top_k, probs_MV.shape[1]).astype(jnp.float32)
    everything = jnp.zeros((probs_MV.shape[0], 1))
    floor_M1 = jax.lax.cond(
        shape.top_k > 0, lambda: _floor(probs_MV, jnp.ones_like(probs_MV), count), lambda: everything
    )
    keep_MV = probs_MV >= floor_M1
    kept_MV = jnp.where(keep_MV, probs_MV, 0.0)
    kept_MV = kept_MV / kept_MV.sum(-1, keepdims=True)
    target = jnp.where(shape.top_p < 1, shape.top_p, 0.0)
    nucleus_MV = kept_MV >= _floor(kept_MV, kept_MV, target)
    return keep_MV & (nucleus_MV | (shape.top_p >= 1))


def _floor(probs_MV: jax.Array, weight_MV: jax.Array, target: jax.Array) -> jax.Array:
    """The largest f, [M, 1], for which the weight of tokens with probability >= f still reaches `target`.

    Non-negative floats are ordered as their bits are, so the 30 bits of a probability are found exactly, the highest
    first, `_bits_at_once` of them in each reading of the array. Tied tokens stay in together.
    """
    bits_MV = jax.lax.bitcast_convert_type(probs_MV, jnp.int32)
    some = _bits_at_once()

    def narrow(i, low_M1):
        unit = jnp.left_shift(1, 30 - some * (i + 1))
        tries_M1 = [low_M1 + j * unit for j in range(1, 1 << some)]
        masked = [jnp.where(bits_MV >= floor_M1, weight_MV, 0.0) for floor_M1 in tries_M1]
        sums = jax.lax.reduce(masked, [jnp.float32(0)] * len(masked), _add_each, (1,))
        # The weight falls as the floor rises, so the floors that still reach the target are the lowest ones.
        return low_M1 + unit * sum((one >= target).astype(jnp.int32) for one in sums)[:, None]

    low_M1 = jax.lax.fori_loop(0, 30 // some, narrow, jnp.zeros((probs_MV.shape[0], 1), jnp.int32))
    return jax.lax.bitcast_convert_type(low_M1, jnp.float32)


def _bits_at_once() -> int:
    """On a GPU a reading of the array costs more than the seven sums that are made on the way; on a CPU not."""
    return 3 if jax.default_backend() == "gpu" else 1


def _add_each(sums: list[jax.Array], more: list[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(sums, more, strict=True)]


def token_logp(shaped_MV: jax.Array, tokens_M: jax.Array) -> jax.Array:
    """log-softmax of `shaped_MV` at `tokens_M`, [M] fp32, without a second [M, V] array."""
    return picked(shaped_MV, tokens_M) - jax.nn.logsumexp(shaped_MV, axis=-1)


def picked(shaped_MV: jax.Array, tokens_M: jax.Array) -> jax.Array:
    """`shaped_MV` at `tokens_M`, [M]."""
    return jnp.take_along_axis(shaped_MV, tokens_M[:, None], axis=1)[:, 0]


def logsumexp(x_MV: jax.Array) -> jax.Array:
    """log of the sum of exp over each row, [M], of finite fp32: on a GPU as below, which takes 225 us instead of 305
    for 1,024 rows of 151,936 (one H200), and has no gradient of its own."""
    return online_logsumexp(x_MV) if jax.default_backend() == "gpu" else jax.nn.logsumexp(x_MV, axis=-1)


def online_logsumexp(x_MV: jax.Array) -> jax.Array:
    """The same in one reading (Milakov and Gimelshein, 2018): the largest number and the sum of exp relative to it are
    carried together, which is twice the exponentials."""

    def join(left, right):
        (top, total), (other, more) = left, right
        new = jnp.maximum(top, other)
        return new, total * jnp.exp(top - new) + more * jnp.exp(other - new)

    lowest = jnp.float32(jnp.finfo(jnp.float32).min)
    top_M, total_M = jax.lax.reduce((x_MV, jnp.ones_like(x_MV)), (lowest, jnp.float32(0)), join, (1,))
    return top_M + jnp.log(total_M)
