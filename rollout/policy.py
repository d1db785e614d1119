"""The policy: frozen base, adapters and tokenizer, and the compiled shapes it samples with.

A class because it holds state: the executables. Every shape is compiled ahead of time and counted, and lengths are
rounded up to buckets, so the number of compilations is at most rows x prompt buckets x reply buckets, and as many for
sampling that penalises or, on a GPU, truncates otherwise.
"""

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from model.config import ModelConfig
from model.executables import compile_together
from model.fused import fits
from model.programs import Program
from rollout.distribution import Sampling, Shape
from rollout.episode import RowId
from rollout.sampler import Rows, base_dtype, decode, prefill
from rollout.text import TextWork, Tokenizer

REPLY_BUCKET = 32
"""Reply caps are rounded up to a multiple of this many tokens."""

SIDE_BY_SIDE_BYTES = 1 << 30
"""Of caches and attention scores that calls running side by side on a CPU may take together."""


class Request(NamedTuple):
    """One row to sample. `name` says whose it is, for errors; `scale` multiplies the adapter's alpha / rank."""

    name: str
    prompt_tokens: Sequence[int]
    max_tokens: int
    scale: float
    row_id: RowId


class Reply(NamedTuple):
    """What a row drew: `tokens` [T] int32, the end-of-turn token included; `logp` [T] fp32; `finished`: not cut."""

    tokens: np.ndarray
    logp: np.ndarray
    finished: bool


class _Sampled(NamedTuple):
    """What one call of the sampler gave: `replies_X` of the cells `cells`, its seconds, tokens and decode steps."""

    cells: list[int]
    replies_X: list[list[Reply]]
    prefill_s: float
    decode_s: float
    tokens: int
    steps: int


class PromptTooLong(ValueError):
    """A prompt that the cache cannot hold."""


