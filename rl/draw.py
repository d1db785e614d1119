"""Drawing a step's chats: a round of every problem, further rounds where a rule wants them, partners mixed in.

Every round of every cell is one batch. How many chats a problem gets is its rule's `Draw`; who plays with the adapter
is its `mixed`. What the chats are paid is not decided here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rl.chat_credit import wants_more
from rl.collect import Cell, Settings
from rl.credit import Draw, team_reward
from rl.reread import shape_of
from rl.rules import CREDITS, TWIN
from rollout.episode import Episode, EpisodePlan
from rollout.play import play_graded
from rollout.policy import Policy
from tasks.base import Problem
from tasks.grading import Grader


@dataclass
class _Drawing:
    """A cell's step under way: `episodes_PG` so far."""

    cell: Cell
    problems: Sequence[Problem]
    episodes_PG: list[list[Episode]]

    @property
    def chats(self) -> int:
        return sum(map(len, self.episodes_PG))


def play_step(
    policy: Policy,
    grader: Grader,
    cells: Sequence[Cell],
    problems_XP: Sequence[Sequence[Problem]],
    step: int,
    settings: Settings,
) -> list[list[list[Episode]]]:
    """Play and grade every cell's problems: `episodes[cell][problem][episode]`, in the order they were drawn."""
    drawing_X = [
        _Drawing(cell, problems, [[] for _ in problems]) for cell, problems in zip(cells, problems_XP, strict=True)
    ]

    def draw(counts_XP: list[list[int]]) -> None:
        if any(map(any, counts_XP)):
            _draw(policy, grader, drawing_X, counts_XP, step, settings)

    draw([[settings.episodes] * len(problems) for problems in problems_XP])
    for _ in range(1, settings.chat.ada_rounds):
        draw([_again(drawing, settings) for drawing in drawing_X])
    # Last, when it is known how much the twins drew.
    draw([_to_match(drawing, drawing_X) for drawing in drawing_X])
    return [drawing.episodes_PG for drawing in drawing_X]


def _draw(
    policy: Policy,
    grader: Grader,
    drawing_X: list[_Drawing],
    counts_XP: list[list[int]],
    step: int,
    settings: Settings,
) -> None:
    """Add `counts_XP[x][p]` chats to each cell's problems, numbered on from those it has."""
    plans_XE = []
    for drawing, counts in zip(drawing_X, counts_XP, strict=True):
        plans_XE.append(
            [
                EpisodePlan(
                    drawing.cell.task, problem, number, drawing.cell.seed, step, players(drawing.cell, number, settings)
                )
                for problem, has, count in zip(drawing.problems, drawing.episodes_PG, counts, strict=True)
                for number in range(len(has), len(has) + count)
            ]
        )
    for drawing, counts, played in zip(
        drawing_X, counts_XP, play_graded(policy, grader, plans_XE, settings.sampling), strict=True
    ):
        rest = iter(played)
        for has, count in zip(drawing.episodes_PG, counts, strict=True):
            has.extend(next(rest) for _ in range(count))


def players(cell: Cell, number: int, settings: Settings) -> tuple[float, ...]:
    """Which agents of a problem's chat `number` use the adapter: all, or, where partners are mixed, in the second half
    of every round of chats only the first agent."""
    others = 0.0 if CREDITS[cell.credit].mixed and 2 * (number % settings.episodes) >= settings.episodes else 1.0
    return (1.0,) + (others,) * (len(cell.task.agents) - 1)


def _again(drawing: _Drawing, settings: Settings) -> list[int]:
    """Another round for each problem whose chats so far are alike, if the rule replays."""
    if CREDITS[drawing.cell.credit].draw is not Draw.REPLAY:
        return [0] * len(drawing.problems)
    return [
        settings.episodes * wants_more(team_reward(shape_of(drawing.cell.task, episodes).answers_GU), settings.chat)
        for episodes in drawing.episodes_PG
    ]


def _to_match(drawing: _Drawing, drawing_X: list[_Drawing]) -> list[int]:
    """The chats a cell still lacks to have as many as its twin, dealt to its problems in turn."""
    if CREDITS[drawing.cell.credit].draw is not Draw.AS_REPLAYED:
        return [0] * len(drawing.problems)
    (twin,) = (d for d in drawing_X if is_twin(d.cell, drawing.cell))
    each, rest = divmod(twin.chats - drawing.chats, len(drawing.problems))
    return [each + (p < rest) for p in range(len(drawing.problems))]


def is_twin(cell: Cell, of: Cell) -> bool:
    """Does `of` draw as many chats as `cell`."""
    return cell.credit == TWIN and (cell.task.arm, cell.seed) == (of.task.arm, of.seed)
