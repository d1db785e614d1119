"""LoRA adapters as PEFT directories, both ways: adapter_config.json and adapter_model.safetensors.

What PEFT can do and model.lora does not (rsLoRA, DoRA, biases, ranks that differ between layers, whole trained
modules, adapted embeddings) is refused by name, never approximated. Dropout and the way an adapter was initialised
change nothing once it is trained, and are ignored.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from model.config import ModelConfig
from model.lora import LINEARS, Lora, LoraConfig, by_layer, linear_shapes, stacked
from model.weights import (
    FLOATS,
    WeightsError,
    linear_name,
    named,
    open_safetensors,
    read_json,
    write_json,
    write_tensors,
)

REFUSED = (
    "use_rslora use_dora lora_bias use_qalora use_bdlora fan_in_fan_out modules_to_save rank_pattern alpha_pattern "
    "layer_replication trainable_token_indices target_parameters alora_invocation_tokens arrow_config kasa_config "
    "velora_config monteclora_config megatron_config"
).split()
"""Fields of adapter_config.json that change the forward pass when they are set."""

SIDES = {"a": "lora_A", "b": "lora_B"}


def save_adapter(directory: Path, lora: Lora, settings: LoraConfig, base_name: str) -> None:
    """Write one cell's adapter so that `peft.PeftModel.from_pretrained(base, directory)` computes what we do.

    `base_name` is a hub id or a path, for the reader's information. Each file appears whole or not at all. Raises
    WeightsError when the arrays are not one cell's of rank `settings.rank`.
    """
    tensors = {}
    for layer, adapters in enumerate(by_layer(lora)):
        for linear, adapter in adapters.items():
            a, b = (np.asarray(adapter[side], np.float32) for side in SIDES)
            if a.ndim != 2 or b.ndim != 2 or a.shape[1] != settings.rank or b.shape[0] != settings.rank:
                raise WeightsError(
                    f"layer {layer}, {linear}: a {a.shape} and b {b.shape} are not one cell's adapter of rank "
                    f"{settings.rank}; pick a cell first (leaf[x])"
                )
            for side, array in (("a", a), ("b", b)):
                tensors[_key(layer, linear, side)] = np.ascontiguousarray(array.T)
    alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha
    write_tensors(Path(directory) / "adapter_model.safetensors", tensors)
    write_json(
        Path(directory) / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "r": settings.rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(LINEARS),
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "use_rslora": False,
            "use_dora": False,
        },
    )


def load_adapter(directory: Path, config: ModelConfig) -> tuple[Lora, LoraConfig]:
    """Read a PEFT adapter for a base of `config`, in fp32. A linear that it leaves alone gets zeros.

    (Zeros in both A and B also have a zero gradient, so further training leaves that linear alone too.)
    Raises WeightsError naming the setting or the tensors that we do not implement, or that do not fit the base.
    """
    directory = Path(directory)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (directory / name).is_file():
            raise WeightsError(f"{directory} has no {name}: it is not a PEFT adapter directory of safetensors")
    settings = _read_settings(directory / "adapter_config.json")
    with open_safetensors(directory / "adapter_model.safetensors") as handle:
        stored = {name: handle.get_slice(name) for name in handle.keys()}
        _check_stored(directory, stored, config, settings.rank)

        def side(layer: int, linear: str, side: str, shape: tuple[int, int]) -> jax.Array:
            name = _key(layer, linear, side)
            if name not in stored:
                return jnp.zeros(shape, jnp.float32)
            return jnp.asarray(handle.get_tensor(name).T.astype(np.float32))

        layers = [
            {
                linear: {
                    "a": side(layer, linear, "a", (inputs, settings.rank)),
                    "b": side(layer, linear, "b", (settings.rank, outputs)),
                }
                for linear, (inputs, outputs) in linear_shapes(config).items()
            }
            for layer in range(config.layers)
        ]
    return stacked(layers), settings


def _key(layer: int, linear: str, side: str) -> str:
    return f"base_model.model.{linear_name(layer, linear)}.{SIDES[side]}.weight"


def _read_settings(path: Path) -> LoraConfig:
    raw = read_json(path)
    if raw.get("peft_type") != "LORA":
        raise WeightsError(f"{path}: peft_type is {raw.get('peft_type')!r}; only LORA adapters are read")
    if raw.get("bias", "none") != "none":
        raise WeightsError(f"{path}: bias {raw['bias']!r} is not supported; this stack trains adapters without biases")
    refused = [f"{name}={raw[name]!r}" for name in REFUSED if raw.get(name)]
    if refused:
        raise WeightsError(
            f"{path}: not supported: {', '.join(refused)}. Merge the adapter with peft and load the result"
        )
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise WeightsError(f"{path}: r is {rank!r} and lora_alpha {alpha!r}; a rank and a number are needed")
    return LoraConfig(rank=rank, alpha=float(alpha))


def _check_stored(directory: Path, stored: dict, config: ModelConfig, rank: int) -> None:
    """Every tensor is one of ours, of the right shape, and A and B come together; at least one pair is there."""
    expected = {}
    for layer in range(config.layers):
        for linear, (inputs, outputs) in linear_shapes(config).items():
            expected[_key(layer, linear, "a")] = (rank, inputs)
            expected[_key(layer, linear, "b")] = (outputs, rank)
    unexpected = sorted(stored.keys() - expected.keys())
    if unexpected or not stored:
        layers = {int(found[1]) for name in unexpected if (found := re.search(r"\.layers\.(\d+)\.", name))}
        hint = f" (the base has {config.layers} layers)" if layers and max(layers) >= config.layers else ""
        found = named(unexpected) if stored else "nothing at all"
        raise WeightsError(f"{directory} adapts what this stack does not{hint}: {found}; it reads {', '.join(LINEARS)}")
    for name, tensor in stored.items():
        if tuple(tensor.get_shape()) != expected[name]:
            raise WeightsError(
                f"{directory}: {name} has shape {tuple(tensor.get_shape())} where rank {rank} on this base asks for "
                f"{expected[name]}; is it an adapter of another model?"
            )
        if tensor.get_dtype() not in FLOATS:
            raise WeightsError(f"{directory}: {name} is {tensor.get_dtype()}, not floating point")
        other = name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")
        if other not in stored:
            raise WeightsError(f"{directory}: {name} is there without {other}")
