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
    """One micro-batch of S slots; slot s holds rows of cell `cells[s]`. Leading axes [S, B].

    `tokens` [S, B, T] int32; `loss_mask` [S, B, T] bool: this token was sampled and is trained; `advantage` and
    `old_logp` [S, B, T] fp32; `weight` [S, B, T] fp32: how much the token counts in its cell's step loss. `select`
    [S, M] int32: flat positions in [B * T] of the trained tokens, padded with 0 (column 0 is never a trained token), so
    that logits are computed for those only. `cells` [S] int32.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    advantage: np.ndarray
    old_logp: np.ndarray
    weight: np.ndarray
    select: np.ndarray
    cells: np.ndarray


class Plan(NamedTuple):
    """A step's micro-batches, and per cell its trained tokens (flat rows included) and live rows."""

    batches: list[Batch]
    trained_tokens_X: np.ndarray
    live_rows_X: np.ndarray


class _Part(NamedTuple):
    """Up to `micro_rows` rows of one cell with their weights, longest first."""

    cell: int
    rows: list[tuple[Row, float]]


def pack(
    rows_X: Sequence[Sequence[Row]],
    micro_rows: int,
    buckets: tuple[int, ...],
    normalisation: Normalisation = "tokens",
    chunks: int = 1,
    seeds_X: Sequence[tuple[int, ...]] | None = None,
    reply_bucket: int = 32,
    slots: int | None = None,
) -> Plan:
    """Cut each cell's live rows, longest first, into parts of `micro_rows` rows, and put parts of like length, whosever
    they are, into micro-batches of `slots` slots (by default as many as cells), padded to one of `buckets`.

    So a cell with few live rows costs little beside one with many, and what is in a part depends on its cell alone.
    `chunks` and `seeds_X` are the `microbatch` normalisation's.
    """
    parts, totals, live_X = [], [], []
    for cell, (rows, seed) in enumerate(zip(rows_X, seeds_X or [(0,)] * len(rows_X), strict=True)):
        counts = np.array([len(r.utterance.tokens) * r.utterance.trained for r in rows])
        caps = np.array([r.cap for r in rows])
        weights = row_weights(counts, normalisation, caps, chunks, seed)
        live = [i for i, r in enumerate(rows) if counts[i] > 0 and r.advantage != 0]
        live.sort(key=lambda i, rows=rows: (-_length(rows[i]), i))
        for start in range(0, len(live), micro_rows):
            parts.append(_Part(cell, [(rows[i], weights[i]) for i in live[start : start + micro_rows]]))
        totals.append(int(counts.sum()))
        live_X.append(len(live))
    # Stable, so that a cell's parts are added up in the order in which they were cut.
    parts.sort(key=lambda part: -_length(part.rows[0][0]))
    slots = slots or len(rows_X)
    groups = [sorted(parts[i : i + slots], key=lambda part: part.cell) for i in range(0, len(parts), slots)]
    batches = [_pad(group, slots, micro_rows, buckets, reply_bucket) for group in groups]
    return Plan(batches, np.array(totals), np.array(live_X))


def _length(row: Row) -> int:
    return len(row.utterance.prompt_tokens) + len(row.utterance.tokens)


def _pad(parts: list[_Part], slots: int, micro_rows: int, buckets: tuple[int, ...], reply_bucket: int) -> Batch:
    longest = max(_length(row) for part in parts for row, _ in part.rows)
    width = next((b for b in buckets if b >= longest), None)
    if width is None:
        raise ValueError(f"a row has {longest} tokens and the longest training bucket holds {buckets[-1]}")
    longest_reply = max(len(row.utterance.tokens) for part in parts for row, _ in part.rows)
    selected = micro_rows * (-(-longest_reply // reply_bucket) * reply_bucket)
    shape = (slots, micro_rows, width)
    batch = Batch(
        tokens=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, bool),
        advantage=np.zeros(shape, np.float32),
        old_logp=np.zeros(shape, np.float32),
        weight=np.zeros(shape, np.float32),
        select=np.zeros((slots, selected), np.int32),
        cells=np.zeros(slots, np.int32),
    )
    for s, part in enumerate(parts):
        batch.cells[s] = part.cell
        for b, (row, weight) in enumerate(part.rows):
            start, end = len(row.utterance.prompt_tokens), _length(row)
            batch.tokens[s, b, :start] = row.utterance.prompt_tokens
            batch.tokens[s, b, start:end] = row.utterance.tokens
            batch.loss_mask[s, b, start:end] = row.utterance.trained
            batch.advantage[s, b, start:end] = row.advantage
            batch.old_logp[s, b, start:end] = row.utterance.logp
            batch.weight[s, b, start:end] = weight
        trained = np.flatnonzero(batch.loss_mask[s].reshape(-1))
        batch.select[s, : len(trained)] = trained
    return batch
