"""The decoder's logits are those of `transformers`, and the properties that sampling and training lean on hold."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from model.config import QWEN2_5_1_5B, ModelConfig, ModelConfigError
from model.lora import LoraConfig, init_lora
from model.packing import packing_of
from model.qwen2 import Qwen2, init_cache
from model.weights import load
from tests.golden.make_golden import CONFIGS, GOLDEN, golden_inputs, golden_weights, hf_logits, hf_model

TINY = ModelConfig(vocab=50, width=16, layers=2, heads=4, kv_heads=2, head_dim=6, mlp=24)


def needs_torch(test):
    absent = importlib.util.find_spec("torch") is None
    reason = "NOT COMPARED with PyTorch: torch is not installed (pip install -e .[parity])"
    ignore = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
    return pytest.mark.slow(pytest.mark.skipif(absent, reason=reason)(ignore(test)))


def write_model(directory: Path, raw: dict, weights: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def our_logits(directory: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """[B, T, V] fp32 of the model in `directory`."""
    _, graphdef, params = load(directory, jnp.float32)
    seen = inputs["attention_mask"]
    mask_BTS = np.tril(np.ones((seen.shape[1],) * 2, bool))[None] & seen[:, None, :]

    @jax.jit
    def forward(params):
        model = nnx.merge(graphdef, params)
        return model.logits(model.hidden(inputs["tokens"], inputs["positions"], mask_BTS)[0])

    return np.asarray(forward(params))


def tiny_model(dtype=jnp.float32) -> Qwen2:
    return Qwen2(TINY, nnx.Rngs(0), dtype)


def causal(batch: int, steps: int) -> jax.Array:
    return jnp.broadcast_to(jnp.tril(jnp.ones((steps, steps), bool))[None], (batch, steps, steps))


def positions(batch: int, steps: int) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(steps)[None], (batch, steps))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_golden_logits(name, tmp_path):
    """Left-padded batches give what `transformers` gave (tests/golden/make_golden.py), without torch here."""
    golden = np.load(GOLDEN / f"{name}.npz")
    raw = json.loads(str(golden["config"]))
    got = our_logits(write_model(tmp_path, raw, golden_weights(raw)), golden)
    seen = golden["attention_mask"]
    np.testing.assert_allclose(got[seen], golden["logits"][seen], atol=1e-4, rtol=0)


@needs_torch
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_logits_equal_transformers(name, tmp_path):
    raw = CONFIGS[name]
    weights, inputs = golden_weights(raw, seed=5), golden_inputs(raw, steps=20)
    got, want = our_logits(write_model(tmp_path, raw, weights), inputs), hf_logits(hf_model(raw, weights), inputs)
    seen = inputs["attention_mask"]
    print(f"\n{name}: max |difference| {np.abs(got - want)[seen].max():.1e}")
    np.testing.assert_allclose(got[seen], want[seen], atol=1e-4, rtol=0)


@needs_torch
def test_logits_equal_transformers_on_chat_prompts(tmp_path, shared):
    """Real Qwen2.5 prompts of different lengths in one left-padded batch, in its vocabulary of 151,936."""
    from model.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load(shared / "tokenizer" / "qwen2.5")
    questions = ["What is 2 + 2?", "Ann has 3 apples and buys 4 more. How many has she?", "Écris «oui» \U0001f600."]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in questions]
    steps = max(map(len, prompts))
    seen = np.array([[False] * (steps - len(p)) + [True] * len(p) for p in prompts])
    tokens = np.array([[tokenizer.pad] * (steps - len(p)) + p for p in prompts], np.int32)
    inputs = {"tokens": tokens, "attention_mask": seen, "positions": np.maximum(seen.cumsum(1) - 1, 0)}
    raw = CONFIGS["qwen2_tied"] | {"vocab_size": 151936}
    weights = golden_weights(raw)
    got, want = our_logits(write_model(tmp_path, raw, weights), inputs), hf_logits(hf_model(raw, weights), inputs)
    print(f"\nchat prompts: max |difference| {np.abs(got - want)[seen].max():.1e}")
    np.testing.assert_allclose(got[seen], want[seen], atol=1e-4, rtol=0)


def test_left_padding_changes_nothing():
    """A row padded by 5 has at its real tokens what it has alone, whatever ids the padding has."""
    model, tokens = tiny_model(), jnp.asarray([[3, 1, 4, 1, 5, 9]])
    alone, _ = model.hidden(tokens, positions(1, 6), causal(1, 6))
    padded = jnp.asarray([[7, 8, 7, 8, 7, 3, 1, 4, 1, 5, 9]])
    real = jnp.arange(11) >= 5
    where = jnp.maximum(jnp.arange(11) - 5, 0)[None]
    got, _ = model.hidden(padded, where, causal(1, 11) & real[None, None])
    np.testing.assert_allclose(got[:, 5:], alone, atol=1e-5)


def test_causality():
    """The gradient of the state at t to later tokens' embeddings is exactly zero, to t's own and earlier ones not.

    Every position holds another token, so a row of the embedding's gradient is one position's.
    """
    graphdef, params = nnx.split(tiny_model())
    tokens = jnp.asarray([[11, 12, 13, 14, 15, 16]])

    @jax.jit
    @jax.grad
    def gradient(params, step):
        hidden, _ = nnx.merge(graphdef, params).hidden(tokens, positions(1, 6), causal(1, 6))
        return jnp.sum(hidden[0, step] ** 3)  # not the square: RMSNorm fixes its sum

    for step in range(6):
        size = jnp.abs(gradient(params, step)["embed_tokens"][...][tokens[0]]).max(axis=-1)
        assert (size[: step + 1] > 0).all() and (size[step + 1 :] == 0).all()


@pytest.mark.parametrize("jit", [True, False])
def test_cached_equals_uncached(jit):
    """A left-padded prompt prefilled into a longer cache, then one token at a time, gives the full forward's states."""
    model, pads, prompt, steps, slots = tiny_model(), jnp.asarray([0, 2]), 5, 9, 12
    graphdef, params = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(1), (2, steps), 0, TINY.vocab)
    where = jnp.maximum(jnp.arange(steps)[None] - pads[:, None], 0)
    real = jnp.arange(slots)[None] >= pads[:, None]
    full, _ = model.hidden(tokens, where, causal(2, steps) & real[:, None, :steps])

    def forward(tokens, where, cache, slot):
        steps = tokens.shape[1]
        upto = jnp.arange(slots)[None] <= slot + jnp.arange(steps)[:, None]
        return nnx.merge(graphdef, params).hidden(tokens, where, upto[None] & real[:, None], cache=cache, slot=slot)

    forward = jax.jit(forward) if jit else forward
    cache = init_cache(TINY, 2, slots, jnp.float32)
    assert cache[0][0].shape == (2, TINY.kv_heads, slots, TINY.head_dim)
    out, cache = forward(tokens[:, :prompt], where[:, :prompt], cache, 0)
    states = [out]
    for step in range(prompt, steps):
        out, cache = forward(tokens[:, step : step + 1], where[:, step : step + 1], cache, step)
        states.append(out)
    got = jnp.concatenate(states, axis=1)
    for row, pad in enumerate(pads):
        np.testing.assert_allclose(got[row, pad:], full[row, pad:], atol=1e-5)


