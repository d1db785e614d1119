"""What a training pass keeps of its forward pass and what it computes again: by name, or by the memory there is.

`none` keeps all that the backward pass asks for; `all` keeps each layer's input and runs the layer again, a third more
work; `products` keeps what goes into large products and attention and what comes out, and computes what is elementwise
between them again, which costs no product. On a GPU it is also faster than `none` (bench/NOTES.md), since elementwise
work in a fused kernel is cheaper than writing its result to memory and reading it back.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from model.config import ModelConfig

Remat = Literal["none", "products", "all"]

SAVED = frozenset({"normed", "low", "q", "k", "v", "attended", "gate", "up", "swiglu"})
"""Names (`jax.ad_checkpoint.checkpoint_name`) that `products` keeps, beside each layer's input and cuDNN attention's
output."""


def checkpointed(layer: Callable, remat: Remat, looped: bool) -> Callable:
    """`layer` as `remat` says. `looped`: under a scan, whose two loops the compiler can't merge anyway."""
    if remat == "none":
        return layer
    return jax.checkpoint(layer, policy=_is_product if remat == "products" else None, prevent_cse=not looped)


def _is_product(primitive: Any, *_: Any, **params: Any) -> bool:
    # cuDNN's attention gives its softmax statistics too, which have no name outside; without them it would run again.
    return params.get("name") in SAVED or primitive.name.startswith("dot_product_attention_fwd")


def saved_bytes(config: ModelConfig, dtype: jnp.dtype, rank: int, remat: Remat) -> int:
    """Bytes that a training pass keeps of one token until its backward pass, over all layers.

    With s bytes a number, N layers, width D, Q = H C and K = kv_heads C, MLP width F, rank R:

    - `all`: N s D: each layer's input;
    - `products`: N (s (4 D + 2 Q + 2 K + 3 F + 7 R) + 4 H): the input, the state after attention, both normed, q, k, v,
      what attention gave and its statistics, gate, up, their SwiGLU, and x A of seven linears;
    - `none`: 1.85 times `products`: six arrays as wide as gate and fp32 copies of the norms' inputs.

    Against jax.vjp's residuals at Qwen2.5-1.5B in bf16 with cuDNN's attention: 3.86, 2.068 and 0.093 MB a token, here
    3.82, 2.064 and 0.086; what is missing is the final norm's. That the last layer makes less of tokens whose states
    nobody wants (Qwen2.hidden) is left out.
    """
    item, c = jnp.dtype(dtype).itemsize, config
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    if remat == "all":
        return c.layers * item * c.width
    products = c.layers * (item * (4 * c.width + 2 * (queries + keys) + 3 * c.mlp + 7 * rank) + 4 * c.heads)
    return products if remat == "products" else int(1.85 * products)
