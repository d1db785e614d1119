"""Log-probabilities of given tokens, without sampling: teacher forcing, for the loss and for evidence.

`selected_logp` is the one forward that training and scoring share. `score` runs it over batches of prompts, each
followed by forced tokens, for all cells side by side.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.folded import pays
from model.packing import packing_of
from model.programs import Program
from model.qwen2 import head_product
from model.remat import Remat
from rollout.distribution import BARRED, Sampling, Shape, logsumexp, picked, shaped_logits, token_logp
from rollout.policy import Policy, PromptTooLong
from rollout.sampler import over_cells

LOGIT_CHUNK = 1024
"""Selected tokens whose logits exist at one time, in each cell."""

FORCED_BUCKET = 32
"""Forced tokens of a row are rounded up to a multiple of this many, and as many may stand before them as a lead-in."""

TOKENS_AT_ONCE = 16 * 1024
"""Padded tokens of a call that scores, over its cells: enough to fill a GPU, few enough that a last call wastes little.
"""

UNTEMPERED = Sampling(1.0)
"""The model's own distribution."""

CPU_TOKENS_AT_ONCE = 1280
"""The same on a CPU, in each cell: what stays in its cache."""


def selected_logp(
    model: Any,
    lora: Any,
    scale_B: jax.Array,
    tokens_BT: jax.Array,
    select_M: jax.Array,
    count: jax.Array,
    shape: Shape,
    allowed_V: jax.Array,
    remat: Remat,
    places_Z: jax.Array | None = None,
) -> jax.Array:
    """Log-probs [M] fp32 of one cell's selected tokens (flat positions in B * T), given all before them in their row.

    Rows start in column 0; what stands to the right of a row's tokens is never seen, and not computed with `places_Z`:
    the flat positions of the rows' tokens, B * T for none. Of `select_M` the first `count` are made and the rest are
    zeros; the same for all cells. Logits are made for the selected tokens only, a chunk at a time, and once: a token's
    log-prob depends on its own state alone, so its slope, [D], is found beside it and kept, and the backward pass only
    scales it.
    """
    rows, width = tokens_BT.shape
    positions = jnp.broadcast_to(jnp.arange(width)[None], (rows, width))
    # Padding is to the right of every real token, so causality alone hides it.
    packing = None if places_Z is None else packing_of(places_Z, rows, width)
    # Padding asks for no state, instead of all for the first one, to whose gradient they would all be added.
    before_M = jnp.where(select_M > 0, select_M - 1, rows * width)
    if packing is not None:
        before_M = packing.inverse.reshape(-1).at[before_M].get(mode="fill", fill_value=places_Z.shape[0])
    options = {"remat": remat, "folded": pays(), "packing": packing, "wanted": before_M}
    hidden_M, _ = model.hidden(tokens_BT, positions, None, lora, scale_B, **options)
    return _token_logp(hidden_M, tokens_BT.reshape(-1)[select_M], model.head, shape, allowed_V, count)


def selected_count(select: jax.Array) -> jax.Array:
    """Scalar: how many of the last axis of `select` there are up to the last that isn't padding (0), in any cell."""
    return jnp.where(select > 0, 1 + jnp.arange(select.shape[-1])[(None,) * (select.ndim - 1)], 0).max(initial=0)


@jax.custom_vjp
def _token_logp(
    hidden_M: jax.Array, target_M: jax.Array, head: jax.Array, shape: Shape, allowed_V: jax.Array, count: jax.Array
) -> jax.Array:
    """Log-probs [M] fp32 of `target_M` after the states `hidden_M` [M, D]; only `hidden_M` has a gradient."""

    def logp(hidden_C, target_C):
        return token_logp(shaped_logits(head_product(hidden_C, head), shape, allowed_V, target_C), target_C)

    return _by_chunks(logp, count, hidden_M, target_M)


