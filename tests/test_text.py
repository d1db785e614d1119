"""Text work in batches: the same ids and words as one at a time, each distinct prompt once, honest seconds."""

import time

import numpy as np
import pytest

from model.tokenizer import UNKNOWN, ChatTokenizer, TokenizerError
from rollout.setup import BUILTIN
from rollout.text import TextWork
from tests import tiny

ODD = [
    "",
    "  two  spaces \n\n",
    "<|im_end|>\n<|im_start|>system",
    "half a pair \ud83d",
    "cafe\u0301 \U0001f600",
    "1,234.5",
]


@pytest.fixture(scope="module")
def builtin():
    return ChatTokenizer(BUILTIN)


def chats(texts):
    return [[{"role": "system", "content": a}, {"role": "user", "content": b}] for a in texts for b in texts]


def by_the_definition(tokenizer, reply):
    """ChatTokenizer.decode_all of one reply, an id at a time."""
    backend, run, out = tokenizer._whole, [], ""
    for id_ in map(int, reply):
        if id_ in tokenizer.end_of_turn:
            break
        written = backend.id_to_token(id_) if id_ >= 0 else None
        if written is not None and id_ not in tokenizer._control_ids:
            run.append(id_)
            continue
        out += backend.decode(run, skip_special_tokens=False) + (written or UNKNOWN)
        run = []
    return out + backend.decode(run, skip_special_tokens=False)


def test_prompts_do_not_depend_on_their_neighbours(builtin):
    asked = [*chats(ODD), *([{"role": "user", "content": text}] for text in ODD)]
    assert TextWork(builtin).encode(asked) == [builtin.encode_chat(chat) for chat in asked]


def test_texts_are_those_of_the_definition(builtin):
    """Ends first, last, in the middle and missing; control tokens, ids below 0 and ids without a token."""
    rng, (end, *_) = np.random.default_rng(0), builtin.end_of_turn
    replies = [rng.integers(-1, builtin.base_vocab + 3, length) for length in (0, 1, *[40] * 30)]
    replies += [rng.integers(10, 300, 40) for _ in range(5)]
    replies += [np.array(ids) for ids in ([end], [50, end], [50, end, 51], [50, *sorted(builtin._control_ids), 51])]
    assert TextWork(builtin).decode(replies) == [by_the_definition(builtin, reply) for reply in replies]


def test_real_prompts_and_replies(shared):
    tokenizer = ChatTokenizer(shared / "tokenizer" / "qwen2.5")
    replies = [np.random.default_rng(seed).integers(0, tokenizer.base_vocab, 60) for seed in range(40)]
    texts = TextWork(tokenizer).decode(replies)
    assert texts == [by_the_definition(tokenizer, reply) for reply in replies]
    asked = chats(texts[:6])
    assert TextWork(tokenizer).encode(asked) == [tokenizer.encode_chat(chat) for chat in asked]


def test_text_that_would_be_control_is_refused_as_ever(builtin, monkeypatch):
    forged = builtin.encode_text("a")[0]
    monkeypatch.setattr(builtin, "_control_ids", builtin._control_ids | {forged})
    with pytest.raises(TokenizerError, match="ordinary text became the control token"):
        TextWork(builtin).encode([[{"role": "user", "content": "a"}]])


class Counting(tiny.ByteTokenizer):
    def __init__(self):
        self.encoded = []

    def encode_chat(self, messages):
        self.encoded.append(messages[0]["content"])
        return super().encode_chat(messages)


def test_a_prompt_is_encoded_once_and_not_again_when_it_was_prepared():
    work = TextWork(Counting())
    asked = [[{"role": "user", "content": text}] for text in "abab"]
    work.prepare(asked[:1])
    assert work.encode(asked) == [tiny.ByteTokenizer().encode_chat(chat) for chat in asked]
    assert work.tokenizer.encoded == ["a", "b"]
    work.prepare(asked[1:2])  # the next step's take the place of the last one's
    work.encode(asked[:1])
    assert work.tokenizer.encoded == ["a", "b", "b", "a"]


def test_work_that_somebody_waits_for_is_not_hidden():
    work = TextWork(tiny.ByteTokenizer())
    with work.timed():
        time.sleep(0.1)
    assert work.seconds["text"] == pytest.approx(work.seconds["text_hidden"]) and work.seconds["text"] >= 0.1
    with work.waiting(), work.timed():
        time.sleep(0.1)
    assert work.seconds["text"] >= 0.2 and 0 < work.seconds["text_hidden"] <= work.seconds["text"] - 0.1
