"""The built-in problems: short arithmetic stories that two copies can only solve together.

A table of patterns, filled with names, things and numbers from a seed; nothing is fetched. A fact is one
sentence with one number; a story has two or three, dealt A, B, A. Left out: more facts, fractions, negative
numbers, and the conversations about the stories (tasks.scripts). To add a shape of story, add a row to
`PATTERNS`, then rebuild the built-in models, whose vocabulary is read from here (rl.warmstart).
"""

import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tasks.base import Problem

NAMES = ("Tom", "Ann", "Kim", "Ben", "Eva", "Max", "Lily", "Sam", "Mia", "Leo", "Zoe", "Dan")
THINGS = ("apples", "books", "cards", "coins", "pens", "shells", "stamps", "balls", "cups", "toys")
LARGEST = 120
"""The largest number in a story or its working: the built-in vocabulary has one token a number up to it."""

HELDOUT_SHARE = 6
"""One in so many (pattern, numbers) pairs is drawn for held-out stories only, whatever the seed."""

PATIENCE = 10_000
"""Stories drawn in vain, in a row, after which no more are looked for."""

SETS = {"stories": 2, "stories-three": 3}
"""The story sets that `--data` can name, and the fewest facts of a story in each."""


@dataclass(frozen=True)
class Pattern:
    """One shape of story.

    `facts`: sentences with one `#` each, where the number goes. {tom}, {ann}, {kim} are three names and
    {apples} a thing. `signs`: how each fact's number enters the answer, one of + - * a fact, in the facts'
    order. `ranges`: the numbers' lowest and highest values. `weight`: how often the pattern is drawn.
    """

    facts: tuple[str, ...]
    question: str
    signs: str
    ranges: tuple[tuple[int, int], ...]
    weight: int = 2


def _sum(*facts: str, ask: str) -> Pattern:
    high = 30 if len(facts) == 2 else 25
    return Pattern(facts, ask, "+" * len(facts), ((2, high),) * len(facts), weight=len(facts))


def _running(signs: str, *facts: str, ask: str) -> Pattern:
    ranges = ((10, 45),) + ((2, 22),) * (len(facts) - 1)
    return Pattern(facts, ask, signs, ranges, weight=len(facts))


def _product(*facts: str, ask: str) -> Pattern:
    return Pattern(facts, ask, "+*", ((2, 10), (2, 12)))


def _difference(*facts: str, ask: str) -> Pattern:
    return Pattern(facts, ask, "+-", ((10, 50), (2, 40)))


