"""A step at the Qwen2.5-1.5B shape: seconds by phase, tokens/s, peak memory, compilations and what was kept of them.

Random weights, real prompts, the real tokenizer, every reply forced to its cap, and grades drawn by a coin so that
hardly a group is flat; but rules that replay flat problems see all of them flat until their last round. So this is the
most work a step can be. It runs what `rl.train` runs (draw, credit, pack, update).

    python -m bench.full_shape --tokenizer ../shared/tokenizer/qwen2.5 --data ../shared/data/gsm8k --seeds 17 18 19
    python -m bench.full_shape --credit grpo reinforce_ada raft mixed_partners --seeds 17 18 19 ...
    python -m bench.full_shape --task board_writers --credit readers_mean evidence_gain --data ../shared/data/math ...
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from model.executables import keep_executables
from model.folded import pays
from rl.batch import length, pack
from rl.collect import credit_step, problems_at
from rl.config import Config
from rl.credit import Draw
from rl.draw import play_step
from rl.presets import PRESETS
from rl.rules import CREDITS
from rl.study import Study, prepare
from rollout.profile import save
from rollout.trace import summary, trace_kernels


class CoinGrader:
    """Grades by coin flips: random weights answer nothing right, and flat groups would be left out of the update.

    `replays_X`: cells whose rule replays. They are graded wrong throughout in each step's first `rounds` - 1 calls,
    which are its rounds of chats; the first call holds every cell's, as many pairs each.
    """

    def __init__(self, replays_X: list[bool], rounds: int) -> None:
        self.rng, self.replays_X, self.rounds = np.random.default_rng(0), replays_X, rounds
        self.calls = 0

    def ahead(self, pairs):
        """Nothing to begin early: a coin is quick."""

    def grade(self, pairs):
        grades = self.rng.integers(0, 2, len(pairs)).astype(float)
        if any(self.replays_X) and self.calls < self.rounds - 1:
            wrong = self.replays_X if self.calls == 0 else [True]  # later rounds are the replaying cells' alone
            grades[np.repeat(wrong, len(pairs) // len(wrong))] = 0.0
        self.calls += 1
        return grades.tolist()


def config_of(args: argparse.Namespace) -> Config:
    return dataclasses.replace(
        PRESETS[args.preset, args.task],
        model="random" if args.preset == "qwen2.5-1.5b" else "builtin",
        tokenizer=args.tokenizer,
        data=args.data,
        seeds=tuple(args.seeds),
        credit=tuple(args.credit),
        train_problems=args.problems,
        heldout_problems=1,
        max_prompt_tokens=args.max_prompt_tokens,
        micro_rows=args.micro_rows,
        prompt_buckets=tuple(args.prompt_buckets),
        train_buckets=tuple(args.train_buckets),
        force_length=True,
        **({"dtype": args.dtype} if args.dtype else {}),
    )


def one_step(study: Study, step: int) -> dict[str, float]:
    """Play, pack and update once; seconds by phase and what was processed."""
    c, policy, learner = study.config, study.policy, study.learner
    before = dict(policy.seconds), policy.sampled_tokens, policy.decode_steps, learner.seconds["compile"]
    problems_XP = [
        problems_at(study.problems.train, cell.seed, c.data_seed, step, c.problems_per_step) for cell in study.cells
    ]
    started = time.perf_counter()
    grader = CoinGrader([CREDITS[cell.credit].draw is Draw.REPLAY for cell in study.cells], c.ada_rounds)
    episodes_XPG = play_step(policy, grader, study.cells, problems_XP, step, study.settings)
    played = time.perf_counter()
    spent = {name: policy.seconds[name] - before[0][name] for name in policy.seconds}
    decode_steps = policy.decode_steps - before[2]
    collected_X = credit_step(policy, grader, study.cells, episodes_XPG, 0.0, study.settings)
    collected = time.perf_counter()
    rows_X = [got.rows for got in collected_X]
    plan = pack(rows_X, c.micro_rows, study.train_buckets, slots=study.slots, packed=pays())
    packed = time.perf_counter()
    study.state, stats = learner.update(study.state, plan.batches)
    study.policy.lora = study.state.lora
    updated = time.perf_counter()
    credit_compile = policy.seconds["compile"] - before[0]["compile"] - spent["compile"]
    update_compile = learner.seconds["compile"] - before[3]
    compile_s = spent["compile"] + credit_compile + update_compile
    return {
        "step": step,
        "prefill_s": spent["prefill"],
        "decode_s": spent["decode"],
        "decode_ms_per_step": 1e3 * spent["decode"] / max(decode_steps, 1),
        "text_s": played - started - sum(spent.values()),
        "credit_s": collected - played - credit_compile,
        "pack_s": packed - collected,
        "update_s": updated - packed - update_compile,
        "compile_s": compile_s,
        "step_s": updated - started - compile_s,
        "sampled_tokens": policy.sampled_tokens - before[1],
        "chats": sum(len(group) for episodes_PG in episodes_XPG for group in episodes_PG),
        "train_tokens": sum(
            length(row) for rows in rows_X for row in rows if row.utterance.trained and row.advantage != 0
        ),
        "computed_train_tokens": sum(b.computed_tokens for b in plan.batches),
        "live_rows": int(plan.live_rows_X.sum()),
        "sampling_logp_gap": float(stats.gap_mean.mean()),
        "sampling_logp_gap_max": float(stats.gap_max.max()),
        "grad_norm": float(stats.grad_norm.mean()),
        "ended_at": time.time(),  # of the wall clock, so that whoever started this process can count from there
    }


def traced_step(study: Study, step: int, folder: Path) -> dict[str, Any]:
    """One step under the profiler, which slows it a little: the share of it in which kernels ran, the gaps, the longest
    kernels as (name, ms in all, count), and the step's own seconds."""
    steps: list[dict[str, float]] = []
    kernels = trace_kernels(lambda: steps.append(one_step(study, step)), folder)
    if not kernels:
        print("the trace shows no device: it isn't a GPU's")
        return {}
    found = summary(kernels)
    span, ran = found["span_ms"], found["busy_ms"]
    print(
        f"traced step: {len(kernels):,} kernels ran {ran:,.0f} of {span:,.0f} ms ({ran / span:.1%}); "
        f"gaps under 0.1 ms {found['short_gaps_ms']:,.0f} ms in all; the longest:"
    )
    for gap in found["longest_gaps"][:12]:
        after, before = gap["after"][:48], gap["before"][:48]
        print(f"  {gap['duration']:7.2f} ms from {gap['start']:,.0f} ms on, after {after}, before {before}")
    return found | {"step": steps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen2.5-1.5b", choices=sorted({preset for preset, _ in PRESETS}))
    parser.add_argument("--task", default="talk_to_solve", choices=sorted({task for _, task in PRESETS}))
    parser.add_argument("--credit", nargs="*", default=[], help="credit rules; one cell for each rule and seed")
    parser.add_argument("--tokenizer", help="tokenizer directory or hub id")
    parser.add_argument("--data", default="openai/gsm8k", help="GSM8K directory or hub id")
    parser.add_argument("--seeds", type=int, nargs="+", default=[17], help="one cell each")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--problems", type=int, default=64, help="training problems loaded")
    parser.add_argument("--max-prompt-tokens", type=int, default=1536)
    parser.add_argument("--micro-rows", type=int, default=8)
    parser.add_argument("--prompt-buckets", type=int, nargs="*", default=[], help="see rl.config; default: a ladder")
    parser.add_argument("--train-buckets", type=int, nargs="*", default=[], help="likewise")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--compile-cache", type=Path, help="see rl.config")
    parser.add_argument("--trace", type=Path, help="trace one more step into this directory: when is the device idle?")
    parser.add_argument("--out", type=Path, help="write all numbers here as JSON")
    args = parser.parse_args()
    if args.compile_cache:
        keep_executables(args.compile_cache)
    started = time.perf_counter()
    study = prepare(config_of(args))
    setup = time.perf_counter() - started
    device = jax.local_devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, X = {len(study.cells)}, set-up {setup:.1f} s", flush=True)
    steps = []
    for step in range(args.steps):
        steps.append(one_step(study, step))
        print(
            " ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in steps[-1].items()), flush=True
        )
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
    last = steps[-1]
    print(
        f"peak memory {peak:.1f} GiB; sampled {last['sampled_tokens'] / last['step_s']:,.0f} tokens/s of a whole step"
    )
    report = {"device": device.device_kind, "jax": jax.__version__, "cells": len(study.cells), "setup_s": setup}
    report |= {"steps": steps, "peak_gib": peak}
    for what in ("compiles", "loads"):
        of_policy = {"x".join(map(str, name)): s for name, s in getattr(study.policy, what).items()}
        report[what] = seconds = of_policy | getattr(study.learner, what)
        print(
            f"{len(seconds)} {what}, {sum(seconds.values()):.1f} s: "
            + "; ".join(f"{name} {s:.1f}" for name, s in seconds.items())
        )
    save(report, args.out)  # at once: a trace may fail
    if args.trace:
        report["traced"] = traced_step(study, args.steps, args.trace)
        save(report, args.out)


if __name__ == "__main__":
    main()
