"""ask_to_solve: who knows what, and that a message carries one number."""

import numpy as np
import pytest

from tasks.ask import HIDDEN, ask_task, one_number
from tasks.base import Problem
from tasks.talk import NO_MESSAGE, PROMPTS

PROBLEM = Problem("p", "How many are left?", "10", ("Fact 1.", "Fact 2.", "Fact 3."))


def test_schedule_and_reads():
    task = ask_task("channel_on", 16, 40)
    assert [turn.agent for turn in task.turns] == [1, 0, 1, 0, 1] and task.graded == (4,)
    assert [turn.max_tokens for turn in task.turns] == [16, 16, 16, 16, 40]
    np.testing.assert_array_equal(task.reads_UU, np.tri(5, k=-1, dtype=bool))
    assert [turn.reads for turn in ask_task("channel_off").turns] == [(), (), (0,), (1,), (0, 2)]


@pytest.mark.parametrize("style", PROMPTS)
def test_only_b_sees_the_question_and_each_its_own_facts(style):
    task = ask_task("channel_on", prompt=PROMPTS[style])
    for index in range(5):
        heard = dict.fromkeys(task.turns[index].reads, "word")
        user = task.render(PROBLEM, index, heard)[1]["content"]
        b_speaks = task.turns[index].agent == 1
        assert (PROBLEM.question in user) == b_speaks and (HIDDEN in user) != b_speaks
        assert ("Fact 2." in user) == b_speaks and ("Fact 1." in user) == ("Fact 3." in user) != b_speaks


def test_a_message_has_room_for_one_number():
    assert one_number("It has 1,200.5 cows and 7 pigs.") == "It has 1,200.5"
    assert one_number("How many?") == "How many?"
    said = {0: "I have 5 and 6", 1: "There are 7 or 8"}
    user = ask_task("channel_on").render(PROBLEM, 2, said)[1]["content"]
    assert "B: I have 5 and 6\nA: There are 7\n" in user  # its own words whole, the other's up to a number


def test_nothing_is_delivered_with_the_channel_off():
    user = ask_task("channel_off").render(PROBLEM, 2, {0: "mine"})[1]["content"]
    assert f"B: mine\nA: {NO_MESSAGE}\n" in user
    with pytest.raises(ValueError, match="of ask_to_solve; the arms are"):
        ask_task("off")


def test_problems_it_cannot_use():
    task = ask_task("channel_on")
    assert task.unsuitable(PROBLEM) is None
    assert task.unsuitable(Problem("p", "?", "1", ("Fact 1.", "Fact 2."))) == "too few facts"
    assert task.unsuitable(Problem("p", "?", "1", ("Fact 1.", "Fact two.", "Fact 3."))) == "a part has no number"
