"""`python -m rollout.profile`: where a sampling call's time goes, and how near it is to what the memory allows.

Prefill and decode of forced length on given weights or random ones: seconds, tokens a second, the share of the measured
memory bandwidth that a decode step reaches, compilations and their seconds by bucket, how far sampled log-probs lie
from the training forward's, and the device's kernels by kind from a trace that Perfetto and TensorBoard open. Text,
grading and training are not in it (bench.full_shape has them).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from model import weights
from model.config import QWEN2_5_1_5B, ModelConfig
from model.lora import LINEARS, LoraConfig, init_lora, parameters
from rollout.distribution import Sampling
from rollout.episode import RowId
from rollout.policy import Policy, Reply, Request
from rollout.scorer import Forced, score
from rollout.setup import BUILTIN, BUILTINS, stack
from rollout.trace import Kernel, kind_of, summary, trace_kernels

CHECKED_ROWS = 8
"""Rows of each cell whose log-probs are compared with the training forward's."""


class AnyIds:
    """Stands for a tokenizer: every id may be sampled, and no id ends a turn."""

    end_of_turn = ()

    def encode_chats(self, chats: Sequence[list[dict[str, str]]]) -> list[list[int]]:
        raise NotImplementedError("prompts are made of random ids")

    def decode_all(self, replies: Sequence[Sequence[int]]) -> list[str]:
        return [""] * len(replies)

    def sampleable(self, vocab: int) -> np.ndarray:
        return np.ones(vocab, bool)


def busy_lora(seed: int, sizes: ModelConfig, config: LoraConfig) -> Any:
    """An adapter whose B isn't zero, as after training: nothing can be left out, and a wrong product shows."""

    def one(key: jax.Array) -> Any:
        keys = dict(zip(LINEARS, jax.random.split(key, len(LINEARS))))
        return {
            name: {"a": pair["a"], "b": 0.02 * jax.random.normal(keys[name], pair["b"].shape, jnp.float32)}
            for name, pair in init_lora(key, sizes, config).items()
        }

    return jax.jit(one)(jax.random.key(seed))


