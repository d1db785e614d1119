"""Tiny stand-ins: a byte tokenizer, a two-layer model, a made-up task. No files, no weights to load."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.config import ModelConfig
from model.lora import LoraConfig, init_lora
from model.qwen2 import Qwen2
from rollout.policy import Policy
from tasks.base import Problem, Task, Turn

END, START, PAD = 256, 257, 258
CONFIG = ModelConfig(vocab=264, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=32)
LORA = LoraConfig(rank=2, alpha=4.0)


class ByteTokenizer:
    """One id a byte, 256 ends a turn, 257 starts one; ids from 259 on don't exist (the embedding has 264 rows)."""

    end_of_turn = (END,)
    base_vocab = 259

    def encode_chat(self, messages):
        out = []
        for message in messages:
            out += [START, *message["content"].encode(), END]
        return [*out, START]

    def decode(self, tokens):
        return bytes(t for t in np.asarray(tokens).tolist() if t < 256).decode(errors="replace")

    def sampleable(self, vocab):
        return np.arange(vocab) < self.base_vocab


def base(seed=0, config=CONFIG, dtype=jnp.float32):
    """(graph, weights) of a random model whose logits are far from flat."""
    model = Qwen2(config, nnx.Rngs(seed), dtype)
    model.embed_tokens[...] = model.embed_tokens[...] * jnp.asarray(40, dtype)
    return nnx.split(model)


def adapters(seeds, config=CONFIG, lora=LORA, b_size=0.3):
    """A tree [X, ...] of adapters that do something (B is not zero)."""
    cells = []
    for seed in seeds:
        tree = init_lora(jax.random.key(seed), config, lora)
        leaves, form = jax.tree.flatten(tree)
        keys = jax.random.split(jax.random.key(seed + 1000), len(leaves))
        noisy = [leaf + b_size * jax.random.normal(k, leaf.shape) for leaf, k in zip(leaves, keys, strict=True)]
        cells.append(jax.tree.unflatten(form, noisy))
    return jax.tree.map(lambda *x: jnp.stack(x), *cells)


def policy(lora, rows=(4,), prompt_buckets=(32, 64), **changes):
    graph, weights = base()
    return Policy(
        config=CONFIG,
        graph=graph,
        base=weights,
        lora=lora,
        lora_scale=LORA.scale,
        tokenizer=ByteTokenizer(),
        prompt_buckets=prompt_buckets,
        row_buckets=rows,
        **changes,
    )


def problem(name="p", answer="3"):
    return Problem(id=name, question="How many?", answer=answer, facts=("Tom has 1.", "Ann has 2."))


def chat_task(arm="on", cap=6):
    """A and B speak once each, then A answers; B reads A, and A reads both (arm "on") or only itself."""
    turns = (
        Turn(0, 0, cap),
        Turn(1, 1, cap, reads=(0,) if arm == "on" else ()),
        Turn(0, 2, cap + 2, reads=(0, 1) if arm == "on" else (0,), graded=True),
    )

    def render(problem, index, heard):
        words = "|".join(heard.get(v, "-") for v in range(index))
        return [{"role": "user", "content": f"{index}{problem.id}:{words}"}]

    return Task("tiny", arm, ("A", "B"), turns, render)
