"""Play episodes: any schedule, round by round, all cells, problems and episodes of a round in one batch.

Knows turns and reads, not tasks: what a turn is shown is what its `reads` deliver.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout.distribution import Sampling
from rollout.episode import Episode, EpisodePlan, RowId, Utterance
from rollout.policy import Policy, Request
from tasks.base import Problem, Task
from tasks.grading import Grader


@dataclass
class _Playing:
    """An episode under way: what each turn said so far."""

    plan: EpisodePlan
    cell: int
    said: dict[int, Utterance]

    def cell_of(self, agent: int) -> int:
        """Whose adapter an agent plays with."""
        return self.cell if self.plan.cells is None else self.plan.cells[agent]


def play(policy: Policy, plans_XE: Sequence[Sequence[EpisodePlan]], sampling: Sampling) -> list[list[Episode]]:
    """Play every plan of every cell; episodes come back in the plans' places, not graded.

    Schedules may differ from plan to plan: a round is whatever turns the plans have in it.
    """
    playing_XE = [[_Playing(plan, cell, dict(plan.given)) for plan in plans] for cell, plans in enumerate(plans_XE)]
    rounds = sorted({r for plans in plans_XE for plan in plans for r in plan.task.rounds})
    for number in rounds:
        due_X: list[list[tuple[_Playing, int]]] = [[] for _ in plans_XE]
        for games in playing_XE:
            for game in games:
                for u, turn in enumerate(game.plan.task.turns):
                    if turn.round == number and u not in game.plan.given:
                        due_X[game.cell_of(turn.agent)].append((game, u))
        if not any(due_X):
            continue
        requests_X = [[_request(policy, game, u) for game, u in due] for due in due_X]
        replies_X = policy.sample(requests_X, sampling)
        for due, requests, replies in zip(due_X, requests_X, replies_X, strict=True):
            for (game, u), request, reply in zip(due, requests, replies, strict=True):
                turn = game.plan.task.turns[u]
                game.said[u] = Utterance(
                    turn=u,
                    prompt_tokens=np.asarray(request.prompt_tokens, np.int32),
                    tokens=reply.tokens,
                    logp=reply.logp,
                    text=policy.tokenizer.decode(reply.tokens),
                    finished=reply.finished,
                    trained=turn.trained and game.plan.adapter[turn.agent] != 0,
                )
    return [
        [Episode(game.plan, game.cell, tuple(game.said[u] for u in sorted(game.said))) for game in games]
        for games in playing_XE
    ]


def _request(policy: Policy, game: _Playing, index: int) -> Request:
    plan, turn = game.plan, game.plan.task.turns[index]
    heard = {v: game.said[v].text for v in turn.reads}
    messages = plan.task.render(plan.problem, index, heard)
    return Request(
        name=f"problem {plan.problem.id}, turn {index} ({plan.task.agents[turn.agent]})",
        prompt_tokens=policy.tokenizer.encode_chat(messages),
        max_tokens=turn.max_tokens,
        scale=plan.adapter[turn.agent],
        row_id=RowId(plan.seed, plan.step, problem_number(plan.problem), plan.episode, index),
    )


def problem_number(problem: Problem) -> int:
    """A stable 32-bit number of a problem, from its id."""
    return zlib.crc32(problem.id.encode())


def longest_prompt(encode_chat, task: Task, problem: Problem) -> int:
    """Tokens of the longest prompt that any turn of `task` can have on `problem`: every reply read at its cap.

    A prompt with an empty reply may be a token short for each: what stands before and after it merges ("A:", " \\n").
    A reply's text could in principle come back as more tokens than were sampled (broken UTF-8 becomes U+FFFD); such a
    prompt, if it then overflows, is an error at run time that names the problem.
    """
    longest = 0
    for index, turn in enumerate(task.turns):
        empty = encode_chat(task.render(problem, index, dict.fromkeys(turn.reads, "")))
        longest = max(longest, len(empty) + sum(task.turns[v].max_tokens + 1 for v in turn.reads))
    return longest


def play_graded(
    policy: Policy, grader: Grader, plans_XE: Sequence[Sequence[EpisodePlan]], sampling: Sampling
) -> list[list[Episode]]:
    """`play`, then grade every graded turn that was sampled, in one call for all cells."""
    episodes_XE = play(policy, plans_XE, sampling)
    asked = [(e, u) for episodes in episodes_XE for e in episodes for u in e.plan.task.graded if u not in e.plan.given]
    grades = grader.grade([(e.utterances[u].text, e.plan.problem.answer) for e, u in asked])
    correct: dict[int, dict[int, float]] = {}
    for (episode, u), grade in zip(asked, grades, strict=True):
        correct.setdefault(id(episode), {})[u] = grade
    return [[episode.graded(correct.get(id(episode), {})) for episode in episodes] for episodes in episodes_XE]