def test_types_and_rows_that_see_nothing():
    """bf16 states, fp32 logits; a token whose mask is empty gets numbers, not NaN."""
    model = tiny_model(jnp.bfloat16)
    hidden, cache = model.hidden(jnp.asarray([[1, 2]]), positions(1, 2), jnp.zeros((1, 2, 2), bool))
    logits = model.logits(hidden)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32 and cache is None
    assert jnp.isfinite(logits).all()


def test_config_round_trip():
    for raw in CONFIGS.values():
        config = ModelConfig.from_hf(raw)
        assert ModelConfig.from_hf(config.to_hf()) == config
    assert ModelConfig.from_hf(QWEN2_5_1_5B.to_hf()) == QWEN2_5_1_5B
    assert QWEN2_5_1_5B.parameters == 1_543_714_304  # the model card says 1.54B


def test_config_reads_both_spellings_of_rope():
    raw = {k: v for k, v in CONFIGS["qwen2_tied"].items() if k != "rope_theta"}
    new = raw | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert ModelConfig.from_hf(new).rope_theta == ModelConfig.from_hf(raw | {"rope_theta": 5e5}).rope_theta == 5e5


def test_config_gives_qwen2_its_biases_whatever_it_says():
    assert ModelConfig.from_hf(CONFIGS["qwen2_tied"] | {"attention_bias": False}).qkv_bias


@pytest.mark.parametrize(
    "change, told",
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"model_type": "llama", "attention_bias": True}, "o_proj"),
        ({"mlp_bias": True}, "bias in the MLP"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_key_value_heads": 3}, "evenly"),
    ],
)
def test_config_refuses_what_the_model_cannot_run(change, told):
    with pytest.raises(ModelConfigError, match=told):
        ModelConfig.from_hf(CONFIGS["qwen2_untied"] | change)


