"""Text work around sampling: prompts to ids and replies to text, many at a time, and how long it took.

One call of the tokenizer for a whole round: it runs on all cores, and lets Python go on meanwhile (a call for a single
text does neither). Each distinct prompt is encoded once: the chats of a problem begin alike. Ids and texts are those
of the tokenizer, always. Left out: what the prompts say (tasks) and when they are needed (rollout.play).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

Chat = Sequence[dict[str, str]]
"""Messages for the chat template."""


class Tokenizer(Protocol):
    """What a policy needs of a tokenizer (model.tokenizer.ChatTokenizer is one; tests bring tiny ones)."""

    end_of_turn: tuple[int, ...]

    def encode_chats(self, chats: Sequence[Chat]) -> list[list[int]]: ...
    def decode_all(self, replies: Sequence[Sequence[int]]) -> list[str]: ...
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
        self._ready = dict(zip(distinct, self.tokenizer.encode_chats(list(distinct.values())), strict=True))

    def encode(self, chats: Sequence[Chat]) -> list[list[int]]:
        """The ids of each chat; equal chats share one list. Raises what it raises."""
        keys = [_key(chat) for chat in chats]
        new = {key: chat for key, chat in zip(keys, chats, strict=True) if key not in self._ready}
        ids = self._ready | dict(zip(new, self.tokenizer.encode_chats(list(new.values())), strict=True))
        return [ids[key] for key in keys]

    def decode(self, replies: Sequence[np.ndarray]) -> list[str]:
        """The text of each reply's ids [T]."""
        return self.tokenizer.decode_all(replies)


def _key(chat: Chat) -> tuple:
    return tuple((message["role"], message["content"]) for message in chat)
