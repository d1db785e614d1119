"""Base weights between disk and device: Hugging Face directories of safetensors, both ways.

One table (`tensor_table`) says which tensor of a checkpoint is which leaf of ours; reading, checking and writing all
go through it. Tensors are read one at a time, so that the host never holds two copies of a model. Left out, and
refused by name: pickled weights (reading them runs code), quantised tensors, vocabularies resized on the way.
Adapters are in model.peft.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from model.config import ModelConfig
from model.lora import LINEARS, Lora
from model.qwen2 import Qwen2

Path_ = tuple[str | int, ...]
"""Where a leaf is in our tree: ("layers", 0, "mlp", "up_proj", "weight")."""

HUB_FILES = ["*.json", "*.jinja", "*.txt", "model*.safetensors", "adapter_model.safetensors"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FLOATS = {"F64", "F32", "F16", "BF16"}


class WeightsError(ValueError):
    """Weights that cannot be found, read or used; the message says what, where and what to do."""


def tensor_table(config: ModelConfig) -> dict[str, tuple[Path_, bool]]:
    """{Hugging Face name: (our path, transpose?)}; theirs are [out, in], ours [in, out]."""
    table: dict[str, tuple[Path_, bool]] = {
        "model.embed_tokens.weight": (("embed_tokens",), False),
        "model.norm.weight": (("norm", "weight"), False),
    }
    if not config.tied:
        table["lm_head.weight"] = (("lm_head",), False)
    for layer in range(config.layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            table[f"model.layers.{layer}.{name}.weight"] = (("layers", layer, name, "weight"), False)
        for linear in LINEARS:
            block, path = linear_name(layer, linear), ("layers", layer, linear_block(linear), linear)
            table[f"{block}.weight"] = ((*path, "weight"), True)
            if config.qkv_bias and linear in ("q_proj", "k_proj", "v_proj"):
                table[f"{block}.bias"] = ((*path, "bias"), False)
    return table


def linear_block(linear: str) -> str:
    """The part of a layer that holds `linear`."""
    return "self_attn" if linear in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"


def linear_name(layer: int, linear: str) -> str:
    """Hugging Face's module name of a linear, "model.layers.0.self_attn.q_proj"."""
    return f"model.layers.{layer}.{linear_block(linear)}.{linear}"


def resolve(path_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """A local directory as it is, or a Hugging Face hub id downloaded (or found in the cache).

    Raises WeightsError for what is neither, and when the hub cannot be reached or refuses.
    """
    text = os.fspath(path_or_hub_id)
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise WeightsError(f"{path} is a file; give the directory that holds config.json and the safetensors")
    if isinstance(path_or_hub_id, Path) or not HUB_ID.fullmatch(text):
        raise WeightsError(f"there is no directory {text}, and it is not a hub id like Qwen/Qwen2.5-1.5B-Instruct")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's client raises its own, httpx's and the operating system's
        raise WeightsError(
            f"there is no directory {text}, and the hub did not give a model of that name "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}). "
            f"Check the spelling; without a network, run `hf download {text} --local-dir DIR` elsewhere and pass DIR"
        ) from error


def load_config(directory: Path) -> ModelConfig:
    """Read config.json. Raises WeightsError when it is missing, ModelConfigError when we can't run it."""
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        adapter = (directory / "adapter_config.json").is_file()
        hint = "it holds a PEFT adapter, not a base model" if adapter else "it is not a Hugging Face model directory"
        raise WeightsError(f"{directory} has no config.json: {hint}")
    return ModelConfig.from_hf(read_json(directory / "config.json"), str(directory / "config.json"))


def load(directory: Path, dtype: jnp.dtype) -> tuple[ModelConfig, nnx.GraphDef, nnx.State]:
    """(config, graphdef, params) of a model directory; `nnx.merge(graphdef, params)` is the model."""
    config = load_config(directory)
    graphdef, _ = abstract_base(config, dtype)
    return config, graphdef, load_base(directory, config, dtype)


