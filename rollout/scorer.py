"""Log-probabilities of given tokens, without sampling: teacher forcing, for the loss and for evidence.

`selected_logp` is the one forward that training and scoring share. `score` runs it over batches of prompts, each
followed by forced tokens, for all cells side by side.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.folded import pays
from model.remat import Remat
from rollout.distribution import Sampling, Shape, shaped_logits, token_logp
from rollout.policy import Policy, PromptTooLong
from rollout.sampler import over_cells

LOGIT_CHUNK = 1024
"""Selected tokens whose logits exist at one time, in each cell."""

FORCED_BUCKET = 32
"""Forced tokens of a row are rounded up to a multiple of this many, and as many may stand before them as a lead-in."""


def selected_logp(
    model: Any,
    lora: Any,
    scale_B: jax.Array,
    tokens_BT: jax.Array,
    select_M: jax.Array,
    shape: Shape,
    allowed_V: jax.Array,
    remat: Remat,
) -> jax.Array:
    """Log-probs [M] fp32 of one cell's selected tokens (flat positions in B * T), given all before them in their row.

    Rows start in column 0; what stands to the right of a row's tokens is never seen. Logits are made for the selected
    tokens only, a chunk at a time, and made again in the backward pass.
    """
    rows, width = tokens_BT.shape
    positions = jnp.broadcast_to(jnp.arange(width)[None], (rows, width))
    # Padding is to the right of every real token, so causality alone hides it.
    hidden, _ = model.hidden(tokens_BT, positions, None, lora, scale_B, remat=remat, folded=pays())
    before_M = hidden.reshape(rows * width, -1)[jnp.maximum(select_M - 1, 0)]
    target_M = tokens_BT.reshape(-1)[select_M]

    @jax.checkpoint
    def chunk_logp(chunk):
        hidden_C, target_C = chunk
        return token_logp(shaped_logits(model.logits(hidden_C), shape, allowed_V, keep_M=target_C), target_C)

    total = target_M.shape[0]
    if total <= LOGIT_CHUNK:
        return chunk_logp((before_M, target_M))
    chunks = -(-total // LOGIT_CHUNK)
    padded = jax.tree.map(
        lambda x: jnp.pad(x, [(0, chunks * LOGIT_CHUNK - total)] + [(0, 0)] * (x.ndim - 1)).reshape(
            chunks, LOGIT_CHUNK, *x.shape[1:]
        ),
        (before_M, target_M),
    )
    return jax.lax.map(chunk_logp, padded).reshape(-1)[:total]


class Forced(NamedTuple):
    """One row to score: the log-probs of `tokens` after `prompt_tokens`; `name` and `scale` as in Request."""

    name: str
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    scale: float


def score(policy: Policy, rows_X: Sequence[Sequence[Forced]], rows_at_once: int) -> list[list[np.ndarray]]:
    """Log-probs [T] of each row's forced tokens, untempered, in the rows' places; `rows_at_once` a cell and call.

    Rows of like length share a call, so that short boards don't pay for long ones.
    """
    out_X: list[list[np.ndarray]] = [[np.empty(0)] * len(rows) for rows in rows_X]
    if not any(rows_X):
        return out_X
    order_X = [sorted(range(len(rows)), key=lambda i, rows=rows: _length(rows[i])) for rows in rows_X]
    for start in range(0, max(map(len, rows_X)), rows_at_once):
        active, lora = policy.active([len(rows) > start for rows in rows_X])
        places_X = [order_X[x][start : start + rows_at_once] for x in active]
        part_X = [[rows_X[x][i] for i in places] for x, places in zip(active, places_X, strict=True)]
        for x, places, logps in zip(active, places_X, _score_part(policy, lora, part_X, rows_at_once), strict=True):
            for i, logp in zip(places, logps, strict=True):
                out_X[x][i] = logp
    return out_X


def _length(row: Forced) -> int:
    return len(row.prompt_tokens) + len(row.tokens)


def _score_part(policy: Policy, lora: Any, part_X: list[Sequence[Forced]], row_count: int) -> list[list[np.ndarray]]:
    longest = max(_length(r) for part in part_X for r in part)
    forced = max(len(r.tokens) for part in part_X for r in part)
    forced = -(-forced // FORCED_BUCKET) * FORCED_BUCKET
    buckets = [bucket + FORCED_BUCKET + forced for bucket in policy.prompt_buckets]
    width = next((b for b in buckets if b >= longest), None)
    if width is None:
        raise PromptTooLong(f"a row to score has {longest} tokens and the longest bucket holds {buckets[-1]}")
    tokens = np.zeros((len(part_X), row_count, width), np.int32)
    select = np.zeros((len(part_X), row_count, forced), np.int32)
    scale = np.zeros((len(part_X), row_count), np.float32)
    for x, part in enumerate(part_X):
        for b, row in enumerate(part):
            start, end = len(row.prompt_tokens), len(row.prompt_tokens) + len(row.tokens)
            tokens[x, b, :start], tokens[x, b, start:end] = row.prompt_tokens, row.tokens
            select[x, b, : end - start] = b * width + np.arange(start, end)
            scale[x, b] = row.scale * policy.lora_scale
    args = (policy.base, lora, tokens, select.reshape(len(part_X), -1), scale)

    def run(base, lora, tokens, select, scale):
        model = nnx.merge(policy.graph, base)

        def cell(lora, tokens_BT, select_M, scale_B):
            shape = Sampling(1.0).arrays()
            return selected_logp(model, lora, scale_B, tokens_BT, select_M, shape, policy.allowed_V, remat="none")

        return over_cells(cell)(lora, tokens, select, scale)

    name = ("score", *tokens.shape, forced)
    logp = np.asarray(policy.executable(name, lambda: [(jax.jit(run).lower(*args), True)])[0](*args))
    logp = logp.reshape(len(part_X), row_count, forced)
    return [[logp[x, b, : len(row.tokens)] for b, row in enumerate(part)] for x, part in enumerate(part_X)]
