"""From episodes and advantages to padded micro-batches of arrays. Host side, no model.

A row is one utterance: its prompt, then its sampled tokens, from column 0 on. The loss mask is where a token was
sampled and its turn is trained; it is never derived from the advantage. Rows whose advantage is 0 add nothing to the
gradient (there is no KL or entropy term), so they are left out of the compute and kept in the weights' denominator.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl.loss import Normalisation, row_weights
from rollout.episode import Utterance


class Row(NamedTuple):
    """One utterance and what its turn is paid; `cap` the most tokens it could have had."""

    utterance: Utterance
    advantage: float
    cap: int


class Batch(NamedTuple):
    """One micro-batch, leading axes [X, B].

    `tokens` [X, B, T] int32; `loss_mask` [X, B, T] bool: this token was sampled and is trained; `advantage` and
    `old_logp` [X, B, T] fp32; `weight` [X, B, T] fp32: how much the token counts in the step's loss. `select` [X, M]
    int32: flat positions in [B * T] of the trained tokens, padded with 0 (column 0 is never a trained token), so
    that logits are computed for those only.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    advantage: np.ndarray
    old_logp: np.ndarray
    weight: np.ndarray
    select: np.ndarray


class Plan(NamedTuple):
    """A step's micro-batches, and per cell its trained tokens (flat rows included) and live rows."""

    batches: list[Batch]
    trained_tokens_X: np.ndarray
    live_rows_X: np.ndarray


def pack(
    rows_X: Sequence[Sequence[Row]],
    micro_rows: int,
    buckets: tuple[int, ...],
    normalisation: Normalisation = "tokens",
    chunks: int = 1,
    seeds_X: Sequence[tuple[int, ...]] | None = None,
    reply_bucket: int = 32,
) -> Plan:
    """Cut each cell's live rows, longest first, into micro-batches of `micro_rows` rows padded to one of `buckets`.

    Cells share the cutting: micro-batch k holds every cell's k-th longest rows; a cell with fewer live rows gets
    empty ones (mask and weight 0). `chunks` and `seeds_X` are the `microbatch` normalisation's.
    """
    weights_X, live_X = [], []
    for rows, seed in zip(rows_X, seeds_X or [(0,)] * len(rows_X), strict=True):
        counts = np.array([len(r.utterance.tokens) * r.utterance.trained for r in rows])
        caps = np.array([r.cap for r in rows])
        weights_X.append((row_weights(counts, normalisation, caps, chunks, seed), int(counts.sum())))
        live = [i for i, r in enumerate(rows) if counts[i] > 0 and r.advantage != 0]
        live_X.append(sorted(live, key=lambda i, rows=rows: (-_length(rows[i]), i)))
    most = max(len(live) for live in live_X)
    batches = []
    for start in range(0, most, micro_rows):
        part_X = [
            [(rows[i], weights[i]) for i in live[start : start + micro_rows]]
            for rows, live, (weights, _) in zip(rows_X, live_X, weights_X, strict=True)
        ]
        batches.append(_pad(part_X, micro_rows, buckets, reply_bucket))
    return Plan(
        batches,
        np.array([total for _, total in weights_X]),
        np.array([len(live) for live in live_X]),
    )


def _length(row: Row) -> int:
    return len(row.utterance.prompt_tokens) + len(row.utterance.tokens)


def _pad(part_X, micro_rows: int, buckets: tuple[int, ...], reply_bucket: int) -> Batch:
    longest = max(_length(row) for part in part_X for row, _ in part)
    width = next((b for b in buckets if b >= longest), None)
    if width is None:
        raise ValueError(f"a row has {longest} tokens and the longest training bucket holds {buckets[-1]}")
    longest_reply = max(len(row.utterance.tokens) for part in part_X for row, _ in part)
    selected = micro_rows * (-(-longest_reply // reply_bucket) * reply_bucket)
    shape = (len(part_X), micro_rows, width)
    batch = Batch(
        tokens=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, bool),
        advantage=np.zeros(shape, np.float32),
        old_logp=np.zeros(shape, np.float32),
        weight=np.zeros(shape, np.float32),
        select=np.zeros((len(part_X), selected), np.int32),
    )
    for x, part in enumerate(part_X):
        for b, (row, weight) in enumerate(part):
            start, end = len(row.utterance.prompt_tokens), _length(row)
            batch.tokens[x, b, :start] = row.utterance.prompt_tokens
            batch.tokens[x, b, start:end] = row.utterance.tokens
            batch.loss_mask[x, b, start:end] = row.utterance.trained
            batch.advantage[x, b, start:end] = row.advantage
            batch.old_logp[x, b, start:end] = row.utterance.logp
            batch.weight[x, b, start:end] = weight
        trained = np.flatnonzero(batch.loss_mask[x].reshape(-1))
        batch.select[x, : len(trained)] = trained
    return batch