def test_config_names_missing_fields():
    with pytest.raises(ModelConfigError, match=r"here/config.json has no hidden_size"):
        raw = {k: v for k, v in CONFIGS["llama"].items() if k != "hidden_size"}
        ModelConfig.from_hf(raw, "here/config.json")


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["products", "all"])
def test_looping_over_layers_equals_unrolling_them(monkeypatch, remat):
    """Deep models loop in training (the compiler then sees one layer); hidden states and adapter gradients agree."""
    config = ModelConfig(vocab=50, width=16, layers=3, heads=4, kv_heads=2, head_dim=4, mlp=32)
    graph, base = nnx.split(Qwen2(config, nnx.Rngs(0)))
    lora = jax.tree.map(lambda x: x + 0.05, init_lora(jax.random.key(0), config, LoraConfig(2, 4.0)))
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, 50)
    positions, mask = jnp.tile(jnp.arange(7)[None], (2, 1)), jnp.tile(jnp.tril(jnp.ones((7, 7), bool))[None], (2, 1, 1))

    def loss(lora):
        hidden, _ = nnx.merge(graph, base).hidden(tokens, positions, mask, lora, jnp.ones(2), remat=remat)
        return (hidden**2).sum(), hidden

    got = []
    for scan_from in (1, 99):
        monkeypatch.setattr("model.qwen2.SCAN_FROM", scan_from)
        got.append(jax.grad(loss, has_aux=True)(lora))
    for looped, unrolled in zip(*map(jax.tree.leaves, got), strict=True):
        np.testing.assert_allclose(looped, unrolled, rtol=1e-4, atol=1e-5)


WANTED = jnp.asarray([7, 2, 2, 12, 11])
"""Flat places of 3 rows of 4 tokens: out of order, one of them twice, and one for none."""


@pytest.mark.parametrize("way", ["plain", "cached", "packed", "looped", "folded"])
def test_states_that_are_wanted_are_those_of_the_whole_pass(monkeypatch, way):
    """With the same gradients and the same cache, whose keys and values are every token's; each row has its own scale
    of the adapter."""
    monkeypatch.setattr("model.qwen2.SCAN_FROM", 1 if way == "looped" else 99)
    graph, base = nnx.split(tiny_model())
    lora = jax.tree.map(lambda x: x + 0.05, init_lora(jax.random.key(0), TINY, LoraConfig(2, 4.0)))
    tokens, where = jax.random.randint(jax.random.key(1), (3, 4), 0, TINY.vocab), positions(3, 4)
    options = {"folded": way == "folded"}
    options |= {"cache": init_cache(TINY, 3, 6, jnp.float32)} if way == "cached" else {}
    options |= {"packing": packing_of(jnp.arange(12), 3, 4)} if way == "packed" else {}

    def states(lora, wanted):
        model = nnx.merge(graph, base)
        scale = jnp.asarray([2.0, 0.0, 1.0])
        hidden, cache = model.hidden(tokens, where, None, lora, scale, wanted=wanted, **options)
        hidden = jnp.pad(hidden.reshape(12, -1), ((0, 1), (0, 0)))[WANTED] if wanted is None else hidden
        return (hidden**3).sum(), (hidden, cache)

    got, want = (jax.grad(states, has_aux=True)(lora, wanted) for wanted in (WANTED, None))
    assert got[1][0].shape == (5, TINY.width)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_what_the_last_layer_makes_of_other_tokens_is_not_computed():
    """2 operations for each weight of its o_proj and MLP and each of the 36 tokens of 40 that nobody asks for."""
    graph, base = nnx.split(tiny_model())
    tokens = jnp.zeros((2, 20), jnp.int32)

    def operations(wanted):
        states = lambda base: nnx.merge(graph, base).hidden(tokens, positions(2, 20), None, wanted=wanted)[0]  # noqa: E731
        return jax.jit(states).lower(base).compile().cost_analysis()["flops"]

    saved = 2 * 36 * (TINY.heads * TINY.head_dim * TINY.width + 3 * TINY.width * TINY.mlp)
    assert saved < operations(None) - operations(jnp.asarray([0, 7, 19, 39])) < 1.2 * saved


def test_no_mask_is_a_causal_mask():
    model = Qwen2(TINY, nnx.Rngs(0))
    tokens = jnp.asarray([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    masked, _ = model.hidden(tokens, positions(2, 5), causal(2, 5))
    plain, cache = model.hidden(tokens, positions(2, 5), None)
    np.testing.assert_allclose(plain, masked, rtol=0, atol=1e-6)
    assert cache is None


def test_no_mask_with_a_cache_fills_its_first_slots():
    """What it held isn't seen, and what is written is what a masked pass writes."""
    model = Qwen2(TINY, nnx.Rngs(0))
    tokens = jnp.asarray([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    held = jax.tree.map(lambda x: x + 3, init_cache(TINY, 2, 8, jnp.float32))
    plain, cache = model.hidden(tokens, positions(2, 5), None, cache=held)
    mask = jnp.pad(causal(2, 5), ((0, 0), (0, 0), (0, 3)))
    masked, expected = model.hidden(tokens, positions(2, 5), mask, cache=held)
    np.testing.assert_allclose(plain, masked, rtol=0, atol=1e-6)
    for got, other in zip(jax.tree.leaves(cache), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, other, atol=1e-6)
        assert (got[:, :, 5:] == 3).all()
