"""Boards: n copies post a note each, then each copy reads some of the notes and answers (SPEC 2.1, 2.2).

Turns 0..n-1 are the notes, n..2n-1 the readers; reader j is turn n + j and copy j. Who reads which note is the arm:
its own, all of them, or the next `degree` notes round the ring. What a copy sees of the problem is `deal`: the whole of
it (as on MATH), or, for problems with facts, its share of them, so that a note can carry what its reader lacks. Two
prompt styles, as in tasks.talk; the published prompts are not public.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tasks import talk
from tasks.base import Message, Problem, Task, Turn

Deal = Literal["whole", "dealt"]
HALVES = 2
"""Dealt boards cut the facts in two; copy j holds half j mod 2, so neighbours on the ring complete each other."""


@dataclass(frozen=True)
class BoardSizes:
    """`copies` n; `degree` notes a reader reads on the ring; caps in tokens, end-of-turn included."""

    copies: int = 4
    degree: int = 2
    note_tokens: int = 256
    answer_tokens: int = 512

    def __post_init__(self) -> None:
        if self.copies < 2:
            raise ValueError(f"a board of {self.copies} copies has nobody to read for; it needs at least 2")
        if not 1 <= self.degree <= self.copies:
            raise ValueError(
                f"a ring of {self.copies} copies can't have degree {self.degree}: a reader reads between 1 and "
                f"{self.copies} notes"
            )


def own_note(reader: int, sizes: BoardSizes) -> tuple[int, ...]:
    """Reader j reads note j."""
    return (reader,)


def shared_board(reader: int, sizes: BoardSizes) -> tuple[int, ...]:
    """Every reader reads every note."""
    return tuple(range(sizes.copies))


def ring(reader: int, sizes: BoardSizes) -> tuple[int, ...]:
    """Reader j reads notes j, j + 1, ..., j + degree - 1 (mod n), so every note has `degree` readers."""
    return tuple((reader + step) % sizes.copies for step in range(sizes.degree))


READS = {"own_note": own_note, "shared_board": shared_board, "readers_only": ring, "readers_and_writers": ring}


def board_task(name: str, arm: str, sizes: BoardSizes, train_notes: bool, deal: Deal, style: str) -> Task:
    """One arm of a board. `train_notes`: are the notes in the batch; what they are paid is the credit rule's."""
    n = sizes.copies
    turns = [Turn(j, 0, sizes.note_tokens, (), graded=True, note=True, trained=train_notes) for j in range(n)]
    turns += [Turn(j, 1, sizes.answer_tokens, READS[arm](j, sizes), graded=True) for j in range(n)]
    parts = HALVES if deal == "dealt" else 1
    write = {"full": _full, "short": _short}[style]

    def render(problem: Problem, index: int, heard: Mapping[int, str]) -> list[Message]:
        facts = problem.facts_of(turns[index].agent % parts, parts)
        return write(problem.question, facts, turns[index], heard)  # what is heard, not `reads`: re-readings differ

    return Task(name, arm, tuple(f"copy {j}" for j in range(n)), tuple(turns), render, parts)


def _full(question: str, facts: tuple[str, ...], turn: Turn, heard: Mapping[int, str]) -> list[Message]:
    """For instruction-tuned models."""
    problem = "\n".join((*facts, question))
    if turn.note:
        system = "You are one of several copies of a model that work on the same problem."
        user = (
            f"Problem:\n{problem}\n\nWrite a note for the other copies: the key steps, and your answer in \\boxed{{}}. "
            "Be brief."
        )
    else:
        system = "You are one of several copies of a model that work on the same problem. Notes may be wrong."
        board = "\n\n".join(f"Note {place + 1}:\n{note}" for place, note in enumerate(heard.values()))
        user = (
            f"Problem:\n{problem}\n\nThe board:\n{board or '(no notes)'}\n\n"
            "Use the notes where they help, work step by step, and put the final answer in \\boxed{}."
        )
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _short(question: str, facts: tuple[str, ...], turn: Turn, heard: Mapping[int, str]) -> list[Message]:
    """For the built-in model, in the words of its chat: even copies are A, odd ones B, and A's notes stand first."""
    order = sorted(heard, key=lambda v: (v % 2, v))
    lines = [f"{'AB'[v % 2]}: {heard[v]}" for v in order]
    return talk.messages(talk.SHORT, "AB", turn.agent % 2, facts, question, lines, answering=not turn.note)