@dataclass
class Policy:
    """Weights that act.

    `lora` is a tree with leading cell axis X; `lora_scale` is alpha / rank. `prompt_buckets` and `row_buckets` are
    ascending. `force_length` ignores the end-of-turn token (benchmarks). `fused`: decode by model.fused; None:
    where its kernels fit. `text`: its text work. `compiles` and `loads`: the seconds that each shape took that was
    compiled, and that was kept by an earlier process (model.executables); `seconds["compile"]` is of both.
    """

    config: ModelConfig
    graph: Any
    base: Any
    lora: Any
    lora_scale: float
    tokenizer: Tokenizer
    prompt_buckets: tuple[int, ...]
    row_buckets: tuple[int, ...]
    force_length: bool = False
    fused: bool | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0, "compile": 0.0})
    sampled_tokens: int = 0
    decode_steps: int = 0
    compiles: dict[tuple, float] = field(default_factory=dict)
    loads: dict[tuple, float] = field(default_factory=dict)
    _executables: dict[tuple, list[Compiled]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        longest = self.prompt_buckets[-1] + REPLY_BUCKET
        if longest > self.config.max_positions:
            raise PromptTooLong(
                f"the longest prompt bucket, {self.prompt_buckets[-1]} tokens, and a reply don't fit the model's "
                f"{self.config.max_positions} positions"
            )
        self.text = TextWork(self.tokenizer)
        self._allowed = jnp.asarray(self.tokenizer.sampleable(self.config.vocab))
        ends = () if self.force_length else self.tokenizer.end_of_turn
        self._ends = jnp.asarray(ends or (-1,), jnp.int32)

    @property
    def allowed_V(self) -> jax.Array:
        """[V] bool: ids that may be sampled."""
        return self._allowed

    @property
    def cells(self) -> int:
        return jax.tree.leaves(self.lora)[0].shape[0]

    def sample(self, requests_X: Sequence[Sequence[Request]], sampling: Sampling) -> list[list[Reply]]:
        """Sample every request; `requests_X[x]` are the rows of cell x. Replies come back in the same places.

        Cells side by side share calls, so the calls are as many as the cell with the most rows needs; cells without
        rows left sit the later ones out.
        """
        if len(requests_X) != self.cells:
            raise ValueError(f"requests for {len(requests_X)} cells; the policy holds {self.cells}")
        started, compiling = time.perf_counter(), self.seconds["compile"]
        sampled = self._run_all(self._calls(requests_X, sampling), self._at_once(requests_X))
        passed = time.perf_counter() - started - (self.seconds["compile"] - compiling)
        # Side by side, calls count more seconds together than pass: those that pass are shared out.
        share = min(1.0, passed / max(1e-9, sum(one.prefill_s + one.decode_s for one in sampled)))
        replies_X: list[list[Reply]] = [[] for _ in requests_X]
        for one in sampled:
            for x, replies in zip(one.cells, one.replies_X, strict=True):
                replies_X[x].extend(replies)
            self.seconds["prefill"] += share * one.prefill_s
            self.seconds["decode"] += share * one.decode_s
            self.sampled_tokens += one.tokens
            self.decode_steps += one.steps
        return replies_X

    def _at_once(self, requests_X: Sequence[Sequence[Request]]) -> int:
        """Calls to run side by side: on a CPU a core each, while they are small.

        A small model's operations leave a second core half idle; a large one's fill all cores, and memory. An
        accelerator takes one call after the other.
        """
        if jax.default_backend() != "cpu":
            return 1
        c, rows, prompt_slots = self.config, self.row_buckets[-1], self.prompt_buckets[-1]
        slots = prompt_slots + max((r.max_tokens for part in requests_X for r in part), default=0)
        token_bytes = 2 * c.layers * c.kv_heads * c.head_dim * base_dtype(self.base).itemsize
        call_bytes = rows * (self.cells * slots * token_bytes + 4 * c.heads * prompt_slots**2)
        needed = -(-max(map(len, requests_X)) // rows)
        return max(1, min(os.cpu_count() or 1, SIDE_BY_SIDE_BYTES // call_bytes, needed))

    def _run_all(self, calls: Iterator[Callable[[], _Sampled]], at_once: int) -> list[_Sampled]:
        """What the calls give, in their order."""
        if at_once == 1:
            return [call() for call in calls]
        with ThreadPoolExecutor(at_once) as pool:  # compiles the next shape, in this thread, while others sample
            return list(pool.map(lambda call: call(), calls))

    def _calls(self, requests_X: Sequence[Sequence[Request]], sampling: Sampling) -> Iterator[Callable[[], _Sampled]]:
        """The calls of the sampler that these requests take; each is compiled when it is asked for."""
        most = max(len(requests) for requests in requests_X)
        start = 0
        while start < most:
            rows = next((r for r in self.row_buckets if r >= most - start), self.row_buckets[-1])
            cells, lora = self.active([len(requests) > start for requests in requests_X])
            yield self._call(cells, lora, [requests_X[x][start : start + rows] for x in cells], rows, sampling)
            start += rows

    def active(self, busy_X: Sequence[bool]) -> tuple[list[int], Any]:
        """The cells to run and their adapters: all of them, or a quarter, or a quarter of that, if these hold the busy.

        A smaller X is another shape to compile, which pays only where much would be computed for nothing. Idle cells
        fill the places that are left.
        """
        busy = [x for x, yes in enumerate(busy_X) if yes]
        size = self.cells
        while busy and len(busy) <= -(-size // 4) < size:
            size = -(-size // 4)
        if size == self.cells:
            return list(range(self.cells)), self.lora
        idle = [x for x, yes in enumerate(busy_X) if not yes]
        chosen = sorted(busy + idle[: size - len(busy)])
        return chosen, jax.tree.map(lambda leaf: leaf[np.array(chosen)], self.lora)

    def _call(
        self, cells: list[int], lora: Any, part_X: list[Sequence[Request]], row_count: int, sampling: Sampling
    ) -> Callable[[], _Sampled]:
        """One call of the sampler, padded and compiled, to be made on any thread; `part_X` are the rows of `cells`."""
        prompt_slots = max(self._prompt_bucket(r) for part in part_X for r in part)
        most_new = max(r.max_tokens for part in part_X for r in part)
        new_slots = -(-most_new // REPLY_BUCKET) * REPLY_BUCKET
        rows = self._pad(part_X, row_count, prompt_slots)
        penalised = sampling.repetition_penalty != 1
        fixed = jax.default_backend() == "gpu"  # elsewhere a program for every truncation saves no more than it takes
        shape, kind = sampling.arrays(fixed), sampling.truncations if fixed else ()
        run_prefill, run_decode = self._compiled(lora, rows, new_slots, penalised, shape, kind)
        ends = () if self.force_length else self.tokenizer.end_of_turn

        def call() -> _Sampled:
            started = time.perf_counter()
            state = jax.block_until_ready(run_prefill(self.base, lora, rows))
            prefilled = time.perf_counter()
            state = run_decode(self.base, lora, rows, state, shape, self._allowed, self._ends)
            tokens, logp, counts, steps = jax.device_get((state.tokens, state.logp, state.counts, state.step))
            ended = time.perf_counter()
            replies_X = [
                [_reply(tokens[x, b, : counts[x, b]], logp[x, b, : counts[x, b]], ends) for b in range(len(part))]
                for x, part in enumerate(part_X)
            ]
            return _Sampled(cells, replies_X, prefilled - started, ended - prefilled, int(counts.sum()), int(steps))

        return call

    def _prompt_bucket(self, request: Request) -> int:
        length = len(request.prompt_tokens)
        index = bisect_left(self.prompt_buckets, length)
        if index == len(self.prompt_buckets):
            raise PromptTooLong(
                f"{request.name}: its prompt has {length} tokens and the longest bucket holds "
                f"{self.prompt_buckets[-1]}; raise --max-prompt-tokens"
            )
        return self.prompt_buckets[index]

    def _pad(self, part_X: list[Sequence[Request]], row_count: int, prompt_slots: int) -> Rows:
        cells = len(part_X)
        tokens = np.zeros((cells, row_count, prompt_slots), np.int32)
        lengths = np.ones((cells, row_count), np.int32)
        caps = np.zeros((cells, row_count), np.int32)
        scale = np.zeros((cells, row_count), np.float32)
        ids = np.zeros((cells, row_count, len(RowId._fields)), np.uint32)
        for x, part in enumerate(part_X):
            for b, request in enumerate(part):
                length = len(request.prompt_tokens)
                tokens[x, b, prompt_slots - length :] = request.prompt_tokens
                lengths[x, b], caps[x, b] = length, request.max_tokens
                scale[x, b] = request.scale * self.lora_scale
                ids[x, b] = request.row_id
        return Rows(*(jnp.asarray(a) for a in (tokens, lengths, caps, scale, ids)))

    def _compiled(
        self, lora: Any, rows: Rows, new_slots: int, penalised: bool, shape: Shape, kind: tuple[str, ...]
    ) -> list[Compiled]:
        """Prefill and decode; `kind`: the truncations that are part of what is compiled."""
        fused = self.fused if self.fused is not None else fits(self.config, base_dtype(self.base))

        def programs() -> list[Program]:
            args = (self.base, lora, rows)
            run_prefill = partial(prefill, self.graph, new_slots=new_slots, penalised=penalised)
            prefilled = Program(run_prefill, args, large=True)
            args += (prefilled, shape, self._allowed, self._ends)
            return [prefilled, Program(partial(decode, self.graph, fused=fused), args, donate=(3,))]

        return self.executable((*rows.tokens.shape, new_slots, penalised, *kind), programs)

    def executable(self, name: tuple, programs: Callable[[], Sequence[Program]]) -> list[Compiled]:
        """The executables called `name`, of these programs: compiled or loaded the first time, and counted."""
        if name not in self._executables:
            started = time.perf_counter()
            built = compile_together(programs())
            self._executables[name] = [one.executable for one in built]
            seconds = time.perf_counter() - started
            (self.loads if all(one.loaded for one in built) else self.compiles)[name] = seconds
            self.seconds["compile"] += seconds
        return self._executables[name]


def _reply(tokens: np.ndarray, logp: np.ndarray, ends: tuple[int, ...]) -> Reply:
    return Reply(tokens, logp, bool(len(tokens)) and int(tokens[-1]) in ends)


def bucket_ladder(longest: int, shortest: int = 64) -> tuple[int, ...]:
    """Ascending lengths, each at most half as long again as the one before, that end at `longest` rounded up to 32."""
    ladder, length = [], shortest
    longest = -(-longest // 32) * 32
    while length < longest:
        ladder.append(length)
        length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
    return (*ladder, longest)
