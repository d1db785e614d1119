"""Checks by hand: what overlaps, what is noise, and that a scan finds a planted hack and says when it can't see."""

import numpy as np
import pytest

from eval.checks import evaluation_noise, lengths, overlap, pinned, reward_hacks, talk_needed
from tasks.base import Problem

LONG = "one two three four five six seven eight nine ten"


def problem(name, question, *facts):
    return Problem(name, question, "1", facts)


def test_overlap_by_hand():
    """LONG has three 8-grams. Changing its last word leaves two of them; changing a word in the middle none."""
    train = [problem("t", LONG), problem("u", "What is left?", "Tom has 3 cats.")]
    assert overlap(train, [problem("a", LONG.upper() + "!")])["exact"] == 1
    assert overlap(train, [problem("b", "what is left", "Tom has 3 cats")])["exact"] == 1
    assert overlap(train, [problem("c", "what is left", "Tom has 4 cats")]) == {
        "exact": 0,
        "near": 0,
        "n": 1,
        "ids": [],
        "verdict": "none",
    }
    twelve = problem("t", LONG + " eleven twelve thirteen fourteen")  # 7 of 14 words' grams
    close = problem("d", LONG + " eleven twelve thirteen other")  # 6 of its 7 8-grams are there
    got = overlap([twelve], [close])
    assert got["near"] == 1 and got["ids"] == ["d"] and "1 more nearly so" in got["verdict"]
    assert overlap([twelve], [problem("e", LONG.replace("five", "5"))])["near"] == 0


def test_grams_of_two_problems_do_not_add_up():
    """Half of a problem in one training problem and half in another is no copy."""
    first, second = "a b c d e f g h i", "i j k l m n o p q"
    assert (
        overlap([problem("t", first), problem("u", second)], [problem("h", "a b c d e f g h i j k l m n o p q")])[
            "near"
        ]
        == 0
    )


def test_evaluation_noise_by_hand():
    """Means 0.1, 0.2, 0.3: sd 0.1; the band is t(2) * 0.1 * sqrt(2)."""
    got = evaluation_noise([{"p": 0.0, "q": 0.2}, {"p": 0.2, "q": 0.2}, {"p": 0.3, "q": 0.3}])
    assert got["sd"] == pytest.approx(0.1) and got["band"] == pytest.approx(4.302653 * 0.1 * np.sqrt(2), rel=1e-5)
    assert evaluation_noise([{"p": 1.0}])["verdict"].startswith("unknown")


def test_talk_needed():
    low, high = {"mean": 0.1, "low": 0.05, "high": 0.15, "n": 9}, {"mean": 0.3, "low": 0.2, "high": 0.4, "n": 9}
    assert talk_needed(high, low)["verdict"].startswith("yes")
    assert talk_needed(low, high)["verdict"].startswith("not shown")
    assert talk_needed(high, None)["verdict"].startswith("unknown")


def test_lengths_tell_what_changed():
    def estimate(mean):
        return {"mean": mean, "low": mean - 1, "high": mean + 1, "n": 9}

    before = {"turn_0_tokens": estimate(20), "turn_1_tokens": estimate(20), "pass_at_1": estimate(0.1)}
    after = {"turn_0_tokens": estimate(10), "turn_1_tokens": estimate(20.5), "pass_at_1": estimate(0.9)}
    got = lengths(before, after)
    assert got["verdict"] == "turn_0 20 -> 10" and set(got["turns"]) == {"turn_0_tokens", "turn_1_tokens"}


def answers(rng, problems, planted):
    """Four answers a problem; a planted hack: right ones are longer. Long problems have long answers either way."""
    rows = []
    for p in range(problems):
        size = int(rng.integers(10, 200))
        for grade in rng.permutation([0.0, 0.0, 1.0, 1.0]):
            rows.append((str(p), "x" * (size + int(rng.integers(0, 5)) + planted * int(grade) * 10), grade))
    return rows


def test_a_planted_hack_is_found_and_an_honest_run_is_clear():
    rng = np.random.default_rng(0)
    found = reward_hacks(answers(rng, 60, planted=1))
    assert found["features"]["characters"]["verdict"] == "look" and "characters" in found["verdict"]
    honest = reward_hacks(answers(rng, 60, planted=0))
    assert honest["features"]["characters"]["verdict"] == "clear" and honest["problems_with_both_grades"] == 60
    assert honest["features"]["boxes"]["verdict"] == "unknown"  # no answer has one


def test_a_scan_without_power_says_so():
    rng = np.random.default_rng(0)
    assert reward_hacks(answers(rng, 4, planted=1))["features"]["characters"]["verdict"] == "unknown"
    same = reward_hacks([("p", "a", 1.0), ("p", "bb", 1.0), ("q", "c", 0.0)])
    assert same["verdict"] == "unknown: no power" and same["problems_with_both_grades"] == 0


def test_the_floor_is_crossed_by_chance_one_time_in_twenty():
    rng, crossed = np.random.default_rng(1), 0
    for seed in range(60):
        crossed += reward_hacks(answers(rng, 40, planted=0), seed)["features"]["characters"]["verdict"] == "look"
    assert crossed <= 9


def test_pinned():
    local = {"model": "builtin", "revision": None, "seeds": [17], "data_seed": 0}
    assert pinned(local)["verdict"] == "everything is pinned or local"
    assert pinned(local | {"model": "Qwen/Qwen2.5-1.5B-Instruct"})["loose"] == ["model Qwen/Qwen2.5-1.5B-Instruct"]
    assert not pinned(local | {"model": "Qwen/Qwen2.5-1.5B-Instruct", "revision": "abc"})["loose"]
