"""The talk metrics on chats written by hand, with the answers written beside them."""

import pytest

from eval import talk
from tasks.base import Problem
from tasks.talk import talk_task
from tests import tiny

TASK = talk_task("channel_on")
# A holds facts 0 and 2, B fact 1. 3 is in both halves and 40 in the question: neither is anybody's alone.
PROBLEM = Problem(
    id="pens",
    question="How many pens are left of the 40 boxes?",
    answer="18",
    facts=("Tom has 3 boxes of 1,200 pens.", "Ann has 5 pens and 3 caps.", "Tom sells 40 at $2.50."),
)


def chat(*texts, problem=PROBLEM):
    return tiny.episode(TASK, problem, texts)


@pytest.mark.parametrize(
    "text, found",
    [
        ("12 eggs and 3 hens", {"12", "3"}),
        ("$1,200.50", {"1200.5"}),
        ("1,000,000", {"1000000"}),
        ("It is 12.", {"12"}),
        ("12.0 = 12 = 12.00", {"12"}),
        ("0.25 and 0 and 0.0", {"0.25", "0"}),
        ("agent 007", {"7"}),
        ("5, 6, and 7,", {"5", "6", "7"}),
        ("1/2 of 80%", {"1", "2", "80"}),
        ("x=4x5", {"4", "5"}),
        ("-3 or \\boxed{18}", {"3", "18"}),
        ("twelve", set()),
        ("", set()),
    ],
)
def test_numbers(text, found):
    assert talk.numbers(text) == found


def test_who_owns_which_number():
    assert talk.owned(PROBLEM, 0, 2) == {"3", "1200", "40", "2.5"}
    assert talk.owned(PROBLEM, 1, 2) == {"5", "3"}
    assert talk.only(PROBLEM, 0, 2) == {"1200", "2.5"}
    assert talk.only(PROBLEM, 1, 2) == {"5"}


def test_recorded_numbers_come_before_the_texts():
    """A story may spell a number out, or hold one that is no fact ("Route 66")."""
    recorded = (("12",), ("7", "9"))
    problem = Problem("r", "How many?", "1", ("A dozen eggs on Route 66.", "Seven and 9."), recorded)
    assert talk.owned(problem, 0, 2) == {"12"} and talk.only(problem, 1, 2) == {"7", "9"}


@pytest.mark.parametrize(
    "texts, sends, uses",
    [
        # (A's first, B's first, A's last, B's last); values are of A, then of B.
        (("1200 pens at 2.50", "I have 5", "5 + 1", "1,200 x 2.5"), [1, 1], [1, 1]),
        (("1200 pens", "I have 3", "5", "2.5"), [0.5, 0], [1, 0.5]),
        (("3 boxes of 40", "hello", "1200", "5"), [0, 0], [0, 0]),
        (("12000", "15", "50", "0.5"), [0, 0], [0, 0]),
    ],
)
def test_sends_own_and_uses_partner(texts, sends, uses):
    assert talk.sends_own(chat(*texts)) == sends
    assert talk.uses_partner(chat(*texts)) == uses


def test_a_copy_with_nothing_of_its_own_is_left_out():
    """B's 3 is A's too. So A alone can send, and B alone can use."""
    problem = Problem("q", "How many?", "1", ("Tom has 3 of 8.", "Ann has 3."))
    episode = chat("I have 8", "I have 3", "x", "no", problem=problem)
    assert talk.only(problem, 1, 2) == set()
    assert talk.sends_own(episode) == [1] and talk.uses_partner(episode) == [0]


@pytest.mark.parametrize("first, second, asked", [("What?", "No.", [1, 0]), ("a", "b? c", [0, 1]), ("a", "b", [0, 0])])
def test_only_first_messages_ask(first, second, asked):
    assert talk.asks(chat(first, second, "Why?", "Really?")) == asked


@pytest.mark.parametrize(
    "third, fourth, agree, boxed",
    [
        ("so \\boxed{18}", "\\boxed{ 18 }.", 1, [1, 1]),
        ("\\boxed{18}", "\\boxed{19}", 0, [1, 1]),
        ("\\boxed{18}", "18", 0, [1, 0]),
        ("18", "18", 0, [0, 0]),
        # The last box is the answer; one that is never closed is none.
        ("\\boxed{1} no, \\boxed{2}", "\\boxed{2}", 1, [1, 1]),
        ("\\boxed{18}", "\\boxed{18", 0, [1, 0]),
        # Text, not value: agree_graded is the one that knows that these are equal.
        ("\\boxed{1/2}", "\\boxed{0.5}", 0, [1, 1]),
    ],
)
def test_agreeing_and_boxing(third, fourth, agree, boxed):
    episode = chat("\\boxed{7}", "\\boxed{7}", third, fourth)
    assert talk.both_agree(episode) == [agree]
    assert talk.METRICS["boxed"](episode) == boxed
    assert talk.boxed_pair(episode) == ((third, talk.last_boxes(episode)[1]) if boxed == [1, 1] else None)


def test_team_solves_it_is_not_both_right():
    episodes = [tiny.episode(TASK, PROBLEM, "wxyz", pair) for pair in [(1.0, 0.0), (1.0, 1.0)]]
    assert [talk.pass_at_1(e) for e in episodes] == [[1, 0], [1, 1]]
    assert [talk.METRICS["both_right"](e) for e in episodes] == [[0], [1]]


def test_estimates_count_what_they_are_the_mean_of():
    """Two problems of two chats. Problem `bare` has no numbers, so its chats add nothing to sends_own."""
    bare = Problem("bare", "How many?", "1", ("Tom has pens.", "Ann has caps."))
    episodes_PG = [
        [
            tiny.episode(TASK, PROBLEM, ("1200, 2.5?", "5", "ab", "abc"), (1.0, 0.0)),
            tiny.episode(TASK, PROBLEM, ("1200", "no", "ab", "abc"), (1.0, 1.0)),
        ],
        [tiny.episode(TASK, bare, ("a", "b", "c", "d"), (0.0, 1.0), finished=False)] * 2,
    ]
    got = talk.estimates(episodes_PG)
    table = {name: (value.mean, value.n) for name, value in got.items() if value is not None}
    assert table["pass_at_1"] == (5 / 8, 8)
    assert table["both_right"] == (1 / 4, 4)
    assert table["A_right"] == (1 / 2, 4) and table["B_right"] == (3 / 4, 4)
    assert table["sends_own"] == ((1 + 1 + 0.5 + 0) / 4, 4)
    assert table["uses_partner"] == (0, 4)
    assert table["asks"] == (1 / 8, 8)
    assert table["truncated"] == (8 / 16, 16)
    assert table["turn_3_chars"] == (2, 4)
    assert talk.estimates(episodes_PG[1:])["sends_own"] is None
