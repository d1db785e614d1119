"""The profile's arithmetic: which kernels a trace holds, what kind they are, and the least a step must read."""

import argparse
import gzip
import json
from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from model.config import ModelConfig
from rollout import profile, trace
from rollout.distribution import Sampling
from tests import tiny


def test_kernels_are_those_of_the_devices_streams(tmp_path):
    """Two kernels on a stream; a host event, another device's non-stream row and a metadata row don't count."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Stream #7(Compute)"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 8, "args": {"name": "XLA Ops"}},
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": 7, "args": {"name": "Stream of nothing"}},
        {"ph": "X", "pid": 1, "tid": 7, "name": "gemm_1", "ts": 3000.0, "dur": 1500.0},
        {"ph": "X", "pid": 1, "tid": 7, "name": "fusion_2", "ts": 2000.0, "dur": 250.0},
        {"ph": "X", "pid": 1, "tid": 7, "name": "gemm_1", "ts": 1000.0, "dur": 500.0},
        {"ph": "X", "pid": 1, "tid": 8, "name": "gemm_1", "dur": 9999.0},
        {"ph": "X", "pid": 2, "tid": 7, "name": "host", "dur": 9999.0},
    ]
    file = tmp_path / "perfetto_trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    kernels = trace.read_kernels(file)
    assert kernels == [("gemm_1", 1.0, 0.5), ("fusion_2", 2.0, 0.25), ("gemm_1", 3.0, 1.5)]
    assert trace.by_name(kernels) == [("gemm_1", 2.0, 2), ("fusion_2", 0.25, 1)]


def test_when_the_device_was_idle():
    """a from 1 to 3 ms, b within it, c from 2.5 to 4 on another stream; nothing until d at 6; e 0.5 ms after d."""
    spans = {"a": (1, 2), "b": (1.5, 0.5), "c": (2.5, 1.5), "d": (6, 1), "e": (7.5, 0.5)}
    found = trace.busy([trace.Kernel(name, *span) for name, span in spans.items()])
    assert found == trace.Busy(7.0, 4.5, [trace.Gap(3.0, 2.0, "c", "d"), trace.Gap(6.0, 0.5, "d", "e")])


def test_kinds_by_name():
    kinds = {
        "gemm_fusion_dot_3": "product",
        "nvjet_sm90_tst": "product",
        "cudnn_flash_fwd": "attention",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>": "attention",
        "qkv__1": "product",
        "out": "product",
        "down": "product",
        "dropout_3": "elementwise, other",
        "wrapped_concatenate": "copy",
        "input_reduce_fusion": "reduction",
        "loop_add_fusion": "elementwise, other",
    }
    assert {name: trace.kind_of(name) for name in kinds} == kinds


def test_what_a_traced_call_is_made_of(capsys):
    """Kernels from 1 to 3, from 3.5 to 4.5 and from 4.5 to 5 ms: 3.5 of 4 ms, products 2.5 of them."""
    spread = {"median": 1.0, "range": [1.0, 1.0]}
    kernels = [trace.Kernel("qkv__1", 1.0, 2.0), trace.Kernel("attention", 3.5, 1.0), trace.Kernel("out", 4.5, 0.5)]
    measured = {"prefill_s": spread, "decode_ms_per_step": spread, "compiles_s": {}}
    found = defaultdict(float, measured | trace.summary(kernels))
    profile.show(found, kernels, Console())
    printed = capsys.readouterr().out
    assert "the device ran kernels 3.5 of the traced call's 4.0 ms (87.5%)" in printed
    assert "the longest gaps 0.50 ms" in printed
    rows = [line.strip("│ ").split() for line in printed.splitlines() if line.startswith("│")]
    product, attention = (next(row for row in rows if row[0] == name) for name in ("product", "attention"))
    assert product[2:8:2] == ["2.50", "2", "1250.0"] and attention[2:8:2] == ["1.00", "1", "1000.0"]


def test_the_least_a_step_reads_by_hand():
    """Weights once, two adapters, and per row (64 + 16) slots of keys and values in two layers, 2 bytes each."""
    sizes = ModelConfig(vocab=10, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp=16)
    args = argparse.Namespace(cells=2, rows=3, prompt_tokens=64, new_tokens=32, rank=1)
    # A and B of q (8+8), k and v (8+4 each), o (8+8), gate and up (8+16 each), down (16+8), in two layers.
    adapter = 2 * (16 + 12 + 12 + 16 + 24 + 24 + 24)
    cache = 2 * 3 * 80 * 2 * 1 * 4 * 2
    assert profile.floor_bytes(sizes, jnp.bfloat16, args) == 2 * (sizes.parameters + 2 * adapter + cache)


def test_log_probs_of_other_weights_are_found_out():
    """Scored with the adapters that sampled them, replies agree; with another's, they don't."""
    policy = tiny.policy(tiny.adapters([1, 2]), rows=(2,), force_length=True, prompt_buckets=(32,))
    args = argparse.Namespace(cells=2, rows=2, prompt_tokens=5, new_tokens=6)
    asked, sampling = profile.requests_of(policy, args), Sampling(0.8, top_p=0.9)
    replies = policy.sample(asked, sampling)
    assert profile.logp_gap(policy, asked, replies, sampling)["sampling_logp_gap_max"] < 1e-4
    policy.lora = jax.tree.map(lambda leaf: leaf[::-1], policy.lora)
    assert profile.logp_gap(policy, asked, replies, sampling)["sampling_logp_gap"] > 0.1


def test_a_trace_that_fails_loses_nothing_measured(tmp_path, monkeypatch):
    def fails(call, folder):
        raise RuntimeError("the profiler is in use")

    monkeypatch.setattr(profile, "make_policy", lambda args: None)
    monkeypatch.setattr(profile, "requests_of", lambda policy, args: [])
    monkeypatch.setattr(profile, "measure", lambda policy, args: {"decode_ms_per_step": 1.9})
    monkeypatch.setattr(profile, "trace_kernels", fails)
    with pytest.raises(RuntimeError, match="in use"):
        profile.main(["--out", str(tmp_path / "p.json")])
    assert json.loads((tmp_path / "p.json").read_text()) == {"decode_ms_per_step": 1.9, "kernels": []}


@pytest.mark.slow
def test_the_command_on_the_built_in_shape(tmp_path, capsys):
    sizes = "--rows 2 --prompt-tokens 30 --prompt-slots 64 --new-tokens 32 --repeats 2 --rank 2".split()
    assert profile.main([*sizes, "--out", str(tmp_path / "p.json")]) == 0
    printed = capsys.readouterr().out
    assert "ms a step" in printed and "compiled 1x2x64x32xFalse" in printed
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["decode_ms_per_step"]["range"][0] <= found["decode_ms_per_step"]["median"]
    runs = found["prefill_s"]["runs"]
    assert len(runs) == 2 and [min(runs), max(runs)] == found["prefill_s"]["range"]
    assert 0 < found["sampling_logp_gap"] <= found["sampling_logp_gap_max"] < 1e-4
    assert found["decode_tokens_per_s"] > 0 and found["bandwidth_gb_per_s"] > 0
    assert profile.main(["--model", str(tmp_path)]) == 2 and "error:" in capsys.readouterr().err
