"""`python -m bench.kernels`: the decode kernels against the plain model in fp32, and where a step's microseconds go.

--check prints a JSON line a comparison: each part of a layer, at shapes that don't fill their tiles, against
model.qwen2 in fp32 on the same weights, and a training pass's gradients likewise (bench.gradient); the error allowed is
the one that plain JAX makes in the same compute type, and half again. --tune times every kernel of a decode step from a
trace, for the tiles in use or those of a JSON file.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.gradient import CHECKED, check_gradient
from model import fused
from model.attention import attend as plain_attend
from model.config import QWEN2_5_1_5B, ModelConfig
from model.lora import LoraConfig, init_lora
from model.programs import LARGE_PRODUCTS
from model.qwen2 import Qwen2
from model.rope import rope_angles, rotate
from model.tiles import FEW, MANY, MOST_FEW, Tile, Tiles
from rollout.trace import by_name, trace_kernels

ODD = ModelConfig(vocab=512, width=384, layers=2, heads=6, kv_heads=2, head_dim=64, mlp=768, qkv_bias=True)
"""Three query heads a key head, three tiles of everything."""


class Case(NamedTuple):
    """Random weights (nnx state), adapters and inputs of one decode step."""

    weights: Any
    lora: Any
    scale: jax.Array
    x: jax.Array
    cache: list
    pad: jax.Array
    slot: jax.Array


def make_case(config: ModelConfig, cells: int, batch: int, slots: int, dtype, rank: int = 32) -> Case:
    """`slots` of cache of which the token's is the last but three; every third row is the untrained base's."""
    keys = iter(jax.random.split(jax.random.key(0), 8 + 2 * config.layers))
    one = [init_lora(k, config, LoraConfig(rank, 1.0)) for k in jax.random.split(next(keys), cells)]
    lora = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one)
    key = next(keys)
    for name, pair in lora.items():
        b = 0.3 * jax.random.normal(jax.random.fold_in(key, len(name)), pair["b"].shape)
        lora[name] = {"a": pair["a"].astype(dtype), "b": (b * rank**-0.5).astype(dtype)}
    scale = jnp.where(jnp.arange(cells * batch) % 3 == 2, 0.0, 2.0).reshape(cells, batch)
    shape = (cells * batch, config.kv_heads, slots, config.head_dim)
    cache = [tuple(jax.random.normal(next(keys), shape, dtype) for _ in range(2)) for _ in range(config.layers)]
    x = jax.random.normal(next(keys), (cells, batch, config.width), dtype)
    pad = jax.random.randint(next(keys), (cells, batch), 0, slots // 2)
    weights = nnx.state(Qwen2(config, nnx.Rngs(0), dtype))
    return Case(weights, lora, scale, x, cache, pad, jnp.int32(slots - 4))


def model_of(config: ModelConfig, weights: Any) -> Qwen2:
    """The module around `weights`."""
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Qwen2(config, nnx.Rngs(0)))), weights)


def plain_parts(c: ModelConfig, dtype, case: Case, qkv: jax.Array) -> dict[str, jax.Array]:
    """Each part of the first layer by model.qwen2 in `dtype`: {name: [X B, ...]}."""
    block = model_of(c, jax.tree.map(lambda leaf: leaf.astype(dtype), case.weights)).layers[0]
    rope = rope_angles((case.slot - case.pad).reshape(-1, 1), c)
    out = defaultdict(list)
    for x in range(case.scale.shape[0]):
        adapter = jax.tree.map(lambda leaf, x=x: leaf[x, 0].astype(dtype), case.lora)
        rows = slice(x * case.scale.shape[1], (x + 1) * case.scale.shape[1])
        h, scale = case.x[x].astype(dtype), case.scale[x]
        normed = block.input_layernorm(h)
        attn = block.self_attn
        pairs = [(attn.q_proj, "q_proj"), (attn.k_proj, "k_proj"), (attn.v_proj, "v_proj")]
        out["qkv"].append(jnp.concatenate([linear(normed, adapter[name], scale) for linear, name in pairs], axis=1))
        heads = qkv[rows].astype(dtype).reshape(-1, 1, c.heads + 2 * c.kv_heads, c.head_dim)
        cos_sin = tuple(r[rows] for r in rope)
        q = rotate(heads[:, :, : c.heads], cos_sin)
        k = rotate(heads[:, :, c.heads : c.heads + c.kv_heads], cos_sin).transpose(0, 2, 1, 3)
        v = heads[:, :, c.heads + c.kv_heads :].transpose(0, 2, 1, 3)
        keys, values = (leaf[rows].astype(dtype) for leaf in case.cache[0])
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k, case.slot, axis=2)
        values = jax.lax.dynamic_update_slice_in_dim(values, v, case.slot, axis=2)
        at = jnp.arange(keys.shape[2])[None]
        mask = (at >= case.pad[x][:, None]) & (at <= case.slot)
        seen = plain_attend(q, keys, values, mask[:, None]).reshape(-1, c.heads * c.head_dim)
        out["attention"].append(h + attn.o_proj(seen, adapter["o_proj"], scale))
        out["squares"].append(jnp.square(out["attention"][-1].astype(jnp.float32)).sum(axis=1, keepdims=True))
        out["cache"].append(jnp.stack([keys, values]).reshape(2, keys.shape[0], -1))
        out["mlp"].append(h + block.mlp(block.post_attention_layernorm(h), adapter, scale, False))
    return {name: jnp.concatenate(parts, axis=1 if name == "cache" else 0) for name, parts in out.items()}


def kernel_parts(c: ModelConfig, case: Case) -> dict[str, jax.Array]:
    """The same by the kernels, and the queries, keys and values that both sides attend with."""
    cells, batch = case.scale.shape
    plan = fused.plan_of(c, cells, batch, case.lora["q_proj"]["a"].shape[-1])
    laid_out = fused.fuse(model_of(c, case.weights), case.lora, case.scale, plan)
    layer, rows = laid_out.layers[0], plan.rows
    padding = ((0, rows.slots - cells), (0, rows.padded - batch), (0, 0))
    x = jnp.pad(case.x, padding).reshape(rows.count, c.width)
    rope = tuple(r.reshape(-1, c.head_dim // 2) for r in rope_angles((case.slot - case.pad).reshape(-1, 1), c))

    def real(y):
        return y.reshape(rows.slots, rows.padded, -1)[:cells, :batch].reshape(cells * batch, -1)

    squares = jnp.square(x.astype(jnp.float32)).sum(axis=1)[None]
    qkv = fused.project(c, plan, layer, x, squares)
    first, at = case.pad.reshape(-1), case.slot.reshape(1)
    (attended, after), cache = fused.attend(c, plan, layer, x, qkv, rope, first, at, case.cache[0])
    mlp, _ = fused.feed_forward(c, plan, layer, x, squares)
    flat = jnp.stack(cache).reshape(2, cells * batch, -1)
    sums = real(after.sum(axis=0)[:, None])
    qkv = real(qkv)[:, : (c.heads + 2 * c.kv_heads) * c.head_dim]
    return {"qkv": qkv, "attention": real(attended), "squares": sums, "mlp": real(mlp), "cache": flat}


def compare(config: ModelConfig, cells: int, batch: int, slots: int, dtype, rank: int = 32) -> list[dict[str, Any]]:
    """A record a part: {"name", "max_err", "allowed", "ok"}; errors against fp32, in units of the fp32 result's rms."""
    case = make_case(config, cells, batch, slots, dtype, rank)
    options = LARGE_PRODUCTS if jax.default_backend() == "gpu" else None
    got = jax.jit(kernel_parts, static_argnums=0, compiler_options=options)(config, case)
    plain_in = jax.jit(plain_parts, static_argnums=(0, 1), compiler_options=options)
    with jax.default_matmul_precision("highest"):
        exact = plain_in(config, jnp.float32, case, got["qkv"])
    plain = plain_in(config, dtype, case, got["qkv"])
    found = []
    for name, want in exact.items():
        size = float(jnp.sqrt(jnp.mean(want**2)))
        error = float(jnp.abs(got[name].astype(jnp.float32) - want).max()) / size
        allowed = 1.5 * float(jnp.abs(plain[name].astype(jnp.float32) - want).max()) / size + 2e-5
        label = f"{name}: {cells} x {batch} rows, width {config.width}, {slots} slots, {jnp.dtype(dtype).name}"
        found.append({"name": label, "max_err": error, "allowed": allowed, "ok": bool(error <= allowed)})
    return found


