"""Rebuild a built-in model from nothing: `python -m rl.warmstart --out model/builtin`, or, for the harder one,
`python -m rl.warmstart --setting hard --out model/builtin_hard`.

Builds the tokenizer from the words of tasks.stories and tasks.habits, trains a half-million-parameter Qwen2
on scripted conversations (supervised, one learning rate schedule that ends at 0), writes a Hugging Face
directory and prints what the result can do (rl.calibration). Seeded; about eight minutes on two CPU cores, sixteen for
the harder one. Left out: reinforcement learning, which is what the result is for.
"""

import argparse
import itertools
import math
import random
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import muon
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from model.config import ModelConfig
from model.qwen2 import Qwen2
from model.tokenizer import ChatTokenizer
from model.weights import read_json, save_hf, write_json
from rl.calibration import calibrate
from tasks.habits import EASY, SETTINGS, Setting, phrase_words
from tasks.scripts import Row, equation, forced_row, informed_row, write_rows
from tasks.stories import LARGEST, Story, story_stream, template_words
from tasks.talk import FULL, NO_MESSAGE, NONE, SHARES, SHORT

PEAK_LR, WARMUP = 6e-3, 50
SUM_ROWS, SUM_LENGTH = 48, 64
"""Rows of bare equations in a step, and their tokens."""
PROMPT_WEIGHT, SUM_WEIGHT = 0.1, 0.3
CIRCLES, NUMBER_SCALE = (2, 4, 5, 10, 20, 50, 100, 250), 0.02


@dataclass(frozen=True)
class Share:
    """What a step holds of one task.

    `chats`: whole conversations. `forced`: practice answers whose choice is given. `informed`: answers that heard
    everything. `message_length`, `answer_length`: row lengths, tokens.
    """

    chats: int
    forced: int
    informed: int
    message_length: int
    answer_length: int


@dataclass(frozen=True)
class Recipe:
    """How a setting is trained: steps, and what each holds, by task.

    `practice`: so many first steps teach forced rows whole. Where using what was told is rare and shows late in an
    answer, it is hardly learned from scripts alone; so it is learned as a common habit, which the later steps unlearn.
    """

    steps: int
    shares: Mapping[str, Share]
    practice: int = 0


RECIPES = {
    "easy": Recipe(1000, {"talk_to_solve": Share(8, 24, 0, message_length=88, answer_length=136)}),
    "hard": Recipe(
        1200,
        {
            "talk_to_solve": Share(6, 8, 8, message_length=88, answer_length=144),
            "talk_three": Share(2, 4, 3, message_length=104, answer_length=176),
            "ask_to_solve": Share(2, 6, 4, message_length=116, answer_length=128),
        },
        practice=650,
    ),
}

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(setting: Setting = EASY) -> PreTrainedTokenizerFast:
    """Whole words and whole numbers; letters, then bytes, for everything else. Lossless on any text.

    A Unigram model whose pieces all cost the same takes the fewest pieces, so text that came from n sampled
    tokens never needs more than n when it is read back, and junk such as `DanWe` falls apart into words.
    """
    prompts = " ".join(str(part) for style in (SHORT, FULL) for part in vars(style).values())
    prompts = re.sub(r"\{\w+\}", " ", prompts) + f"{NO_MESSAGE} nothing yet system user assistant {SHARES[2]} {NONE[2]}"
    words = template_words() | phrase_words(setting) | set(re.findall(r"[A-Za-z]+", prompts))
    pieces = [chr(code) for code in range(32, 127)] + ["\n", "\ufffd"]
    pieces += [" " + mark for mark in "+-*=("] + ["\\boxed{", " \\boxed{", "}."]
    # A control token that was sampled is shown as its name, which then is text: two pieces, not a dozen.
    pieces += [mark.removesuffix("|>") for mark in (PAD, START, END)] + ["|>"]
    pieces += [space + str(n) for space in ("", " ") for n in range(LARGEST + 1) if space or n > 9]
    pieces += [space + word for word in sorted(words) for space in ("", " ") if space or len(word) > 1]
    # Unigram wants an "unknown" piece, though byte fallback never uses it: a one-byte character, so that
    # reading it back costs one token. Bytes cost so much that a literal "<0x41>" in a text stays text.
    vocab = [("\x7f", -1.0)] + [(piece, -1.0) for piece in pieces]
    vocab += [(f"<0x{byte:02X}>", -1000.0) for byte in range(256)]
    raw = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in (PAD, START, END)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def model_config(tokenizer: PreTrainedTokenizerFast) -> ModelConfig:
    vocab = math.ceil(len(tokenizer) / 32) * 32
    return ModelConfig(vocab, width=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp=256, max_positions=1024)


