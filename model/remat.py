"""What a training pass keeps of its forward pass and what it computes again: by name, or by the memory there is.

`none` keeps all that the backward pass asks for; `all` keeps each layer's input and runs the layer again, a third more
work; `products` keeps what came out of large products and of attention, and computes norms, RoPE's and SwiGLU's
elementwise parts again, which costs no product. On an accelerator it should also be faster than `none`, since
elementwise work in a fused kernel is cheaper than writing its result to memory and reading it back (not measured).
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from model.config import ModelConfig

Remat = Literal["none", "products", "all"]

SAVED = frozenset({"low", "q", "k", "v", "attended", "gate", "up"})
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
    - `products`: N (s (2 D + 2 Q + 2 K + 2 F + 7 R) + 4 H): the input, the state after attention, q, k, v, what
      attention gave and its statistics, gate, up, and x A of seven linears;
    - `none`: 2.75 times `products`: six arrays as wide as gate and fp32 copies of the norms' inputs.

    Against jax.vjp's residuals at Qwen2.5-1.5B in bf16 with cuDNN's attention: 3.83, 1.397 and 0.093 MB a token, here
    3.82, 1.390 and 0.086; what is missing is the final norm's.
    """
    item, c = jnp.dtype(dtype).itemsize, config
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    if remat == "all":
        return c.layers * item * c.width
    products = c.layers * (item * 2 * (c.width + queries + keys + c.mlp) + item * 7 * rank + 4 * c.heads)
    return products if remat == "products" else int(2.75 * products)
