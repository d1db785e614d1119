"""The Qwen2 decoder in Flax NNX: grouped-query attention, RoPE, RMSNorm, SwiGLU; Llama checkpoints are a setting.

One function serves training, prefill and decoding: `Qwen2.hidden` takes the tokens' positions, who may see whom,
and optionally a KV cache to write to. Weights are kept [in, out]. Activations are kept 2-D, [B*T, D], between
attentions: on a CPU XLA's 3-D products are a third as fast. Products take the compute type and accumulate in
fp32; norms, softmax and logits are fp32. There is no dropout and no loss here, and nothing is made for tokens nobody
asks about: the last layer ends with attention for them, and `logits` is a separate call on the states that are wanted.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from model.attention import attend, attend_causally
from model.config import ModelConfig
from model.folded import Base, folded_linears, widened_linears
from model.lora import LayerLora, Lora, by_layer, lora_update
from model.norm import norm_and_residual, rms_norm
from model.packing import Packing, repack, take, unpack
from model.remat import Remat, checkpointed
from model.rope import folded_rotate_qkv, rope_angles, rotate_qkv

Cache = list[tuple[jax.Array, jax.Array]]
"""cache[layer] = (keys [B, K, S, C], values [B, K, S, C]): S next to C, as attention reads it."""


SCAN_FROM = 8
"""Layers from which a pass without a cache loops over them instead of unrolling; below, unrolled compiles faster.

Never on a GPU: a loop copies what a training pass keeps into its arrays and back, and its products get slower layouts:
0.27 s against 0.21 for 16 x 1,024 tokens on an H200 (bench/NOTES.md).
"""


class Linear(nnx.Module):
    """y = x W (+ bias) (+ the row's LoRA update)."""

    def __init__(self, inputs: int, outputs: int, bias: bool, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        scale = jnp.asarray(inputs**-0.5, dtype)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (inputs, outputs), dtype) * scale)
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: jax.Array, adapter: dict[str, jax.Array] | None, scale: jax.Array | None) -> jax.Array:
        """[M, in] -> [M, out] in x's type; `scale` [M] goes with `adapter`."""
        # The product accumulates in fp32; product, bias and adapter are each rounded to x's type, as PEFT does, since
        # fp32 results would double a large batch's traffic. Nothing is rounded in fp32.
        y = jnp.dot(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...][None]
        if adapter is not None:
            y = y + lora_update(x, adapter, scale)
        return y


def linears(
    x: jax.Array, members: dict[str, Linear], lora: LayerLora | None, scale: jax.Array | None, folded: bool
) -> jax.Array:
    """All of `members` applied to x [M, in], side by side, [M, sum of outs], with their adapters in `lora`; `folded`:
    by model.folded."""
    if folded:
        return folded_linears(x, *frozen(members, lora), scale)
    return jnp.concatenate([member(x, lora and lora[name], scale) for name, member in members.items()], axis=1)


def frozen(members: dict[str, Linear], lora: LayerLora) -> tuple[tuple[Base, ...], tuple[dict[str, jax.Array], ...]]:
    """`members` and their adapters as model.folded takes them."""
    bases = (Base(m.weight[...], None if m.bias is None else m.bias[...]) for m in members.values())
    return tuple(bases), tuple(lora[name] for name in members)