# Examples


def prompt_text(tokenizer: PreTrainedTokenizerFast, row: Row) -> str:
    messages = row.task.render(row.story.problem, row.turn, row.heard)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def encode_row(tokenizer: PreTrainedTokenizerFast, row: Row, whole: bool = False) -> tuple[list[int], list[float]]:
    """(tokens, their weights in the loss); `whole`: what the row is given is learned too."""
    prompt = tokenizer.backend_tokenizer.encode(prompt_text(tokenizer, row)).ids
    reply = tokenizer.backend_tokenizer.encode(row.reply).ids + [tokenizer.eos_token_id]
    given = 0 if whole else len(tokenizer.backend_tokenizer.encode(row.given).ids)
    return prompt + reply, [PROMPT_WEIGHT] * len(prompt) + [0.0] * given + [1.0] * (len(reply) - given)


def encode_sums(tokenizer: PreTrainedTokenizerFast, stream: Iterator[Story], rng: random.Random):
    """A row full of equations; only what follows from what stands before is trained: results and boxes."""
    tokens: list[int] = []
    while len(tokens) < SUM_LENGTH:
        tokens += tokenizer.backend_tokenizer.encode(equation(next(stream), rng.random() < 0.3)).ids
    tokens = tokens[:SUM_LENGTH]
    follows = set(tokenizer.convert_tokens_to_ids([" =", " \\boxed{"]))
    return tokens, [0.0] + [SUM_WEIGHT * (before in follows) for before in tokens[:-1]]


def pack(rows: list[tuple[list[int], list[float]]], length: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [B, T] int32, weights [B, T] float32), padded on the right."""
    tokens_BT = np.full((len(rows), length), pad, np.int32)
    weights_BT = np.zeros((len(rows), length), np.float32)
    for index, (tokens, weights) in enumerate(rows):
        if len(tokens) > length:
            raise ValueError(f"a row of {len(tokens)} tokens does not fit {length}")
        tokens_BT[index, : len(tokens)], weights_BT[index, : len(tokens)] = tokens, weights
    return tokens_BT, weights_BT


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, setting: Setting, recipe: Recipe
) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Endless steps: messages and answers of each task, then equations."""
    rng = random.Random(seed)
    stream = story_stream(rng, least_facts=setting.least_facts)
    for step in itertools.count(1):
        groups, whole = [], step <= recipe.practice
        for task, share in recipe.shares.items():
            rows = [row for _ in range(share.chats) for row in write_rows(next(stream), rng, setting, task)]
            rows += [forced_row(next(stream), rng, setting, task) for _ in range(share.forced)]
            rows += [informed_row(next(stream), rng, setting, task) for _ in range(share.informed)]
            for graded, length in ((False, share.message_length), (True, share.answer_length)):
                chosen = [row for row in rows if row.task.turns[row.turn].graded == graded]
                groups.append(([encode_row(tokenizer, row, whole) for row in chosen], length))
        groups.append(([encode_sums(tokenizer, stream, rng) for _ in range(SUM_ROWS)], SUM_LENGTH))
        yield [pack(rows, length, tokenizer.pad_token_id) for rows, length in groups]


# Training


