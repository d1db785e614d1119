"""Boards: who reads what, what they see, and when a board can't be."""

import numpy as np
import pytest

from tasks.base import Problem
from tasks.board import BoardSizes, board_task

STORY = Problem("s", "How many in all?", "9", ("Tom has 2.", "Ann has 3.", "Kim has 4."))


def board(arm, deal="whole", style="full", **sizes):
    return board_task("board_writers", arm, BoardSizes(**sizes), True, deal, style)


def reads(task):
    n = len(task.agents)
    assert [t.round for t in task.turns] == [0] * n + [1] * n and not task.reads_UU[:n].any()
    return [task.turns[n + j].reads for j in range(n)]


@pytest.mark.parametrize(
    "arm, expected",
    [
        ("own_note", [(0,), (1,), (2,), (3,)]),
        ("shared_board", [(0, 1, 2, 3)] * 4),
        ("readers_only", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        ("readers_and_writers", [(0, 1), (1, 2), (2, 3), (3, 0)]),
    ],
)
def test_reads(arm, expected):
    assert reads(board(arm)) == expected


def test_rings_of_any_degree_give_every_note_as_many_readers():
    for copies in (2, 3, 5):
        for degree in range(1, copies + 1):
            task = board("readers_only", copies=copies, degree=degree)
            assert task.reads_UU[copies:, :copies].sum(axis=0).tolist() == [degree] * copies
            assert all(j in read for j, read in enumerate(reads(task)))


@pytest.mark.parametrize("copies, degree", [(4, 5), (3, 0), (1, 1)])
def test_boards_that_cannot_be(copies, degree):
    with pytest.raises(ValueError, match=r"ring|at least 2"):
        BoardSizes(copies, degree)


def test_notes_are_graded_and_are_not_the_outcome():
    task = board("readers_only")
    assert task.graded == tuple(range(8)) and task.answers == (4, 5, 6, 7) and task.notes == (0, 1, 2, 3)
    frozen = board_task("message_board", "own_note", BoardSizes(), False, "whole", "full")
    assert [t.trained for t in frozen.turns] == [False] * 4 + [True] * 4


def text(task, index, heard):
    return task.render(STORY, index, heard)[1]["content"]


def test_a_whole_board_shows_everybody_everything():
    task = board("readers_only")
    for index in range(8):
        shown = text(task, index, {v: f"note {v}" for v in task.turns[index].reads})
        assert all(fact in shown for fact in STORY.facts) and STORY.question in shown
        assert [v for v in range(4) if f"note {v}" in shown] == sorted(task.turns[index].reads)


def test_a_dealt_board_shows_each_copy_one_half():
    """Copy j holds half j mod 2, so that neighbours on the ring complete each other."""
    task = board("readers_only", deal="dealt", style="short")
    for index in range(8):
        shown = text(task, index, {v: f"note {v}" for v in task.turns[index].reads})
        half = index % 4 % 2
        assert [fact in shown for fact in STORY.facts] == [i % 2 == half for i in range(3)]
        assert task.facts_of(STORY, task.turns[index].agent) == STORY.facts[half::2]


def test_the_short_prompt_is_the_chats():
    """Even copies are A, odd ones B, A's notes first: what the built-in model was warm-started on."""
    task = board("readers_only", deal="dealt", style="short")
    assert "Chat: A: note 2\nB: note 1\n" in text(task, 5, {1: "note 1", 2: "note 2"})
    assert "Chat: (nothing yet)" in text(task, 5, {})


def test_arms_differ_in_reads_alone():
    one, other = board("readers_only"), board("readers_and_writers")
    assert one.turns == other.turns
    own, shared = board("own_note"), board("shared_board")
    assert np.all([text(own, j, {}) == text(shared, j, {}) for j in range(4)])
