"""Write the golden logits: what `transformers` computes for three tiny decoders with known weights.

    python tests/golden/make_golden.py        (needs torch; rewrites tests/golden/*.npz)

The weights are not stored: `golden_weights` draws them by name and shape from numpy's generator, so a machine without
torch can build the same model. Each file holds tokens, attention_mask and positions [B, T] and logits [B, T, V] fp32.
"""

import json
import zlib
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent
SIZES = {"vocab_size": 80, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64, "hidden_act": "silu"}
CONFIGS = {
    "qwen2_tied": SIZES | {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen2_untied": SIZES | {"model_type": "qwen2", "tie_word_embeddings": False, "rms_norm_eps": 1e-5},
    # head_dim is not width / heads, and there are no biases
    "llama": SIZES | {"model_type": "llama", "tie_word_embeddings": False, "head_dim": 8, "num_key_value_heads": 1},
}
PADS = (0, 3, 7)
"""How many tokens each row is padded by on the left."""


def golden_weights(raw: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """{Hugging Face name: fp32 array}: each from its own generator, so that none depends on another."""
    width, heads, mlp = raw["hidden_size"], raw["num_attention_heads"], raw["intermediate_size"]
    dim = raw.get("head_dim", width // heads)
    queries, keys = heads * dim, raw["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (raw["vocab_size"], width), "model.norm.weight": (width,)}
    if not raw["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (raw["vocab_size"], width)
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (width,)
        for name, out in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            shapes[f"{prefix}self_attn.{name}.weight"] = (out, width)
            if raw["model_type"] == "qwen2":
                shapes[f"{prefix}self_attn.{name}.bias"] = (out,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (width, queries)
        shapes[f"{prefix}mlp.gate_proj.weight"] = shapes[f"{prefix}mlp.up_proj.weight"] = (mlp, width)
        shapes[f"{prefix}mlp.down_proj.weight"] = (width, mlp)
    return {name: _draw(name, shape, seed) for name, shape in shapes.items()}


def _draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if "norm" in name:
        return (1 + 0.2 * normal).astype(np.float32)
    return (normal * (0.3 if name.endswith("bias") else shape[-1] ** -0.5)).astype(np.float32)


def golden_inputs(raw: dict, steps: int = 12) -> dict[str, np.ndarray]:
    """A left-padded batch: tokens, attention_mask and positions, [B, T]."""
    tokens = np.random.default_rng(1).integers(1, raw["vocab_size"], (len(PADS), steps))
    attention_mask = np.arange(steps)[None] >= np.asarray(PADS)[:, None]
    return {
        "tokens": np.where(attention_mask, tokens, 0).astype(np.int32),
        "attention_mask": attention_mask,
        "positions": np.maximum(np.cumsum(attention_mask, axis=1) - 1, 0).astype(np.int32),
    }


def hf_logits(model, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """[B, T, V] fp32 of a `transformers` model."""
    import torch

    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(inputs["tokens"], dtype=torch.long),
            attention_mask=torch.tensor(inputs["attention_mask"]).long(),
            position_ids=torch.tensor(inputs["positions"], dtype=torch.long),
        )
    return out.logits.float().numpy()


def hf_model(raw: dict, weights: dict[str, np.ndarray]):
    """The `transformers` model of these weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), dtype=torch.float32).eval()
    absent, unexpected = model.load_state_dict({k: torch.tensor(v) for k, v in weights.items()}, strict=False)
    assert not unexpected and set(absent) <= {"lm_head.weight"}, (absent, unexpected)
    model.tie_weights()
    return model


def main() -> None:
    for name, raw in CONFIGS.items():
        inputs = golden_inputs(raw)
        logits = hf_logits(hf_model(raw, golden_weights(raw)), inputs)
        np.savez_compressed(GOLDEN / f"{name}.npz", config=json.dumps(raw), logits=logits, **inputs)
        print(f"{name}: logits {logits.shape}, absolute mean {np.abs(logits).mean():.3f}")


if __name__ == "__main__":
    main()
