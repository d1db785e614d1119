"""tasks.stories: fair, seeded, never on both sides, and not to be guessed from one half."""

import itertools
import random
import re
from collections import Counter, defaultdict

import pytest

from tasks.stories import (
    HELDOUT_SHARE,
    LARGEST,
    PATTERNS,
    Story,
    is_heldout,
    solve,
    stories,
    story_stream,
    template_words,
    work_order,
)


def some(count: int, heldout: bool = False, seed: int = 0) -> list[Story]:
    return list(itertools.islice(story_stream(random.Random(seed), heldout), count))


@pytest.mark.parametrize(
    "signs, numbers, answer",
    [
        ("++", (7, 8), 15),
        ("+-", (17, 5), 12),
        ("+*", (6, 7), 42),
        ("+-+", (15, 6, 11), 20),  # A's 15 + 11 first, then B's - 6
        ("+--", (40, 22, 14), 4),
        ("+-", (5, 17), None),  # negative
        ("++-", (10, 9, 12), None),  # A's 10 - 12 comes before B's + 9
        ("++", (8, 8), None),  # twice the same number
        ("+-", (16, 8), None),  # the answer is one of the facts' numbers
        ("+*", (11, 11), None),
        ("+*", (12, 11), None),  # above LARGEST
    ],
)
def test_answers_by_hand(signs, numbers, answer):
    assert solve(signs, numbers) == answer


def test_work_is_done_in_the_order_a_then_b():
    story = next(s for s in some(1000) if PATTERNS[s.pattern].signs == "+-+")
    a, b, c = story.numbers
    steps, result = story.work(story.order)
    assert story.order == work_order(3) == (0, 2, 1)
    assert steps == [f"{a} + {c} = {a + c}", f"{a + c} - {b} = {a + c - b}"]
    assert str(result) == story.problem.answer
    assert story.work((1,)) == ([], b)


def test_every_pattern_is_drawn_and_well_formed():
    drawn = some(3000)
    assert {s.pattern for s in drawn} == set(range(len(PATTERNS)))
    for story in drawn:
        problem, signs = story.problem, PATTERNS[story.pattern].signs
        assert len(problem.facts) == len(signs) == len(PATTERNS[story.pattern].ranges) in (2, 3)
        assert not re.search(r"\d|[{}#]", problem.question) and problem.question.endswith("?")
        for fact, own in zip(problem.facts, problem.fact_numbers):
            assert tuple(re.findall(r"\d+", fact)) == own
            assert fact.endswith(".") and not re.search("[{}#]", fact)
        partial = [story.work(story.order[: n + 1])[1] for n in range(len(signs))]
        assert all(0 <= value <= LARGEST for value in partial)
        words = set(re.findall("[A-Za-z]+", " ".join((*problem.facts, problem.question))))
        assert words <= template_words()


def test_seeded_and_distinct():
    train, heldout, dropped = stories(1024, 300, 0)
    assert not dropped
    assert (train, heldout, {}) == stories(1024, 300, 0)
    assert train != stories(1024, 300, 1)[0]
    assert train[:10] == stories(10, 5, 0)[0]
    assert [p.id for p in train[:2]] == ["stories/train/0", "stories/train/1"]
    assert heldout[12].id == "stories/heldout/12"
    texts = [(p.facts, p.question) for p in train + heldout]
    assert len(set(texts)) == len(texts) == 1324


def test_no_seed_mixes_the_sides():
    """Whatever the seed, the held-out (pattern, numbers) are disjoint from training's and the warm start's."""
    sides = [{(s.pattern, s.numbers) for s in some(4000, heldout, seed=heldout)} for heldout in (False, True)]
    assert not sides[0] & sides[1]
    assert all(is_heldout(*pair) for pair in sides[1])
    texts = [{(p.facts, p.question) for seed in range(3) for p in stories(400, 100, seed)[side]} for side in (0, 1)]
    assert not texts[0] & texts[1]


def test_heldout_share():
    drawn = [tuple(random.Random(n).choices(range(50), k=2)) for n in range(3000)]
    assert sum(is_heldout(0, pair) for pair in drawn) / 3000 == pytest.approx(1 / HELDOUT_SHARE, abs=0.03)


def test_one_half_hardly_tells_the_answer():
    """The best guess from one copy's facts, knowing all of `PATTERNS`, is right in at most one case of twenty."""
    right = weight = 0.0
    for pattern in PATTERNS:
        answers = (defaultdict(Counter), defaultdict(Counter))
        count = 0
        for numbers in itertools.product(*(range(low, high + 1) for low, high in pattern.ranges)):
            answer = solve(pattern.signs, numbers)
            if answer is not None:
                count += 1
                for agent in (0, 1):
                    answers[agent][numbers[agent::2]][answer] += 1
        best = sum(max(known.values()) for side in answers for known in side.values())
        right += pattern.weight * best / (2 * count)
        weight += pattern.weight
    assert right / weight < 0.05


def test_answers_are_spread():
    train, _, _ = stories(1024, 1, 0)
    counts = Counter(p.answer for p in train)
    assert len(counts) > 60 and counts.most_common(1)[0][1] / 1024 < 0.05


def test_too_many_is_refused(monkeypatch):
    rows = [pattern for pattern in PATTERNS if pattern.facts[0] == "The room has # rows."]
    monkeypatch.setattr("tasks.stories.PATTERNS", rows)
    assert len(stories(60, 5, 0)[0]) == 60
    with pytest.raises(ValueError, match="ask for fewer"):
        stories(0, 91, 0)  # the pattern has 90 pairs of numbers


def test_stories_of_three_facts_and_stories_left_out():
    train, heldout, _ = stories(50, 20, 0, least_facts=3)
    assert all(len(p.facts) == 3 for p in train + heldout)
    unfit = lambda p: "no cats" if len(p.facts) == 2 else None  # noqa: E731
    train, heldout, dropped = stories(50, 20, 0, unfit=unfit)
    assert (len(train), len(heldout)) == (50, 20) and all(len(p.facts) == 3 for p in train + heldout)
    assert set(dropped) == {"no cats"} and dropped["no cats"] > 0
