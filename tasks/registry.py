"""The tasks there are, by name. To add one: write its file, and add a line here."""

from collections.abc import Callable
from dataclasses import dataclass

from tasks import talk
from tasks.ask import ask_task
from tasks.base import Problem, Task
from tasks.board import BoardSizes, Deal, board_task
from tasks.stories import SETS, stories


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
    `boards`: a board, not a chat."""

    name: str
    arms: dict[str, str]
    build: Callable[[str, TaskOptions], Task]
    boards: bool = False


def _chat(build: Callable[..., Task]) -> Callable[[str, TaskOptions], Task]:
    def chat(arm: str, options: TaskOptions) -> Task:
        return build(arm, options.message_tokens, options.answer_tokens, talk.PROMPTS[options.prompt_style])

    return chat


def _board(name: str, train_notes: bool) -> Callable[[str, TaskOptions], Task]:
    def build(arm: str, options: TaskOptions) -> Task:
        sizes = BoardSizes(options.copies, options.degree, options.message_tokens, options.answer_tokens)
        return board_task(name, arm, sizes, train_notes, options.deal, options.prompt_style)

    return build


CHAT_ARMS = dict.fromkeys(talk.ARMS, "grpo")
TASKS: dict[str, TaskSpec] = {
    spec.name: spec
    for spec in (
        TaskSpec("talk_to_solve", CHAT_ARMS, _chat(talk.talk_task)),
        TaskSpec("talk_three", CHAT_ARMS, _chat(talk.three_task)),
        TaskSpec("ask_to_solve", CHAT_ARMS, _chat(ask_task)),
        TaskSpec(
            "message_board",
            {"shared_board": "readers_only", "own_note": "readers_only"},
            _board("message_board", train_notes=False),
            boards=True,
        ),
        TaskSpec(
            "board_writers",
            {"readers_and_writers": "readers_mean", "readers_only": "readers_only"},
            _board("board_writers", train_notes=True),
            boards=True,
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
    """Where problems come from: `source` is one of tasks.stories.SETS (built in), a JSONL directory or a hub id."""

    source: str
    split_rule: str
    train: int
    heldout: int
    seed: int
    revision: str | None = None


def load_problems(
    options: DataOptions, split_facts: bool, unfit: Callable[[Problem], str | None] | None = None
) -> Problems:
    """A task's problems, cut into facts if `split_facts`; those for which `unfit` gives a reason are left out."""
    o = options
    if o.source in SETS:
        train, heldout, dropped = stories(o.train, o.heldout, o.seed, SETS[o.source], unfit)
        return Problems(train, heldout, dropped, f"{o.source} seed {o.seed}")
    if split_facts:
        from tasks.gsm8k import load_talk_problems

        data = load_talk_problems(o.source, o.split_rule, o.train, o.heldout, o.seed, unfit=unfit, revision=o.revision)
    else:
        from tasks.competition import load_whole_problems

        data = load_whole_problems(o.source, o.train, o.heldout, o.seed, unfit=unfit, revision=o.revision)
    return Problems(data.train, data.heldout, data.dropped, data.fingerprint)
