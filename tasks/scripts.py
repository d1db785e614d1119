"""Scripted chats of mixed quality: what the built-in models are warm-started on.

A script sometimes sends its facts and sometimes asks or chats, sometimes uses what it heard and sometimes
does not: everything that reinforcement learning then has to choose from. How often, in which words and in which
tasks is a `Setting`'s matter (tasks.habits). Text only. Left out: tokens and loss weights (rl.warmstart), and the
prompts, which are the product's own (tasks.talk, tasks.ask).
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tasks.ask import one_number
from tasks.base import Task
from tasks.habits import ASKS, CHATS, EASY, HOW_MANY, KNOW, WHO, Setting, phrase_words
from tasks.stories import LARGEST, NAMES, Story


@dataclass(frozen=True)
class Row:
    """One supervised example: turn `turn` of `task` on `story`, with `heard` delivered, should say `reply`.

    `given`: the reply's beginning, if it is given and not learned, so that the row teaches a skill but no habit.
    """

    task: Task
    story: Story
    turn: int
    heard: dict[int, str]
    reply: str
    kind: str
    given: str = ""


def write_rows(story: Story, rng: random.Random, setting: Setting = EASY, name: str = "talk_to_solve") -> list[Row]:
    """A whole conversation of the task `name`, one row a turn."""
    task = setting.tasks[name]["channel_off" if rng.random() < setting.off_share else "channel_on"]
    rows: list[Row] = []
    said: dict[int, str] = {}
    for index, turn in enumerate(task.turns):
        heard = {v: said[v] for v in turn.reads}
        kind, reply = (_answer if turn.graded else _message)(setting, task, story, index, heard, rng)
        rows.append(Row(task, story, index, heard, reply, kind))
        said[index] = garble(reply, rng, setting) if rng.random() < setting.garbled_share else reply
    return rows


def informed_row(story: Story, rng: random.Random, setting: Setting = EASY, name: str = "talk_to_solve") -> Row:
    """An answer, of any kind, of a copy whose partners sent everything that it lacks."""
    task, turn, heard = _informed(story, rng, setting, name)
    kind, reply = _answer(setting, task, story, turn, heard, rng)
    return Row(task, story, turn, heard, reply, kind)


def forced_row(story: Story, rng: random.Random, setting: Setting = EASY, name: str = "talk_to_solve") -> Row:
    """An informed answer that uses what it was sent, up to the choice of doing so given: practice that leaves the
    habits alone."""
    task, turn, heard = _informed(story, rng, setting, name)
    reply = work_out(setting, "use", story, story.order)
    return Row(task, story, turn, heard, reply, "use", given=commitment(setting, task, story, turn))


def _informed(story: Story, rng: random.Random, setting: Setting, name: str) -> tuple[Task, int, dict[int, str]]:
    """(task, an answer's turn, what it heard): the partners always sent everything; what the copy itself said before
    varies, as in any conversation."""
    task = setting.tasks[name]["channel_on"]
    turn = rng.choice(task.answers)
    said: dict[int, str] = {}
    order = rng.sample(range(2), 2) if name == "ask_to_solve" else None
    for v in range(turn):
        heard = {w: said[w] for w in task.turns[v].reads}
        facts = task.facts_of(story.problem, task.turns[v].agent)
        if task.turns[v].graded:
            said[v] = _answer(setting, task, story, v, heard, rng)[1]
        elif task.turns[v].agent == task.turns[turn].agent:
            said[v] = _message(setting, task, story, v, heard, rng)[1]
        elif order is None:
            said[v] = tell(facts)
        else:  # A's messages are turns 1 and 3, with room for a fact each
            said[v] = tell([facts[order[v // 2]]])
    return task, turn, {v: said[v] for v in range(turn)}


def commitment(setting: Setting, task: Task, story: Story, turn: int) -> str:
    """The beginning of a right answer that only an answer of kind `use` has: its first word where openings differ, else
    all up to the first number that the copy was told."""
    if len(set(setting.openings.values())) > 1:
        return setting.openings["use"].split()[0]
    own = _own(task, story, turn)
    at = next(at for at, fact in enumerate(story.order) if fact not in own)
    if at == 0:
        return f"{setting.openings['use']} {story.numbers[story.order[0]]}"
    steps = story.work(story.order[: at + 1])[0]
    steps[-1] = steps[-1].split(" =")[0]
    return f"{setting.openings['use']} {', '.join(steps)}"


def tell(facts: Sequence[str]) -> str:
    """The message that is worth sending."""
    return " ".join((KNOW, *facts))


def work_out(setting: Setting, kind: str, story: Story, facts: tuple[int, ...]) -> str:
    """An answer that works with some facts, in the given order."""
    steps, result = story.work(facts)
    return f"{setting.openings[kind]} {', '.join(steps) or result}. The answer is \\boxed{{{result}}}."


def wanted(task: Task, story: Story, fact: str) -> str:
    """The question of ask_to_solve that asks for a fact of A's: its sentence without what B has not seen."""
    seen = " ".join((*task.facts_of(story.problem, 1), story.problem.question))
    words = re.sub(r"\d+", HOW_MANY, fact).removesuffix(".").split(" ")
    if words[0] not in seen and words[0] in NAMES:
        words[0] = WHO
    return " ".join(words) + "?"


def _own(task: Task, story: Story, turn: int) -> tuple[int, ...]:
    """The facts that a turn's copy holds, by index, in the order of work."""
    return tuple(i for i in story.order if i % task.parts == task.turns[turn].agent)


def told(task: Task, story: Story, turn: int, heard: Mapping[int, str]) -> tuple[int, ...]:
    """The facts that others' messages told a turn's copy, by index, in the order of work."""
    texts = [heard[v] for v in heard if task.turns[v].agent != task.turns[turn].agent and not task.turns[v].graded]
    facts = story.problem.facts
    if task.name == "ask_to_solve":  # delivered up to the first number, which must not be the start of a longer one
        texts = [one_number(text) + "." for text in texts]
        facts = [one_number(fact) + "." for fact in facts]
    own = _own(task, story, turn)
    return tuple(i for i in story.order if i not in own and any(facts[i] in text for text in texts))


def _message(
    setting: Setting, task: Task, story: Story, turn: int, heard: Mapping[int, str], rng: random.Random
) -> tuple[str, str]:
    """(kind, text) of a message."""
    agent = task.turns[turn].agent
    facts = task.facts_of(story.problem, agent)
    shares = setting.habits[task.name].messages
    kind = rng.choices(list(shares), shares.values())[0]
    if kind == "some" and len(facts) == 1:
        kind = "ask"
    if kind == "all":
        return kind, tell(facts)
    if kind == "some":
        return kind, tell([rng.choice(facts)])
    if kind == "follow":
        return kind, _follow(task, story, turn, heard, rng)
    others = " and ".join(name for name in task.agents if name != task.agents[agent])
    return kind, rng.choice(ASKS if kind == "ask" else CHATS).format(other=others)


def _follow(task: Task, story: Story, turn: int, heard: Mapping[int, str], rng: random.Random) -> str:
    """What serves ask_to_solve: B asks for a fact that it still lacks, A tells one that was just asked for, if any."""
    theirs = task.facts_of(story.problem, 0)
    if task.turns[turn].agent == 1:
        known = [story.problem.facts[i] for i in told(task, story, turn, heard)]
        return wanted(task, story, rng.choice([fact for fact in theirs if fact not in known] or theirs))
    asked = [fact for fact in theirs if wanted(task, story, fact) == heard.get(turn - 1)]
    fresh = [fact for fact in asked if all(fact not in text for v, text in heard.items() if task.turns[v].agent == 0)]
    return tell([rng.choice(fresh or asked or theirs)])


def _answer(
    setting: Setting, task: Task, story: Story, turn: int, heard: Mapping[int, str], rng: random.Random
) -> tuple[str, str]:
    """(kind, text) of a last message, given what was delivered."""
    own, others = _own(task, story, turn), told(task, story, turn, heard)
    known = tuple(i for i in story.order if i in own + others)
    kinds = dict(setting.habits[task.name].answers)
    if not others or not fits(story, known):
        del kinds["use"]
    kind = rng.choices(list(kinds), kinds.values())[0]
    if kind == "own" and not fits(story, own):
        kind = "guess"
    if kind == "guess" and not setting.invents:
        return kind, f"{setting.openings[kind]} \\boxed{{{rng.randint(1, 99)}}}."
    if kind == "guess":
        return kind, work_out(setting, kind, _invented(story, own, rng), story.order)
    return kind, work_out(setting, kind, story, known if kind == "use" else own)


def _invented(story: Story, own: tuple[int, ...], rng: random.Random) -> Story:
    """The story with any numbers for the facts that a copy does not hold: so many that luck is rare."""
    while True:
        numbers = tuple(n if i in own else rng.randint(1, 99) for i, n in enumerate(story.numbers))
        other = replace(story, numbers=numbers)
        if fits(other, other.order):
            return other


def fits(story: Story, facts: tuple[int, ...]) -> bool:
    """Does working with these facts alone stay within 0..LARGEST?"""
    return all(0 <= story.work(facts[: n + 1])[1] <= LARGEST for n in range(len(facts)))


def garble(text: str, rng: random.Random, setting: Setting = EASY) -> str:
    """Spoil a message the way sampling does: words dropped, doubled, swapped, glued, or the end cut off."""
    words = text.split(" ")
    at = rng.randrange(len(words))
    kind = rng.choice(("drop", "double", "swap", "glue", "cut", "junk"))
    if kind == "drop":
        del words[at]
    elif kind == "double":
        words.insert(at, words[at])
    elif kind == "swap":
        rng.shuffle(words)
    elif kind == "glue":
        return " ".join(words[:at]) + "".join(words[at:])
    elif kind == "cut":
        words = words[:at]
    else:
        words[at:] = [rng.choice(sorted(phrase_words(setting))) for _ in range(rng.randint(1, 6))]
    return " ".join(words)


def equation(story: Story, boxed: bool) -> str:
    """A story's working without its words: ` 17 + 5 = 22, 22 - 3 = 19.`, and its box if wanted."""
    steps, result = story.work(story.order)
    return f" {', '.join(steps)}." + (f" The answer is \\boxed{{{result}}}." if boxed else "")
