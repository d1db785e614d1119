"""The tasks there are, by name. To add one: write its file, and add a line here."""

from collections.abc import Callable
from dataclasses import dataclass

from tasks import talk
from tasks.base import Problem, Task


@dataclass(frozen=True)
class TaskOptions:
    """What a run may choose about a task's prompts: caps in tokens, end-of-turn included, and the prompt style."""

    message_tokens: int
    answer_tokens: int
    prompt_style: str


@dataclass(frozen=True)
class TaskSpec:
    """`build(arm, options)` makes one arm's schedule; `arms[0]` is the default; `needs_facts`: facts are split."""

    name: str
    arms: tuple[str, ...]
    build: Callable[[str, TaskOptions], Task]
    needs_facts: bool
    credits: tuple[str, ...]


def _talk(arm: str, options: TaskOptions) -> Task:
    return talk.talk_task(arm, options.message_tokens, options.answer_tokens, talk.PROMPTS[options.prompt_style])


TASKS: dict[str, TaskSpec] = {
    "talk_to_solve": TaskSpec("talk_to_solve", talk.ARMS, _talk, needs_facts=True, credits=("grpo",)),
}


@dataclass(frozen=True)
class Problems:
    """A task's problems. `dropped` counts what was left out and why; `fingerprint` identifies the data."""

    train: list[Problem]
    heldout: list[Problem]
    dropped: dict[str, int]
    fingerprint: str


def load_problems(
    source: str,
    split_rule: str,
    train: int,
    heldout: int,
    data_seed: int,
    fits: Callable[[Problem], bool] | None = None,
    revision: str | None = None,
) -> Problems:
    """Problems from `source`: "stories" (built in), a JSONL directory or file, or a hub id."""
    if source == "stories":
        from tasks.stories import stories

        problems = stories(train, heldout, data_seed)
        kept = [[p for p in part if fits is None or fits(p)] for part in problems]
        dropped = len(problems[0]) + len(problems[1]) - len(kept[0]) - len(kept[1])
        return Problems(kept[0], kept[1], {"too long": dropped}, f"stories seed {data_seed}")
    from tasks.gsm8k import load_talk_problems

    data = load_talk_problems(source, split_rule, train, heldout, data_seed, fits=fits, revision=revision)
    return Problems(data.train, data.heldout, data.dropped, data.fingerprint)
