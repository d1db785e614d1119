"""tasks.scripts and tasks.habits: what the built-in models are warm-started on says what it should, as often."""

import itertools
import random
import re
from collections import Counter

import pytest

from tasks.habits import EASY, HARD
from tasks.scripts import (
    Row,
    fits,
    forced_row,
    garble,
    informed_row,
    tell,
    told,
    wanted,
    work_out,
    write_rows,
)
from tasks.stories import Story, story_stream

MESSAGES, ANSWERS = EASY.habits["talk_to_solve"].messages, EASY.habits["talk_to_solve"].answers
each_hard_task = pytest.mark.parametrize("name", HARD.tasks)


def drawn(count: int, seed: int = 0, least_facts: int = 2) -> list[Story]:
    return list(itertools.islice(story_stream(random.Random(seed), least_facts=least_facts), count))


def conversations(count: int, seed: int = 0) -> list[list[Row]]:
    rng = random.Random(seed)
    return [write_rows(story, rng) for story in drawn(count, seed)]


def hard_rows(name: str, count: int) -> list[Row]:
    rng = random.Random(0)
    return [row for story in drawn(count, 0, 3) for row in write_rows(story, rng, HARD, name)]


def informed(row: Row) -> bool:
    """Was everything told that its copy lacks?"""
    own = row.task.facts_of(row.story.problem, row.task.turns[row.turn].agent)
    return len(told(row.task, row.story, row.turn, row.heard)) + len(own) == len(row.story.numbers)


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
    assert len(off) / len(chats) == pytest.approx(EASY.off_share, abs=0.02)
    assert all(row.kind != "use" for rows in off for row in rows)
    assert all(v % 2 == row.turn % 2 for rows in off for row in rows for v in row.heard)


def test_forced_rows_are_right():
    rng = random.Random(0)
    for story in drawn(300):
        row = forced_row(story, rng)
        assert row.given == "We" and row.turn in (2, 3)
        assert row.heard[1 - row.turn % 2] == tell(story.problem.facts_of(1 - row.turn % 2, 2))
        assert row.reply == work_out(EASY, "use", story, story.order)
        assert row.reply.endswith(f"\\boxed{{{story.problem.answer}}}.")


def test_equations_are_true():
    for story in drawn(300):
        for left, right in re.findall(r"(\d+ [-+*] \d+) = (\d+)", work_out(EASY, "use", story, story.order)):
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


# The harder setting


@each_hard_task
def test_hard_answers_all_begin_alike(name):
    rows = [row for row in hard_rows(name, 300) if row.task.turns[row.turn].graded]
    assert {row.kind for row in rows} == {"use", "own", "guess"}
    assert all(re.fullmatch(r"Let us see: [0-9 ,=+-]+\. The answer is \\boxed{\d+}\.", row.reply) for row in rows)


@each_hard_task
def test_hard_answers_keep_their_shares_and_only_use_is_right(name):
    answers, lucky, ignorant = HARD.habits[name].answers, 0, 0
    rng, seen = random.Random(0), Counter()
    for story in drawn(2000, 0, 3):
        row = informed_row(story, rng, HARD, name)
        assert informed(row)
        right = row.reply.endswith(f"\\boxed{{{story.problem.answer}}}.")
        assert right or row.kind != "use"
        lucky, ignorant = lucky + (right and row.kind != "use"), ignorant + (row.kind != "use")
        seen[row.kind] += 1
    assert seen["use"] / 2000 == pytest.approx(answers["use"], abs=0.03)
    assert lucky / ignorant < 0.03


@each_hard_task
def test_hard_messages_keep_their_shares(name):
    shares, rows = HARD.habits[name].messages, hard_rows(name, 1500)
    # A copy with one fact that would tell some of its facts asks instead.
    first = [row for row in rows if row.turn == (1 if name == "ask_to_solve" else 0)]
    seen = Counter(row.kind for row in first)
    assert {kind: seen[kind] / len(first) for kind in shares} == pytest.approx(dict(shares), abs=0.04)


@each_hard_task
def test_hard_forced_rows_are_given_what_only_use_says(name):
    rng = random.Random(0)
    for story in drawn(300, 0, 3):
        row = forced_row(story, rng, HARD, name)
        own = row.task.facts_of(story.problem, row.task.turns[row.turn].agent)
        assert informed(row) and row.reply.startswith(row.given)
        assert row.reply.endswith(f"\\boxed{{{story.problem.answer}}}.")
        last = re.findall(r"\d+", row.given)[-1]
        assert last in {str(story.numbers[i]) for i in told(row.task, story, row.turn, row.heard)}
        assert last not in numbers(" ".join(own))


def test_who_lacks_facts_asks_for_one_at_a_time():
    followed = 0
    for row in (row for row in hard_rows("ask_to_solve", 500) if row.kind == "follow"):
        facts, agent = row.task.facts_of(row.story.problem, 0), row.task.turns[row.turn].agent
        questions = {fact: wanted(row.task, row.story, fact) for fact in facts}
        if agent == 0:
            asked = [fact for fact in facts if questions[fact] == row.heard.get(0 if row.turn == 1 else 2)]
            assert row.reply in [tell([fact]) for fact in asked or facts]
            continue
        known = [row.story.problem.facts[i] for i in told(row.task, row.story, row.turn, row.heard)]
        lacked = [fact for fact in facts if fact not in known] or facts
        assert row.reply in [questions[fact] for fact in lacked] and not numbers(row.reply)
        followed += len(known) == 1
    assert followed > 20


def test_a_question_names_nobody_that_the_asker_has_not_seen():
    task = HARD.tasks["ask_to_solve"]["channel_on"]
    seen = set()
    for story in drawn(500, 0, 3):
        for fact in task.facts_of(story.problem, 0):
            question = wanted(task, story, fact)
            names = {"Who"} if question.startswith("Who") else {fact.split()[0]}
            seen |= names
            mine = " ".join((*task.facts_of(story.problem, 1), story.problem.question))
            assert names == {"Who"} or fact.split()[0] in mine or fact.split()[0] in {"The", "Then", "There"}
    assert "Who" in seen and len(seen) > 5


def test_a_number_cut_short_tells_nothing():
    task = HARD.tasks["ask_to_solve"]["channel_on"]
    story = next(s for s in drawn(500, 0, 3) if 10 <= s.numbers[0] and s.numbers[0] // 10 not in s.numbers)
    fact = story.problem.facts[0]
    assert told(task, story, 4, {1: tell([fact])}) == (0,)
    assert told(task, story, 4, {1: tell([fact.replace(str(story.numbers[0]), str(story.numbers[0]) + "0")])}) == ()
    assert told(task, story, 4, {1: f"3 and {fact}"}) == ()
