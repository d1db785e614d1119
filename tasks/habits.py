"""How the scripts of the built-in models behave and in which words: the two settings of the warm start.

EASY is talk_to_solve with habits that hang on an answer's first word. In HARD all answers start alike, using what the
partner sent is rare, stories have three facts, and three tasks are played. The scripts themselves are in tasks.scripts.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tasks.ask import HIDDEN, WORDS, ask_task
from tasks.base import Task
from tasks.talk import ARMS, NONE, SHARES, SHORT, talk_task, three_task

MESSAGE_TOKENS, ANSWER_TOKENS = 24, 28
"""The built-in defaults' caps, end-of-turn token included; scripts keep within them (tested)."""

KNOW = "I know:"
ASKS = ("What do you know?", "What are your facts?", "Can you tell me your facts?")
CHATS = (
    "Hello {other}!",
    "Hello {other}, let us work together.",
    "Good luck, {other}!",
    "This is a nice story.",
)
HOW_MANY, WHO = "how many", "Who"
"""What stands in a specific question for the number, and for a name that the asker has not seen."""


@dataclass(frozen=True)
class Habits:
    """How often the scripts of one task do what: shares by kind.

    `messages`: `all` its facts, `some` (one) of them, `follow` (B of ask_to_solve asks for a fact it lacks, A tells
    the fact asked for), `ask` what the others know, `chat`. `answers`, where the others' facts were heard: `use` them,
    work with its `own` only, `guess`; where none were, own and guess at the same odds.
    """

    messages: Mapping[str, float]
    answers: Mapping[str, float]


@dataclass(frozen=True)
class Setting:
    """What a built-in model's scripts are like.

    `tasks`: {task: {arm: its schedule}}; `habits`: {task: its habits}. `openings`: an answer's first words, by kind.
    `invents`: a guess works with invented numbers for what the copy does not hold; otherwise it boxes any number.
    `least_facts`: the fewest facts of a story. `off_share`: share of chats with the channel cut. `garbled_share`:
    delivered messages that are spoilt, so that what a model samples at temperature 1 is no surprise to it.
    """

    tasks: Mapping[str, Mapping[str, Task]]
    habits: Mapping[str, Habits]
    openings: Mapping[str, str]
    invents: bool
    least_facts: int
    off_share: float = 0.10
    garbled_share: float = 0.08


def _arms(build: Callable[..., Task]) -> dict[str, Task]:
    return {arm: build(arm, MESSAGE_TOKENS, ANSWER_TOKENS, SHORT) for arm in ARMS}


EASY = Setting(
    tasks={"talk_to_solve": _arms(talk_task)},
    habits={
        "talk_to_solve": Habits(
            messages={"all": 0.45, "some": 0.18, "ask": 0.18, "chat": 0.19},
            answers={"use": 0.36, "own": 0.42, "guess": 0.22},
        )
    },
    openings={"use": "We have", "own": "I have", "guess": "I guess"},
    invents=False,
    least_facts=2,
)
# Where more must go right for one right answer (two messages of three copies; two questions and two replies), use is
# less rare, so that every task starts with some reward.
HARD = Setting(
    tasks={"talk_to_solve": _arms(talk_task), "talk_three": _arms(three_task), "ask_to_solve": _arms(ask_task)},
    habits={
        "talk_to_solve": Habits(
            messages={"all": 0.28, "some": 0.22, "ask": 0.25, "chat": 0.25},
            answers={"use": 0.10, "own": 0.51, "guess": 0.39},
        ),
        "talk_three": Habits(
            messages={"all": 0.42, "ask": 0.30, "chat": 0.28}, answers={"use": 0.12, "own": 0.50, "guess": 0.38}
        ),
        "ask_to_solve": Habits(
            messages={"follow": 0.38, "some": 0.20, "ask": 0.20, "chat": 0.22},
            answers={"use": 0.22, "own": 0.44, "guess": 0.34},
        ),
    },
    openings=dict.fromkeys(("use", "own", "guess"), "Let us see:"),
    invents=True,
    least_facts=3,
)
SETTINGS = {"easy": EASY, "hard": HARD}


def phrase_words(setting: Setting) -> set[str]:
    """Every word of the scripts that is not a story's, and of the prompts' parts that depend on the task."""
    phrases = [KNOW, *ASKS, *CHATS, *setting.openings.values(), "The answer is", "A B"]
    if "talk_three" in setting.tasks:
        phrases += ["C and", SHARES[3], NONE[3]]
    if "ask_to_solve" in setting.tasks:
        phrases += [HIDDEN, HOW_MANY, WHO, *vars(WORDS[SHORT]).values()]
    return set(re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", " ", " ".join(phrases))))
