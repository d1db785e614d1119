"""The chat's schedule and prompts, and the checks of a task's schedule."""

import numpy as np
import pytest

from tasks.base import Problem, Task, Turn
from tasks.talk import ARMS, NO_MESSAGE, PROMPTS, SHORT, talk_task, three_task

PROBLEM = Problem("p", "How many?", "10", ("Fact one.", "Fact two.", "Fact three.", "Fact four."))
SAID = {0: "first of A", 1: "first of B", 2: "last of A", 3: "last of B"}

READS = {
    "channel_on": [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]],
    "channel_off": [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]],
}


def user_prompt(task: Task, index: int) -> str:
    heard = {read: SAID[read] for read in task.turns[index].reads}
    system, user = task.render(PROBLEM, index, heard)
    assert (system["role"], user["role"]) == ("system", "user")
    return user["content"]


@pytest.mark.parametrize("arm", ARMS)
def test_who_reads_whom(arm):
    np.testing.assert_array_equal(talk_task(arm).reads_UU, np.array(READS[arm], bool))


def test_schedule():
    task = talk_task("channel_on", message_tokens=160, answer_tokens=384)
    assert [turn.agent for turn in task.turns] == [0, 1, 0, 1]
    assert [turn.max_tokens for turn in task.turns] == [160, 160, 384, 384]
    assert task.rounds == (0, 1, 2, 3) and task.graded == (2, 3)
    assert all(turn.trained for turn in task.turns)


@pytest.mark.parametrize("style", PROMPTS)
@pytest.mark.parametrize("arm", ARMS)
def test_each_copy_is_shown_its_own_facts_and_the_question(arm, style):
    task = talk_task(arm, prompt=PROMPTS[style])
    for index in range(4):
        prompt = user_prompt(task, index)
        mine, others = ("one", "three"), ("two", "four")
        if task.turns[index].agent == 1:
            mine, others = others, mine
        assert all(f"Fact {fact}." in prompt for fact in mine)
        assert not any(f"Fact {fact}." in prompt for fact in others)
        assert PROBLEM.question in prompt


# What each turn's transcript is, by arm; "-" is a message that is not delivered.
TRANSCRIPTS = {
    "channel_on": [[], ["first of A"], ["first of A", "first of B"], ["first of A", "first of B", "last of A"]],
    "channel_off": [[], ["-"], ["first of A", "-"], ["-", "first of B", "-"]],
}


@pytest.mark.parametrize("arm", ARMS)
def test_transcripts(arm):
    task = talk_task(arm)
    for index, said in enumerate(TRANSCRIPTS[arm]):
        lines = [f"{'AB'[turn % 2]}: {NO_MESSAGE if text == '-' else text}" for turn, text in enumerate(said)]
        transcript = "\n".join(lines) or "(nothing yet)"
        assert f"Conversation so far:\n{transcript}\n\n" in user_prompt(task, index)


def test_full_prompt_word_for_word():
    system, user = talk_task("channel_on").render(PROBLEM, 3, {v: SAID[v] for v in range(3)})
    assert system["content"].startswith("You are B. You and A solve one math problem together.")
    assert user["content"] == (
        "Your facts:\nFact two.\nFact four.\n\nQuestion: How many?\n\nConversation so far:\n"
        "A: first of A\nB: first of B\nA: last of A\n\n"
        "This is your last message. Use your facts and what A told you, work step by step, and put the final "
        "answer in \\boxed{}."
    )


def test_messages_ask_for_a_message_and_last_ones_for_a_box():
    task = talk_task("channel_on")
    prompts = [user_prompt(task, index) for index in range(4)]
    assert ["\\boxed{}" in prompt for prompt in prompts] == [False, False, True, True]
    assert "Write one short message to B." in prompts[0]
    assert "Write one short message to A." in prompts[1]


def test_braces_in_a_problem_or_a_message_stay_text():
    task = talk_task("channel_on", prompt=SHORT)
    problem = Problem("p", "What is {x}?", "1", ("{me} has 2.", "{0} has 3."))
    _, user = task.render(problem, 1, {0: "{other} \\boxed{5}"})
    assert "What is {x}?" in user["content"] and "{0} has 3." in user["content"]
    assert "A: {other} \\boxed{5}" in user["content"]


def test_unknown_arm():
    with pytest.raises(ValueError, match="channel_on, channel_off"):
        talk_task("channel_of")


def bad(*turns: Turn) -> None:
    Task("t", "arm", ("A", "B"), turns, lambda problem, index, heard: [])


def test_schedules_that_cannot_be_played():
    with pytest.raises(ValueError, match="turn 1 reads turn 0, which is not of an earlier round"):
        bad(Turn(0, 0, 8), Turn(1, 0, 8, reads=(0,)))
    with pytest.raises(ValueError, match="turn 0 reads turn 5"):
        bad(Turn(0, 1, 8, reads=(5,)))
    with pytest.raises(ValueError, match="turn 0: agent 2"):
        bad(Turn(2, 0, 8))
    with pytest.raises(ValueError, match="max_tokens is 0"):
        bad(Turn(0, 0, 0))


def test_facts_are_dealt_in_turn():
    assert PROBLEM.facts_of(0, 2) == ("Fact one.", "Fact three.")
    assert PROBLEM.facts_of(1, 2) == ("Fact two.", "Fact four.")
    assert PROBLEM.facts_of(2, 3) == ("Fact three.",)


def test_three_copies_hold_a_third_each_and_hear_the_other_two():
    task = three_task("channel_on", message_tokens=5, answer_tokens=9)
    assert [turn.agent for turn in task.turns] == [0, 1, 2, 0, 1, 2] and task.graded == (3, 4, 5)
    np.testing.assert_array_equal(task.reads_UU, np.tri(6, k=-1, dtype=bool))
    assert [turn.reads for turn in three_task("channel_off").turns] == [(), (), (), (0,), (1,), (2,)]
    problem = Problem("p", "How many?", "6", ("Fact 1.", "Fact 2.", "Fact 3."))
    system, user = three_task("channel_on", prompt=SHORT).render(problem, 4, {0: "a", 1: "b", 2: "c", 3: "d"})
    assert system["content"] == "You are B. You and A and C each know a third of the facts."
    assert user["content"] == "Fact 2.\nHow many?\nChat: A: a\nB: b\nC: c\nA: d\nSolve and box it."
    assert task.unsuitable(problem) is None
    assert task.unsuitable(Problem("p", "?", "1", ("Fact 1.", "Fact 2."))) == "too few facts"
