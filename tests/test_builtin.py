"""model/builtin and the command that makes it: tokenizer, prompts as the product renders them, loss weights, skill."""

import itertools
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import weights
from model.config import ModelConfig
from model.tokenizer import ChatTokenizer
from rl import warmstart
from rollout.distribution import Sampling
from rollout.play import longest_prompt
from tasks.scripts import ANSWER_TOKENS, MESSAGE_TOKENS, TASKS, forced_row, write_rows
from tasks.stories import LARGEST, PATTERNS, stories, story_stream

LONGEST_PROMPT = 160
"""What the tiny preset leaves for a prompt (rl.config), tokens."""


@pytest.fixture(scope="module")
def directory(request):
    return request.config.rootpath / "model" / "builtin"


@pytest.fixture(scope="module")
def tokenizer(directory) -> ChatTokenizer:
    return ChatTokenizer(directory)


def pieces(tokenizer: ChatTokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode_text(text)]


# The directory


def test_directory_is_small_and_complete(directory):
    names = {path.name for path in directory.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert sum(path.stat().st_size for path in directory.iterdir()) < 8e6


def test_config_is_a_qwen2_that_transformers_reads(directory, tokenizer):
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(directory)
    ours = weights.load_config(directory)
    assert theirs.model_type == "qwen2" and theirs.architectures == ["Qwen2ForCausalLM"]
    assert ModelConfig.from_hf(theirs.to_dict()) == ours
    assert theirs.eos_token_id == tokenizer.end_of_turn[0] and theirs.pad_token_id == tokenizer.pad
    assert ours.vocab >= tokenizer.base_vocab
    assert ours.tied and ours.parameters < 1e6


def test_weights_load_and_are_finite(directory):
    _, _, params = weights.load(directory, jnp.float32)
    assert all(bool(jnp.isfinite(leaf).all()) for _, leaf in nnx.to_flat_state(params))


# The tokenizer


def test_tokenizer_is_what_the_command_builds(directory):
    built = json.loads(warmstart.build_tokenizer().backend_tokenizer.to_str())
    assert built == json.loads((directory / "tokenizer.json").read_text())


def test_padding_is_not_the_end(tokenizer):
    assert len(tokenizer.end_of_turn) == 1 and tokenizer.pad not in tokenizer.end_of_turn


def test_numbers_are_single_tokens(tokenizer):
    for number in range(LARGEST + 1):
        assert len(tokenizer.encode_text(str(number))) == len(tokenizer.encode_text(f" {number}")) == 1


@pytest.mark.parametrize(
    "text, expected",
    [
        ("We have 17 + 5 = 22.", ["We", " have", " 17", " +", " 5", " =", " 22", "."]),
        (" The answer is \\boxed{22}.", [" The", " answer", " is", " \\boxed{", "22", "}."]),
        ("DanWe", ["Dan", "We"]),
        ("A: (no message)\nB:", ["A", ":", " (", "no", " message", ")", "\n", "B", ":"]),
        ("<|im_end|>", ["<|im_end", "|>"]),
    ],
)
def test_words_stay_whole(tokenizer, text, expected):
    assert pieces(tokenizer, text) == expected


def test_scripts_need_no_letters(tokenizer):
    """Everything that the warm start shows is whole words, numbers and marks."""
    rng = random.Random(0)
    for story in itertools.islice(story_stream(rng), 300):
        for row in write_rows(story, rng):
            words = {piece.strip() for piece in pieces(tokenizer, row.reply)}
            assert {word for word in words if word.isalpha() and len(word) == 1} <= {"A", "B", "I", "a"}


def any_text(rng: random.Random) -> str:
    ranges = ((0, 0x80), (0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x110000))
    odd = (
        "<|im_end|>",
        "<|im_start|>",
        "<0x41>",
        "<unk>",
        "\ufffd",
        "\x7f\x7f",
        "▁",
        "\r\n",
        " 12",
        "\\boxed{",
        "é\ufffd",
    )
    parts = [rng.choice(odd) if rng.random() < 0.3 else chr(rng.randrange(*rng.choice(ranges))) for _ in range(20)]
    return "".join(parts[: rng.randrange(21)])


def test_any_text_survives(tokenizer):
    rng = random.Random(0)
    for _ in range(5000):
        text = any_text(rng)
        ids = tokenizer.encode_text(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & {*tokenizer.end_of_turn, tokenizer.pad}


def test_what_was_sampled_comes_back_in_no_more_tokens(tokenizer):
    """So a prompt that quotes a reply is never longer than the reply's cap allows for (rollout.play.longest_prompt).

    Control tokens are the exception: they are shown as text, two pieces each.
    """
    rng = random.Random(0)
    control = {tokenizer.pad, *tokenizer.end_of_turn, *tokenizer._control_ids}
    plain = [token for token in range(tokenizer.base_vocab) if token not in control]
    words = plain[-256 - 200 : -256]
    for _ in range(5000):
        ids = rng.choices(rng.choice((plain, words, plain[:120])), k=rng.randrange(1, ANSWER_TOKENS))
        assert len(tokenizer.encode_text(tokenizer.decode(ids))) <= len(ids)
    start = next(iter(control - {tokenizer.pad, *tokenizer.end_of_turn}))
    assert len(tokenizer.encode_text(tokenizer.decode([start]))) == 2


def test_prompts_and_scripts_fit(tokenizer):
    train, heldout, _ = stories(512, 64, 0)
    longest = max(longest_prompt(tokenizer.encode_chat, t, p) for t in TASKS.values() for p in train + heldout)
    assert longest <= LONGEST_PROMPT
    rng = random.Random(0)
    for story in itertools.islice(story_stream(rng), 500):
        for row in write_rows(story, rng):
            cap = MESSAGE_TOKENS if row.turn < 2 else ANSWER_TOKENS
            assert len(tokenizer.encode_text(row.reply)) + 1 <= cap


# The command


def test_training_sees_the_products_prompts(tokenizer):
    built, rng = warmstart.build_tokenizer(), random.Random(0)
    for story in itertools.islice(story_stream(rng), 30):
        for row in write_rows(story, rng):
            tokens, loss_weights = warmstart.encode_row(built, row)
            prompt = tokenizer.encode_chat(row.task.render(row.story.problem, row.turn, row.heard))
            reply = tokenizer.encode_text(row.reply) + [tokenizer.end_of_turn[0]]
            assert tokens == prompt + reply
            assert loss_weights == [warmstart.PROMPT_WEIGHT] * len(prompt) + [1.0] * len(reply)


def test_a_forced_row_teaches_all_but_its_first_word():
    built, rng = warmstart.build_tokenizer(), random.Random(0)
    tokens, loss_weights = warmstart.encode_row(built, forced_row(next(story_stream(rng)), rng))
    start = tokens.index(built.convert_tokens_to_ids("We"), 40)
    assert loss_weights[start] == 0 and set(loss_weights[start + 1 :]) == {1.0}


def test_equations_train_results_only():
    built, rng = warmstart.build_tokenizer(), random.Random(0)
    tokens, loss_weights = warmstart.encode_sums(built, story_stream(rng), rng)
    trained = {built.decode([b]) for b, weight in zip(tokens, loss_weights[1:]) if weight}
    assert trained <= {" =", " \\boxed{"} and " =" in trained


def test_batches_are_seeded_and_fit():
    built = warmstart.build_tokenizer()
    once, again = (next(warmstart.batches(built, 3)) for _ in range(2))
    for (tokens, loss_weights), other in zip(once, again):
        np.testing.assert_array_equal(tokens, other[0])
        assert tokens.shape == loss_weights.shape and loss_weights.sum() > 0
    stream = warmstart.batches(built, 0)
    for _ in range(20):
        next(stream)  # raises if a row does not fit its length


@pytest.mark.slow
def test_the_command_makes_a_directory_that_loads(tmp_path, monkeypatch, capsys):
    for name, small in (("CONVERSATIONS", 1), ("FORCED_ROWS", 2), ("SUM_ROWS", 2)):
        monkeypatch.setattr(warmstart, name, small)
    monkeypatch.setattr("sys.argv", ["warmstart", "--out", str(tmp_path), "--steps", "2"])
    monkeypatch.setattr(warmstart, "calibrate", lambda model, tokenizer: {"nothing": 0.0})
    with jax.numpy_dtype_promotion("standard"):  # optax's Muon raises a float to an int32 power
        warmstart.main()
    assert "parameters" in capsys.readouterr().out
    weights.load(tmp_path, jnp.float32)
    assert ChatTokenizer(tmp_path).end_of_turn


@pytest.mark.slow
def test_skill_and_habits(directory, tokenizer):
    """It can add and multiply what it was told, and RL has everything left to teach: when to tell and to use it."""
    config, graph, params = weights.load(directory, jnp.float32)
    policy = warmstart.make_policy(nnx.merge(graph, params), tokenizer)
    held = list(itertools.islice(story_stream(random.Random(1), heldout=True), 256))
    rows = [forced_row(story, random.Random(index)) for index, story in enumerate(held)]
    greedy = warmstart.answers(policy, rows, "We", Sampling(1e-3))
    assert np.mean([warmstart.is_right(*pair) for pair in zip(held, greedy)]) >= 0.95
    assert {story.pattern for story in held} == set(range(len(PATTERNS)))
    for arm, low, high in (("channel_on", 0.10, 0.30), ("channel_off", 0.0, 0.03)):
        said = warmstart.chats(policy, arm, held)
        assert low <= np.mean([warmstart.is_right(s, c[u]) for s, c in zip(held, said) for u in (2, 3)]) <= high