LEFT = "How many dollars are left?"
TOGETHER = "How many {apples} do they have together?"
NOW = "How many {apples} does {tom} have now?"
PATTERNS = (
    _sum("{tom} has # {apples}.", "{ann} has # {apples}.", ask=TOGETHER),
    _sum(
        "{tom} reads # pages on Monday.",
        "{tom} reads # pages on Friday.",
        ask="How many pages does {tom} read?",
    ),
    _sum("The class has # boys.", "The class has # girls.", ask="How many children are in the class?"),
    _sum(
        "The red box holds # {apples}.",
        "The blue box holds # {apples}.",
        ask="How many {apples} are in the boxes?",
    ),
    _sum("The hat costs # dollars.", "The bag costs # dollars.", ask="How many dollars do they cost together?"),
    _sum("{tom} walks # miles.", "Then {tom} runs # miles.", ask="How many miles does {tom} go?"),
    _sum("{tom} has # {apples}.", "{ann} has # {apples}.", "{kim} has # {apples}.", ask=TOGETHER),
    _sum(
        "{tom} reads # pages on Monday.",
        "{tom} reads # pages on Friday.",
        "{tom} reads # pages on Sunday.",
        ask="How many pages does {tom} read?",
    ),
    _sum(
        "The farm has # cows.",
        "The farm has # pigs.",
        "The farm has # ducks.",
        ask="How many animals are there?",
    ),
    _sum(
        "The red box holds # {apples}.",
        "The blue box holds # {apples}.",
        "The green box holds # {apples}.",
        ask="How many {apples} are in the boxes?",
    ),
    _running("++", "{tom} has # {apples}.", "{tom} finds # {apples}.", ask=NOW),
    _running("+-", "{tom} has # {apples}.", "{tom} loses # {apples}.", ask=NOW),
    _running("++", "The bus has # people.", "Then # people get on.", ask="How many people are on the bus?"),
    _running("+-", "The bus has # people.", "Then # people get off.", ask="How many people are on the bus?"),
    _running("+-", "{tom} has # dollars.", "{tom} spends # dollars.", ask=LEFT),
    _running("++-", "{tom} has # {apples}.", "{tom} buys # {apples}.", "{tom} sells # {apples}.", ask=NOW),
    _running("+-+", "{tom} has # {apples}.", "{tom} loses # {apples}.", "{tom} finds # {apples}.", ask=NOW),
    _running("+--", "{tom} has # {apples}.", "{tom} sells # {apples}.", "{tom} loses # {apples}.", ask=NOW),
    _running(
        "++-",
        "The bus has # people.",
        "Then # people get on.",
        "Then # people get off.",
        ask="How many people are on the bus?",
    ),
    _running(
        "+-+",
        "There are # birds in the tree.",
        "Then # birds fly away.",
        "Then # birds come back.",
        ask="How many birds are in the tree?",
    ),
    _running("++-", "{tom} has # dollars.", "{tom} earns # dollars.", "{tom} spends # dollars.", ask=LEFT),
    _running(
        "+-+",
        "The park has # cars.",
        "Then # cars leave.",
        "Then # cars come.",
        ask="How many cars are there?",
    ),
    _running(
        "+--",
        "The shop has # {apples}.",
        "{tom} buys # {apples}.",
        "{ann} buys # {apples}.",
        ask="How many {apples} are left?",
    ),
    _product("There are # bags.", "Each bag holds # {apples}.", ask="How many {apples} are there?"),
    _product("{tom} works # days.", "{tom} earns # dollars a day.", ask="How many dollars does {tom} earn?"),
    _product("The room has # rows.", "Each row has # seats.", ask="How many seats are there?"),
    _product("{tom} buys # {apples}.", "The {apples} cost # dollars each.", ask="How many dollars does {tom} pay?"),
    _difference("{tom} has # {apples}.", "{ann} has # {apples}.", ask="How many more {apples} does {tom} have?"),
    _difference("The book has # pages.", "{tom} reads # pages.", ask="How many pages are left?"),
    _difference("{tom} is # years old.", "{ann} is # years old.", ask="How many years older is {tom}?"),
    _difference("The rope has # meters.", "{tom} cuts off # meters.", ask="How many meters are left?"),
)


@dataclass(frozen=True)
class Story:
    """A filled pattern, with what a script needs to work it out; `problem.id` is empty until it is dealt."""

    problem: Problem
    pattern: int
    numbers: tuple[int, ...]

    def work(self, facts: tuple[int, ...]) -> tuple[list[str], int]:
        """(the equations, the result) of working with these facts only, in the given order.

        The first number is taken as it is; a single fact has no equation.
        """
        signs, result, steps = PATTERNS[self.pattern].signs, self.numbers[facts[0]], []
        for fact in facts[1:]:
            before, number = result, self.numbers[fact]
            result = apply_sign(before, signs[fact], number)
            steps.append(f"{before} {signs[fact]} {number} = {result}")
        return steps, result

    @property
    def order(self) -> tuple[int, ...]:
        """The order of work: A's facts, then B's. No partial result is negative in it."""
        return work_order(len(self.numbers))


def work_order(facts: int) -> tuple[int, ...]:
    """Indices of A's facts, then of B's."""
    return tuple(range(0, facts, 2)) + tuple(range(1, facts, 2))


def apply_sign(before: int, sign: str, number: int) -> int:
    return {"+": before + number, "-": before - number, "*": before * number}[sign]


