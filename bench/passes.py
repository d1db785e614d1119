"""The forward passes of a step one by one, at the Qwen2.5-1.5B shape: gradient, prefill, scoring. Milliseconds.

Random weights and tokens, every row full, `--repeats` timed calls after one that compiles. `--plain` takes the linears
without model.folded, `--remat` what the gradient keeps (model.remat), to compare.

    python -m bench.passes                        # gradient of 16 x 1,024, prefill of 32 x 256, scoring 144 x 600
    python -m bench.passes --plain --remat all    # as it was
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from model import folded, weights
from model.config import QWEN2_5_1_5B
from model.lora import LoraConfig, init_lora
from rl.batch import Batch
from rl.memory import free_bytes, plan_memory
from rl.update import Learner, OptimConfig
from rollout.distribution import Sampling
from rollout.episode import RowId
from rollout.policy import Policy, Request, bucket_ladder
from rollout.profile import AnyIds
from rollout.scorer import Forced, score
from rollout.setup import stack

RNG = np.random.default_rng(0)


def batch_of(slots: int, rows: int, tokens: int, trained: int) -> Batch:
    """Full rows whose last `trained` tokens are trained."""
    shape = (slots, rows, tokens)
    mask = np.zeros(shape, bool)
    mask[..., -trained:] = True
    select = np.stack([np.flatnonzero(one.reshape(-1)) for one in mask]).astype(np.int32)
    ids = RNG.integers(0, QWEN2_5_1_5B.vocab, shape).astype(np.int32)
    floats = [np.full(shape, value, np.float32) for value in (0.5, -12.0, 1e-4)]
    return Batch(ids, mask, *floats, select, np.arange(slots, dtype=np.int32))


def timed(name: str, tokens: int, repeats: int, call: Callable[[], object]) -> None:
    """Print the median and range of `call`'s milliseconds."""
    started = time.perf_counter()
    jax.block_until_ready(call())
    first = time.perf_counter() - started
    took = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        took.append(1e3 * (time.perf_counter() - started))
    middle = statistics.median(took)
    print(
        f"{name}: {middle:.1f} ms [{min(took):.1f}, {max(took):.1f}], {1e3 * tokens / middle:,.0f} tokens/s; "
        f"first call {first:.0f} s",
        flush=True,
    )


def gradient(args: argparse.Namespace, graph, base, lora) -> None:
    rows, tokens = args.train
    wanted = None if args.remat == "auto" else args.remat
    plan = plan_memory(wanted, free_bytes(), QWEN2_5_1_5B, args.dtype, 32, args.cells, rows * tokens)
    learner = Learner(
        graph, base, 2.0, jnp.ones(QWEN2_5_1_5B.vocab, bool), OptimConfig(1e-4, 10), Sampling(0.9), plan.remat
    )
    batch = batch_of(args.cells, rows, tokens, min(args.trained, tokens - 1))
    held = [jax.tree.map(jnp.zeros_like, lora)]

    def call():
        held[0], stats = learner.accumulate(lora, held[0], batch)
        return stats

    print(f"the plan for this memory: {plan}; timed with {args.cells} slots")
    timed(f"gradient {args.cells} x {rows} x {tokens}, {plan.remat}", batch.tokens.size, args.repeats, call)
    compiled = next(iter(learner._executables.values()))
    if (memory := compiled.memory_analysis()) is not None:
        print(f"  temporary memory {memory.temp_size_in_bytes / 2**30:.1f} GiB")


def prefill(args: argparse.Namespace, policy: Policy) -> None:
    rows, tokens = args.prefill
    ids = RNG.integers(0, QWEN2_5_1_5B.vocab, (args.cells, rows, tokens))
    requests = [
        [Request("r", row.tolist(), 32, 1.0, RowId(x, 0, b, 0, 0)) for b, row in enumerate(cell)]
        for x, cell in enumerate(ids)
    ]
    took = []
    for _ in range(args.repeats + 1):
        before = policy.seconds["prefill"]
        policy.sample(requests, Sampling(0.9))
        took.append(1e3 * (policy.seconds["prefill"] - before))
    middle = statistics.median(took[1:])
    speed = 1e3 * ids.size / middle
    print(f"prefill {args.cells} x {rows} x {tokens}: {middle:.1f} ms [{min(took[1:]):.1f}], {speed:,.0f} tokens/s")


def scoring(args: argparse.Namespace, policy: Policy) -> None:
    rows, tokens = args.score
    lengths = RNG.integers(tokens // 2, tokens * 3 // 2, (args.cells, rows))
    ids = lambda count: RNG.integers(0, QWEN2_5_1_5B.vocab, count).tolist()  # noqa: E731
    rows_X = [[Forced("r", ids(n), ids(8), 1.0) for n in cell] for cell in lengths]
    timed(
        f"scoring {args.cells} x {rows} x about {tokens}",
        int(lengths.sum()) + 8 * args.cells * rows,
        args.repeats,
        lambda: score(policy, rows_X),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=1, help="adapters side by side, a slot each")
    parser.add_argument("--train", type=int, nargs=2, default=[16, 1024], metavar=("ROWS", "TOKENS"))
    parser.add_argument("--trained", type=int, default=384, help="trained tokens of a row")
    parser.add_argument("--prefill", type=int, nargs=2, default=[32, 256], metavar=("ROWS", "TOKENS"))
    parser.add_argument("--score", type=int, nargs=2, default=[144, 600], metavar=("ROWS", "TOKENS"))
    parser.add_argument("--remat", default="auto", choices=["auto", "none", "products", "all"])
    parser.add_argument("--plain", action="store_true", help="linears without model.folded")
    parser.add_argument("--only", choices=["gradient", "prefill", "score"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    folded.FOLD = not args.plain
    graph, base = weights.random_base(QWEN2_5_1_5B, 0, jnp.dtype(args.dtype))
    one = jax.jit(lambda key: init_lora(key, QWEN2_5_1_5B, LoraConfig()))
    lora = stack([one(jax.random.key(x)) for x in range(args.cells)])
    print(f"{jax.local_devices()[0].device_kind}, jax {jax.__version__}, {args.cells} cells", flush=True)
    if args.only in (None, "gradient"):
        gradient(args, graph, base, lora)
    buckets = tuple(sorted({args.prefill[1], *bucket_ladder(args.score[1] * 3 // 2, 256)}))
    policy = Policy(QWEN2_5_1_5B, graph, base, lora, 2.0, AnyIds(), buckets, (args.prefill[0],), force_length=True)
    if args.only in (None, "prefill"):
        prefill(args, policy)
    if args.only in (None, "score"):
        scoring(args, policy)


if __name__ == "__main__":
    main()
