"""How much of a step goes through the update at a time, and what is kept for its backward pass: by the memory there is.

Both are one decision: tokens at once x bytes a token must fit. Neither changes a gradient but by rounding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.config import ModelConfig
from model.remat import Remat, saved_bytes
from rollout.scorer import LOGIT_CHUNK

TOKENS_AT_ONCE = 48 * 1024
"""Tokens of a micro-batch, over its slots, beyond which a CPU is no busier."""

GPU_TOKENS_AT_ONCE = 24 * 1024
"""The same for a GPU (11k and 22k tokens at once take equally long a token, bench/NOTES.md). What a pass keeps is
allocated in one piece, which a memory with other things in it may not have."""

SHARE = 0.8
"""Share of the free memory that is planned with; the rest is for what is not counted, and for fragments."""


class MemoryPlan(NamedTuple):
    """`remat` for the training forward; `slots` of a micro-batch (rl.batch)."""

    remat: Remat
    slots: int


def free_bytes() -> int | None:
    """Bytes that JAX may still allocate on the first device; None where it doesn't say (a CPU)."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None


def plan_memory(
    wanted: Remat | None, free: int | None, sizes: ModelConfig, dtype: str, rank: int, cells: int, row_tokens: int
) -> MemoryPlan:
    """The plan for slots of `row_tokens` padded tokens each, of which `cells` at most are of use.

    `wanted` None: `products` if one slot of it fits in `free` bytes, else `all`; and `none` where `free` is None, since
    on a CPU the small model's compute is what takes time. Counted: saved activations (model.remat), one layer's
    backward pass (6 F numbers a token), a chunk of logits with its gradient in each slot, and a copy of the base.
    """
    if free is None:
        return MemoryPlan(wanted or "none", max(1, min(cells, TOKENS_AT_ONCE // row_tokens)))
    most = max(1, min(cells, GPU_TOKENS_AT_ONCE // row_tokens))
    item = jnp.dtype(dtype).itemsize
    left = SHARE * free - item * sizes.parameters

    def fits(remat: Remat) -> int:
        a_token = saved_bytes(sizes, dtype, rank, remat) + 6 * item * sizes.mlp
        return int(left // (row_tokens * a_token + 3 * 4 * LOGIT_CHUNK * sizes.vocab))

    remat = wanted or ("products" if fits("products") >= 1 else "all")
    return MemoryPlan(remat, max(1, min(most, fits(remat))))
