"""ask_to_solve: one copy has the question, the other what it lacks, and a message has room for one number.

B sees the question and every second fact, from the second on; A holds the rest and is not told the question. They speak
B, A, B, A, B, and B's last message is graded. Of each message only what stands up to its first number is delivered,
so of two facts that B lacks it must ask for one, and then for the other: the follow-up. `channel_off` delivers nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from tasks.base import Message, Problem, Task, Turn
from tasks.talk import FULL, NO_MESSAGE, SHORT, ChatPrompt, check_arm, messages

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
HIDDEN = "(only B knows the question)"
TURNS = (1, 0, 1, 0, 1)
"""Who speaks: 0 is A, 1 is B."""
LEAST_FACTS = 3
"""So that B lacks at least two."""
WORDS = {
    FULL: replace(
        FULL,
        system=(
            "You are {me}. You and {other} solve one math problem together. Only B knows the question, and A holds "
            "facts that B needs. Of each message only the part up to its first number gets through."
        ),
        message="Write one short message to {other}: ask for one thing, or tell one number and what it is.",
    ),
    SHORT: replace(SHORT, message="Write to {other}, one number."),
}
"""This task's wording of each style."""


def one_number(text: str) -> str:
    """A text up to and including its first number; all of it if it has none."""
    found = NUMBER.search(text)
    return text if found is None else text[: found.end()]


def ask_task(arm: str, message_tokens: int = 160, answer_tokens: int = 384, prompt: ChatPrompt = FULL) -> Task:
    """The five-turn chat of one arm; caps in tokens, the end-of-turn token included."""
    check_arm("ask_to_solve", arm)
    names = ("A", "B")
    turns = []
    for index, agent in enumerate(TURNS):
        last = index == len(TURNS) - 1
        reads = tuple(v for v in range(index) if arm == "channel_on" or TURNS[v] == agent)
        turns.append(Turn(agent, index, answer_tokens if last else message_tokens, reads, graded=last))

    def render(problem: Problem, index: int, heard: Mapping[int, str]) -> list[Message]:
        turn = turns[index]
        # A copy remembers its own words whole; what it hears of the other's ends at the first number.
        said = {v: text if TURNS[v] == turn.agent else one_number(text) for v, text in heard.items()}
        chat = [f"{names[TURNS[v]]}: {said.get(v, NO_MESSAGE)}" for v in range(index)]
        question = problem.question if turn.agent == 1 else HIDDEN
        facts = problem.facts_of(turn.agent, 2)
        return messages(WORDS[prompt], names, turn.agent, facts, question, chat, turn.graded)

    return Task("ask_to_solve", arm, names, tuple(turns), render, parts=2, least_facts=LEAST_FACTS)
