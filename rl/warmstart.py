"""Rebuild the built-in model from nothing: `python -m rl.warmstart --out model/builtin`.

Builds the tokenizer from the words of tasks.stories and tasks.scripts, trains a half-million-parameter Qwen2
on scripted conversations (supervised, one learning rate schedule that ends at 0), writes a Hugging Face
directory and prints what the result can do. Seeded; under ten minutes on two CPU cores. Left out:
reinforcement learning, which is what the result is for, and Math-Verify (a pattern match is enough for
calibration).
"""

import argparse
import itertools
import json
import math
import random
import re
import time
from collections.abc import Iterator
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
from tasks.scripts import TASKS, Row, equation, forced_row, phrase_words, tell, write_rows
from tasks.stories import LARGEST, Story, story_stream, template_words
from tasks.talk import FULL, NO_MESSAGE, SHORT

STEPS, PEAK_LR, WARMUP = 1000, 6e-3, 50
CONVERSATIONS, FORCED_ROWS, SUM_ROWS = 8, 24, 48
"""What a step holds: whole conversations (4 rows each), practice answers, rows of bare equations."""
MESSAGE_LENGTH, ANSWER_LENGTH, SUM_LENGTH = 88, 136, 64
PROMPT_WEIGHT, SUM_WEIGHT = 0.1, 0.3
CIRCLES, NUMBER_SCALE = (2, 4, 5, 10, 20, 50, 100, 250), 0.02

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words and whole numbers; letters, then bytes, for everything else. Lossless on any text.

    A Unigram model whose pieces all cost the same takes the fewest pieces, so text that came from n sampled
    tokens never needs more than n when it is read back, and junk such as `DanWe` falls apart into words.
    """
    prompts = " ".join(str(part) for style in (SHORT, FULL) for part in vars(style).values())
    prompts = re.sub(r"\{\w+\}", " ", prompts) + NO_MESSAGE + " nothing yet system user assistant"
    words = template_words() | phrase_words() | set(re.findall(r"[A-Za-z]+", prompts))
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


def encode_row(tokenizer: PreTrainedTokenizerFast, row: Row) -> tuple[list[int], list[float]]:
    """(tokens, their weights in the loss)."""
    prompt = tokenizer.backend_tokenizer.encode(prompt_text(tokenizer, row)).ids
    reply = tokenizer.backend_tokenizer.encode(row.reply).ids + [tokenizer.eos_token_id]
    first = 0.0 if row.forced else 1.0
    return prompt + reply, [PROMPT_WEIGHT] * len(prompt) + [first] + [1.0] * (len(reply) - 1)


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


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Endless steps: [messages, answers, equations]."""
    rng = random.Random(seed)
    stream = story_stream(rng)
    while True:
        rows = [row for _ in range(CONVERSATIONS) for row in write_rows(next(stream), rng)]
        rows += [forced_row(next(stream), rng) for _ in range(FORCED_ROWS)]
        messages = [encode_row(tokenizer, row) for row in rows if row.turn < 2]
        answers = [encode_row(tokenizer, row) for row in rows if row.turn >= 2]
        sums = [encode_sums(tokenizer, stream, rng) for _ in range(SUM_ROWS)]
        sides = ((messages, MESSAGE_LENGTH), (answers, ANSWER_LENGTH), (sums, SUM_LENGTH))
        yield [pack(rows, length, tokenizer.pad_token_id) for rows, length in sides]


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


