"""model/builtin, model/builtin_hard and the command that makes them: tokenizer, prompts as the product renders them,
loss weights, skill."""

import functools
import itertools
import json
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import weights
from model.config import ModelConfig
from model.tokenizer import ChatTokenizer
from rl import calibration, warmstart
from rl.presets import PRESETS
from rollout.play import longest_prompt
from rollout.setup import BUILTINS
from tasks.habits import ANSWER_TOKENS, MESSAGE_TOKENS, SETTINGS, Setting
from tasks.scripts import forced_row, write_rows
from tasks.stories import LARGEST, PATTERNS, Story, stories, story_stream

PRESET = {"easy": "tiny", "hard": "tiny-hard"}


@pytest.fixture(scope="module", params=SETTINGS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def setting(name) -> Setting:
    return SETTINGS[name]


@pytest.fixture(scope="module")
def directory(name):
    return BUILTINS[PRESETS[PRESET[name], "talk_to_solve"].model]


@pytest.fixture(scope="module")
def tokenizer(directory) -> ChatTokenizer:
    return ChatTokenizer(directory)


@pytest.fixture(scope="module")
def built(setting):
    return warmstart.build_tokenizer(setting)


def drawn(setting: Setting, count: int, rng: random.Random) -> list[Story]:
    return list(itertools.islice(story_stream(rng, least_facts=setting.least_facts), count))


def scripts(setting: Setting, count: int):
    """`count` conversations of each task, one row a turn."""
    rng = random.Random(0)
    for task in setting.tasks:
        for story in drawn(setting, count, rng):
            yield from write_rows(story, rng, setting, task)


@functools.cache
def decoded(tokenizer: ChatTokenizer, token: int) -> str:
    return tokenizer.decode([token])


def pieces(tokenizer: ChatTokenizer, text: str) -> list[str]:
    return [decoded(tokenizer, token) for token in tokenizer.encode_text(text)]


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


def test_tokenizer_is_what_the_command_builds(directory, built):
    assert json.loads(built.backend_tokenizer.to_str()) == json.loads((directory / "tokenizer.json").read_text())


def test_padding_is_not_the_end(tokenizer):
    assert len(tokenizer.end_of_turn) == 1 and tokenizer.pad not in tokenizer.end_of_turn


def test_numbers_are_single_tokens(tokenizer):
    for number in range(LARGEST + 1):
        assert len(tokenizer.encode_text(str(number))) == len(tokenizer.encode_text(f" {number}")) == 1


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Tom has 17 + 5 = 22.", ["Tom", " has", " 17", " +", " 5", " =", " 22", "."]),
        (" The answer is \\boxed{22}.", [" The", " answer", " is", " \\boxed{", "22", "}."]),
        ("DanTom", ["Dan", "Tom"]),
        ("A: (no message)\nB:", ["A", ":", " (", "no", " message", ")", "\n", "B", ":"]),
        ("<|im_end|>", ["<|im_end", "|>"]),
    ],
)
def test_words_stay_whole(tokenizer, text, expected):
    assert pieces(tokenizer, text) == expected


def test_scripts_and_prompts_need_no_letters(tokenizer, setting):
    """Everything that the warm start shows is whole words, numbers and marks."""
    texts = set()
    for row in scripts(setting, 200):
        prompt = row.task.render(row.story.problem, row.turn, row.heard)
        texts |= {row.reply, *(message["content"] for message in prompt)}
    for text in texts:
        words = {piece.strip() for piece in pieces(tokenizer, text)}
        assert {word for word in words if word.isalpha() and len(word) == 1} <= {"A", "B", "C", "I", "a"}
        assert tokenizer.decode(tokenizer.encode_text(text)) == text


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


def test_prompts_and_scripts_fit(tokenizer, setting, name):
    train, heldout, _ = stories(512, 64, 0, setting.least_facts)
    for task, arms in setting.tasks.items():
        longest = max(longest_prompt(tokenizer.encode_chat, t, p) for t in arms.values() for p in train + heldout)
        assert longest <= PRESETS[PRESET[name], task].max_prompt_tokens
    for row in scripts(setting, 400):
        cap = ANSWER_TOKENS if row.task.turns[row.turn].graded else MESSAGE_TOKENS
        assert len(tokenizer.encode_text(row.reply)) + 1 <= cap


# The command


def test_training_sees_the_products_prompts(tokenizer, built, setting):
    for row in scripts(setting, 20):
        tokens, loss_weights = warmstart.encode_row(built, row)
        prompt = tokenizer.encode_chat(row.task.render(row.story.problem, row.turn, row.heard))
        reply = tokenizer.encode_text(row.reply) + [tokenizer.end_of_turn[0]]
        assert tokens == prompt + reply
        assert loss_weights == [warmstart.PROMPT_WEIGHT] * len(prompt) + [1.0] * len(reply)


