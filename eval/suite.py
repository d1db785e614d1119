"""Which evaluations a study has, and playing those that its run directory does not keep yet.

The untrained base in every arm (and, of a chat, with the channel off, which tells whether talk is needed), as often as
the settings say; every trained cell; and of chats every trained cell as the first copy beside the untrained base.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eval.evaluate import Evaluation, by_problem, evaluate, summarise
from eval.kept import Kept
from rollout.policy import Policy
from rollout.setup import PlaySettings, build_task, eval_sampling
from tasks.base import Problem, Task
from tasks.grading import Grader
from tasks.registry import TASKS

SILENT = "channel_off"
TRAINED, WITH_BASE = "trained", "with_untrained_partner"


@dataclass(frozen=True)
class Subject:
    """A trained cell to evaluate: its name, arm, rule, seed, task and place `x` among the policy's adapters."""

    name: str
    credit: str
    seed: int
    task: Task
    x: int


def base_name(arm: str, repeat: int = 0) -> str:
    return f"base-{arm}" + (f"-again-{repeat}" if repeat else "")


def base_evaluations(c: PlaySettings, tasks: Mapping[str, Task]) -> list[Evaluation]:
    """The untrained base in every arm, each time with fresh draws; the silent arm, if it is no arm of this, once."""
    out = [
        Evaluation(base_name(arm, repeat), task, None, (0.0,) * len(task.agents), repeat)
        for arm, task in tasks.items()
        for repeat in range(c.base_evaluations)
    ]
    if SILENT in TASKS[c.task].arms and SILENT not in tasks:
        task = build_task(c, SILENT)
        out.append(Evaluation(base_name(SILENT), task, None, (0.0,) * len(task.agents)))
    return out


def trained_evaluations(subjects: Sequence[Subject]) -> list[Evaluation]:
    """Every cell with itself, and as the first copy with the untrained base where a copy reads another."""
    out = []
    for subject in subjects:
        agents = len(subject.task.agents)
        out.append(Evaluation(f"{subject.name}-{TRAINED}", subject.task, subject.x, (1.0,) * agents))
        if reads_others(subject.task):
            adapter = (1.0,) + (0.0,) * (agents - 1)
            out.append(Evaluation(f"{subject.name}-{WITH_BASE}", subject.task, subject.x, adapter))
    return out


def reads_others(task: Task) -> bool:
    """Is it a chat in which a turn is shown another copy's words."""
    chat = not task.notes
    return chat and any(task.turns[v].agent != turn.agent for turn in task.turns for v in turn.reads)


def play_missing(
    c: PlaySettings,
    policy: Policy,
    grader: Grader,
    kept: Kept,
    evaluations: Sequence[Evaluation],
    problems: Sequence[Problem],
    together: bool = True,
    checkpoint: Callable[[], None] = lambda: None,
) -> list[str]:
    """Play the evaluations that are not kept, keep each, and return their names.

    `together`: if one is missing, play all of them. A part would be sampled in other batches, and floating point would
    not give quite the same numbers as a run that was never interrupted. `checkpoint` is called before and after.
    """
    checkpoint()
    missing = [item for item in evaluations if kept.load(item.name) is None]
    if missing and together:
        missing = list(evaluations)
    if missing:
        played = evaluate(policy, grader, missing, problems, c.eval_episodes, eval_sampling(c))
        for item, episodes_PG in zip(missing, played, strict=True):
            flat = [episode for group in episodes_PG for episode in group]
            summary = {"metrics": summarise(episodes_PG, grader), "problems": by_problem(episodes_PG)}
            kept.save(item.name, summary, flat)
        checkpoint()
    return [item.name for item in missing]
