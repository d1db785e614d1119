"""The jitted sampler: prefill the prompts, then decode on the device until every row has stopped.

Pure functions of arrays. Prompts are left-padded to a bucket of P slots, so that all rows write the same cache slot at
the same step; RoPE positions count from a row's first real token, so padding shifts nothing. Cells are the leading
axis X: the frozen base serves all of them and each brings its adapter. A row's key is made from its `RowId`, so its
sample doesn't depend on its neighbours or on its place. No text here, and no choice of buckets (see policy).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from model.attention import half_on_gpu
from model.folded import pays
from model.fused import fuse, fused_hidden, plan_of
from model.lora import by_layer
from model.qwen2 import Cache, init_cache
from rollout.distribution import Shape, draw, penalise, shaped_logits

PREFILL_TOKENS = 64 * 1024
"""Padded tokens of one prefill chunk at most; at the 1.5B shape their activations take about 5 GB."""

PREFILL_SCORE_BYTES = 4 << 30
"""Attention scores one prefill chunk may take, bytes, where attention keeps them (not flash attention)."""

TOKENS_A_CHECK = 8
"""On a GPU the host waits to learn whether a row still runs, and the GPU then waits for the host; so it asks once in so
many tokens."""


class Rows(NamedTuple):
    """A padded batch of prompts, [X, B, ...].

    `tokens` [X, B, P] int32, left-padded; `lengths` [X, B] real prompt tokens; `caps` [X, B] most tokens to sample (0:
    the row is padding); `scale` [X, B] fp32, the adapter's; `ids` [X, B, 5] uint32, see `RowId`.
    """

    tokens: jax.Array
    lengths: jax.Array
    caps: jax.Array
    scale: jax.Array
    ids: jax.Array


class Decoding(NamedTuple):
    """The state that goes round the decode loop.

    `step` tokens sampled so far, scalar; `cache` by layer, [X, B, K, S, C]; `hidden` [X, B, D] of the last token;
    `tokens`, `logp` [X, B, T] what was sampled; `counts` [X, B] how many are real; `done` [X, B]; `seen` [X, B, V] ids
    in the context (only with a repetition penalty, else None).
    """

    step: jax.Array
    cache: Cache
    hidden: jax.Array
    tokens: jax.Array
    logp: jax.Array
    counts: jax.Array
    done: jax.Array
    seen: jax.Array | None


def over_cells(function: Callable) -> Callable:
    """`vmap` over the leading cell axis; for X = 1 the axis is dropped instead, which keeps a CPU's products 2-D."""

    def call(*args: Any) -> Any:
        if jax.tree.leaves(args)[0].shape[0] == 1:
            return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))
        return jax.vmap(function)(*args)

    return call


def row_keys(ids: jax.Array) -> jax.Array:
    """[..., 5] uint32 -> [...] keys, by folding in one field after the other."""

    def one(fields: jax.Array) -> jax.Array:
        key = jax.random.key(0)
        for field in fields:
            key = jax.random.fold_in(key, field)
        return key

    for _ in range(ids.ndim - 1):
        one = jax.vmap(one)
    return one(ids)


