"""Attention over a row's tokens. The decode step's on a GPU is in model.decode_attention.

Queries, keys and values come and go as arrays; which linears made them and where a cache lies is model.qwen2's.
"""

import jax
import jax.numpy as jnp


def half_on_gpu(dtype: jnp.dtype) -> bool:
    """Half precision on a GPU: what flash attention and the decode kernels serve."""
    return jax.default_backend() == "gpu" and dtype in (jnp.bfloat16, jnp.float16)


def attend_causally(q: jax.Array, k: jax.Array, v: jax.Array, lengths_B: jax.Array | None = None) -> jax.Array:
    """Every token sees itself and those before it: q [B, T, H, C], k and v [B, T, K, C] -> [B, T, H, C].

    On a GPU in half precision by cuDNN's flash attention, which keeps no T x T scores (for a training pass at the 1.5B
    shape these are most of its memory); elsewhere as `attend`. `lengths_B` int32: what comes after so many tokens of a
    row is padding, need not be computed, and may be anything.
    """
    if half_on_gpu(q.dtype):
        ends = {"query_seq_lengths": lengths_B, "key_value_seq_lengths": lengths_B}
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn", **ends)
    batch, steps = q.shape[:2]
    seen_TT = jnp.tril(jnp.ones((steps, steps), bool))
    mask_BTT = jnp.broadcast_to(seen_TT[None], (batch, steps, steps))
    return attend(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), mask_BTT)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Softmax attention: q [B, T, H, C], k and v [B, K, S, C], mask [B, T, S] -> [B, T, H, C].

    One batched product over [B, K] with the G = H/K queries of a group side by side; the softmax is normalised after
    the value product, which touches T*C numbers instead of T*S. A token that may see nothing gets
    the mean of the values, not NaN.
    """
    batch, steps, heads, dim = q.shape
    kv_heads, slots = k.shape[1:3]
    group = heads // kv_heads
    q = q.reshape(batch, steps, kv_heads, group, dim).transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    scores = jnp.einsum("bkmc,bksc->bkms", q, k, preferred_element_type=jnp.float32) * dim**-0.5
    scores = scores.reshape(batch, kv_heads, group, steps, slots)
    scores = jnp.where(mask_BTS[:, None, None], scores, -1e30)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    total = weights.sum(-1).reshape(batch, kv_heads, group * steps, 1)
    weights = weights.reshape(batch, kv_heads, group * steps, slots).astype(v.dtype)
    out = jnp.einsum("bkms,bksc->bkmc", weights, v, preferred_element_type=jnp.float32) / total
    out = out.reshape(batch, kv_heads, group, steps, dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, steps, heads, dim).astype(q.dtype)
