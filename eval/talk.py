"""The talk metrics of SPEC 4: did a copy send what only it knew, and use what only the partner knew?

Text in, per-problem sums out; intervals are eval.stats'. A metric is a function of one episode that returns the values
it adds (often two: one a copy).
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from eval.stats import Estimate, ratio_estimate
from rollout.episode import Episode
from tasks.base import Problem
from tasks.grading import last_box

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> set[str]:
    """num(text): the numbers in a text, thousands commas removed, 12.0 and 12 being one number."""
    found = set()
    for match in NUMBER.findall(text):
        plain = match.replace(",", "")
        whole, _, decimals = plain.partition(".")
        decimals = decimals.rstrip("0")
        found.add((whole.lstrip("0") or "0") + ("." + decimals if decimals else ""))
    return found


def owned(problem: Problem, agent: int, agents: int) -> set[str]:
    """The numbers in the facts dealt to `agent`; those its maker recorded, if it did."""
    if problem.fact_numbers is not None:
        return {n for fact in problem.fact_numbers[agent::agents] for n in fact}
    return {n for fact in problem.facts_of(agent, agents) for n in numbers(fact)}


def only(problem: Problem, agent: int, agents: int) -> set[str]:
    """Numbers that `agent` alone holds: in its facts, in nobody else's, not in the question."""
    others = {n for other in range(agents) if other != agent for n in owned(problem, other, agents)}
    return owned(problem, agent, agents) - others - numbers(problem.question)


def _turns_of(episode: Episode, agent: int) -> list[int]:
    return [u for u, turn in enumerate(episode.plan.task.turns) if turn.agent == agent]


def _shares(episode: Episode, sender_is_self: bool, turn_at: int) -> list[float]:
    """Share of someone's own numbers found in each copy's first (0) or last (-1) message."""
    agents = len(episode.plan.task.agents)
    shares = []
    for agent in range(agents):
        if not sender_is_self and not episode.plan.task.turns[_turns_of(episode, agent)[-1]].graded:
            continue
        holders = [agent] if sender_is_self else [other for other in range(agents) if other != agent]
        for holder in holders:
            mine = only(episode.plan.problem, holder, agents)
            if mine:
                text = episode.utterances[_turns_of(episode, agent)[turn_at]].text
                shares.append(len(mine & numbers(text)) / len(mine))
    return shares


def sends_own(episode: Episode) -> list[float]:
    """|only_X in X's first message| / |only_X| for each copy X with only_X non-empty."""
    return _shares(episode, sender_is_self=True, turn_at=0)


def uses_partner(episode: Episode) -> list[float]:
    """|only_Y in X's last message| / |only_Y| for each copy X that answers and partner Y with only_Y non-empty."""
    return _shares(episode, sender_is_self=False, turn_at=-1)


def asks(episode: Episode) -> list[float]:
    """Is there a "?" in each copy's first message."""
    agents = range(len(episode.plan.task.agents))
    return [float("?" in episode.utterances[_turns_of(episode, a)[0]].text) for a in agents]


def last_boxes(episode: Episode) -> list[str | None]:
    return [last_box(episode.utterances[u].text) for u in episode.plan.task.graded]


def both_agree(episode: Episode) -> list[float]:
    """All graded messages are boxed and their boxed answers are the same text (white space aside); for two or more."""
    if len(episode.plan.task.graded) < 2:
        return []
    boxes = [None if box is None else "".join(box.split()) for box in last_boxes(episode)]
    return [float(None not in boxes and len(set(boxes)) == 1)]


def pass_at_1(episode: Episode) -> list[float]:
    """Every graded answer's own grade ("team solves it"; not "both right")."""
    return list(episode.correct)


METRICS: dict[str, Callable[[Episode], list[float]]] = {
    "pass_at_1": pass_at_1,
    "both_right": lambda e: [float(all(c == 1 for c in e.correct))],
    "sends_own": sends_own,
    "uses_partner": uses_partner,
    "asks": asks,
    "both_agree": both_agree,
    "boxed": lambda e: [float(box is not None) for box in last_boxes(e)],
    "truncated": lambda e: [float(not u.finished) for u in e.utterances],
}


def estimates(episodes_PG: Sequence[Sequence[Episode]]) -> dict[str, Estimate | None]:
    """Every metric over a set of held-out problems, problems being the bootstrap's unit.

    Also, by turn: tokens and characters; and each agent's own rate of right answers.
    """
    task = episodes_PG[0][0].plan.task
    metrics = dict(METRICS)
    for position, u in enumerate(task.graded):
        name = task.agents[task.turns[u].agent]
        metrics[f"{name}_right"] = lambda e, position=position: [e.correct[position]]
    for u in range(len(task.turns)):
        metrics[f"turn_{u}_tokens"] = lambda e, u=u: [float(len(e.utterances[u].tokens))]
        metrics[f"turn_{u}_chars"] = lambda e, u=u: [float(len(e.utterances[u].text))]
    return {name: _estimate(metric, episodes_PG) for name, metric in metrics.items()}


def _estimate(metric: Callable[[Episode], list[float]], episodes_PG: Sequence[Sequence[Episode]]) -> Estimate | None:
    values_PN = [[value for episode in group for value in metric(episode)] for group in episodes_PG]
    return ratio_estimate(
        np.array([sum(values) for values in values_PN]), np.array([len(values) for values in values_PN])
    )


def boxed_pair(episode: Episode) -> tuple[str, str] | None:
    """(first copy's last message, second copy's boxed answer), to be graded against each other, or None."""
    boxes = last_boxes(episode)
    if len(boxes) < 2 or None in (boxes[0], boxes[-1]):
        return None
    return episode.utterances[episode.plan.task.graded[0]].text, boxes[-1]
