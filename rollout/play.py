"""Play episodes: any schedule, round by round, all cells, problems and episodes of a round in one batch.

Knows turns and reads, not tasks: what a turn is shown is what its `reads` deliver. Where a round takes several calls of
the sampler, one half of the episodes is sampled while a thread reads and writes the other half's text.
"""

import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from rollout.distribution import Sampling
from rollout.episode import Episode, EpisodePlan, RowId, Utterance
from rollout.policy import Policy, Reply, Request
from rollout.text import TextWork
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


_Games = Sequence[Sequence[_Playing]]
"""Episodes under way, by cell."""
_Rounds = Generator[list[list[Request]], list[list[Reply]], None]
"""Yields the rows of a round, by cell, and is sent their replies."""


def play(
    policy: Policy,
    plans_XE: Sequence[Sequence[EpisodePlan]],
    sampling: Sampling,
    foresee: Callable[[list[tuple[str, str]]], None] = lambda pairs: None,
) -> list[list[Episode]]:
    """Play every plan of every cell; episodes come back in the plans' places, not graded.

    Schedules may differ from plan to plan: a round is whatever turns the plans have in it. `foresee` is told the (text,
    gold) of graded turns as soon as they are said, in halves on another thread.
    """
    playing_XE = [[_Playing(plan, cell, dict(plan.given)) for plan in plans] for cell, plans in enumerate(plans_XE)]
    parts = _in_parts(playing_XE, policy.row_buckets[-1])
    rounds = [_rounds(policy.text, part, foresee) for part in parts]
    if len(rounds) == 1:
        _sample_alone(policy, rounds[0], sampling)
    else:
        _take_turns(policy, rounds, sampling)
    return [
        [Episode(game.plan, game.cell, tuple(game.said[u] for u in sorted(game.said))) for game in games]
        for games in playing_XE
    ]


def _in_parts(playing_XE: _Games, rows: int) -> list[_Games]:
    """Two halves, where these take no more calls of `rows` rows than the whole; otherwise the whole.

    Fewer rows in a call would cost as much as many: every step of decoding reads all weights.
    """
    most = max(map(len, playing_XE))
    cut = rows * -(-most // (2 * rows))
    halves = [[games[:cut] for games in playing_XE], [games[cut:] for games in playing_XE]]
    free = cut < most and sum(_calls(half, rows) for half in halves) == _calls(playing_XE, rows)
    return halves if free else [playing_XE]


def _calls(playing_XE: _Games, rows: int) -> int:
    """Calls of the sampler that these episodes take at `rows` rows a cell."""
    return sum(-(-max(map(len, due_X)) // rows) for due_X in _due(playing_XE))


def _due(playing_XE: _Games) -> Iterator[list[list[tuple[_Playing, int]]]]:
    """Round by round, the turns that are to be sampled, under the cell whose adapter speaks."""
    for number in sorted({r for games in playing_XE for game in games for r in game.plan.task.rounds}):
        due_X: list[list[tuple[_Playing, int]]] = [[] for _ in playing_XE]
        for games in playing_XE:
            for game in games:
                for u, turn in enumerate(game.plan.task.turns):
                    if turn.round == number and u not in game.plan.given:
                        due_X[game.cell_of(turn.agent)].append((game, u))
        if any(due_X):
            yield due_X


def _sample_alone(policy: Policy, part: _Rounds, sampling: Sampling) -> None:
    """Text and sampling by turns. In this thread: a switch to another would cost more than the text of a tiny model."""
    replies_X = None
    while True:
        with policy.text.waiting():
            requests_X = _next(policy.text, part, replies_X)
        if requests_X is None:
            return
        replies_X = policy.sample(requests_X, sampling)


def _take_turns(policy: Policy, parts: Sequence[_Rounds], sampling: Sampling) -> None:
    """Sample for one part after the other; meanwhile a thread does the text of those whose turn it isn't."""
    with ThreadPoolExecutor(1) as thread:
        turns = deque((part, thread.submit(_next, policy.text, part, None)) for part in parts)
        while turns:
            part, asked = turns.popleft()
            with policy.text.waiting():
                requests_X = asked.result()
            if requests_X is not None:
                replies_X = policy.sample(requests_X, sampling)
                turns.append((part, thread.submit(_next, policy.text, part, replies_X)))


def _next(text: TextWork, part: _Rounds, replies_X: list[list[Reply]] | None) -> list[list[Request]] | None:
    """What a part asks for after these replies; None: it has been played."""
    with text.timed():
        try:
            return part.send(replies_X)
        except StopIteration:
            return None


def _rounds(text: TextWork, playing_XE: _Games, foresee: Callable[[list[tuple[str, str]]], None]) -> _Rounds:
    """The text work of some episodes: yields a round's requests, is sent its replies."""
    for due_X in _due(playing_XE):
        requests_X = _requests(text, due_X)
        replies_X = yield requests_X
        flat = [
            (game, u, request, reply)
            for rows in zip(due_X, requests_X, replies_X, strict=True)
            for (game, u), request, reply in zip(*rows, strict=True)
        ]
        texts = text.decode([reply.tokens for *_, reply in flat])
        for (game, u, request, reply), words in zip(flat, texts, strict=True):
            turn = game.plan.task.turns[u]
            trained = turn.trained and game.plan.adapter[turn.agent] != 0
            game.said[u] = Utterance(u, request.prompt_tokens, reply.tokens, reply.logp, words, reply.finished, trained)
        graded = [(game, u) for game, u, *_ in flat if game.plan.task.turns[u].graded]
        foresee([(game.said[u].text, game.plan.problem.answer) for game, u in graded])


def _requests(text: TextWork, due_X: list[list[tuple[_Playing, int]]]) -> list[list[Request]]:
    """A round's rows; their prompts are encoded together."""
    chats = []
    for due in due_X:
        for game, u in due:
            heard = {v: game.said[v].text for v in game.plan.task.turns[u].reads}
            chats.append(game.plan.task.render(game.plan.problem, u, heard))
    prompts = iter(text.encode(chats))
    return [[_request(game, u, next(prompts)) for game, u in due] for due in due_X]


def _request(game: _Playing, index: int, prompt_tokens: Sequence[int]) -> Request:
    plan, turn = game.plan, game.plan.task.turns[index]
    return Request(
        name=f"problem {plan.problem.id}, turn {index} ({plan.task.agents[turn.agent]})",
        prompt_tokens=np.array(prompt_tokens, np.int32),
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
    """`play`, then grade every graded turn that was sampled, in one call for all cells.

    The grader's workers begin with a turn as soon as it is said, while other rounds are sampled.
    """
    episodes_XE = play(policy, plans_XE, sampling, grader.ahead)
    asked = [(e, u) for episodes in episodes_XE for e in episodes for u in e.plan.task.graded if u not in e.plan.given]
    grades = grader.grade([(e.utterances[u].text, e.plan.problem.answer) for e, u in asked])
    correct: dict[int, dict[int, float]] = {}
    for (episode, u), grade in zip(asked, grades, strict=True):
        correct.setdefault(id(episode), {})[u] = grade
    return [[episode.graded(correct.get(id(episode), {})) for episode in episodes] for episodes in episodes_XE]