def abstract_base(config: ModelConfig, dtype: jnp.dtype) -> tuple[nnx.GraphDef, nnx.State]:
    """(graphdef, params) with ShapeDtypeStructs for leaves: nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: Qwen2(config, nnx.Rngs(0), dtype)))


def random_base(config: ModelConfig, seed: int, dtype: jnp.dtype) -> tuple[nnx.GraphDef, nnx.State]:
    """(graphdef, params) with random weights, made on the device: for benchmarks of shapes.

    Not under one jit: XLA then compiles every layer's draws anew (26 s for 28 layers; op by op it takes 3 s).
    """
    return nnx.split(Qwen2(config, nnx.Rngs(seed), dtype))


def load_base(directory: Path, config: ModelConfig, dtype: jnp.dtype) -> nnx.State:
    """The weights under `directory`, cast to `dtype`, as the state that `nnx.split(Qwen2(config, ...))` gives.

    Reads model.safetensors or the shards that model.safetensors.index.json names. Raises WeightsError naming the
    tensors that are missing, not ours, of another shape than config.json says, or not floating point.
    """
    directory, table = Path(directory), tensor_table(config)
    _, params = abstract_base(config, dtype)
    shapes = {path: leaf.shape for path, leaf in _by_path(params).items()}
    with ExitStack() as stack:
        files = {file: stack.enter_context(open_safetensors(file)) for file in _weight_files(directory)}
        where = {name: file for file, handle in files.items() for name in handle.keys()}
        read = {name: files[file].get_tensor for name, file in where.items()}
        _check_names(directory, table, where)
        for name, (path, transpose) in table.items():
            _check_tensor(where[name], name, files[where[name]].get_slice(name), shapes[path], transpose)
        if config.tied and "lm_head.weight" in where:
            _check_tied(directory, read)
        leaves = {}
        for name, (path, transpose) in table.items():
            array = read[name](name)
            leaves[path] = jnp.asarray((array.T if transpose else array).astype(np.dtype(dtype)))
    return jax.tree.unflatten(jax.tree.structure(params), [leaves[path] for path in shapes])


def fingerprint(directory: Path) -> str:
    """sha256 of config.json and of 64 blocks of 64 KiB spread over each weight file: tells checkpoints apart in
    milliseconds, and is no proof against a single flipped bit."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for file in _weight_files(directory):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as stream:
            for block in range(64):
                stream.seek(size * block // 64)
                digest.update(stream.read(1 << 16))
    return digest.hexdigest()


def save_hf(directory: Path, config: ModelConfig, params: nnx.State, dtype: jnp.dtype) -> None:
    """Write config.json and model.safetensors as `transformers` reads them; each file appears whole or not at all."""
    _save(Path(directory), config, params, dtype, lambda path, array: array)


def save_merged(directory: Path, config: ModelConfig, params: nnx.State, lora: Lora, scale: float) -> None:
    """`save_hf` with one cell's adapter in the weights: W + scale * A B in fp32, then rounded to W's type.

    Rounding to bf16 loses updates far smaller than their weight; keep the adapter (model.peft) where that matters.
    """

    def merge(path: Path_, array: np.ndarray) -> np.ndarray:
        if len(path) != 5 or path[-1] != "weight":  # ("layers", layer, block, linear, "weight")
            return array
        adapter = jax.tree.map(lambda leaf: np.asarray(leaf[path[1]], np.float32), lora[path[3]])
        return array.astype(np.float32) + np.float32(scale) * (adapter["a"] @ adapter["b"])

    dtype = jax.tree.leaves(params)[0].dtype
    _save(Path(directory), config, params, dtype, merge)


def read_json(path: Path) -> dict:
    """A JSON object. Raises WeightsError naming the file when it is anything else."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise WeightsError(f"{path} holds a {type(raw).__name__} where a JSON object is expected")
    return raw


@contextmanager
def open_safetensors(path: Path) -> Iterator[safe_open]:
    """Open for reading by numpy. Raises WeightsError when the file is missing, cut short or not safetensors."""
    try:
        with safe_open(path, framework="numpy") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} cannot be read ({error}); download or copy it again") from error


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a temporary file beside `path`, flush it, rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        write(partial)
        partial.chmod(0o644)  # safetensors makes files that only their owner can read
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file marked as PyTorch's, which `transformers` and `peft` insist on."""
    replace_file(path, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))