def _with_slope(hidden_M, target_M, head, shape, allowed_V, count):
    def logp_and_slope(hidden_C, target_C):
        shaped_CV = shaped_logits(head_product(hidden_C, head), shape, allowed_V, target_C)
        picked_C, total_C = picked(shaped_CV, target_C), logsumexp(shaped_CV)
        is_target_CV = jnp.arange(head.shape[0])[None] == target_C[:, None]
        # On the support log p is logits / temperature less the log of the sum of exp; off it nothing moves it.
        slope_CV = is_target_CV.astype(jnp.float32) - jnp.exp(shaped_CV - total_C[:, None])
        slope_CD = jnp.dot(slope_CV.astype(head.dtype), head, preferred_element_type=jnp.float32)
        moves_C = jnp.where(picked_C > BARRED, 1 / shape.temperature, 0.0)
        return picked_C - total_C, (slope_CD * moves_C[:, None]).astype(hidden_C.dtype)

    return _by_chunks(logp_and_slope, count, hidden_M, target_M)


def _scale_slope(slope_MD, dlogp_M):
    return (slope_MD.astype(jnp.float32) * dlogp_M[:, None]).astype(slope_MD.dtype), *[None] * 5


_token_logp.defvjp(_with_slope, _scale_slope)


def _by_chunks(function: Callable, count: jax.Array, *args_M: jax.Array) -> Any:
    """`function` of the first `count` of M, LOGIT_CHUNK at a time; zeros for the rest, up to the last chunk."""
    total = args_M[0].shape[0]
    if total <= LOGIT_CHUNK:
        return function(*args_M)
    room = -(-total // LOGIT_CHUNK) * LOGIT_CHUNK
    args_M = [jnp.pad(x, [(0, room - total)] + [(0, 0)] * (x.ndim - 1)) for x in args_M]

    def chunk(i):
        return function(*(jax.lax.dynamic_slice_in_dim(x, i * LOGIT_CHUNK, LOGIT_CHUNK) for x in args_M))

    def fill(i, out):
        put = jax.lax.dynamic_update_slice_in_dim
        return jax.tree.map(lambda all_M, some: put(all_M, some, i * LOGIT_CHUNK, 0), out, chunk(i))

    like = jax.eval_shape(chunk, 0)
    out = jax.tree.map(lambda leaf: jnp.zeros((room, *leaf.shape[1:]), leaf.dtype), like)
    out = jax.lax.fori_loop(0, (count + LOGIT_CHUNK - 1) // LOGIT_CHUNK, fill, out)
    return jax.tree.map(lambda leaf: leaf[:total], out)


class Forced(NamedTuple):
    """One row to score: the log-probs of `tokens` after `prompt_tokens`; `name` and `scale` as in Request."""

    name: str
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    scale: float


def score(
    policy: Policy, rows_X: Sequence[Sequence[Forced]], sampling: Sampling = UNTEMPERED
) -> list[list[np.ndarray]]:
    """Log-probs [T] of each row's forced tokens under `sampling`, in the rows' places. Raises PromptTooLong.

    Rows of like length share a call, the longest first, so that short ones don't pay for them and what a last call
    leaves empty is short. Calls are queued, and read when all are.
    """
    out_X: list[list[np.ndarray]] = [[np.empty(0)] * len(rows) for rows in rows_X]
    if not any(rows_X):
        return out_X
    longest = max(_length(row) for rows in rows_X for row in rows)
    forced = _rounded(max(len(row.tokens) for rows in rows_X for row in rows), FORCED_BUCKET)
    most = policy.prompt_buckets[-1] + FORCED_BUCKET + forced
    if longest > most:
        raise PromptTooLong(f"a row to score has {longest} tokens and the longest bucket holds {most}")
    order_X = [sorted(range(len(rows)), key=lambda i, rows=rows: -_length(rows[i])) for rows in rows_X]
    start, calls = 0, []
    while any(len(order) > start for order in order_X):
        active, lora = policy.active([len(order) > start for order in order_X])
        left_X = [order_X[x][start:] for x in active]
        width = min(_width(max(_length(rows_X[x][left[0]]) for x, left in zip(active, left_X) if left)), most)
        row_count = _row_count(_tokens_at_once(len(active)) // width, max(map(len, left_X)))
        places_X = [left[:row_count] for left in left_X]
        part_X = [[rows_X[x][i] for i in places] for x, places in zip(active, places_X)]
        calls.append((active, places_X, _score_part(policy, lora, part_X, sampling, (row_count, width, forced))))
        start += row_count
    for active, places_X, logps in calls:
        for x, places, logp_BT in zip(active, places_X, np.asarray(logps)):
            for i, logp_T in zip(places, logp_BT):
                out_X[x][i] = logp_T[: len(rows_X[x][i].tokens)]
    return out_X


def _length(row: Forced) -> int:
    return len(row.prompt_tokens) + len(row.tokens)


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step


def _tokens_at_once(cells: int) -> int:
    """Padded tokens of a call in each of so many cells."""
    return CPU_TOKENS_AT_ONCE if jax.default_backend() == "cpu" else TOKENS_AT_ONCE // cells


def _width(longest: int) -> int:
    """The next of four lengths an octave, multiples of 32: a tenth of padding on average, few shapes to compile."""
    octave = 1 << max(6, (longest - 1).bit_length() - 1)
    return _rounded(next(octave * quarter // 4 for quarter in (4, 5, 6, 7, 8) if octave * quarter // 4 >= longest), 32)


def _row_count(fits: int, left: int) -> int:
    """Rows of a call: powers of two and half as many again, as many as fit, or the fewest that hold what is left."""
    counts = sorted({base << power for base in (1, 3) for power in range(12)})
    return next((c for c in counts if c >= left and c <= fits), max((c for c in counts if c <= fits), default=1))


def _score_part(
    policy: Policy, lora: Any, part_X: list[Sequence[Forced]], sampling: Sampling, sizes: tuple[int, int, int]
) -> jax.Array:
    """Queue one call of `sizes` (rows, width, forced); log-probs [X, rows, forced]."""
    row_count, width, forced = sizes
    tokens = np.zeros((len(part_X), row_count, width), np.int32)
    select = np.zeros((len(part_X), row_count, forced), np.int32)
    scale = np.zeros((len(part_X), row_count), np.float32)
    for x, part in enumerate(part_X):
        for b, row in enumerate(part):
            start, end = len(row.prompt_tokens), _length(row)
            tokens[x, b, :start], tokens[x, b, start:end] = row.prompt_tokens, row.tokens
            select[x, b, : end - start] = b * width + np.arange(start, end)
            scale[x, b] = row.scale * policy.lora_scale
    select, shape = select.reshape(len(part_X), -1), sampling.arrays()
    args = (policy.base, lora, tokens, select, scale, shape, policy.allowed_V)
    name = ("score", *tokens.shape, forced, *sampling.truncations)
    (compiled,) = policy.executable(name, lambda: [Program(partial(scored, policy.graph), args, large=True)])
    return compiled(*args)


def scored(
    graph: Any,
    base: Any,
    lora: Any,
    tokens_XBT: jax.Array,
    select_XM: jax.Array,
    scale_XB: jax.Array,
    shape: Shape,
    allowed_V: jax.Array,
) -> jax.Array:
    """`selected_logp` of every cell's rows, as many tokens of each: [X, B, M / B]."""
    model, count = nnx.merge(graph, base), selected_count(select_XM)

    def cell(lora, tokens_BT, select_M, scale_B):
        return selected_logp(model, lora, scale_B, tokens_BT, select_M, count, shape, allowed_V, remat="none")

    return over_cells(cell)(lora, tokens_XBT, select_XM, scale_XB).reshape(*tokens_XBT.shape[:2], -1)