def only(wanted: jax.Array | None, *arrays: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """The rows `wanted` [M] of each array, zeros for those beyond it; all of its rows where `wanted` is None."""
    return arrays if wanted is None else tuple(x if x is None else take(x, wanted) for x in arrays)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, in fp32 (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)

    def with_residual(self, x: jax.Array, folded: bool) -> tuple[jax.Array, jax.Array]:
        """(x's norm, x), [M, D]; `folded`: as one function, whose gradient is one pass."""
        return norm_and_residual(x, self.weight[...], self.eps) if folded else (self(x), x)


class Attention(nnx.Module):
    """Grouped-query attention with RoPE; H query heads share K key/value heads."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.config = config
        self.q_proj = Linear(config.width, queries, config.qkv_bias, rngs, dtype)
        self.k_proj = Linear(config.width, keys, config.qkv_bias, rngs, dtype)
        self.v_proj = Linear(config.width, keys, config.qkv_bias, rngs, dtype)
        self.o_proj = Linear(queries, config.width, False, rngs, dtype)

    def __call__(self, x, rope, mask_BTS, lora, scale, layer_cache, slot, folded, packing, wanted):
        """x [B*T, D] -> ([B*T, D], or [M, D] of the M `wanted`; the layer's cache with T tokens written from `slot` on,
        or None); packed, B is 1 and T is Z."""
        c, (batch, steps) = self.config, rope[0].shape[:2]
        members = {"q_proj": self.q_proj, "k_proj": self.k_proj, "v_proj": self.v_proj}
        qkv = linears(x, members, lora, scale, folded).reshape(batch, steps, -1, c.head_dim)
        q, k, v = (folded_rotate_qkv if folded else rotate_qkv)(qkv, rope, (c.heads, c.kv_heads))
        q, k, v = checkpoint_name(q, "q"), checkpoint_name(k, "k"), checkpoint_name(v, "v")
        if packing is not None:
            q, k, v = (unpack(y[0], packing) for y in (q, k, v))
        y = attend_causally(q, k, v, packing and packing.lengths) if mask_BTS is None else None
        if mask_BTS is not None or layer_cache is not None:
            k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        if layer_cache is not None:
            keys, values = layer_cache
            k = jax.lax.dynamic_update_slice_in_dim(keys, k, slot, axis=2)
            v = jax.lax.dynamic_update_slice_in_dim(values, v, slot, axis=2)
        y = attend(q, k, v, mask_BTS) if y is None else y
        y = (y if packing is None else repack(y, packing)).reshape(batch * steps, c.heads * c.head_dim)
        y, scale = only(wanted, y, scale)
        y = linears(y, {"o_proj": self.o_proj}, lora, scale, folded)
        return y, (k, v) if layer_cache is not None else None


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.gate_proj = Linear(config.width, config.mlp, False, rngs, dtype)
        self.up_proj = Linear(config.width, config.mlp, False, rngs, dtype)
        self.down_proj = Linear(config.mlp, config.width, False, rngs, dtype)

    def __call__(self, x: jax.Array, lora: LayerLora | None, scale: jax.Array | None, folded: bool) -> jax.Array:
        members = {"gate_proj": self.gate_proj, "up_proj": self.up_proj}
        if folded:
            gate, up = widened_linears(x, *frozen(members, lora), scale)
        else:
            gate, up = (member(x, lora and lora[name], scale) for name, member in members.items())
        x = checkpoint_name(jax.nn.silu(checkpoint_name(gate, "gate")) * checkpoint_name(up, "up"), "swiglu")
        return linears(x, {"down_proj": self.down_proj}, lora, scale, folded)


class Block(nnx.Module):
    """One decoder layer, pre-norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.input_layernorm = RMSNorm(config.width, config.norm_eps, dtype)
        self.self_attn = Attention(config, rngs, dtype)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps, dtype)
        self.mlp = MLP(config, rngs, dtype)

    def __call__(self, x, rope, mask_BTS, lora, scale, layer_cache, slot, folded, packing, wanted):
        normed, x = self.input_layernorm.with_residual(x, folded)
        normed = checkpoint_name(normed, "normed")
        y, layer_cache = self.self_attn(normed, rope, mask_BTS, lora, scale, layer_cache, slot, folded, packing, wanted)
        x, scale = only(wanted, x, scale)
        x = checkpoint_name(x + y, "attended")
        normed, x = self.post_attention_layernorm.with_residual(x, folded)
        normed = checkpoint_name(normed, "normed")
        return x + self.mlp(normed, lora, scale, folded), layer_cache


