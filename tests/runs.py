"""Small runs: the flags of one, and run directories written by hand, with numbers whose provenance can be seen."""

import json
import shutil
from pathlib import Path

from rollout.setup import BUILTIN

SIZES = "--train-problems 8 --heldout-problems 2 --problems-per-step 2 --episodes-per-problem 2 --rank 4 --show-every 0"
# One shape of each kind, so that little is compiled.
SHAPES = "--prompt-buckets 160 --train-buckets 192 --micro-rows 16"
SMALL = [*SIZES.split(), *SHAPES.split(), *"--arms channel_on channel_off --steps 2 --checkpoint-every 1".split()]
"""Flags of a run that takes seconds."""

EVALUATION_STEP = 1 << 30
CHAT_READS = ((), (0,), (0, 1), (0, 1, 2))
RING_READS = ((), (), (0, 1), (1, 0))
ESTIMATE = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 1200}


def chat(texts=("one", "two", "three", "four"), advantage=0.25, correct=(None, None, 1.0, 0.0), **changes):
    """A training episode of talk_to_solve, a piece a character; `changes` replace its fields."""
    said = [
        {
            "turn": u,
            "agent": "AB"[u % 2],
            "reads": list(CHAT_READS[u]),
            "note": False,
            "text": text,
            "tokens": [u] * len(text),
            "logp": [-0.5] * len(text),
            "prompt_tokens": 9,
            "finished": True,
            "trained": True,
            "correct": correct[u],
            "advantage": advantage,
            "pieces": list(text),
        }
        for u, text in enumerate(texts)
    ]
    episode = {
        "cell": "channel_on-grpo-17",
        "problem": "stories/1",
        "question": "How many pears?",
        "facts": ["Tom has 1.", "Ann has 2."],
        "gold": "3",
        "arm": "channel_on",
        "seed": 17,
        "step": 0,
        "episode": 0,
        "adapter": [1.0, 1.0],
        "agents": ["A", "B"],
        "parts": 2,
        "utterances": said,
    }
    return episode | changes


def board(notes, readers, **changes):
    """A training episode of a ring of two notes and two readers, with their grades."""
    episode = chat(correct=(*notes, *readers))
    for u, utterance in enumerate(episode["utterances"]):
        utterance |= {"note": u < 2, "reads": list(RING_READS[u]), "agent": f"copy {u % 2}"}
    return episode | {"agents": ["copy 0", "copy 1"], "cell": "readers_and_writers-readers_mean-17"} | changes


def evaluated(name="base-channel_on", **changes):
    """An episode of an evaluation: neither a cell nor pieces nor advantages."""
    episode = {"evaluation": name, **chat(**changes), "step": EVALUATION_STEP}
    del episode["cell"]
    for utterance in episode["utterances"]:
        del utterance["advantage"], utterance["pieces"]
    return episode


def results(**changes):
    """results.json of two arms and two seeds."""
    cells = [
        {
            "name": f"{arm}-grpo-{seed}",
            "arm": arm,
            "credit": "grpo",
            "seed": seed,
            "steps": 2,
            "adapter": f"adapters/{arm}-grpo-{seed}",
            "diagnostics": {"reward": {**ESTIMATE, "n": 2}, "credit/flat_notes_frac": None},
            "cost": {"episodes": 64, "sampled_tokens": 12345, "seconds": 7.5},
            "evaluations": {"trained": {"pass_at_1": {**ESTIMATE, "mean": seed / 100}, "sends_own": None}},
        }
        for arm in ("channel_on", "channel_off")
        for seed in (17, 18)
    ]
    against = {"delta": -0.31, "low": -0.41, "high": -0.21, "seeds": 2, "verdict": "moved the wrong way"}
    arms = [
        {"arm": "channel_on", "credit": "grpo", "seeds": [17, 18], "metrics": {"pass_at_1": ESTIMATE}},
        {
            "arm": "channel_off",
            "credit": "grpo",
            "seeds": [17, 18],
            "metrics": {"pass_at_1": ESTIMATE},
            "against_first": against,
        },
    ]
    whole = {
        "schema": 2,
        "task": "talk_to_solve",
        "base": {"channel_on": {"pass_at_1": {**ESTIMATE, "mean": 0.43}}},
        "cells": cells,
        "arms": arms,
        "sampling": {
            name: {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.0} for name in ("train", "eval")
        },
        "checks": {"pinned": {"verdict": "everything is pinned", "seeds": {"training": [17, 18], "data": 0}}},
        "data": {"fingerprint": "stories seed 0"},
        "versions": {"jax": "0.10.2"},
        "device": "1 x cpu",
        "seconds": {"collect": 12.0, "collect/decode": 7.0, "total": 20.0},
        "compiles": {"sample 4x32": 2.1},
    }
    return whole | changes


def write_run(path: Path, episodes=None, finished=True, steps=2, **changes) -> Path:
    """A run directory; `changes` replace keys of results.json, `finished` False leaves that file out."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"task": "talk_to_solve", "steps": 2, "problems_per_step": 8, "episodes_per_problem": 4, "evaluate": True}
    (path / "config.json").write_text(json.dumps(config | {"model": "builtin", "data": "stories"}))
    metrics = [
        {"step": step, "cell": f"{arm}-grpo-{seed}", "reward": 0.1 * step, "credit/flat_group_frac": 0.5}
        for step in range(steps)
        for arm in ("channel_on", "channel_off")
        for seed in (17, 18)
    ]
    timing = [{"step": step, "time/collect_s": 1.5, "time/collect/decode_s": 0.5} for step in range(steps)]
    episodes = [chat(), evaluated()] if episodes is None else episodes
    for name, lines in (("metrics", metrics), ("timing", timing), ("episodes", episodes)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (path / "results.json").write_text(json.dumps(results(**changes)))
    return path


def builtin_copy(tmp_path, **changes):
    """A copy of the built-in model, with fields of its config.json changed."""
    copy = tmp_path / "model"
    shutil.copytree(BUILTIN, copy)
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | changes))
    return copy
