"""The board metrics of SPEC 4: were the notes right, did they rescue or mislead, what would a vote have said?

A metric is a function of one episode that returns the values it adds; intervals are eval.stats'. A reader's own note is
the one its copy wrote: the i-th note and the i-th answer are one copy's.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from eval import stats
from eval.stats import Estimate, ratio_estimate
from eval.talk import numbers, only
from rollout.episode import Episode
from tasks.base import Task
from tasks.grading import last_box


def note_correct(episode: Episode) -> list[float]:
    """Each note's own grade."""
    return [float(episode.utterances[u].correct) for u in episode.plan.task.notes]


def reader_correct(episode: Episode) -> list[float]:
    """Each reader's grade."""
    return [float(episode.utterances[u].correct) for u in episode.plan.task.answers]


def rescued(episode: Episode) -> list[float]:
    """Over all readers: own note wrong and reader right."""
    return [float(note < 1 and reader == 1) for note, reader in _pairs(episode)]


def misled(episode: Episode) -> list[float]:
    """Over all readers: own note right and reader wrong."""
    return [float(note == 1 and reader < 1) for note, reader in _pairs(episode)]


def rescued_of_wrong(episode: Episode) -> list[float]:
    """Reader right, over readers whose own note is wrong."""
    return [float(reader == 1) for note, reader in _pairs(episode) if note < 1]


def misled_of_right(episode: Episode) -> list[float]:
    """Reader wrong, over readers whose own note is right."""
    return [float(reader < 1) for note, reader in _pairs(episode) if note == 1]


def vote(episode: Episode) -> list[float]:
    """The grade of the most common boxed note answer (ties: first posted); no boxed note is wrong."""
    boxed = [(last_box(episode.utterances[u].text), episode.utterances[u].correct) for u in episode.plan.task.notes]
    answers = [("".join(box.split()), correct) for box, correct in boxed if box is not None]
    if not answers:
        return [0.0]
    # Counter keeps the order of first sight, and max takes the first of equals.
    winner = max(Counter(answer for answer, _ in answers).items(), key=lambda item: item[1])[0]
    return [float(next(correct for answer, correct in answers if answer == winner))]


def notes_boxed(episode: Episode) -> list[float]:
    """Does each note hold a closed box, right or wrong."""
    return [float(last_box(episode.utterances[u].text) is not None) for u in episode.plan.task.notes]


def notes_send_own(episode: Episode) -> list[float]:
    """On dealt boards, the share of the numbers that only a note's writer's half holds and that are in the note."""
    task, problem = episode.plan.task, episode.plan.problem
    shares = []
    for u in task.notes:
        mine = only(problem, task.turns[u].agent % task.parts, task.parts) if task.parts > 1 else set()
        if mine:
            shares.append(len(mine & numbers(episode.utterances[u].text)) / len(mine))
    return shares


def pass_at_k(episode: Episode) -> list[float]:
    """pass@k with k = n, the number of readers: is any of them right."""
    grades = reader_correct(episode)
    return [stats.pass_at_k(len(grades), sum(grade == 1 for grade in grades), len(grades))]


METRICS = {
    "pass_at_1": reader_correct,
    "pass_at_k": pass_at_k,
    "notes_right": note_correct,
    "vote": vote,
    "rescued": rescued,
    "misled": misled,
    "rescued_of_wrong": rescued_of_wrong,
    "misled_of_right": misled_of_right,
    "notes_boxed": notes_boxed,
    "notes_send_own": notes_send_own,
    "note_chars": lambda e: [float(len(e.utterances[u].text)) for u in e.plan.task.notes],
    "note_tokens": lambda e: [float(len(e.utterances[u].tokens)) for u in e.plan.task.notes],
    "answer_tokens": lambda e: [float(len(e.utterances[u].tokens)) for u in e.plan.task.answers],
    "truncated": lambda e: [float(not u.finished) for u in e.utterances],
}


def estimates(episodes_PG: Sequence[Sequence[Episode]]) -> dict[str, Estimate | None]:
    """Every metric over a set of held-out problems, problems being the bootstrap's unit."""
    found = {}
    for name, metric in METRICS.items():
        values_PN = [[value for episode in group for value in metric(episode)] for group in episodes_PG]
        found[name] = ratio_estimate(
            np.array([sum(values) for values in values_PN]), np.array([len(values) for values in values_PN])
        )
    return found


def is_board(task: Task) -> bool:
    """Has the task notes."""
    return bool(task.notes)


def _pairs(episode: Episode) -> list[tuple[float, float]]:
    return list(zip(note_correct(episode), reader_correct(episode), strict=True))