def test_a_forced_row_teaches_all_but_what_it_is_given(tokenizer, built, setting):
    rng = random.Random(0)
    for task in setting.tasks:
        for story in drawn(setting, 20, rng):
            row = forced_row(story, rng, setting, task)
            tokens, loss_weights = warmstart.encode_row(built, row)
            start = loss_weights.index(0.0)
            taught = tokens[start + loss_weights[start:].count(0.0) :]
            assert loss_weights[-len(taught) :] == [1.0] * len(taught)
            assert row.given + tokenizer.decode(taught) == row.reply
            assert tokenizer.decode(tokens[start:]) == row.reply
            whole = warmstart.encode_row(built, row, whole=True)
            assert whole[0] == tokens and 0.0 not in whole[1]


def test_equations_train_results_only(built, setting):
    rng = random.Random(0)
    tokens, loss_weights = warmstart.encode_sums(built, story_stream(rng, least_facts=setting.least_facts), rng)
    trained = {built.decode([b]) for b, weight in zip(tokens, loss_weights[1:]) if weight}
    assert trained <= {" =", " \\boxed{"} and " =" in trained


def test_batches_are_seeded_and_fit(built, setting, name):
    recipe = warmstart.RECIPES[name]
    once, again = (next(warmstart.batches(built, 3, setting, recipe)) for _ in range(2))
    for (tokens, loss_weights), other in zip(once, again):
        np.testing.assert_array_equal(tokens, other[0])
        assert tokens.shape == loss_weights.shape and loss_weights.sum() > 0
    stream = warmstart.batches(built, 0, setting, recipe)
    for _ in range(20):
        next(stream)  # raises if a row does not fit its length


def test_practice_ends(built, setting):
    """First the choice is learned from practice rows, then it is not."""
    share = warmstart.Share(chats=1, forced=4, informed=0, message_length=88, answer_length=144)
    recipe = warmstart.Recipe(2, {"talk_to_solve": share}, practice=1)
    groups = [groups[1] for groups in itertools.islice(warmstart.batches(built, 0, setting, recipe), 2)]
    for forced, (_, weights_BT) in zip((0, 4), groups):
        ends = [np.flatnonzero(row)[-1] for row in weights_BT]
        assert sum(0.0 in row[: end + 1] for row, end in zip(weights_BT, ends)) == forced


@pytest.mark.slow
def test_the_command_makes_a_directory_that_loads(name, tmp_path, monkeypatch, capsys):
    shares = {task: replace(share, chats=1, forced=2) for task, share in warmstart.RECIPES[name].shares.items()}
    monkeypatch.setitem(warmstart.RECIPES, name, warmstart.Recipe(2, shares))
    monkeypatch.setattr(warmstart, "SUM_ROWS", 2)
    monkeypatch.setattr("sys.argv", ["warmstart", "--setting", name, "--out", str(tmp_path)])
    monkeypatch.setattr(warmstart, "calibrate", lambda model, tokenizer, setting: {"nothing": 0.0})
    with jax.numpy_dtype_promotion("standard"):  # optax's Muon raises a float to an int32 power
        warmstart.main()
    assert "parameters" in capsys.readouterr().out
    weights.load(tmp_path, jnp.float32)
    assert ChatTokenizer(tmp_path).end_of_turn


BOUNDS = {
    ("easy", "talk_to_solve"): (0.95, (0.10, 0.30), (0.0, 0.03), (0.1, 0.5)),
    ("hard", "talk_to_solve"): (0.95, (0.003, 0.05), (0.0, 0.02), (0.7, 0.97)),
    ("hard", "talk_three"): (0.75, (0.01, 0.05), (0.0, 0.02), (0.7, 0.97)),
    ("hard", "ask_to_solve"): (0.85, (0.005, 0.05), (0.0, 0.02), (0.75, 0.98)),
}
"""Of the base, by setting and task: the least share of right answers that use all facts, likeliest tokens taken; pass@1
with the channel on and off; flat groups."""


@pytest.mark.slow
def test_skill_and_habits(directory, tokenizer, setting, name):
    """It can calculate with what it was told, and RL has everything left to teach: when to tell and to use it."""
    _, graph, params = weights.load(directory, jnp.float32)
    model = nnx.merge(graph, params)
    shares = calibration.calibrate(model, tokenizer, setting, count=256)
    for task in setting.tasks:
        skill, *bounds = BOUNDS[name, task]
        assert shares[f"{task}: right when it uses them, greedy"] >= skill
        for key, (low, high) in zip(("pass@1, channel_on", "pass@1, channel_off", "flat groups"), bounds):
            assert low <= shares[f"{task}: {key}"] <= high, (task, key, shares)
    if name == "easy":
        assert {story.pattern for story in calibration.heldout_stories(256, setting)} == set(range(len(PATTERNS)))
