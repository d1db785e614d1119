"""What a task is: a problem, a schedule of turns, and who reads whom. Text only.

A task is data. `Turn.reads` says which earlier turns' words are delivered, and that alone tells an own-note
board from a shared board, a ring, a chat or a cut channel. The same relation as a matrix (`Task.reads_UU`) is
what note credit is computed from. This module holds no prompts, no datasets and no arrays of the model's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Message = dict[str, str]
"""One chat-template message: {"role": "system" | "user" | "assistant", "content": text}."""


@dataclass(frozen=True)
class Problem:
    """One dataset item.

    `answer` is the gold, as text the grader can parse. `facts` are the sentences to be split among copies (empty
    for tasks that show everybody everything). `fact_numbers[i]` are the numbers (as digit strings) that fact i
    holds, when the dataset's maker recorded them; None means they are read from the text.
    """

    id: str
    question: str
    answer: str
    facts: tuple[str, ...] = ()
    fact_numbers: tuple[tuple[str, ...], ...] | None = None

    def facts_of(self, agent: int, agents: int) -> tuple[str, ...]:
        """The facts dealt to `agent` of `agents`: in turn, starting with agent 0 (A, B, A, B, ...)."""
        return self.facts[agent::agents]


@dataclass(frozen=True)
class Turn:
    """A slot in an episode's schedule. Turns of one round are sampled together.

    `reads`: indices of earlier turns whose text this turn is shown. `max_tokens`: the cap on sampled tokens, the
    end-of-turn token included. `graded`: its text is graded. `note`: it is written for others to read, so its grade is
    recorded and is no part of the episode's outcome. `trained`: False for turns that are only played (round-one notes
    of message_board).
    """

    agent: int
    round: int
    max_tokens: int
    reads: tuple[int, ...] = ()
    graded: bool = False
    note: bool = False
    trained: bool = True


Render = Callable[[Problem, int, Mapping[int, str]], list[Message]]
"""(problem, turn index, {earlier turn index: its text, for the turns it reads}) -> messages for the chat template."""


@dataclass(frozen=True)
class Task:
    """One arm of a task: a schedule and the function that writes each turn's prompt.

    `parts`: into how many parts a problem's facts are dealt; agent j holds part j mod `parts`. 1: all see everything.
    `least_facts`: the fewest facts a problem must have to be dealt (never fewer than `parts`).
    """

    name: str
    arm: str
    agents: tuple[str, ...]
    turns: tuple[Turn, ...]
    render: Render
    parts: int = 1
    least_facts: int = 0

    def __post_init__(self) -> None:
        for index, turn in enumerate(self.turns):
            where = f"task {self.name}/{self.arm}, turn {index}"
            if not 0 <= turn.agent < len(self.agents):
                raise ValueError(f"{where}: agent {turn.agent} is not one of {len(self.agents)} agents")
            if turn.max_tokens < 1:
                raise ValueError(f"{where}: max_tokens is {turn.max_tokens}; it must be at least 1")
            for read in turn.reads:
                if not 0 <= read < len(self.turns) or self.turns[read].round >= turn.round:
                    raise ValueError(f"{where} reads turn {read}, which is not of an earlier round")

    def facts_of(self, problem: Problem, agent: int) -> tuple[str, ...]:
        """The facts that an agent is shown."""
        return problem.facts_of(agent % self.parts, self.parts)

    def unsuitable(self, problem: Problem) -> str | None:
        """Why this problem can't be dealt: too few facts, or a part without a number; None if it can."""
        if self.parts == 1:
            return None
        if len(problem.facts) < max(self.parts, self.least_facts):
            return "too few facts"
        parts = (" ".join(problem.facts_of(part, self.parts)) for part in range(self.parts))
        return None if all(any(c.isdigit() for c in part) for part in parts) else "a part has no number"

    @property
    def rounds(self) -> tuple[int, ...]:
        """The round numbers, in the order they are played."""
        return tuple(sorted({turn.round for turn in self.turns}))

    @property
    def graded(self) -> tuple[int, ...]:
        """Indices of the turns whose text is graded."""
        return tuple(index for index, turn in enumerate(self.turns) if turn.graded)

    @property
    def answers(self) -> tuple[int, ...]:
        """Indices of the graded turns that are the episode's outcome: all but the notes."""
        return tuple(index for index in self.graded if not self.turns[index].note)

    @property
    def notes(self) -> tuple[int, ...]:
        """Indices of the notes."""
        return tuple(index for index, turn in enumerate(self.turns) if turn.note)

    @property
    def reads_UU(self) -> np.ndarray:
        """[U, U] bool, `reads_UU[u, v]`: turn u is shown turn v."""
        reads_UU = np.zeros((len(self.turns), len(self.turns)), bool)
        for index, turn in enumerate(self.turns):
            reads_UU[index, list(turn.reads)] = True
        return reads_UU