def train(model: Qwen2, data: Iterator, steps: int, out: Path, tokenizer: PreTrainedTokenizerFast) -> Qwen2:
    """`steps` steps of Muon; every 100 the model so far is written to `out`.

    Muon (Jordan et al., 2024) learns the sums in half the steps that Adam needs, and more of them.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon(schedule(steps), adam_b2=0.98, consistent_rms=0.2))
    graph, params = nnx.split(model)
    state, step, started = optimizer.init(params), make_step(graph, optimizer), time.time()
    for index, groups in zip(range(1, steps + 1), data):
        params, state, loss = step(params, state, groups)
        if index % 25 == 0:
            print(f"step {index}/{steps}  loss {float(loss):.3f}  {time.time() - started:.0f} s", flush=True)
        if index % 100 == 0 and index < steps:
            save(out, nnx.merge(graph, params), tokenizer)
    return nnx.merge(graph, params)


# What it can do


@nnx.jit(static_argnames=("steps",))
def _sample(model: Qwen2, tokens_BT, lengths_B, key, temperature, top_p, steps: int):
    """Continue each row by `steps` tokens; every token recomputes the whole row, there is no cache."""
    rows = jnp.arange(tokens_BT.shape[0])

    def one(index, carry):
        tokens_BT, key = carry
        key, draw = jax.random.split(key)
        last = lengths_B + index
        logits = model.logits(forward(model, tokens_BT)[rows, last - 1]) / temperature
        probs = jax.nn.softmax(logits)
        order = jnp.sort(probs, axis=-1)[:, ::-1]
        kept = jnp.sum(jnp.cumsum(order, -1) - order < top_p, -1)
        floor = jnp.take_along_axis(order, kept[:, None] - 1, 1)
        choice = jax.random.categorical(draw, jnp.where(probs >= floor, logits, -jnp.inf))
        return tokens_BT.at[rows, last].set(choice.astype(jnp.int32)), key

    return jax.lax.fori_loop(0, steps, one, (tokens_BT, key))[0]


class Speaker:
    """Samples replies for rows of text prompts, for calibration only (training has rollout.sampler)."""

    def __init__(self, model: Qwen2, tokenizer: PreTrainedTokenizerFast, seed: int, temperature: float = 0.9):
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.key = jax.random.key(seed)

    def replies(self, prompts: list[str], cap: int, top_p: float = 0.95) -> list[str]:
        ids = [self.tokenizer.backend_tokenizer.encode(prompt).ids for prompt in prompts]
        lengths = np.array([len(row) for row in ids])
        tokens_BT = np.zeros((len(ids), 176), np.int32)
        for index, row in enumerate(ids):
            tokens_BT[index, : len(row)] = row
        self.key, key = jax.random.split(self.key)
        out = np.asarray(_sample(self.model, tokens_BT, lengths, key, self.temperature, top_p, cap))
        texts = []
        for row, length in zip(out.tolist(), lengths):
            reply = row[length : length + cap]
            end = reply.index(self.tokenizer.eos_token_id) if self.tokenizer.eos_token_id in reply else cap
            texts.append(self.tokenizer.decode(reply[:end], skip_special_tokens=True))
        return texts


def is_right(story: Story, text: str) -> bool:
    boxes = re.findall(r"\\boxed\{(\d+)\}", text)
    return bool(boxes) and boxes[-1] == story.problem.answer


def play(speaker: Speaker, tell_all: bool, arm: str, held: list[Story]) -> list[list[str]]:
    """Four replies a story; `tell_all` replaces the two messages with the stories' facts."""
    task, chats = TASKS[arm], [[] for _ in held]
    for index, turn in enumerate(task.turns):
        if tell_all and not turn.graded:
            replies = [tell(story, turn.agent) for story in held]
        else:
            rows = [Row(task, s, index, {v: c[v] for v in turn.reads}, "", "") for s, c in zip(held, chats)]
            replies = speaker.replies([prompt_text(speaker.tokenizer, row) for row in rows], turn.max_tokens)
        for chat, reply in zip(chats, replies):
            chat.append(reply)
    return chats


def skill(speaker: Speaker, held: list[Story], top_p: float) -> list[bool]:
    """Is the answer right when the partner told everything and the reply is made to start with "We"?"""
    rng = random.Random(0)
    rows = [forced_row(story, rng) for story in held]
    prompts = [prompt_text(speaker.tokenizer, row) + "We" for row in rows]
    return [is_right(s, r) for s, r in zip(held, speaker.replies(prompts, 28, top_p))]


def calibrate(model: Qwen2, tokenizer: PreTrainedTokenizerFast, count: int = 256) -> dict[str, float]:
    """Shares on `count` held-out stories, one sampled chat each (T 0.9, top_p 0.95)."""
    held = list(itertools.islice(story_stream(random.Random("calibration"), heldout=True), count))
    speaker = Speaker(model, tokenizer, seed=0)
    out = {}
    for arm in TASKS:
        chats = play(speaker, False, arm, held)
        out[f"{arm}: answers right"] = np.mean([is_right(s, r) for s, c in zip(held, chats) for r in c[2:]])
    chats = play(speaker, False, "channel_on", held)
    out["sends all its facts"] = np.mean([c[a] == tell(s, a) for s, c in zip(held, chats) for a in (0, 1)])
    out["asks"] = np.mean(["?" in c[a] for c in chats for a in (0, 1)])
    chats = play(speaker, True, "channel_on", held)
    out["uses a full message"] = np.mean([c[a].startswith("We") for c in chats for a in (2, 3)])
    greedy = skill(Speaker(model, tokenizer, 0, temperature=1e-3), held, 1.0)
    out["right when it starts with We, greedy"] = np.mean(greedy)
    out["right when it starts with We, top_p 0.95"] = np.mean(skill(speaker, held, 0.95))
    out["right when it starts with We, top_p 1"] = np.mean(skill(speaker, held, 1.0))
    for kind, test in (
        ("two facts", lambda s: len(s.numbers) == 2),
        ("three facts", lambda s: len(s.numbers) == 3),
        ("products", lambda s: "*" in equation(s, False)),
    ):
        out[f"greedy, {kind}"] = np.mean([right for s, right in zip(held, greedy) if test(s)])
    return {key: float(value) for key, value in out.items()}


# Files


def save(out: Path, model: Qwen2, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the Hugging Face directory."""
    from safetensors.numpy import save_file

    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = "model." + ".".join(str(part) for part in path)
        array = np.asarray(value[...])
        linear = name.endswith("_proj.weight")
        name = name + ".weight" if name == "model.embed_tokens" else name
        tensors[name] = np.ascontiguousarray(array.T if linear else array)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = model.config.to_hf() | special | {"dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(special | {"do_sample": True}, indent=2) + "\n")
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write, e.g. model/builtin")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = build_tokenizer()
    config = model_config(tokenizer)
    print(f"{len(tokenizer)} tokens, {config.parameters:,} parameters")
    model = init_model(config, tokenizer, args.seed)
    model = train(model, batches(tokenizer, args.seed), args.steps, args.out, tokenizer)
    save(args.out, model, tokenizer)
    for name, value in calibrate(model, tokenizer).items():
        print(f"{name:45} {value:.3f}")


if __name__ == "__main__":
    main()