class Qwen2(nnx.Module):
    """The decoder. Random weights unless they are loaded (model.weights)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32) -> None:
        scale = jnp.asarray(0.02, dtype)
        shape = (config.vocab, config.width)
        self.config = config
        self.embed_tokens = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * scale)
        self.layers = nnx.List([Block(config, rngs, dtype) for _ in range(config.layers)])
        self.norm = RMSNorm(config.width, config.norm_eps, dtype)
        self.lm_head = None if config.tied else nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * scale)

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        mask_BTS: jax.Array | None,
        lora: Lora | list[LayerLora] | None = None,
        scale_B: jax.Array | None = None,
        cache: Cache | None = None,
        slot: jax.Array | int = 0,
        remat: Remat = "none",
        folded: bool = False,
        packing: Packing | None = None,
        wanted: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Final hidden states [B, T, D], and the cache with these tokens written at `slot`...`slot + T - 1`.

        `mask_BTS` bool: may token t see slot s (without a cache S is T); None: every token sees those before it among
        these in its row, and nothing that the cache held. `lora` is one cell's, or a list of its layers;
        `scale_B` fp32 is alpha / rank for rows that use it and 0 for the untrained base. `remat`: what the backward
        pass computes again (model.remat). `folded`: adapters by model.folded, for many tokens on a GPU. `packing`
        (model.packing), without a mask and a cache: only its tokens are computed, and the states are [1, Z, D].
        `wanted` [M]: flat places of B * T (of Z), or that number for none, whose states alone are returned, [M, D];
        what the last layer makes of the others after attention, nobody sees, so it isn't made.
        """
        scale = None if lora is None else jnp.repeat(scale_B, tokens_BT.shape[1])
        folded = folded and lora is not None
        if packing is not None:
            assert mask_BTS is None and cache is None, "packed rows see what is before them in their row, and no cache"
            scale = None if scale is None else repack(scale.reshape(tokens_BT.shape), packing)
            tokens_BT, positions_BT = (repack(x, packing)[None] for x in (tokens_BT, positions_BT))
        batch, steps = tokens_BT.shape
        x = self.embed_tokens[...][tokens_BT.reshape(-1)]
        rope = rope_angles(positions_BT, self.config)
        parts = [nnx.split(block) for block in self.layers]
        graph, weights = parts[0][0], [weights for _, weights in parts]
        out: Cache = []
        if cache is None and len(parts) >= SCAN_FROM and jax.default_backend() != "gpu":
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)

            def layer(x, args):
                args = args[0], x, rope, mask_BTS, args[1], scale, None, 0, packing, None
                return _layer(graph, remat, True, folded, *args)[0], None

            (x,) = only(wanted, jax.lax.scan(layer, x, (stacked, lora))[0])  # a last layer apart would be compiled too
        else:
            adapters = by_layer(lora) if isinstance(lora, dict) else lora or [None] * len(parts)
            for index, adapter in enumerate(adapters):
                args = weights[index], x, rope, mask_BTS, adapter, scale, cache and cache[index], slot, packing
                last = index + 1 == len(parts)
                x, layer_cache = _layer(graph, remat, False, folded, *args, wanted if last else None)
                out.append(layer_cache)
        x = self.norm(x)
        x = x.reshape(batch, steps, self.config.width) if wanted is None else x
        return x, None if cache is None else out

    @property
    def head(self) -> jax.Array:
        """[V, D]: what makes logits."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] in fp32."""
        out = head_product(hidden.reshape(-1, self.config.width), self.head)
        return out.reshape(*hidden.shape[:-1], self.config.vocab)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))  # so that one layer is traced and lowered, and not all of them
def _layer(graph, remat: Remat, looped: bool, folded: bool, weights, x, rope, mask, adapter, scale, *others):
    """A layer of the graph `graph`, as `remat` says: (x [B*T, D], or [M, D] of the tokens wanted; the layer's cache or
    None)."""

    def apply(weights, x, rope, mask, adapter, scale, layer_cache, slot, packing, wanted):
        return nnx.merge(graph, weights)(x, rope, mask, adapter, scale, layer_cache, slot, folded, packing, wanted)

    return checkpointed(apply, remat, looped)(weights, x, rope, mask, adapter, scale, *others)


@jax.custom_vjp
def head_product(x: jax.Array, head: jax.Array) -> jax.Array:
    """[M, D] and [V, D] -> [M, V] in fp32. Its gradients are products in x's type too, summed in fp32: left to itself,
    JAX multiplies the fp32 gradient of the logits by an fp32 copy of the head."""
    return jax.lax.dot_general(x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _head_backward(kept, dy):
    (x, head), dy = kept, dy.astype(kept[0].dtype)
    return jnp.dot(dy, head), jax.lax.dot_general(dy, x, (((0,), (0,)), ((), ())))


head_product.defvjp(lambda x, head: (head_product(x, head), (x, head)), _head_backward)


def init_cache(config: ModelConfig, rows: int, slots: int, dtype: jnp.dtype) -> Cache:
    """An empty cache of `slots` slots for `rows` rows."""
    shape = (rows, config.kv_heads, slots, config.head_dim)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.layers)]
