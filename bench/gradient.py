"""`python -m bench.gradient`: seconds of one micro-batch's LoRA forward and backward, by the executable training uses.

Random weights and tokens; rows go through rl.batch.pack and rl.update.Learner.accumulate, so that what is timed is what
a step runs a micro-batch at a time; all rows are equally long, so they aren't packed. Replies are not sampled; clipping
and AdamW aren't in it (see bench.full_shape). `check_gradient` is for bench.kernels --check.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model import folded
from model.config import QWEN2_5_1_5B, ModelConfig
from model.lora import LoraConfig
from model.qwen2 import Qwen2
from model.remat import Remat
from rl.batch import Row, pack
from rl.memory import free_bytes, plan_memory
from rl.update import Learner, OptimConfig
from rollout.distribution import Sampling
from rollout.episode import Utterance
from rollout.policy import Policy
from rollout.profile import busy_lora, make_policy, save, shape_flags, spread
from rollout.setup import stack

CHECKED = replace(QWEN2_5_1_5B, layers=3, vocab=8192)
"""The shape whose gradients are compared: wide as the real one, and not deep."""


def rows_of(args: argparse.Namespace, vocab: int) -> list[Row]:
    """Rows of the asked lengths, half of them paid +1 and half -1, drawn as if all ids were equally likely."""
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, vocab, n).astype(np.int32)  # noqa: E731 - used twice in one line
    logp = np.full(args.new_tokens, -np.log(vocab), np.float32)
    return [
        Row(
            Utterance(0, draw(args.prompt_tokens), draw(args.new_tokens), logp, "", False, True),
            1.0 - 2.0 * (b % 2),
            args.new_tokens,
        )
        for b in range(args.rows)
    ]


def measure(policy: Policy, args: argparse.Namespace) -> dict:
    """Seconds of `repeats` calls after one that compiles, s; peak memory, GiB; the gradient's norm."""
    width = args.prompt_tokens + args.new_tokens
    dtype = jax.tree.leaves(policy.base)[0].dtype.name
    plan = plan_memory(args.remat, free_bytes(), policy.config, dtype, args.rank, args.cells, args.rows * width)
    learner = Learner(
        graph=policy.graph,
        base=policy.base,
        lora_scale=policy.lora_scale,
        allowed_V=policy.allowed_V,
        config=OptimConfig(lr=1e-4, steps=80),
        sampling=Sampling(args.temperature),
        remat=plan.remat,
    )
    rows_X = [rows_of(args, policy.config.vocab) for _ in range(args.cells)]
    (batch,) = pack(rows_X, args.rows, (width,)).batches
    grads, _ = learner.accumulate(policy.lora, jax.tree.map(jnp.zeros_like, policy.lora), batch)
    norm = float(np.sqrt(sum(float(np.vdot(g, g)) for g in jax.tree.leaves(jax.device_get(grads)))))
    seconds = []
    for _ in range(args.repeats):
        jax.block_until_ready(grads)
        started = time.perf_counter()
        grads, stats = learner.accumulate(policy.lora, grads, batch)
        jax.block_until_ready((grads, stats))
        seconds.append(time.perf_counter() - started)
    device = jax.local_devices()[0]
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "remat": plan.remat,
        "rows": args.rows,
        "tokens": width,
        "gradient_s": spread(seconds),
        "grad_norm": norm,
        "peak_gib": (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30,
        "compiles_s": learner.compiles,
    }


def check_gradient(
    config: ModelConfig, dtype: Any, cells: int = 2, rank: int = 32, longest: int = 1024
) -> list[dict[str, Any]]:
    """Gradients of rows of unlike lengths up to `longest`, padded and packed, against fp32's on the same weights: a
    record each, as bench.kernels'. The error, in norm, may be half again that of plain linears and padded rows in
    `dtype`."""
    rng = np.random.default_rng(0)
    weights = nnx.state(Qwen2(config, nnx.Rngs(0), dtype))
    graph = nnx.graphdef(nnx.eval_shape(lambda: Qwen2(config, nnx.Rngs(0))))
    lora = stack([busy_lora(seed, config, LoraConfig(rank, 2.0 * rank)) for seed in range(cells)])
    lengths = argparse.Namespace(rows=1, prompt_tokens=0, new_tokens=0)
    rows_X = [[] for _ in range(cells)]
    for rows in rows_X:
        for b in range(12):
            lengths.prompt_tokens = int(rng.integers(5, longest * 2 // 3))
            lengths.new_tokens = int(rng.integers(5, longest // 3))
            (row,) = rows_of(lengths, config.vocab)
            rows.append(row._replace(advantage=1.0 - 2.0 * (b % 2)))

    def gradient(dtype: Any, fold: bool, packed: bool) -> np.ndarray:
        folded.FOLD, before = fold, folded.FOLD
        try:
            learner = Learner(
                graph=graph,
                base=jax.tree.map(lambda leaf: leaf.astype(dtype), weights),
                lora_scale=2.0,
                allowed_V=jnp.ones(config.vocab, bool),
                config=OptimConfig(lr=1e-4, steps=80),
                sampling=Sampling(20.0),  # so hot that all tokens are about as likely as `rows_of` says they were
                remat="products",
            )
            grads = jax.tree.map(jnp.zeros_like, lora)
            for batch in pack(rows_X, 4, (longest // 2, longest), packed=packed).batches:
                grads, _ = learner.accumulate(lora, grads, batch)
            return np.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(jax.device_get(grads))])
        finally:
            folded.FOLD = before

    with jax.default_matmul_precision("highest"):
        exact = gradient(jnp.float32, False, False)
    error = lambda got: float(np.linalg.norm(got - exact) / np.linalg.norm(exact))  # noqa: E731 - used twice
    allowed, found = 1.5 * error(gradient(dtype, False, False)) + 2e-5, []
    for name, packed in (("padded", False), ("packed", True)):
        label = f"gradient of {name} rows: {cells} cells, width {config.width}, {jnp.dtype(dtype).name}"
        off = error(gradient(dtype, True, packed))
        found.append({"name": label, "max_err": off, "allowed": allowed, "ok": off <= allowed})
    return found


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, or 1 where the gradient is zero or not finite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape_flags(parser)
    parser.add_argument("--remat", choices=get_args(Remat), help="by default what the memory allows, as in training")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    args = parser.parse_args(argv)
    folded.FOLD = not args.plain
    found = measure(make_policy(args), args)
    print(json.dumps(found))
    save(found, args.out)
    return 0 if 0 < found["grad_norm"] < float("inf") else 1


if __name__ == "__main__":
    sys.exit(main())