def init_model(config: ModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2:
    """Random weights, but a number's embedding starts with its place on circles of several sizes.

    Sums of angles are how small transformers come to add (Nanda et al., 2023); starting there saves many steps.
    """
    model = Qwen2(config, rngs=nnx.Rngs(seed))
    numbers = np.arange(LARGEST + 1)
    angles = 2 * np.pi * numbers[:, None] / np.array(CIRCLES)[None]
    mix = np.random.default_rng(seed).normal(size=(2 * len(CIRCLES), config.width)) / np.sqrt(len(CIRCLES))
    features = np.concatenate([np.cos(angles), np.sin(angles)], 1) @ mix
    table = np.array(model.embed_tokens[...])
    for space in ("", " "):
        table[tokenizer.convert_tokens_to_ids([f"{space}{n}" for n in numbers])] += NUMBER_SCALE * features
    model.embed_tokens[...] = jnp.asarray(table, jnp.float32)
    return model


def weighted_loss(model: Qwen2, groups: list) -> jax.Array:
    """Mean cross-entropy of the next token over all groups, by weight."""
    total, weight = jnp.zeros(()), jnp.zeros(())
    for tokens_BT, weights_BT in groups:
        hidden = forward(model, tokens_BT[:, :-1])
        nll = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), tokens_BT[:, 1:])
        total += (nll * weights_BT[:, 1:]).sum()
        weight += weights_BT[:, 1:].sum()
    return total / weight


def forward(model: Qwen2, tokens_BT: jax.Array) -> jax.Array:
    """Final hidden states of rows that start at position 0; causality hides the padding on the right."""
    batch, steps = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(steps)[None], (batch, steps))
    mask_BTS = jnp.broadcast_to(jnp.tril(jnp.ones((steps, steps), bool))[None], (batch, steps, steps))
    return model.hidden(tokens_BT, positions_BT, mask_BTS)[0]


def make_step(graph: nnx.GraphDef, optimizer: optax.GradientTransformation):
    @jax.jit
    def step(params, state, groups):
        loss, grads = jax.value_and_grad(lambda p: weighted_loss(nnx.merge(graph, p), groups))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def schedule(steps: int, peak: float = PEAK_LR) -> optax.Schedule:
    """Linear warm-up, flat for a third, then linear to 0."""
    flat = steps // 3
    parts = [optax.linear_schedule(0, peak, WARMUP), optax.constant_schedule(peak)]
    return optax.join_schedules(parts + [optax.linear_schedule(peak, 0, steps - flat)], [WARMUP, flat])


def train(model: Qwen2, data: Iterator, steps: int) -> Qwen2:
    """`steps` steps of Muon (Jordan et al., 2024), which gets all sums right where as many of Adam's do not."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon(schedule(steps), adam_b2=0.98, consistent_rms=0.2))
    graph, params = nnx.split(model)
    state, step, started = optimizer.init(params), make_step(graph, optimizer), time.time()
    for index, groups in zip(range(1, steps + 1), data):
        params, state, loss = step(params, state, groups)
        if index % 25 == 0:
            seconds = f"{time.time() - started:.0f} s, {time.process_time():.0f} s of CPU"
            print(f"step {index}/{steps}  loss {float(loss):.3f}  {seconds}", flush=True)
    return nnx.merge(graph, params)


def save(out: Path, model: Qwen2, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the Hugging Face directory."""
    save_hf(out, model.config, nnx.state(model), jnp.float32)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    write_json(out / "config.json", read_json(out / "config.json") | ends)
    write_json(out / "generation_config.json", ends | {"do_sample": True})
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write, e.g. model/builtin")
    parser.add_argument(
        "--setting",
        choices=SETTINGS,
        default="easy",
        help="easy (default): talk_to_solve, model/builtin; hard: three tasks, answers that start alike and rarely use "
        "what the partner sent, model/builtin_hard",
    )
    parser.add_argument("--steps", type=int, help="training steps, count; by default the setting's own")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights and scripts (default 0)")
    args = parser.parse_args()
    setting, recipe = SETTINGS[args.setting], RECIPES[args.setting]
    tokenizer = build_tokenizer(setting)
    config = model_config(tokenizer)
    print(f"{len(tokenizer)} tokens, {config.parameters:,} parameters")
    model = init_model(config, tokenizer, args.seed)
    model = train(model, batches(tokenizer, args.seed, setting, recipe), args.steps or recipe.steps)
    save(args.out, model, tokenizer)
    for name, value in calibrate(model, ChatTokenizer(args.out), setting).items():
        print(f"{name:60} {value:.3f}")


if __name__ == "__main__":
    main()
