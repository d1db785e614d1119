"""The next step's problems, drawn and their first prompts encoded on a thread while the device updates.

Only when that happens changes: which problems a step has is a function of its number (rl.collect.problems_at), and a
prompt that is found ready is the one that would have been encoded. Left out: later rounds, which need the replies.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

from rl.collect import Cell, problems_at
from rollout.text import TextWork
from tasks.base import Message, Problem


class Upcoming(AbstractContextManager):
    """Draws `per_step` of `problems` for each cell, a step ahead. `text` gets the prompts of the first round.

    Every `start` is followed by one `take`, before any other text work begins; the last may be left.
    """

    def __init__(
        self, text: TextWork, cells: Sequence[Cell], problems: Sequence[Problem], data_seed: int, per_step: int
    ) -> None:
        self.text, self.cells, self.problems = text, cells, problems
        self.data_seed, self.per_step = data_seed, per_step
        self._thread = ThreadPoolExecutor(1)
        self._drawn: Future[tuple[list[list[Problem]], float]] | None = None

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    def start(self, step: int) -> None:
        """Begin with a step."""
        self._drawn = self._thread.submit(self._draw, step)

    def take(self) -> list[list[Problem]]:
        """The problems of the step that was started, by cell. Raises what drawing them raised."""
        with self.text.waiting():
            problems_XP, seconds = self._drawn.result()
        # Counted here and not by the thread, so that it is among the seconds of the step it was done for.
        self.text.count(seconds)
        return problems_XP

    def _draw(self, step: int) -> tuple[list[list[Problem]], float]:
        started = time.perf_counter()
        problems_XP = [
            problems_at(self.problems, cell.seed, self.data_seed, step, self.per_step) for cell in self.cells
        ]
        self.text.prepare(opening(self.cells, problems_XP))
        return problems_XP, time.perf_counter() - started


def opening(cells: Sequence[Cell], problems_XP: Sequence[Sequence[Problem]]) -> list[list[Message]]:
    """The prompts of every cell's first round, one for each problem and turn: the same for all its chats."""
    return [
        cell.task.render(problem, u, {})
        for cell, problems in zip(cells, problems_XP, strict=True)
        for problem in problems
        for u, turn in enumerate(cell.task.turns)
        if turn.round == cell.task.rounds[0]
    ]