def solve(signs: str, numbers: tuple[int, ...]) -> int | None:
    """The answer, or None if these numbers make no fair story.

    Unfair: two equal numbers or an answer that a fact states (a copy's own number would then look like one of
    its partner's), or anything outside 0..LARGEST on the way.
    """
    order = work_order(len(numbers))
    result = numbers[order[0]]
    for fact in order[1:]:
        result = apply_sign(result, signs[fact], numbers[fact])
        if not 0 <= result <= LARGEST:
            return None
    return None if len(set(numbers)) < len(numbers) or result in numbers else result


def is_heldout(pattern: int, numbers: tuple[int, ...]) -> bool:
    """Does this pair belong to held-out stories? Fixed by the pair alone, so no seed mixes the two sides."""
    return zlib.crc32(f"{PATTERNS[pattern].facts}{numbers}".encode()) % HELDOUT_SHARE == 0


def story_stream(rng: random.Random, heldout: bool = False, least_facts: int = 2) -> Iterator[Story]:
    """Endless stories of one side, of `least_facts` facts or more, repeats possible."""
    weights = [pattern.weight * (len(pattern.facts) >= least_facts) for pattern in PATTERNS]
    while True:
        index = rng.choices(range(len(PATTERNS)), weights)[0]
        pattern = PATTERNS[index]
        numbers = tuple(rng.randint(low, high) for low, high in pattern.ranges)
        answer = solve(pattern.signs, numbers)
        if answer is not None and is_heldout(index, numbers) == heldout:
            yield Story(_write(pattern, numbers, answer, rng), index, numbers)


def _write(pattern: Pattern, numbers: tuple[int, ...], answer: int, rng: random.Random) -> Problem:
    words = dict(zip(("tom", "ann", "kim"), rng.sample(NAMES, 3))) | {"apples": rng.choice(THINGS)}
    facts = tuple(f.format(**words).replace("#", str(n)) for f, n in zip(pattern.facts, numbers))
    own = tuple((str(n),) for n in numbers)
    return Problem("", pattern.question.format(**words), str(answer), facts, own)


def stories(
    n_train: int,
    n_heldout: int,
    data_seed: int,
    least_facts: int = 2,
    unfit: Callable[[Problem], str | None] | None = None,
) -> tuple[list[Problem], list[Problem], dict[str, int]]:
    """(training problems, held-out problems, how many were left out by reason), all different.

    The two sides share no (pattern, numbers) pair: held-out stories come from pairs that no seed ever trains on, nor
    the warm start. Left out are those for which `unfit` gives a reason. ValueError when there are too few.
    """
    dropped: Counter[str] = Counter()
    sides = [
        _distinct(count, side, data_seed, least_facts, unfit, dropped)
        for side, count in (("heldout", n_heldout), ("train", n_train))
    ]
    return sides[1], sides[0], dict(dropped)


def _distinct(
    count: int,
    side: str,
    data_seed: int,
    least_facts: int,
    unfit: Callable[[Problem], str | None] | None,
    dropped: Counter[str],
) -> list[Problem]:
    stream = story_stream(random.Random(f"stories/{side}/{data_seed}"), side == "heldout", least_facts)
    seen: set[tuple] = set()
    problems: list[Problem] = []
    vain = 0
    while len(problems) < count:
        problem = next(stream).problem
        text = (problem.facts, problem.question)
        vain += 1
        if vain > PATIENCE:
            raise ValueError(
                f"there are hardly more than {len(problems)} different {side} stories that can be used; ask for "
                f"fewer, or raise --max-prompt-tokens (left out: {dict(dropped)})"
            )
        if text in seen:
            continue
        seen.add(text)
        if unfit is not None and (reason := unfit(problem)) is not None:
            dropped[reason] += 1
            continue
        vain = 0
        problems.append(replace(problem, id=f"stories/{side}/{len(problems)}"))
    return problems


def template_words() -> set[str]:
    """Every word a story can hold, without its numbers: for a vocabulary."""
    text = " ".join(" ".join(p.facts) + " " + p.question for p in PATTERNS)
    return set(re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", " ", text))) | set(NAMES) | set(THINGS)
