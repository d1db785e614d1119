"""The tasks there are, by name. To add one: write its file, and add a line here."""

from collections.abc import Callable
from dataclasses import dataclass

from tasks import talk
from tasks.base import Problem, Task
from tasks.board import BoardSizes, Deal, board_task


@dataclass(frozen=True)
class TaskOptions:
    """What a run may choose about a task's schedule and prompts: caps in tokens, end-of-turn included; prompt style;
    for boards the copies, the ring's degree, and whether facts are dealt."""

    message_tokens: int
    answer_tokens: int
    prompt_style: str
    copies: int = 4
    degree: int = 2
    deal: Deal = "whole"


@dataclass(frozen=True)
class TaskSpec:
    """`build(arm, options)` makes one arm's schedule. `arms`: {arm: its default credit rule}, the default arm first.
    `boards`: a board, not a chat. `needs_facts(options)`: are facts split."""

    name: str
    arms: dict[str, str]
    build: Callable[[str, TaskOptions], Task]
    boards: bool
    needs_facts: Callable[[TaskOptions], bool]


def _talk(arm: str, options: TaskOptions) -> Task:
    return talk.talk_task(arm, options.message_tokens, options.answer_tokens, talk.PROMPTS[options.prompt_style])


def _board(name: str, train_notes: bool) -> Callable[[str, TaskOptions], Task]:
    def build(arm: str, options: TaskOptions) -> Task:
        sizes = BoardSizes(options.copies, options.degree, options.message_tokens, options.answer_tokens)
        return board_task(name, arm, sizes, train_notes, options.deal, options.prompt_style)

    return build


def _dealt(options: TaskOptions) -> bool:
    return options.deal == "dealt"


TASKS: dict[str, TaskSpec] = {
    spec.name: spec
    for spec in (
        TaskSpec("talk_to_solve", dict.fromkeys(talk.ARMS, "grpo"), _talk, False, lambda options: True),
        TaskSpec(
            "message_board",
            {"shared_board": "readers_only", "own_note": "readers_only"},
            _board("message_board", train_notes=False),
            True,
            _dealt,
        ),
        TaskSpec(
            "board_writers",
            {"readers_and_writers": "readers_mean", "readers_only": "readers_only"},
            _board("board_writers", train_notes=True),
            True,
            _dealt,
        ),
    )
}


@dataclass(frozen=True)
class Problems:
    """A task's problems. `dropped` counts what was left out and why; `fingerprint` identifies the data."""

    train: list[Problem]
    heldout: list[Problem]
    dropped: dict[str, int]
    fingerprint: str


@dataclass(frozen=True)
class DataOptions:
    """Where problems come from: `source` is "stories" (built in), a JSONL directory or file, or a hub id."""

    source: str
    split_rule: str
    train: int
    heldout: int
    seed: int
    revision: str | None = None


def load_problems(options: DataOptions, split_facts: bool, fits: Callable[[Problem], bool] | None = None) -> Problems:
    """A task's problems, cut into facts if `split_facts`; those that don't satisfy `fits` are left out."""
    o = options
    if o.source == "stories":
        from tasks.stories import stories

        problems = stories(o.train, o.heldout, o.seed)
        kept = [[p for p in part if fits is None or fits(p)] for part in problems]
        dropped = len(problems[0]) + len(problems[1]) - len(kept[0]) - len(kept[1])
        return Problems(kept[0], kept[1], {"too long": dropped}, f"stories seed {o.seed}")
    if split_facts:
        from tasks.gsm8k import load_talk_problems

        data = load_talk_problems(o.source, o.split_rule, o.train, o.heldout, o.seed, fits=fits, revision=o.revision)
    else:
        from tasks.competition import load_whole_problems

        data = load_whole_problems(o.source, o.train, o.heldout, o.seed, fits=fits, revision=o.revision)
    return Problems(data.train, data.heldout, data.dropped, data.fingerprint)
