"""The next step made ready during the update: the same problems and prompts, found when they are asked for."""

import dataclasses
import time

import pytest

from rl.collect import Cell, Settings, problems_at
from rl.draw import play_step
from rl.presets import PRESETS
from rl.upcoming import Upcoming, opening
from rollout.distribution import Sampling
from rollout.setup import build_task
from rollout.text import TextWork
from tasks.talk import talk_task
from tests import tiny

PROBLEMS = [dataclasses.replace(tiny.problem(f"p{i}"), question=f"How many in box {i}?") for i in range(10)]
TASK = talk_task("channel_on", message_tokens=5, answer_tokens=9)
CELLS = [Cell(TASK, "grpo", 17), Cell(TASK, "grpo", 18)]


class Counting(tiny.ByteTokenizer):
    """Remembers what it encoded."""

    def __init__(self):
        self.encoded = []

    def encode_chat(self, messages):
        self.encoded.append(messages)
        return super().encode_chat(messages)


@pytest.mark.parametrize("first", [0, 3])
def test_problems_are_those_of_the_step(first):
    """Wherever a run begins or is resumed, and across the end of a pass over the problems."""
    with Upcoming(TextWork(tiny.ByteTokenizer()), CELLS, PROBLEMS, 5, 4) as ahead:
        ahead.start(first)
        for step in range(first, first + 4):
            problems_XP = ahead.take()
            ahead.start(step + 1)
            assert problems_XP == [problems_at(PROBLEMS, cell.seed, 5, step, 4) for cell in CELLS]


def test_the_first_round_finds_its_prompts_ready():
    policy = tiny.ScriptedPolicy(cells=2, tokenizer=Counting())
    encoded = policy.tokenizer.encoded
    with Upcoming(policy.text, CELLS, PROBLEMS, 0, 4) as ahead:
        ahead.start(0)
        problems_XP = ahead.take()
        assert encoded and all(chat in opening(CELLS, problems_XP) for chat in encoded)
        encoded.clear()
        play_step(policy, tiny.FakeGrader(), CELLS, problems_XP, 0, Settings(3, 1, Sampling(0.9)))
    later = [request for call in policy.calls[1:] for requests in call for request in requests]
    assert len(policy.calls[0][0]) == 12 and len(later) == 3 * 24 and len(encoded) <= len(later)
    assert not any(chat in opening(CELLS, problems_XP) for chat in encoded)


def test_an_opening_has_every_turn_of_the_first_round():
    """Four notes on a board, one message of a chat; nothing has been heard yet."""
    board = build_task(PRESETS["tiny", "message_board"], "shared_board")
    chats = opening([Cell(board, "readers_mean", 1), CELLS[0]], [PROBLEMS[:2], PROBLEMS[:1]])
    assert chats[:4] == [board.render(PROBLEMS[0], u, {}) for u in range(4)]
    assert len(chats) == 2 * 4 + 1 and chats[8] == TASK.render(PROBLEMS[0], 0, {})


class Slow(tiny.ByteTokenizer):
    def encode_chat(self, messages):
        time.sleep(0.05)
        return super().encode_chat(messages)


@pytest.mark.parametrize("update_s", [0.0, 0.6])
def test_only_what_the_update_covers_is_hidden(update_s):
    work = TextWork(Slow())
    with Upcoming(work, CELLS[:1], PROBLEMS, 0, 4) as ahead:
        ahead.start(0)
        time.sleep(update_s)
        assert work.seconds["text"] == 0  # counted for the step that takes it
        ahead.take()
    assert work.seconds["text"] >= 0.2
    hidden = work.seconds["text_hidden"]
    assert hidden == pytest.approx(work.seconds["text"], abs=0.05) if update_s else hidden < 0.05


def test_what_goes_wrong_is_raised_where_the_step_is_taken():
    with Upcoming(TextWork(tiny.ByteTokenizer()), CELLS, [], 0, 4) as ahead:
        ahead.start(0)
        with pytest.raises(ZeroDivisionError):
            ahead.take()