def prefill(graph: Any, base: Any, lora: Any, rows: Rows, new_slots: int, penalised: bool) -> Decoding:
    """Run the prompts and make the decode loop's first state, with room for `new_slots` tokens a row.

    Prompts are moved to the left for it, so that what pads them comes after them and causality hides it: no mask, so
    that flash attention serves. Then keys and values move to the slots at the right that decoding expects; the slots of
    the padding hold numbers that no token sees.
    """
    model = nnx.merge(graph, base)
    cells, batch, prompt_slots = rows.tokens.shape
    config, dtype = model.config, base_dtype(base)
    slots_P = jnp.arange(prompt_slots)

    def chunk(adapter, tokens_BP, lengths_B, scale_B):
        pad_B1 = prompt_slots - lengths_B[:, None]
        tokens_BP = jnp.take_along_axis(tokens_BP, (slots_P[None] + pad_B1) % prompt_slots, axis=1)
        positions_BP = jnp.broadcast_to(slots_P[None], tokens_BP.shape)
        cache = init_cache(config, tokens_BP.shape[0], prompt_slots, dtype)
        last_B = prompt_slots * jnp.arange(tokens_BP.shape[0]) + lengths_B - 1
        options = {"folded": pays(), "wanted": last_B}
        last, cache = model.hidden(tokens_BP, positions_BP, None, adapter, scale_B, cache, **options)
        from_BP = (slots_P[None] - pad_B1) % prompt_slots
        back = jax.vmap(lambda x_KPC, from_P: x_KPC[:, from_P])
        grow = ((0, 0), (0, 0), (0, new_slots), (0, 0))
        return last, jax.tree.map(lambda x: jnp.pad(back(x, from_BP), grow), cache)

    fits = max(1, PREFILL_TOKENS // prompt_slots)
    if not half_on_gpu(dtype):
        fits = max(1, min(fits, PREFILL_SCORE_BYTES // (4 * config.heads * prompt_slots**2)))
    rows_at_once = next(r for r in range(min(fits, batch), 0, -1) if batch % r == 0)

    def cell(args):
        adapter, *rows_B = args
        if batch == rows_at_once:
            return chunk(adapter, *rows_B)
        parts = [x.reshape(-1, rows_at_once, *x.shape[1:]) for x in rows_B]
        out = jax.lax.map(lambda part: chunk(adapter, *part), tuple(parts))
        return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), out)

    args = (lora, rows.tokens, rows.lengths, rows.scale)
    # Prefill is bound by compute, so cells gain nothing from running side by side and memory does from taking turns.
    hidden, cache = over_cells(lambda *one: cell(one))(*args) if cells == 1 else jax.lax.map(cell, args)
    empty = (cells, batch, new_slots)
    return Decoding(
        step=jnp.int32(0),
        cache=cache,
        hidden=hidden,
        tokens=jnp.zeros(empty, jnp.int32),
        logp=jnp.zeros(empty, jnp.float32),
        counts=jnp.zeros((cells, batch), jnp.int32),
        done=rows.caps <= 0,
        seen=_seen(rows, config.vocab) if penalised else None,
    )


def decode(
    graph: Any,
    base: Any,
    lora: Any,
    rows: Rows,
    state: Decoding,
    shape: Shape,
    allowed_V: jax.Array,
    ends_E: jax.Array,
    fused: bool = False,
) -> Decoding:
    """Sample until every row has drawn an end-of-turn token (one of `ends_E`, kept) or reached its cap; on a GPU up to
    TOKENS_A_CHECK - 1 steps more, in which nothing is sampled.

    `fused`: by model.fused's kernels, for a GPU.
    """
    model = nnx.merge(graph, base)
    prompt_slots, new_slots = rows.tokens.shape[2], state.tokens.shape[2]
    keys = row_keys(rows.ids)
    # Here, so that the loop doesn't take the stack apart, or cast it, at every token.
    forward = _fused_forward(model, lora, rows) if fused else _plain_forward(model, lora, rows, base_dtype(base))
    # The loop carries the cache as `forward` has it: reshaped inside, it would be copied at every token on a CPU.
    cells = rows.tokens.shape[0]
    flat = fused or cells == 1
    if flat:
        state = state._replace(cache=jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), state.cache))

    def any_row_runs(state: Decoding) -> jax.Array:
        return ~state.done.all() & (state.step < new_slots)

    def one_token(state: Decoding) -> Decoding:
        token, logp = _draw(model, state, keys, shape, allowed_V)
        running = ~state.done
        token = jnp.where(running, token, 0)
        write = partial(jax.lax.dynamic_update_index_in_dim, index=state.step, axis=2)
        counts = state.counts + running.astype(jnp.int32)
        ended = (token[..., None] == ends_E[None, None]).any(-1) | (counts >= rows.caps)
        seen = state.seen
        if seen is not None:
            seen = seen | (running[..., None] & (jnp.arange(seen.shape[-1])[None, None] == token[..., None]))
        done = state.done | ended
        hidden, cache = forward(token, state.cache, prompt_slots + state.step, done)
        return Decoding(
            step=state.step + 1,
            cache=cache,
            hidden=hidden,
            tokens=write(state.tokens, token),
            logp=write(state.logp, jnp.where(running, logp, 0.0)),
            counts=counts,
            done=done,
            seen=seen,
        )

    checked = math.gcd(TOKENS_A_CHECK, new_slots) if jax.default_backend() == "gpu" else 1
    some_tokens = partial(jax.lax.fori_loop, 0, checked, lambda _, state: one_token(state))
    state = jax.lax.while_loop(any_row_runs, some_tokens if checked > 1 else one_token, state)
    if flat:
        state = state._replace(cache=jax.tree.map(lambda leaf: leaf.reshape(cells, -1, *leaf.shape[1:]), state.cache))
    return state