def write_json(path: Path, value: dict) -> None:
    replace_file(path, lambda partial: partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8"))


def named(names: list[str]) -> str:
    """Up to five of them, and how many more."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _weight_files(directory: Path) -> list[Path]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        files = sorted(set(read_json(index).get("weight_map", {}).values()))
        if any(Path(file).name != file for file in files) or not files:
            raise WeightsError(f"{index}: weight_map must name files of its own directory")
        absent = [file for file in files if not (directory / file).is_file()]
        if absent:
            raise WeightsError(
                f"{directory} lacks {named(absent)}, which {index.name} names; the download is incomplete"
            )
        return [directory / file for file in files]
    if single.is_file():
        return [single]
    if list(directory.glob("*.bin")) or list(directory.glob("*.pt*")):
        raise WeightsError(
            f"{directory} has pickled weights only, and reading those runs code that they contain. Convert them: "
            f"AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIR) writes model.safetensors"
        )
    raise WeightsError(
        f"{directory} has neither model.safetensors nor model.safetensors.index.json: no weights to load"
    )


def _check_names(directory: Path, table: dict[str, tuple[Path_, bool]], where: dict[str, Path]) -> None:
    missing = [name for name in table if name not in where]
    unexpected = sorted(
        name for name in where.keys() - table.keys() if not name.endswith("inv_freq") and name != "lm_head.weight"
    )
    if missing or unexpected:
        parts = [f"missing: {named(missing)}"] * bool(missing) + [f"not ours: {named(unexpected)}"] * bool(unexpected)
        raise WeightsError(
            f"the tensors in {directory} are not those that its config.json asks for; {'; '.join(parts)}"
        )


def _check_tensor(file: Path, name: str, stored, shape: tuple[int, ...], transpose: bool) -> None:
    got, expected = tuple(stored.get_shape()), shape[::-1] if transpose else shape
    if got != expected:
        raise WeightsError(f"{file}: {name} has shape {got} where config.json asks for {expected}")
    if stored.get_dtype() not in FLOATS:
        raise WeightsError(f"{file}: {name} is {stored.get_dtype()}; quantised weights aren't read, use bf16 or fp32")


def _check_tied(directory: Path, read: dict[str, Callable[[str], np.ndarray]]) -> None:
    """A second copy of the embedding is harmless; another matrix under that name is another model."""
    names = ("lm_head.weight", "model.embed_tokens.weight")
    if not np.array_equal(*(read[name](name) for name in names)):
        raise WeightsError(
            f"{directory}: config.json ties lm_head to embed_tokens, but the file holds two different matrices; "
            f"set tie_word_embeddings to false if lm_head.weight is meant"
        )


def _by_path(params: nnx.State) -> dict[Path_, jax.Array]:
    """{path: array} in the tree's order, which `jax.tree.unflatten` takes back."""
    flat, _ = jax.tree.flatten_with_path(params)
    # The last part of each is an nnx.Param's own, which has no key.
    return {tuple(part.key for part in path if hasattr(part, "key")): leaf for path, leaf in flat}


def _save(directory: Path, config: ModelConfig, params: nnx.State, dtype: jnp.dtype, change: Callable) -> None:
    leaves, tensors = _by_path(params), {}
    for name, (path, transpose) in tensor_table(config).items():
        array = change(path, np.asarray(leaves[path])).astype(np.dtype(dtype))
        tensors[name] = np.ascontiguousarray(array.T if transpose else array)
    write_tensors(directory / "model.safetensors", tensors)
    write_json(directory / "config.json", config.to_hf() | {"dtype": np.dtype(dtype).name})