def time_kernels(config: ModelConfig, cells: int, batch: int, slots: int, tiles: Tiles | None, steps: int = 10) -> dict:
    """us a call of each kernel of `fused_hidden`, and ms a token of all layers, from `steps` tokens in one loop."""
    case = make_case(config, cells, batch, slots, jnp.bfloat16)
    plan = fused.plan_of(config, cells, batch, 32, tiles)
    lay_out = jax.jit(lambda weights, lora, scale: fused.fuse(model_of(config, weights), lora, scale, plan))
    laid_out = lay_out(case.weights, case.lora, case.scale)
    token = jnp.zeros((cells, batch), jnp.int32)

    def run(laid_out, cache):  # the weights are arguments: constants would be folded, at length
        def body(_, carry):
            token, cache = carry
            hidden, cache = fused.fused_hidden(config, plan, laid_out, token, case.pad, cache, case.slot, case.pad)
            return (hidden[..., 0] > 0).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, steps, body, (token, cache))

    started = time.perf_counter()
    compiled = jax.jit(run, donate_argnums=1).lower(laid_out, case.cache).compile()
    compile_s = time.perf_counter() - started
    token, cache = compiled(laid_out, case.cache)
    token.block_until_ready()
    started = time.perf_counter()
    token, cache = compiled(laid_out, cache)
    token.block_until_ready()
    ms = 1e3 * (time.perf_counter() - started) / steps
    with tempfile.TemporaryDirectory() as scratch:
        kernels = by_name(trace_kernels(lambda: compiled(laid_out, cache), Path(scratch)))
    us = {name: round(1e3 * total / count, 2) for name, total, count in kernels if count >= steps}
    return {"ms": ms, "layers": config.layers, "compile_s": compile_s, "us": us}