def _plain_forward(model: Any, lora: Any, rows: Rows, dtype: jnp.dtype) -> Callable:
    """(token [X, B], cache, slot, done [X, B]) -> (hidden [X, B, D], cache), a cell beside the other. The cache of one
    cell is without the cell axis."""
    layers = jax.tree.map(lambda leaf: leaf.astype(dtype), by_layer(lora, axis=1))
    pad_XB = rows.tokens.shape[2] - rows.lengths

    def forward(token_XB, cache, slot, done_XB):
        def cell(adapter, tokens_B, pad_B, scale_B, cache):
            slots_S = jnp.arange(cache[0][0].shape[2])
            mask_BS = (slots_S[None] >= pad_B[:, None]) & (slots_S[None] <= slot)
            hidden, cache = model.hidden(
                tokens_B[:, None], (slot - pad_B)[:, None], mask_BS[:, None], adapter, scale_B, cache, slot
            )
            return hidden[:, 0], cache

        if token_XB.shape[0] == 1:
            one = jax.tree.map(lambda leaf: leaf[0], (layers, token_XB, pad_XB, rows.scale))
            hidden, cache = cell(*one, cache)
            return hidden[None], cache
        return jax.vmap(cell)(layers, token_XB, pad_XB, rows.scale, cache)

    return forward


def _fused_forward(model: Any, lora: Any, rows: Rows) -> Callable:
    """The same by model.fused: all cells' rows side by side, in the cache too. A row that is done reads none of it."""
    cells, batch = rows.scale.shape
    plan = plan_of(model.config, cells, batch, lora["q_proj"]["a"].shape[-1])
    weights = fuse(model, lora, rows.scale, plan)
    pad_XB = rows.tokens.shape[2] - rows.lengths

    def forward(token_XB, cache, slot, done_XB):
        first_XB = jnp.where(done_XB, slot, pad_XB)
        return fused_hidden(model.config, plan, weights, token_XB, first_XB, cache, slot, pad_XB)

    return forward


def _draw(model, state: Decoding, keys, shape: Shape, allowed_V) -> tuple[jax.Array, jax.Array]:
    """One token a row, and its log-probability under the distribution it was drawn from."""
    cells, batch, width = state.hidden.shape
    logits_MV = model.logits(state.hidden.reshape(-1, width))
    if state.seen is not None:
        logits_MV = penalise(logits_MV, state.seen.reshape(logits_MV.shape), shape.repetition_penalty)
    shaped_MV = shaped_logits(logits_MV, shape, allowed_V)
    token_M, logp_M = draw(shaped_MV, jax.vmap(lambda key: jax.random.fold_in(key, state.step))(keys.reshape(-1)))
    return token_M.reshape(cells, batch), logp_M.reshape(cells, batch)


def _seen(rows: Rows, vocab: int) -> jax.Array:
    """[X, B, V] bool: ids in each prompt, padding left out."""
    cells, batch, prompt_slots = rows.tokens.shape
    real = jnp.arange(prompt_slots)[None, None] >= prompt_slots - rows.lengths[..., None]
    where = jnp.where(real, rows.tokens, vocab).reshape(cells * batch, prompt_slots)
    seen = jnp.zeros((cells * batch, vocab + 1), bool)
    seen = seen.at[jnp.arange(cells * batch)[:, None], where].set(True)
    return seen[:, :vocab].reshape(cells, batch, vocab)


def base_dtype(base: Any) -> jnp.dtype:
    """The compute type: that of the base's weights."""
    return jax.tree.leaves(base)[0].dtype
