"""`python -m bench.gradient`: seconds of one micro-batch's LoRA forward and backward, by the executable training uses.

Random weights and tokens; rows go through rl.batch.pack and rl.update.Learner.accumulate, so that what is timed is what
a step runs a micro-batch at a time. Replies are not sampled; clipping and AdamW aren't in it (see bench.full_shape).
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from model import folded
from model.remat import Remat
from rl.batch import Row, pack
from rl.memory import free_bytes, plan_memory
from rl.update import Learner, OptimConfig
from rollout.distribution import Sampling
from rollout.episode import Utterance
from rollout.policy import Policy
from rollout.profile import make_policy, shape_flags, spread


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
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))
    return 0 if 0 < found["grad_norm"] < float("inf") else 1


if __name__ == "__main__":
    sys.exit(main())
