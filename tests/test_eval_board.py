"""The board metrics on boards written by hand."""

import pytest

from eval.board import METRICS, estimates
from tasks.base import Problem
from tasks.board import BoardSizes, board_task
from tests import tiny

TASK = board_task("board_writers", "readers_only", BoardSizes(), True, "dealt", "short")
STORY = Problem("s", "How many in all?", "9", ("Tom has 2.", "Ann has 3.", "Kim has 4."))


def board(notes, readers=("", "", "", ""), correct=(0,) * 8):
    return tiny.episode(TASK, STORY, [*notes, *readers], correct)


def box(*answers):
    return [f"\\boxed{{{a}}}" if a is not None else "no box" for a in answers]


@pytest.mark.parametrize(
    "metric, correct, expected",
    [
        ("pass_at_1", (1, 1, 1, 1, 1, 0, 0, 1), [1, 0, 0, 1]),
        ("notes_right", (1, 0, 0, 1, 0, 0, 0, 0), [1, 0, 0, 1]),
        ("pass_at_k", (1, 1, 1, 1, 0, 0, 0, 0), [0]),
        ("pass_at_k", (0, 0, 0, 0, 0, 0, 1, 0), [1]),
        # Notes (1, 0, 0, 1), readers (1, 1, 0, 0): reader 1 is rescued, reader 3 misled.
        ("rescued", (1, 0, 0, 1, 1, 1, 0, 0), [0, 1, 0, 0]),
        ("misled", (1, 0, 0, 1, 1, 1, 0, 0), [0, 0, 0, 1]),
        ("rescued_of_wrong", (1, 0, 0, 1, 1, 1, 0, 0), [1, 0]),
        ("misled_of_right", (1, 0, 0, 1, 1, 1, 0, 0), [0, 1]),
        ("rescued_of_wrong", (1, 1, 1, 1, 0, 0, 0, 0), []),
    ],
)
def test_of_grades(metric, correct, expected):
    assert METRICS[metric](board(["n"] * 4, correct=correct)) == expected


@pytest.mark.parametrize(
    "answers, correct, expected",
    [
        ((9, 8, 8, 7), (1, 0, 0, 0), 0),
        ((9, 8, 9, 7), (1, 0, 1, 0), 1),
        ((9, 8, 7, None), (1, 0, 0, 0), 1),  # a tie: the first posted
        ((8, 9, 7, None), (0, 1, 0, 0), 0),
        ((None, None, None, 9), (0, 0, 0, 1), 1),
        ((None,) * 4, (1, 1, 1, 1), 0),  # no boxed note is wrong, whatever the grader made of the text
        (("9", " 9 ", "8", "8"), (1, 1, 0, 0), 1),
    ],
)
def test_vote(answers, correct, expected):
    assert METRICS["vote"](board(box(*answers), correct=(*correct, 0, 0, 0, 0))) == [expected]


def test_notes_boxed_counts_closed_boxes():
    assert METRICS["notes_boxed"](board(["\\boxed{1}", "\\boxed{1", "1", "\\boxed{}"])) == [1, 0, 0, 1]


def test_notes_send_what_only_their_half_holds():
    """Copies 0 and 2 hold 2 and 4, copies 1 and 3 hold 3."""
    assert METRICS["notes_send_own"](board(["2 and 4", "3", "4 or 3", "2"])) == [1, 1, 0.5, 0]


def test_estimates_have_intervals_and_counts():
    groups = [[board(["n"] * 4, correct=(0, 0, 0, 0, 1, 1, 1, 1))], [board(["n"] * 4)]]
    found = estimates(groups)
    assert found["pass_at_1"].mean == 0.5 and found["pass_at_1"].n == 8
    assert found["pass_at_1"].low == 0 and found["pass_at_1"].high == 1
    assert found["misled_of_right"] is None
