"""The distribution a token is drawn from: one definition, used by the sampler and by the loss.

Log-probabilities that leave out the temperature or the truncated support are those of another policy, and the ratio
of such a policy is biased; so both sides call `shaped_logits`. Truncation needs no sort: the floor of the nucleus is
found by bisection on the bits of a float, which is exact.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

BARRED = -1e30
"""Logit of a token outside the support: exp gives exactly 0 in fp32, and no inf - inf arises."""

FLAT = 4096
"""Ids of the largest vocabulary that `draw` takes at once."""

BLOCK = 128
"""Ids that `draw` takes together of a larger one."""


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
    def truncations(self) -> tuple[str, ...]:
        """The names of those settings that bar tokens for being improbable."""
        return ("top_p",) * (self.top_p < 1) + ("top_k",) * (self.top_k > 0)

    def arrays(self, fixed: bool = True) -> "Shape":
        """The settings as traced scalars, so that another value compiles nothing. `fixed`: truncations that are off are
        left out of what is compiled, which then serves only settings that have the same ones on; otherwise it serves
        all and asks as it runs, for which a GPU would have to wait for the host at every token."""
        top_p, top_k = jnp.float32(self.top_p), jnp.int32(self.top_k)
        on = self.truncations if fixed else ("top_p", "top_k")
        return Shape(
            temperature=jnp.float32(self.temperature),
            top_p=top_p if "top_p" in on else None,
            top_k=top_k if "top_k" in on else None,
            repetition_penalty=jnp.float32(self.repetition_penalty),
            truncates=None if fixed else jnp.bool_(bool(self.truncations)),
        )


class Shape(NamedTuple):
    """`Sampling` as scalar arrays. `top_p` and `top_k` are None where they are off, and on where `truncates` is None;
    otherwise `truncates` says whether one of them is on, and their values whether they are."""

    temperature: jax.Array
    top_p: jax.Array | None
    top_k: jax.Array | None
    repetition_penalty: jax.Array
    truncates: jax.Array | None


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
    if shape.top_p is None and shape.top_k is None:
        return logits_MV

    def truncate(logits_MV: jax.Array) -> jax.Array:
        keep_MV = _support(jax.lax.stop_gradient(logits_MV), shape)
        if keep_M is not None:
            keep_MV |= jnp.arange(logits_MV.shape[1])[None] == keep_M[:, None]
        return jnp.where(keep_MV, logits_MV, BARRED)

    if shape.truncates is None:
        return truncate(logits_MV)
    return jax.lax.cond(shape.truncates, truncate, lambda x: x, logits_MV)


def _support(logits_MV: jax.Array, shape: Shape) -> jax.Array:
    """[M, V] bool: the top_k most probable tokens, and of those the smallest set with `top_p` of their mass."""
    weight_MV = jnp.exp(logits_MV - logits_MV.max(-1, keepdims=True))  # at most 1, and in no need of being normed
    keep_MV, known = jnp.ones(weight_MV.shape, bool), shape.truncates is None
    if shape.top_k is not None:
        floor_M1 = partial(_floor, weight_MV, jnp.ones_like(weight_MV), shape.top_k.astype(jnp.float32))
        everything = partial(jnp.zeros, (weight_MV.shape[0], 1))
        keep_MV = weight_MV >= (floor_M1() if known else jax.lax.cond(shape.top_k > 0, floor_M1, everything))
        weight_MV = jnp.where(keep_MV, weight_MV, 0.0)
    if shape.top_p is not None:
        nucleus_MV = weight_MV >= _floor(weight_MV, weight_MV, shape.top_p * weight_MV.sum(-1))
        keep_MV &= nucleus_MV if known else nucleus_MV | (shape.top_p >= 1)
    return keep_MV


def _floor(x_MV: jax.Array, weight_MV: jax.Array, target: jax.Array) -> jax.Array:
    """The largest f, [M, 1], for which the weight of those with x >= f still reaches `target` (scalar or [M]); x in
    [0, 1].

    Non-negative floats are ordered as their bits are, so the 30 bits of such a number are found exactly, the highest
    first, `_bits_at_once` of them in each reading of the array. Those that are equal stay in together.
    """
    bits_MV = jax.lax.bitcast_convert_type(x_MV, jnp.int32)
    some = _bits_at_once()

    def narrow(i, low_M1):
        unit = jnp.left_shift(1, 30 - some * (i + 1))
        tries_M1 = [low_M1 + j * unit for j in range(1, 1 << some)]
        masked = [jnp.where(bits_MV >= floor_M1, weight_MV, 0.0) for floor_M1 in tries_M1]
        sums = jax.lax.reduce(masked, [jnp.float32(0)] * len(masked), _add_each, (1,))
        # The weight falls as the floor rises, so the floors that still reach the target are the lowest ones.
        return low_M1 + unit * sum((one >= target).astype(jnp.int32) for one in sums)[:, None]

    # Unrolled on a GPU, where a loop would cut a decode step's CUDA graph in pieces.
    lowest_M1 = jnp.zeros((x_MV.shape[0], 1), jnp.int32)
    low_M1 = jax.lax.fori_loop(0, 30 // some, narrow, lowest_M1, unroll=jax.default_backend() == "gpu")
    return jax.lax.bitcast_convert_type(low_M1, jnp.float32)


def _bits_at_once() -> int:
    """On a GPU a reading of the array costs more than the seven sums that are made on the way; on a CPU not."""
    return 3 if jax.default_backend() == "gpu" else 1


def _add_each(sums: list[jax.Array], more: list[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(sums, more, strict=True)]


def draw(shaped_MV: jax.Array, keys_M: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A token a row from the softmax of `shaped_MV` [M, V] fp32, by the row's key (`keys_M` [M]), and its
    log-probability, nats: [M] int32 and [M] fp32.

    The Gumbel trick: the largest of logits and noise. Of a large vocabulary first a block is drawn, by the log of its
    sum of exp, and then an id in it, which is the same distribution for 1,315 random numbers instead of 151,936.
    """
    if shaped_MV.shape[1] <= FLAT:
        token_M = jnp.argmax(shaped_MV + _gumbel(keys_M, shaped_MV.shape[1]), axis=-1).astype(jnp.int32)
        return token_M, token_logp(shaped_MV, token_M)
    padding = ((0, 0), (0, -shaped_MV.shape[1] % BLOCK))
    blocks_MNK = jnp.pad(shaped_MV, padding, constant_values=BARRED).reshape(len(keys_M), -1, BLOCK)
    block_logsumexp_MN = jax.nn.logsumexp(blocks_MNK, axis=-1)
    count = block_logsumexp_MN.shape[1]
    noise_MR = _gumbel(keys_M, count + BLOCK)
    block_M = jnp.argmax(block_logsumexp_MN + noise_MR[:, :count], axis=-1)
    mine_MK = jnp.take_along_axis(blocks_MNK, block_M[:, None, None], axis=1)[:, 0]
    place_M = jnp.argmax(mine_MK + noise_MR[:, count:], axis=-1)
    token_M = (block_M * BLOCK + place_M).astype(jnp.int32)
    return token_M, picked(mine_MK, place_M) - jax.nn.logsumexp(block_logsumexp_MN, axis=-1)


def _gumbel(keys_M: jax.Array, count: int) -> jax.Array:
    """[M, count] fp32 of noise."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (count,), jnp.float32))(keys_M)


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
