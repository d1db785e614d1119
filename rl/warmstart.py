"""Rebuild the built-in model from nothing: `python -m rl.warmstart --out model/builtin`.

Builds the tokenizer from the words of tasks.stories and tasks.scripts, trains a half-million-parameter Qwen2
on scripted conversations (supervised, one learning rate schedule that ends at 0), writes a Hugging Face
directory and prints what the result can do. Seeded; about eight minutes on two CPU cores. Left out:
reinforcement learning, which is what the result is for, and Math-Verify (a pattern match is enough for
calibration).
"""

import argparse
import itertools
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
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
from model.lora import LoraConfig, init_lora
from model.qwen2 import Qwen2
from model.tokenizer import ChatTokenizer
from model.weights import read_json, save_hf, write_json
from rollout.distribution import Sampling
from rollout.episode import EpisodePlan, RowId
from rollout.play import play
from rollout.policy import Policy, Request
from tasks.scripts import ANSWER_TOKENS, TASKS, Row, equation, forced_row, phrase_words, tell, write_rows
from tasks.stories import LARGEST, Story, story_stream, template_words
from tasks.talk import FULL, NO_MESSAGE, SHORT

STEPS, PEAK_LR, WARMUP = 1000, 6e-3, 50
CONVERSATIONS, FORCED_ROWS, SUM_ROWS = 8, 24, 48
"""What a step holds: whole conversations (4 rows each), practice answers, rows of bare equations."""
MESSAGE_LENGTH, ANSWER_LENGTH, SUM_LENGTH = 88, 136, 64
PROMPT_WEIGHT, SUM_WEIGHT = 0.1, 0.3
CIRCLES, NUMBER_SCALE = (2, 4, 5, 10, 20, 50, 100, 250), 0.02
SAMPLING = Sampling(temperature=0.9, top_p=0.95)

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


# What it can do


def make_policy(model: Qwen2, tokenizer: ChatTokenizer) -> Policy:
    """The model with an adapter that changes nothing."""
    graph, params = nnx.split(model)
    lora = jax.tree.map(lambda x: x[None], init_lora(jax.random.key(0), model.config, LoraConfig(1, 1.0)))
    return Policy(model.config, graph, params, lora, 0.0, tokenizer, (ANSWER_LENGTH + 32,), (512,))


def is_right(story: Story, text: str) -> bool:
    boxes = re.findall(r"\\boxed\{(\d+)\}", text)
    return bool(boxes) and boxes[-1] == story.problem.answer


def chats(policy: Policy, arm: str, held: list[Story]) -> list[list[str]]:
    """Four replies a story."""
    problems = [replace(story.problem, id=str(index)) for index, story in enumerate(held)]
    plans = [EpisodePlan(TASKS[arm], problem, 0, 0, 0, (0.0, 0.0)) for problem in problems]
    return [[said.text for said in episode.utterances] for episode in play(policy, [plans], SAMPLING)[0]]


def answers(policy: Policy, rows: list[Row], start: str, sampling: Sampling) -> list[str]:
    """A reply a row, made to start with `start`."""
    given = policy.tokenizer.encode_text(start)
    requests = []
    for index, row in enumerate(rows):
        prompt = policy.tokenizer.encode_chat(row.task.render(row.story.problem, row.turn, row.heard))
        requests.append(Request(str(index), prompt + given, ANSWER_TOKENS, 0.0, RowId(0, 0, index, 0, row.turn)))
    return [start + policy.tokenizer.decode(reply.tokens) for reply in policy.sample([requests], sampling)[0]]


def calibrate(model: Qwen2, tokenizer: ChatTokenizer, count: int = 512) -> dict[str, float]:
    """Shares on `count` held-out stories, one chat each."""
    held = list(itertools.islice(story_stream(random.Random("calibration"), heldout=True), count))
    policy, out = make_policy(model, tokenizer), {}
    for arm in TASKS:
        said = chats(policy, arm, held)
        out[f"answers right, {arm}"] = np.mean([is_right(s, c[u]) for s, c in zip(held, said) for u in (2, 3)])
        out[f"sends all its facts, {arm}"] = np.mean([c[a] == tell(s, a) for s, c in zip(held, said) for a in (0, 1)])
        out[f"asks, {arm}"] = np.mean(["?" in c[u] for c in said for u in (0, 1)])
    rows = [forced_row(story, random.Random(0)) for story in held]
    out["uses a full message"] = np.mean([r.startswith("We") for r in answers(policy, rows, "", SAMPLING)])
    for name, sampling in (("greedy", Sampling(1e-3)), ("top_p 0.95", SAMPLING), ("top_p 1", Sampling(0.9))):
        right = [is_right(*pair) for pair in zip(held, answers(policy, rows, "We", sampling))]
        out[f"right when it uses a full message, {name}"] = np.mean(right)
    out["... of three facts"] = np.mean([ok for s, ok in zip(held, right) if len(s.numbers) == 3])
    return {name: float(value) for name, value in out.items()}


def save(out: Path, model: Qwen2, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the Hugging Face directory."""
    save_hf(out, model.config, nnx.state(model), jnp.float32)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    write_json(out / "config.json", read_json(out / "config.json") | ends)
    write_json(out / "generation_config.json", ends | {"do_sample": True})
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
    model = train(model, batches(tokenizer, args.seed), args.steps)
    save(args.out, model, tokenizer)
    for name, value in calibrate(model, ChatTokenizer(args.out)).items():
        print(f"{name:50} {value:.3f}")


if __name__ == "__main__":
    main()
