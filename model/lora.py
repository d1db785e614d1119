"""LoRA adapters: low-rank updates of the seven linears of a layer, as a plain tree of arrays.

The adapter is an argument of the forward pass, not part of the module, so that many cells can share one frozen
base: a study's tree has a leading cell axis X and the forward is `vmap`ped over it. A row's scale multiplies its
update; 0 is the untrained base. No dropout, no bias, no rsLoRA or DoRA.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from model.config import ModelConfig

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Lora = dict[str, dict[str, jax.Array]]
"""lora[linear] = {"a": [N, in, R], "b": [N, R, out]}, fp32, N layers; a study's has X in front of each.

Layers are stacked, so that an adapter is 14 arrays however deep the model is: what an optimiser compiles, a checkpoint
writes and a training pass loops over.
"""

LayerLora = dict[str, dict[str, jax.Array]]
"""One layer's: {linear: {"a": [in, R], "b": [R, out]}}."""


@dataclass(frozen=True)
class LoraConfig:
    """`rank` R and `alpha`; an adapter's update is alpha / rank * A B."""

    rank: int = 32
    alpha: float = 64.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """{linear: (inputs, outputs)} of one layer."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "q_proj": (config.width, queries),
        "k_proj": (config.width, keys),
        "v_proj": (config.width, keys),
        "o_proj": (queries, config.width),
        "gate_proj": (config.width, config.mlp),
        "up_proj": (config.width, config.mlp),
        "down_proj": (config.mlp, config.width),
    }


def init_lora(key: jax.Array, config: ModelConfig, lora: LoraConfig) -> Lora:
    """A fresh adapter of one cell: A uniform in ±1/sqrt(inputs), B zero, so it changes nothing yet."""
    adapter = {}
    for index, (name, (inputs, outputs)) in enumerate(linear_shapes(config).items()):
        bound = inputs**-0.5
        key_of = jax.random.fold_in(key, index)
        a = jax.random.uniform(key_of, (config.layers, inputs, lora.rank), jnp.float32, -bound, bound)
        adapter[name] = {"a": a, "b": jnp.zeros((config.layers, lora.rank, outputs), jnp.float32)}
    return adapter


def by_layer(lora: Lora, axis: int = 0) -> list[LayerLora]:
    """The layers' adapters one by one; `axis` is where the layers are (1 behind a cell axis)."""
    layers = jax.tree.leaves(lora)[0].shape[axis]
    # Not by indexing, whose gradient is an array of all layers for each of them.
    parts = jax.tree.map(lambda leaf: [p.squeeze(axis) for p in jax.lax.split(leaf, (1,) * layers, axis)], lora)
    return jax.tree.transpose(jax.tree.structure(lora), jax.tree.structure([0] * layers), parts)


def stacked(layers: list[LayerLora]) -> Lora:
    """The inverse of `by_layer`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def lora_update(x: jax.Array, adapter: dict[str, jax.Array], scale: jax.Array) -> jax.Array:
    """The adapter's addition to a linear's output, [M, out] in x's type.

    `x` [M, in] in the compute type, `scale` [M] fp32: each row's own. The adapter is cast to the compute type, as
    the base is; the products accumulate in fp32.
    """
    low = jnp.dot(x, adapter["a"].astype(x.dtype), preferred_element_type=jnp.float32)
    low = checkpoint_name((low * scale[:, None]).astype(x.dtype), "low")
    return jnp.dot(low, adapter["b"].astype(x.dtype))


def parameters(config: ModelConfig, lora: LoraConfig) -> int:
    """How many numbers one adapter holds."""
    return config.layers * sum(lora.rank * (i + o) for i, o in linear_shapes(config).values())
