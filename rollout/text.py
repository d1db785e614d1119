"""Text work around sampling: prompts to ids and replies to text, many at a time, and how long it took.

One call of the tokenizer for a whole round: it runs on all cores, and lets Python go on meanwhile (a call for a single
text does neither). Each distinct prompt is encoded once: the chats of a problem begin alike. Ids and texts are those
of `encode_chat` and `decode`, always. Left out: what the prompts say (tasks) and when they are needed (rollout.play).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Protocol

import numpy as np

from model.tokenizer import ChatTokenizer

Chat = Sequence[dict[str, str]]
"""Messages for the chat template."""


class Tokenizer(Protocol):
    """What a policy needs of a tokenizer (model.tokenizer.ChatTokenizer is one; tests bring tiny ones)."""

    end_of_turn: tuple[int, ...]

    def encode_chat(self, messages: Chat) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def sampleable(self, vocab: int) -> np.ndarray: ...


class TextWork:
    """Encodes and decodes for a policy, one thread at a time, and counts the seconds.

    `seconds["text"]`: all of it; `seconds["text_hidden"]`: those in which the device worked and nobody waited.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.seconds = {"text": 0.0, "text_hidden": 0.0}
        self._ready: dict[tuple, list[int]] = {}

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts as text work, hidden until somebody is found `waiting` for it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.count(time.perf_counter() - started)

    def count(self, seconds: float) -> None:
        """Add text work that was done elsewhere; as `timed`."""
        for name in self.seconds:
            self.seconds[name] += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The caller has nothing else to do than to wait for text work, which is therefore not hidden."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds["text_hidden"] -= time.perf_counter() - started

    def prepare(self, chats: Sequence[Chat]) -> None:
        """Encode prompts that will be asked for next; they take the place of those prepared before."""
        distinct = {_key(chat): chat for chat in chats}
        self._ready = dict(zip(distinct, encode_chats(self.tokenizer, list(distinct.values())), strict=True))

    def encode(self, chats: Sequence[Chat]) -> list[list[int]]:
        """`encode_chat` of each chat; equal chats share one list. Raises what it raises."""
        keys = [_key(chat) for chat in chats]
        new = {key: chat for key, chat in zip(keys, chats, strict=True) if key not in self._ready}
        ids = self._ready | dict(zip(new, encode_chats(self.tokenizer, list(new.values())), strict=True))
        return [ids[key] for key in keys]

    def decode(self, replies: Sequence[np.ndarray]) -> list[str]:
        """`decode` of each reply's ids [T]."""
        return decode_replies(self.tokenizer, replies)


def encode_chats(tokenizer: Tokenizer, chats: Sequence[Chat]) -> list[list[int]]:
    """`tokenizer.encode_chat` of each chat; a ChatTokenizer's in one call that runs on all cores."""
    if not isinstance(tokenizer, ChatTokenizer):
        return [tokenizer.encode_chat(chat) for chat in chats]
    pieces = [_filled(tokenizer, chat) for chat in chats]
    texts = list({part: None for parts in pieces for part in parts if isinstance(part, str)})
    # JSON may hold half of a surrogate pair, which has no UTF-8; encode_text writes "?" too.
    plain = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
    encoded = tokenizer._text.encode_batch_fast(plain, add_special_tokens=False)
    ids = {text: one.ids for text, one in zip(texts, encoded, strict=True)}
    for text in texts:
        if not tokenizer._control_ids.isdisjoint(ids[text]):
            tokenizer.encode_text(text)  # raises, and says why
    return [
        list(chain.from_iterable(ids[part] if isinstance(part, str) else (part,) for part in parts)) for parts in pieces
    ]


def _filled(tokenizer: ChatTokenizer, chat: Chat) -> list[int | str]:
    """A chat as control tokens' ids and the texts between them, as encode_chat cuts it."""
    roles = tuple(message["role"] for message in chat)
    if roles not in tokenizer._pieces:
        tokenizer.encode_chat(chat)  # which remembers how the template is cut
    contents = [m["content"].strip() if m["role"] in tokenizer._stripped else m["content"] for m in chat]
    return [
        piece if isinstance(piece, int) else "".join(contents[p] if isinstance(p, int) else p for p in piece)
        for piece in tokenizer._pieces[roles]
    ]


def decode_replies(tokenizer: Tokenizer, replies: Sequence[np.ndarray]) -> list[str]:
    """`tokenizer.decode` of each reply; a ChatTokenizer's ordinary replies in one call that runs on all cores."""
    if not isinstance(tokenizer, ChatTokenizer):
        return [tokenizer.decode(reply) for reply in replies]
    ordinary = tokenizer.sampleable(tokenizer.base_vocab)
    ordinary[list(tokenizer._control_ids)] = False
    runs = {}
    for index, reply in enumerate(replies):
        ends = np.flatnonzero(np.isin(reply, tokenizer.end_of_turn))
        run = reply[: ends[0]] if len(ends) else reply
        if not len(run) or (run.min() >= 0 and run.max() < tokenizer.base_vocab and ordinary[run].all()):
            runs[index] = run.tolist()
    texts = dict(zip(runs, tokenizer._whole.decode_batch(list(runs.values()), skip_special_tokens=False), strict=True))
    # Control tokens within a reply and ids without a token are rare, and decode knows how they are written.
    return [texts[i] if i in texts else tokenizer.decode(reply) for i, reply in enumerate(replies)]


def _key(chat: Chat) -> tuple:
    return tuple((message["role"], message["content"]) for message in chat)
