"""Scripted talk_to_solve conversations of mixed quality: what the built-in model is warm-started on.

A script sometimes sends its facts and sometimes asks or chats, sometimes uses what it heard and sometimes
does not: everything that reinforcement learning then has to choose from. Shares are in MESSAGES, ANSWERS and
the constants below them. Text only. Left out: tokens and loss weights (rl.warmstart), and the prompts, which
are the product's own (tasks.talk).
"""

import random
import re
from dataclasses import dataclass

from tasks.base import Task
from tasks.stories import LARGEST, Story
from tasks.talk import ARMS, SHORT, talk_task

MESSAGE_TOKENS, ANSWER_TOKENS = 24, 28
"""The built-in default's caps, end-of-turn token included; scripts keep within them (tested)."""

MESSAGES = {"all": 0.45, "some": 0.18, "ask": 0.18, "chat": 0.19}
ANSWERS = {"use": 0.36, "own": 0.42, "guess": 0.22}
OFF_SHARE = 0.10
"""Scripts with the channel cut."""
GARBLED_SHARE = 0.08
"""Delivered messages that are spoilt, so that what a model samples at temperature 1 is no surprise to it."""

KNOW = "I know:"
ASKS = ("What do you know?", "What are your facts?", "Can you tell me your facts?")
CHATS = (
    "Hello {other}!",
    "Hello {other}, let us work together.",
    "Good luck, {other}!",
    "This is a nice story.",
)


@dataclass(frozen=True)
class Row:
    """One supervised example: turn `turn` of `task` on `story`, with `heard` delivered, should say `reply`.

    `forced`: the reply's first word is given, not learned, so the row teaches a skill but no habit.
    """

    task: Task
    story: Story
    turn: int
    heard: dict[int, str]
    reply: str
    kind: str
    forced: bool = False


TASKS = {arm: talk_task(arm, MESSAGE_TOKENS, ANSWER_TOKENS, SHORT) for arm in ARMS}


def write_rows(story: Story, rng: random.Random) -> list[Row]:
    """A whole conversation, one row a turn."""
    task = TASKS["channel_off" if rng.random() < OFF_SHARE else "channel_on"]
    rows: list[Row] = []
    said: dict[int, str] = {}
    for index, turn in enumerate(task.turns):
        heard = {v: said[v] for v in turn.reads}
        kind, reply = _answer(story, index, heard, rng) if turn.graded else _message(story, turn.agent, rng)
        rows.append(Row(task, story, index, heard, reply, kind))
        said[index] = garble(reply, rng) if rng.random() < GARBLED_SHARE else reply
    return rows


def forced_row(story: Story, rng: random.Random) -> Row:
    """An answer that uses the partner's message, its first word given: practice that leaves the habits alone.

    The partner always sent everything; what the copy itself said before varies, as in any conversation.
    """
    turn = rng.choice((2, 3))
    agent = turn % 2
    said = {agent: _message(story, agent, rng)[1], 1 - agent: tell(story, 1 - agent)}
    if turn == 3:
        said[2] = _answer(story, 2, said, rng)[1]
    heard = {v: said[v] for v in range(turn)}
    return Row(TASKS["channel_on"], story, turn, heard, use(story, story.order), "use", forced=True)


def tell(story: Story, agent: int) -> str:
    """The message that is worth sending."""
    return " ".join((KNOW, *story.problem.facts_of(agent, 2)))


def use(story: Story, facts: tuple[int, ...]) -> str:
    steps, result = story.work(facts)
    return f"We have {', '.join(steps)}. The answer is \\boxed{{{result}}}."


def _own(story: Story, facts: tuple[int, ...]) -> str:
    steps, result = story.work(facts)
    return f"I have {', '.join(steps) or result}. The answer is \\boxed{{{result}}}."


def _message(story: Story, agent: int, rng: random.Random) -> tuple[str, str]:
    """(kind, text) of a first message."""
    facts = story.problem.facts_of(agent, 2)
    kind = rng.choices(list(MESSAGES), MESSAGES.values())[0]
    if kind == "some" and len(facts) == 1:
        kind = "ask"
    if kind == "all":
        return kind, tell(story, agent)
    if kind == "some":
        return kind, f"{KNOW} {rng.choice(facts)}"
    return kind, rng.choice(ASKS if kind == "ask" else CHATS).format(other="BA"[agent])


def _answer(story: Story, turn: int, heard: dict[int, str], rng: random.Random) -> tuple[str, str]:
    """(kind, text) of a last message, given what was delivered."""
    agent = turn % 2
    own = tuple(i for i in story.order if i % 2 == agent)
    told = heard.get(1 - agent, "")
    partner = tuple(i for i in story.order if i % 2 != agent and story.problem.facts[i] in told)
    known = tuple(i for i in story.order if i in own + partner)
    kinds = dict(ANSWERS)
    if not partner or not fits(story, known):
        del kinds["use"]
    kind = rng.choices(list(kinds), kinds.values())[0]
    if kind == "own" and not fits(story, own):
        kind = "guess"
    if kind == "guess":
        return kind, f"I guess \\boxed{{{rng.randint(1, 99)}}}."
    return kind, use(story, known) if kind == "use" else _own(story, own)


def fits(story: Story, facts: tuple[int, ...]) -> bool:
    """Does working with these facts alone stay within 0..LARGEST?"""
    return all(0 <= story.work(facts[: n + 1])[1] <= LARGEST for n in range(len(facts)))


def garble(text: str, rng: random.Random) -> str:
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
        words[at:] = [rng.choice(sorted(phrase_words())) for _ in range(rng.randint(1, 6))]
    return " ".join(words)


def equation(story: Story, boxed: bool) -> str:
    """A story's working without its words: ` 17 + 5 = 22, 22 - 3 = 19.`, and its box if wanted."""
    steps, result = story.work(story.order)
    return f" {', '.join(steps)}." + (f" The answer is \\boxed{{{result}}}." if boxed else "")


def phrase_words() -> set[str]:
    """Every word of the scripts that is not a story's."""
    text = " ".join((KNOW, *ASKS, *CHATS, "We have I guess The answer is", "A B"))
    return set(re.findall(r"[A-Za-z]+", text.replace("{other}", " ")))