def read_tiles(fields: dict[str, Any], rows: int) -> Tiles:
    """{"qkv": [columns, depth, warps, stages], "down_splits": 7, ...} over the tiles in use for so many rows."""
    used = FEW if rows <= MOST_FEW else MANY
    return dataclasses.replace(used, **{k: Tile(*v) if isinstance(v, list) else v for k, v in fields.items()})


def report(records: list[dict[str, Any]]) -> bool:
    """Print the records; are all right?"""
    for record in records:
        print(json.dumps(record), flush=True)
    return all(record["ok"] for record in records)


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, or 1 if a comparison failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tiles", type=Path, help="JSON list of tiles to time, see read_tiles")
    parser.add_argument("--shapes", nargs="+", default=["1x32"], help="cells x rows to time")
    parser.add_argument("--layers", type=int, default=8, help="layers to time")
    parser.add_argument("--slots", type=int, default=1024)
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    ok, gpu = True, jax.default_backend() == "gpu"
    if args.check:
        dtype = jnp.bfloat16 if gpu else jnp.float32
        cases = [(ODD, 1, 5, 160), (ODD, 3, 24, 224), (ODD, 5, 40, 96)]
        if gpu:
            one = dataclasses.replace(QWEN2_5_1_5B, layers=1, vocab=512)
            cases += [(one, 1, 32, 1024), (one, 3, 32, 1024), (one, 1, 128, 1056)]
        with ThreadPoolExecutor(len(cases)) as pool:  # compilation is most of it, and takes cores, not turns
            for records in pool.map(lambda case: compare(*case, dtype), cases):
                ok &= report(records)
        ok &= report(check_gradient(CHECKED if gpu else ODD, dtype))
    if args.tune:
        config = dataclasses.replace(QWEN2_5_1_5B, layers=args.layers)
        for fields in json.loads(args.tiles.read_text()) if args.tiles else [{}]:
            for shape in args.shapes:
                cells, batch = map(int, shape.split("x"))
                try:
                    found = time_kernels(config, cells, batch, args.slots, read_tiles(fields, cells * batch))
                except Exception as error:  # a tile that doesn't fit the chip is an answer too
                    found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
                print(json.dumps({"shape": shape, "tiles": fields, **found}), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    np.set_printoptions(suppress=True)
    sys.exit(main())
