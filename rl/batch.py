"""From episodes and advantages to micro-batches of arrays. Host side, no model.

A row is one utterance: its prompt, then its sampled tokens, from column 0 on. The loss mask is where a token was
sampled and its turn is trained; it is never derived from the advantage. Rows whose advantage is 0 add nothing to the
gradient (there is no KL or entropy term), so they are left out of the compute and kept in the weights' denominator.

Padded micro-batches hold a fixed number of rows and compute every place of them. Packed ones hold as many rows as their
tokens have room for, and compute these tokens only (model.packing); rows are padded for attention alone.
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
    that logits are computed for those only. `cells` [S] int32. `places` [S, Z] int32, if packed: flat positions in
    [B * T] of the rows' tokens, padded with B * T; None: all places are computed.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    advantage: np.ndarray
    old_logp: np.ndarray
    weight: np.ndarray
    select: np.ndarray
    cells: np.ndarray
    places: np.ndarray | None = None

    @property
    def computed_tokens(self) -> int:
        """Tokens that the model computes, padding among them."""
        return self.tokens.size if self.places is None else self.places.size


class Plan(NamedTuple):
    """A step's micro-batches, and per cell its trained tokens (flat rows included) and live rows."""

    batches: list[Batch]
    trained_tokens_X: np.ndarray
    live_rows_X: np.ndarray


class _Part(NamedTuple):
    """Rows of one cell that go through the model together, with their weights, longest first."""

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
    packed: bool = False,
) -> Plan:
    """Cut each cell's live rows, longest first, into parts, and put parts of like length, whosever they are, into
    micro-batches of `slots` slots (by default as many as cells), padded to one of `buckets`.

    A part is `micro_rows` rows; `packed`: rows of as many tokens as `micro_rows` of the longest bucket. So a cell with
    few live rows costs little beside one with many, and what is in a part depends on its cell alone.
    `chunks` and `seeds_X` are the `microbatch` normalisation's.
    """
    parts, totals, live_X = [], [], []
    for cell, (rows, seed) in enumerate(zip(rows_X, seeds_X or [(0,)] * len(rows_X), strict=True)):
        counts = np.array([len(r.utterance.tokens) * r.utterance.trained for r in rows])
        caps = np.array([r.cap for r in rows])
        weights = row_weights(counts, normalisation, caps, chunks, seed)
        live = [i for i, r in enumerate(rows) if counts[i] > 0 and r.advantage != 0]
        live.sort(key=lambda i, rows=rows: (-length(rows[i]), i))
        if packed:
            cuts = _packed_parts([length(rows[i]) for i in live], micro_rows * buckets[-1], buckets)
        else:
            cuts = [range(start, min(start + micro_rows, len(live))) for start in range(0, len(live), micro_rows)]
        parts += [_Part(cell, [(rows[live[i]], weights[live[i]]) for i in cut]) for cut in cuts]
        totals.append(int(counts.sum()))
        live_X.append(len(live))
    # Stable, so that a cell's parts are added up in the order in which they were cut.
    parts.sort(key=lambda part: -length(part.rows[0][0]))
    slots = slots or len(rows_X)
    groups = [sorted(parts[i : i + slots], key=lambda part: part.cell) for i in range(0, len(parts), slots)]
    batches = []
    for group in groups:
        lengths_P = [[length(row) for row, _ in part.rows] for part in group]
        if packed:
            rows, width, tokens = _packed_shape(lengths_P, micro_rows, buckets)
            batch = _empty((slots, rows, width), tokens, tokens)
        else:
            width = _bucket(max(map(max, lengths_P)), buckets)
            longest_reply = max(len(row.utterance.tokens) for part in group for row, _ in part.rows)
            selected = micro_rows * -(-longest_reply // reply_bucket) * reply_bucket
            batch = _empty((slots, micro_rows, width), selected, None)
        _fill(batch, group)
        batches.append(batch)
    return Plan(batches, np.array(totals), np.array(live_X))


def length(row: Row) -> int:
    """Tokens of a row."""
    return len(row.utterance.prompt_tokens) + len(row.utterance.tokens)


def _bucket(longest: int, buckets: tuple[int, ...]) -> int:
    width = next((b for b in buckets if b >= longest), None)
    if width is None:
        raise ValueError(f"a row has {longest} tokens and the longest training bucket holds {buckets[-1]}")
    return width


PADDED = 2
"""Places of a packed part's rows, padded for attention, for each token it has room for: with fewer, short rows leave
room that is computed for nothing; attention itself stops at a row's end."""


def _packed_parts(lengths: list[int], room: int, buckets: tuple[int, ...]) -> list[list[int]]:
    """Which rows make up each part, of rows that get shorter: the longest that is left, then again and again the
    longest that fits into what `room` is left."""
    left, parts = list(range(len(lengths))), []
    while left:
        part, free = [], room
        most = _rows(room, _bucket(lengths[left[0]], buckets))
        for i in left:
            if lengths[i] <= free and len(part) < most:
                part.append(i)
                free -= lengths[i]
        parts.append(part)
        left = sorted(set(left) - set(part))
    return parts


def _rows(tokens: int, width: int) -> int:
    """Rows of `width` of a packed part with room for `tokens`."""
    return -(-PADDED * tokens // width)


def _packed_shape(lengths_P: list[list[int]], micro_rows: int, buckets: tuple[int, ...]) -> tuple[int, int, int]:
    """(rows, width, tokens) of a slot of a packed micro-batch. A last part has all the room too: what is saved by less
    is soon lost again, since a GPU tunes every product of a new size, which takes longer than all else of compiling."""
    widths = [_bucket(lengths[0], buckets) for lengths in lengths_P]
    room = micro_rows * buckets[-1]
    return _rows(room, min(widths)), max(widths), room


def _empty(shape: tuple[int, int, int], selected: int, packed_tokens: int | None) -> Batch:
    """A micro-batch of `shape` (slots, rows, width) without rows."""
    slots, rows, width = shape
    return Batch(
        tokens=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, bool),
        advantage=np.zeros(shape, np.float32),
        old_logp=np.zeros(shape, np.float32),
        weight=np.zeros(shape, np.float32),
        select=np.zeros((slots, selected), np.int32),
        cells=np.zeros(slots, np.int32),
        places=None if packed_tokens is None else np.full((slots, packed_tokens), rows * width, np.int32),
    )


def _fill(batch: Batch, parts: list[_Part]) -> None:
    width = batch.tokens.shape[2]
    for s, part in enumerate(parts):
        batch.cells[s] = part.cell
        packed = 0
        for b, (row, weight) in enumerate(part.rows):
            start, end = len(row.utterance.prompt_tokens), length(row)
            batch.tokens[s, b, :start] = row.utterance.prompt_tokens
            batch.tokens[s, b, start:end] = row.utterance.tokens
            batch.loss_mask[s, b, start:end] = row.utterance.trained
            batch.advantage[s, b, start:end] = row.advantage
            batch.old_logp[s, b, start:end] = row.utterance.logp
            batch.weight[s, b, start:end] = weight
            if batch.places is not None:
                batch.places[s, packed : packed + end] = b * width + np.arange(end)
                packed += end
        trained = np.flatnonzero(batch.loss_mask[s].reshape(-1))
        batch.select[s, : len(trained)] = trained
