"""tasks.scripts: what the built-in model is warm-started on says what it should, as often as it should."""

import itertools
import random
import re
from collections import Counter

import pytest

from tasks.scripts import ANSWERS, MESSAGES, OFF_SHARE, Row, fits, forced_row, garble, tell, use, write_rows
from tasks.stories import Story, story_stream


def drawn(count: int, seed: int = 0) -> list[Story]:
    return list(itertools.islice(story_stream(random.Random(seed)), count))


def conversations(count: int, seed: int = 0) -> list[list[Row]]:
    rng = random.Random(seed)
    return [write_rows(story, rng) for story in drawn(count, seed)]


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+", text))


def test_seeded():
    assert conversations(20) == conversations(20)
    assert conversations(20) != conversations(20, seed=1)


def test_message_kinds():
    chats = conversations(3000)
    two = Counter(row.kind for rows in chats for row in rows if row.turn == 0 and len(row.story.numbers) == 3)
    total = sum(two.values())
    assert {kind: two[kind] / total for kind in MESSAGES} == pytest.approx(MESSAGES, abs=0.03)
    for row in (row for rows in chats for row in rows if row.turn < 2):
        own = row.story.problem.facts_of(row.turn, 2)
        sent = [fact in row.reply for fact in own]
        assert {"all": all(sent), "some": sum(sent) == 1 < len(own)}.get(row.kind, not any(sent))
        assert ("?" in row.reply) == (row.kind == "ask")


def test_answer_kinds_and_what_they_hold():
    seen = Counter()
    for row in (row for rows in conversations(3000) for row in rows if row.turn >= 2):
        agent = row.turn % 2
        told = [i for i in range(len(row.story.numbers)) if i % 2 != agent]
        partner = {
            str(row.story.numbers[i]) for i in told if row.story.problem.facts[i] in row.heard.get(1 - agent, "")
        }
        full = len(partner) == len(told)
        if full:
            seen[row.kind] += 1
        if row.kind == "use":
            assert partner and partner <= numbers(row.reply) and row.reply.startswith("We have ")
        if row.kind == "use" and full:
            assert row.reply.endswith(f"The answer is \\boxed{{{row.story.problem.answer}}}.")
        if row.kind == "own":
            assert row.reply.startswith("I have ")
        if row.kind == "guess":
            assert re.fullmatch(r"I guess \\boxed\{\d+\}\.", row.reply)
    assert {kind: seen[kind] / seen.total() for kind in ANSWERS} == pytest.approx(ANSWERS, abs=0.03)


def test_a_cut_channel_delivers_only_own_words():
    chats = conversations(2000)
    off = [rows for rows in chats if rows[0].task.arm == "channel_off"]
    assert len(off) / len(chats) == pytest.approx(OFF_SHARE, abs=0.02)
    assert all(row.kind != "use" for rows in off for row in rows)
    assert all(v % 2 == row.turn % 2 for rows in off for row in rows for v in row.heard)


def test_forced_rows_are_right():
    rng = random.Random(0)
    for story in drawn(300):
        row = forced_row(story, rng)
        assert row.forced and row.turn in (2, 3)
        assert row.heard[1 - row.turn % 2] == tell(story, 1 - row.turn % 2)
        assert row.reply == use(story, story.order)
        assert row.reply.endswith(f"\\boxed{{{story.problem.answer}}}.")


def test_equations_are_true():
    for story in drawn(300):
        for left, right in re.findall(r"(\d+ [-+*] \d+) = (\d+)", use(story, story.order)):
            assert eval(left) == int(right)


def test_partial_work_never_leaves_the_vocabulary():
    story = next(
        s for s in drawn(2000) if s.numbers[0] < s.numbers[1] and len(s.numbers) == 3 and s.work((0, 1))[1] < 0
    )
    assert fits(story, story.order) and not fits(story, (0, 1))


def test_garbling_takes_any_text():
    rng = random.Random(0)
    spoilt = {garble("I know: Tom has 12 apples.", rng) for _ in range(200)}
    assert len(spoilt) > 50 and "" in spoilt
    assert isinstance(garble("", rng), str)
