"""The sizes of a Qwen2- or Llama-shaped decoder, and their translation from and to a Hugging Face config.json.

Only what changes a forward pass is kept. Anything in a config.json that would change it in a way the model
does not implement (another architecture, RoPE scaling, sliding windows that bite) is refused here, by name.
"""

from dataclasses import dataclass
from typing import Any

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


class ModelConfigError(ValueError):
    """A config.json that this model cannot run."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes: V `vocab`, D `width`, N `layers`, H `heads`, K `kv_heads`, C `head_dim`, F `mlp`."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope_theta: float = 1e4
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    tied: bool = True
    max_positions: int = 32768
    family: str = "qwen2"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelConfigError(f"{self.heads} query heads can't share {self.kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ModelConfigError(f"head_dim is {self.head_dim}; RoPE rotates pairs, so it must be even")

    @classmethod
    def from_hf(cls, raw: dict[str, Any], where: str = "config.json") -> "ModelConfig":
        """Read a parsed config.json; `where` names it in errors."""
        family = raw.get("model_type")
        if family not in ARCHITECTURES:
            raise ModelConfigError(
                f"{where}: model_type {family!r} is not supported; this stack runs {', '.join(ARCHITECTURES)}"
            )
        _refuse_unsupported(raw, where)
        missing = [
            key
            for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
            if key not in raw
        ]
        if missing:
            raise ModelConfigError(f"{where} has no {', '.join(missing)}")
        heads = raw["num_attention_heads"]
        return cls(
            vocab=raw["vocab_size"],
            width=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            mlp=raw["intermediate_size"],
            rope_theta=float(_rope(raw).get("rope_theta") or raw.get("rope_theta") or 1e4),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            qkv_bias=family == "qwen2",  # transformers gives Qwen2 one whatever `attention_bias` says
            tied=bool(raw.get("tie_word_embeddings", False)),
            max_positions=raw.get("max_position_embeddings", 32768),
            family=family,
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json that `transformers` reads back to the same model."""
        if self.qkv_bias != (self.family == "qwen2"):
            raise ModelConfigError(f"a {self.family} with qkv_bias={self.qkv_bias} has no config.json")
        out = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_positions,
        }
        if self.family == "llama":
            out["attention_bias"] = False
        return out

    @property
    def parameters(self) -> int:
        """How many numbers the base holds."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = self.width * qkv + self.heads * self.head_dim * self.width + (qkv if self.qkv_bias else 0)
        layer = attention + 3 * self.width * self.mlp + 2 * self.width
        heads = 1 if self.tied else 2
        return self.layers * layer + self.width + heads * self.vocab * self.width


QWEN2_5_1_5B = ModelConfig(
    vocab=151936, width=1536, layers=28, heads=12, kv_heads=2, head_dim=128, mlp=8960, rope_theta=1e6
)


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, transformers 4 `rope_scaling` (and a top-level `rope_theta`)."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _refuse_unsupported(raw: dict[str, Any], where: str) -> None:
    kind = _rope(raw).get("rope_type", _rope(raw).get("type", "default"))
    if kind != "default":
        raise ModelConfigError(
            f"{where}: RoPE scaling {kind!r} is not supported; use a checkpoint without it, or set rope_scaling to "
            f"null if your prompts stay within the length that the model was trained at"
        )
    if _rope(raw).get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelConfigError(f"{where}: a partial_rotary_factor is not supported; this stack rotates whole heads")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        raise ModelConfigError(f"{where}: sliding-window attention is not supported")
    if raw["model_type"] == "llama" and raw.get("attention_bias"):
        raise ModelConfigError(f"{where}: attention_bias in a llama puts a bias on o_proj too, which is not supported")
    if raw.get("mlp_bias"):
        raise ModelConfigError(f"{where}: a bias in the MLP is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"{where}: activation {raw['hidden_act']!r} is not supported; this stack runs silu")
    if raw.get("quantization_config"):
        raise ModelConfigError(f"{where}: the checkpoint is quantised; use the bf16 or fp32 one")