def make_policy(args: argparse.Namespace) -> Policy:
    """A policy of the asked shape with adapters that do something."""
    dtype = jnp.dtype(args.dtype or ("bfloat16" if args.preset == "qwen2.5-1.5b" else "float32"))
    if args.model:
        sizes, graph, base = weights.load(BUILTINS.get(args.model) or weights.resolve(args.model), dtype)
    else:
        sizes = QWEN2_5_1_5B if args.preset == "qwen2.5-1.5b" else weights.load_config(BUILTIN)
        graph, base = weights.random_base(sizes, 0, dtype)
    lora_config = LoraConfig(args.rank, 2.0 * args.rank)
    lora = stack([busy_lora(x, sizes, lora_config) for x in range(args.cells)])
    prompt_slots = args.prompt_slots or -(-args.prompt_tokens // 32) * 32
    return Policy(
        sizes,
        graph,
        base,
        lora,
        lora_config.scale,
        AnyIds(),
        (prompt_slots,),
        (args.rows,),
        force_length=True,
        fused=False if args.plain else None,
    )


def requests_of(policy: Policy, args: argparse.Namespace) -> list[list[Request]]:
    """Random prompts of the asked length."""
    rng = np.random.default_rng(0)
    return [
        [
            Request(
                f"row {b}",
                rng.integers(0, policy.config.vocab, args.prompt_tokens).tolist(),
                args.new_tokens,
                1.0,
                RowId(x, 0, b, 0, 0),
            )
            for b in range(args.rows)
        ]
        for x in range(args.cells)
    ]


def bandwidth() -> float:
    """Bytes a second of a large copy on this device, counted in and out; the best of five rounds of ten copies."""
    size, copies = (1 << 30 if jax.default_backend() == "gpu" else 1 << 26) // 4, 10
    x = jax.random.normal(jax.random.key(0), (size,))
    copy = jax.jit(lambda x: x + jnp.float32(1), donate_argnums=0)
    x = copy(x).block_until_ready()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(copies):  # queued, so that waiting for each doesn't count
            x = copy(x)
        x.block_until_ready()
        times.append((time.perf_counter() - started) / copies)
    return 2 * 4 * size / min(times)


def floor_bytes(sizes: ModelConfig, dtype: jnp.dtype, args: argparse.Namespace) -> float:
    """The fewest bytes of one decode step: every weight and adapter once, and the live part of the cache."""
    item = jnp.dtype(dtype).itemsize
    adapters = args.cells * parameters(sizes, LoraConfig(args.rank, 1.0)) * item
    slots = args.prompt_tokens + args.new_tokens / 2
    cache = args.cells * args.rows * slots * 2 * sizes.kv_heads * sizes.head_dim * sizes.layers * item
    return sizes.parameters * item + adapters + cache


def measure(policy: Policy, args: argparse.Namespace) -> dict[str, Any]:
    """Medians, ranges and all values of `repeats` calls, after one that compiles."""
    asked, sampling = requests_of(policy, args), Sampling(args.temperature, args.top_p)
    replies = policy.sample(asked, sampling)
    prefill, decode = [], []
    for _ in range(args.repeats):
        before = dict(policy.seconds)
        steps = policy.decode_steps
        policy.sample(asked, sampling)
        prefill.append(policy.seconds["prefill"] - before["prefill"])
        decode.append(1e3 * (policy.seconds["decode"] - before["decode"]) / (policy.decode_steps - steps))
    speed = bandwidth()
    dtype = jax.tree.leaves(policy.base)[0].dtype
    floor_ms = 1e3 * floor_bytes(policy.config, dtype, args) / speed
    rows = args.cells * args.rows
    step_ms = statistics.median(decode)
    device = jax.local_devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "cells": args.cells,
        "rows": args.rows,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "top_p": args.top_p,
        "prefill_s": spread(prefill),
        "prefill_tokens_per_s": rows * args.prompt_tokens / statistics.median(prefill),
        "decode_ms_per_step": spread(decode),
        "decode_tokens_per_s": rows / step_ms * 1e3,
        "bandwidth_gb_per_s": speed / 1e9,
        "decode_floor_ms": floor_ms,
        "bandwidth_share": floor_ms / step_ms,
        "peak_gib": peak,  # read before the comparison, which needs room of its own
        **logp_gap(policy, asked, replies, sampling),
        "compiles_s": {"x".join(map(str, key)): seconds for key, seconds in policy.compiles.items()},
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """How measured values are reported."""
    return {"median": statistics.median(values), "range": [min(values), max(values)], "runs": list(values)}


def logp_gap(
    policy: Policy, asked_X: Sequence[Sequence[Request]], replies_X: Sequence[Sequence[Reply]], sampling: Sampling
) -> dict[str, float]:
    """Mean and largest |log-prob in the training forward - log-prob when sampled|, nats, over CHECKED_ROWS a cell."""
    pairs_X = [list(zip(asked, said))[:CHECKED_ROWS] for asked, said in zip(asked_X, replies_X)]
    forced_X = [[Forced(q.name, q.prompt_tokens, r.tokens, q.scale) for q, r in pairs] for pairs in pairs_X]
    scored = [logp_T for logps in score(policy, forced_X, sampling) for logp_T in logps]
    drawn = [r.logp for pairs in pairs_X for _, r in pairs]
    gap = np.abs(np.concatenate(scored) - np.concatenate(drawn))
    return {"sampling_logp_gap": float(gap.mean()), "sampling_logp_gap_max": float(gap.max())}


def show(found: dict[str, Any], kernels: list[Kernel], console: Console) -> None:
    """Everything in a few tables; `kernels` of one traced call as they began, whose `summary` is in `found`."""
    decode, prefill = found["decode_ms_per_step"], found["prefill_s"]
    low, high = decode["range"]
    console.print(
        f"{found['device']}, jax {found['jax']}: {found['cells']} cells x {found['rows']} rows, "
        f"{found['prompt_tokens']} + {found['new_tokens']} tokens, top_p {found['top_p']}\n"
        f"prefill {prefill['median']:.4f} s [{prefill['range'][0]:.4f}, {prefill['range'][1]:.4f}], "
        f"{found['prefill_tokens_per_s']:,.0f} tokens/s\n"
        f"decode  {decode['median']:.3f} ms a step [{low:.3f}, {high:.3f}], "
        f"{found['decode_tokens_per_s']:,.0f} tokens/s\n"
        f"floor   {found['decode_floor_ms']:.3f} ms a step at {found['bandwidth_gb_per_s']:,.0f} GB/s: decode reaches "
        f"{found['bandwidth_share']:.0%} of the memory's speed\n"
        f"log-probs sampled against the training forward's: {found['sampling_logp_gap']:.4f} nats apart, at most "
        f"{found['sampling_logp_gap_max']:.4f}\n"
        f"compiled {', '.join(f'{k} in {s:.1f} s' for k, s in found['compiles_s'].items())}",
        markup=False,
        soft_wrap=True,
    )
    if not kernels:
        console.print("no kernels in the trace: this device isn't traced by kernel")
        return
    span, ran = found["span_ms"], found["busy_ms"]
    gaps = ", ".join(f"{gap['duration']:.2f}" for gap in found["longest_gaps"][:5])
    console.print(
        f"the device ran kernels {ran:,.1f} of the traced call's {span:,.1f} ms ({ran / span:.1%}), which the profiler "
        f"slows; the longest gaps {gaps} ms",
        markup=False,
        soft_wrap=True,
    )
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for kernel in kernels:
        kind = kinds[kind_of(kernel.name)]
        kind[0] += kernel.duration
        kind[1] += 1
    for title, rows in (
        ("kernels by kind, one call", [(k, ms, n) for k, (ms, n) in sorted(kinds.items(), key=lambda i: -i[1][0])]),
        ("longest kernels", found["kernels"][:12]),
    ):
        table = Table(title=title, title_justify="left")
        for column in ("", "ms", "count", "us each"):
            table.add_column(column, justify="left" if not column else "right", overflow="fold")
        for name, ms, count in rows:
            table.add_row(name[:60], f"{ms:.2f}", f"{int(count):,}", f"{1e3 * ms / count:.1f}")
        console.print(table)


def save(report: dict[str, Any], out: Path | None) -> None:
    """The report as JSON, where it was asked for (bench.gradient and bench.full_shape too)."""
    if out:
        out.write_text(json.dumps(report, indent=1))


def shape_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `make_policy`: which model, and how many rows of what length (bench.gradient takes them too)."""
    parser.add_argument("--preset", default="tiny", choices=["tiny", "qwen2.5-1.5b"], help="shape of random weights")
    parser.add_argument("--model", help="real weights instead: builtin, builtin-hard, a directory or a hub id")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="by default bfloat16 at the 1.5B shape")
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank")
    parser.add_argument("--cells", type=int, default=1, help="adapters side by side")
    parser.add_argument("--rows", type=int, default=32, help="rows of each cell")
    parser.add_argument("--prompt-tokens", type=int, default=640)
    parser.add_argument("--prompt-slots", type=int, help="bucket the prompts are padded to; default: the next of 32")
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--plain", action="store_true", help="decode by the plain forward on a GPU too")


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, or 2 for a user's error."""
    parser = argparse.ArgumentParser(
        prog="python -m rollout.profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shape_flags(parser)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--trace", type=Path, help="keep the trace in this directory")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    console = Console(highlight=False)
    try:
        policy = make_policy(args)
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    found = measure(policy, args) | {"kernels": []}
    save(found, args.out)  # at once: a trace may fail
    kernels: list[Kernel] = []
    if not args.no_trace:
        with tempfile.TemporaryDirectory() as scratch:
            asked, sampling = requests_of(policy, args), Sampling(args.temperature, args.top_p)
            kernels = trace_kernels(lambda: policy.sample(asked, sampling), args.trace or Path(scratch))
    if kernels:
        found |= summary(kernels)
    show(found, kernels, console)
    save(found, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
