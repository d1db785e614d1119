"""Adapters on disk: what we write, `peft` computes alike; what `peft` writes, we do; the rest is refused by name."""

import json
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.config import ModelConfig
from model.lora import LINEARS, LoraConfig
from model.peft import load_adapter, save_adapter
from model.weights import WeightsError
from tests.golden.make_golden import CONFIGS, golden_inputs, golden_weights, hf_logits
from tests.test_qwen2 import needs_torch, our_logits, write_model
from tests.test_weights import CONFIG, RAW, SETTINGS, adapted_logits, hf_from, trained_lora


def edit_json(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def adapter(tmp_path) -> Path:
    save_adapter(tmp_path / "adapter", trained_lora(), SETTINGS, "some/base")
    return tmp_path / "adapter"


def test_adapter_round_trip(adapter):
    lora, settings = load_adapter(adapter, CONFIG)
    assert settings == SETTINGS
    jax.tree.map(np.testing.assert_array_equal, lora, trained_lora())
    stored = load_file(adapter / "adapter_model.safetensors")
    first = "base_model.model.model.layers.0.self_attn.q_proj"
    assert stored[f"{first}.lora_A.weight"].shape == (3, 24) and stored[f"{first}.lora_B.weight"].shape == (24, 3)
    assert len(stored) == 2 * 2 * len(LINEARS)


def test_an_adapter_of_some_linears_has_zeros_elsewhere(adapter):
    file = adapter / "adapter_model.safetensors"
    save_file({name: array for name, array in load_file(file).items() if "q_proj" in name}, file)
    lora, _ = load_adapter(adapter, CONFIG)
    assert lora["q_proj"]["b"][1].any() and not lora["up_proj"]["a"].any() and not lora["up_proj"]["b"].any()
    assert lora["up_proj"]["a"][1].shape == (24, 3)


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "lora_only"}, "lora_only"),
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"r": 0}, "r is 0"),
        ({"r": 4}, r"has shape \(3, .*asks for \(4, "),
    ],
)
def test_adapters_that_we_do_not_implement(adapter, fields, told):
    edit_json(adapter / "adapter_config.json", **fields)
    with pytest.raises(WeightsError, match=told):
        load_adapter(adapter, CONFIG)


def test_adapters_that_do_not_fit(adapter, tmp_path):
    file = adapter / "adapter_model.safetensors"
    stored = load_file(file)
    embedding = {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((3, 80), np.float32)}
    save_file(stored | embedding, file)
    with pytest.raises(WeightsError, match="embed_tokens"):
        load_adapter(adapter, CONFIG)
    deeper = {name.replace("layers.1.", "layers.7."): array for name, array in stored.items()}
    save_file(deeper, file)
    with pytest.raises(WeightsError, match="the base has 2 layers"):
        load_adapter(adapter, CONFIG)
    save_file({name: array for name, array in stored.items() if "layers.1.mlp.up_proj.lora_B" not in name}, file)
    with pytest.raises(WeightsError, match="up_proj.lora_A.weight is there without"):
        load_adapter(adapter, CONFIG)
    lora_X = jax.tree.map(lambda leaf: leaf[None], trained_lora())
    with pytest.raises(WeightsError, match="pick a cell first"):
        save_adapter(tmp_path / "x", lora_X, SETTINGS, "b")
    with pytest.raises(WeightsError, match="no adapter_config.json"):
        load_adapter(tmp_path, CONFIG)


@needs_torch
@pytest.mark.skipif(find_spec("peft") is None, reason="NOT COMPARED with PEFT: peft is not installed")
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_peft_reads_our_adapter(name, tmp_path):
    import peft

    raw = CONFIGS[name]
    config, inputs = ModelConfig.from_hf(raw), golden_inputs(raw)
    base = write_model(tmp_path / "base", raw, golden_weights(raw))
    save_adapter(tmp_path / "adapter", trained_lora(config), SETTINGS, str(base))
    theirs = hf_logits(peft.PeftModel.from_pretrained(hf_from(base), tmp_path / "adapter"), inputs)
    ours, seen = adapted_logits(base, trained_lora(config), inputs, SETTINGS.scale), inputs["attention_mask"]
    print(f"\n{name}: max |difference| {np.abs(ours - theirs)[seen].max():.1e}")
    np.testing.assert_allclose(ours[seen], theirs[seen], atol=1e-4, rtol=0)


@needs_torch
@pytest.mark.skipif(find_spec("peft") is None, reason="NOT COMPARED with PEFT: peft is not installed")
@pytest.mark.parametrize("modules", [list(LINEARS), ["q_proj", "v_proj"], "all-linear"])
def test_we_read_an_adapter_of_peft(modules, tmp_path):
    """Rank 4, alpha 6, B drawn at random (init_lora_weights=False)."""
    import peft

    base = write_model(tmp_path / "base", RAW, golden_weights(RAW))
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(hf_from(base), settings).eval()
    model.save_pretrained(tmp_path / "adapter")
    inputs = golden_inputs(RAW)
    lora, ours_settings = load_adapter(tmp_path / "adapter", CONFIG)
    assert ours_settings == LoraConfig(rank=4, alpha=6.0)
    ours, theirs = adapted_logits(base, lora, inputs, ours_settings.scale), hf_logits(model, inputs)
    seen = inputs["attention_mask"]
    print(f"\n{modules}: max |difference| {np.abs(ours - theirs)[seen].max():.1e}")
    assert np.abs(theirs - our_logits(base, inputs)).max() > 0.05
    np.testing.assert_allclose(ours[seen], theirs[seen], atol=1e-4, rtol=0)
