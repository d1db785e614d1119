"""Tiny stand-ins: a byte tokenizer, a two-layer model, a made-up task. No files, no weights to load."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.config import ModelConfig
from model.lora import LoraConfig, init_lora
from model.qwen2 import Qwen2
from rollout.episode import Episode, EpisodePlan, Utterance
from rollout.policy import Policy, Reply
from rollout.text import TextWork
from tasks.base import Problem, Task, Turn

END, START, PAD = 256, 257, 258
CONFIG = ModelConfig(vocab=264, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=32)
LORA = LoraConfig(rank=2, alpha=4.0)


class ByteTokenizer:
    """One id a byte, 256 ends a turn, 257 starts one; ids from 259 on don't exist (the embedding has 264 rows)."""

    end_of_turn = (END,)
    base_vocab = 259

    def encode_text(self, text):
        return list(text.encode())

    def encode_chat(self, messages):
        out = []
        for message in messages:
            out += [START, *message["content"].encode(), END]
        return [*out, START]

    def encode_chats(self, chats):
        return [self.encode_chat(chat) for chat in chats]

    def decode_all(self, replies):
        return [self.decode(reply) for reply in replies]

    def decode(self, tokens):
        return bytes(t for t in np.asarray(tokens).tolist() if t < 256).decode(errors="replace")

    def sampleable(self, vocab):
        return np.arange(vocab) < self.base_vocab


def base(seed=0, config=CONFIG, dtype=jnp.float32):
    """(graph, weights) of a random model whose logits are far from flat."""
    model = Qwen2(config, nnx.Rngs(seed), dtype)
    model.embed_tokens[...] = model.embed_tokens[...] * jnp.asarray(40, dtype)
    return nnx.split(model)


_base_once = functools.cache(base)


def adapters(seeds, config=CONFIG, lora=LORA, b_size=0.3):
    """A tree [X, ...] of adapters that do something (B is not zero)."""
    cells = []
    for seed in seeds:
        tree = init_lora(jax.random.key(seed), config, lora)
        leaves, form = jax.tree.flatten(tree)
        keys = jax.random.split(jax.random.key(seed + 1000), len(leaves))
        noisy = [leaf + b_size * jax.random.normal(k, leaf.shape) for leaf, k in zip(leaves, keys, strict=True)]
        cells.append(jax.tree.unflatten(form, noisy))
    return jax.tree.map(lambda *x: jnp.stack(x), *cells)


_EXECUTABLES = {}
"""Compiled samplers by shape. Weights and adapters are arguments to them, so all tiny policies can share them."""


def policy(lora, rows=(4,), prompt_buckets=(32, 64), compile_afresh=False, **changes):
    graph, weights = _base_once()
    changes = {"tokenizer": ByteTokenizer(), "_executables": {} if compile_afresh else _EXECUTABLES, **changes}
    return Policy(
        config=CONFIG,
        graph=graph,
        base=weights,
        lora=lora,
        lora_scale=LORA.scale,
        prompt_buckets=prompt_buckets,
        row_buckets=rows,
        **changes,
    )


def problem(name="p", answer="3"):
    return Problem(id=name, question="How many?", answer=answer, facts=("Tom has 1.", "Ann has 2."))


def chat_task(arm="on", cap=6):
    """A and B speak once each, then A answers; B reads A, and A reads both (arm "on") or only itself."""
    turns = (
        Turn(0, 0, cap),
        Turn(1, 1, cap, reads=(0,) if arm == "on" else ()),
        Turn(0, 2, cap + 2, reads=(0, 1) if arm == "on" else (0,), graded=True),
    )

    def render(problem, index, heard):
        words = "|".join(heard.get(v, "-") for v in range(index))
        return [{"role": "user", "content": f"{index}{problem.id}:{words}"}]

    return Task("tiny", arm, ("A", "B"), turns, render)


class ScriptedPolicy:
    """Says `words(row_id)` and remembers what it was asked; no model. `tokens(row_id)` replaces the words' own ids."""

    def __init__(
        self,
        words=lambda row: f"e{row.episode}t{row.turn}",
        cells=1,
        tokenizer=None,
        tokens=None,
        row_buckets=(1024,),
    ):
        self.cells, self.row_buckets = cells, row_buckets
        self.tokenizer = tokenizer or ByteTokenizer()
        self.text = TextWork(self.tokenizer)
        self.tokens = tokens or (lambda row: [*words(row).encode(), END])
        self.calls = []

    def sample(self, requests_X, sampling):
        assert len(requests_X) == self.cells
        self.calls.append([list(requests) for requests in requests_X])
        return [[self._reply(request) for request in requests] for requests in requests_X]

    @property
    def requests(self):
        return [request for call in self.calls for requests in call for request in requests]

    def _reply(self, request):
        tokens = np.array(self.tokens(request.row_id), np.int32)
        return Reply(tokens, np.full(len(tokens), -0.5, np.float32), bool(tokens[-1] == END))


class FakeGrader:
    """Remembers the (text, gold) pairs it was given; `judge(text, gold)` grades them."""

    def __init__(self, judge=lambda text, gold: float(gold in text)):
        self.judge, self.pairs, self.foreseen = judge, [], []

    def ahead(self, pairs):
        self.foreseen += pairs

    def grade(self, pairs):
        self.pairs += pairs
        return [self.judge(text, gold) for text, gold in pairs]


def episode(task, problem, texts, correct=None, number=0, adapter=None, finished=True, step=0):
    """A chat written by hand. Ids show where they come from: 100 * (chat + 1) + turn, once a character."""
    grades = dict(zip(task.graded, correct or (), strict=False))
    adapter = adapter or (1.0,) * len(task.agents)
    utterances = [
        Utterance(
            turn=u,
            prompt_tokens=np.array([u + 1], np.int32),
            tokens=np.full(len(text), 100 * (number + 1) + u, np.int32),
            logp=np.full(len(text), -0.25, np.float32),
            text=text,
            finished=finished,
            trained=adapter[task.turns[u].agent] != 0,
            correct=grades.get(u),
        )
        for u, text in enumerate(texts)
    ]
    return Episode(EpisodePlan(task, problem, number, 17, step, adapter), 0, tuple(utterances))
