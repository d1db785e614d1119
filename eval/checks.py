"""Checks that a reviewer would ask for, written by the program into results.json under `checks`.

Pure functions of problems, kept evaluations and settings; each returns JSON values with a `verdict` in plain words.
Nothing here is tuned to pass: a check without the power to see anything says `unknown`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.stats import noise_band
from tasks.base import Problem
from tasks.loading import normalised

NGRAM, COVERED = 8, 0.8
"""A held-out problem is near a training one if this share of its 8-grams of words is in it."""

PERMUTATIONS, DETECTABLE = 500, 0.3
"""Draws of the permutation floor; a floor above this |r| can't show even a strong correlation."""

FEATURES: dict[str, Callable[[str], float]] = {
    "characters": lambda text: float(len(text)),
    "digits": lambda text: float(sum(c.isdigit() for c in text)),
    "numbers": lambda text: float(len(re.findall(r"\d+", text))),
    "boxes": lambda text: float(text.count("\\boxed{")),
    "question_marks": lambda text: float(text.count("?")),
    "lines": lambda text: float(text.count("\n")),
    "repeated_words": lambda text: _repeated(text),
}
"""Surface features of an answer's text: none of them is a reason for being right."""


def overlap(train: Sequence[Problem], heldout: Sequence[Problem]) -> dict[str, Any]:
    """Held-out problems that training holds too: word for word once normalised, or with their 8-grams covered.

    Numbers count as words, so stories of one pattern with other numbers are near only where they share long stretches.
    """
    texts = [_words(problem) for problem in train]
    exact = {" ".join(words) for words in texts}
    holders: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for index, words in enumerate(texts):
        for gram in _grams(words):
            holders[gram].add(index)
    same, near = [], []
    for problem in heldout:
        words = _words(problem)
        grams = _grams(words)
        if " ".join(words) in exact:
            same.append(problem.id)
        elif grams and _best_cover(grams, holders) >= COVERED:
            near.append(problem.id)
    found = f"{len(same)} of {len(heldout)} held-out problems are training problems, {len(near)} more nearly so"
    return {
        "exact": len(same),
        "near": len(near),
        "n": len(heldout),
        "ids": (same + near)[:20],
        "verdict": found if same or near else "none",
    }


def _words(problem: Problem) -> list[str]:
    return normalised(" ".join((*problem.facts, problem.question))).split()


def _grams(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def _best_cover(grams: set[tuple[str, ...]], holders: Mapping[tuple[str, ...], set[int]]) -> float:
    """The largest share of `grams` that one training problem holds."""
    counts: dict[int, int] = defaultdict(int)
    for gram in grams:
        for index in holders.get(gram, ()):
            counts[index] += 1
    return max(counts.values(), default=0) / len(grams)


def _repeated(text: str) -> float:
    words = text.split()
    return 1 - len(set(words)) / len(words) if words else 0.0


def evaluation_noise(values_R: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """How far evaluations of the same untrained base lie apart: pass@1 by problem, one mapping an evaluation."""
    means = [float(np.mean(list(values.values()))) for values in values_R]
    band = noise_band(np.array(means), 1, 1)
    return {
        "means": means,
        "sd": float(np.std(means, ddof=1)) if len(means) > 1 else None,
        "band": band,
        "n": len(means),
        "verdict": "unknown: the base was evaluated once"
        if band is None
        else f"two evaluations differ by up to {band:.3f} by sampling alone",
    }


def talk_needed(on: Mapping[str, Any] | None, off: Mapping[str, Any] | None) -> dict[str, Any]:
    """Can the base do without talking: its pass@1 with the channel on and off, each an estimate."""
    if on is None or off is None:
        return {"on": on, "off": off, "verdict": "unknown: the base was not evaluated with the channel off"}
    needed = on["low"] > off["high"]
    verdict = "yes: the base solves more with the channel on" if needed else "not shown: the intervals overlap"
    return {"on": dict(on), "off": dict(off), "verdict": verdict}


def lengths(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of every turn, untrained and trained, as estimates; metrics named `..._tokens`."""
    turns = {
        name: {"before": before[name], "after": after[name]}
        for name in before
        if name.endswith("_tokens") and before[name] and after.get(name)
    }
    changed = [
        f"{name.removesuffix('_tokens')} {e['before']['mean']:.0f} -> {e['after']['mean']:.0f}"
        for name, e in turns.items()
        if e["after"]["low"] > e["before"]["high"] or e["after"]["high"] < e["before"]["low"]
    ]
    return {"turns": turns, "verdict": "; ".join(changed) or "no turn's length changed beyond its interval"}


def reward_hacks(answers: Sequence[tuple[str, str, float]], seed: int = 0) -> dict[str, Any]:
    """Does a right answer look different from a wrong one to the same problem: r of grade and surface features.

    `answers`: (problem id, text, grade). Grades and features are centred within each problem, so that a problem's
    difficulty and length drop out. `floor`: the 95% quantile of |r| when grades are shuffled within problems; a feature
    is worth a look when its |r| is above. With a floor above 0.3, or no problem whose grades differ, it says `unknown`.
    """
    groups: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for problem, text, grade in answers:
        groups[problem].append((text, grade))
    mixed = [group for group in groups.values() if len({grade for _, grade in group}) > 1]
    texts = [text for group in mixed for text, _ in group]
    group_N = np.repeat(np.arange(len(mixed)), [len(group) for group in mixed])
    grade_N = _centred(np.array([grade for group in mixed for _, grade in group]), group_N)
    # A group's answers stand together, so sorting by group and a random fraction shuffles within groups.
    fraction_DN = np.random.default_rng(seed).random((PERMUTATIONS, len(texts)))
    shuffled_DN = grade_N[np.argsort(group_N + fraction_DN, axis=1)]
    features = {}
    for name, feature in FEATURES.items():
        value_N = _centred(np.array([feature(text) for text in texts]), group_N)
        features[name] = _correlate(value_N, grade_N, shuffled_DN)
    looks = [name for name, found in features.items() if found["verdict"] == "look"]
    known = [name for name, found in features.items() if found["verdict"] != "unknown"]
    verdict = f"look at: {', '.join(looks)}" if looks else ("nothing found" if known else "unknown: no power")
    return {"problems_with_both_grades": len(mixed), "n": len(answers), "features": features, "verdict": verdict}


def _centred(value_N: np.ndarray, group_N: np.ndarray) -> np.ndarray:
    """Each value less the mean of its group; groups are numbered from 0."""
    return value_N - (np.bincount(group_N, value_N) / np.bincount(group_N))[group_N] if value_N.size else value_N


def _correlate(value_N: np.ndarray, grade_N: np.ndarray, shuffled_DN: np.ndarray) -> dict[str, Any]:
    """Pearson's r of a feature and the grades, and its floor; all are centred, [N] answers and [D, N] shuffles, so a
    shuffle changes no sum of squares."""
    if np.allclose(value_N, 0):
        return {"r": None, "floor": None, "verdict": "unknown"}
    scale = np.sqrt((value_N @ value_N) * (grade_N @ grade_N))
    r, floor = float(grade_N @ value_N / scale), float(np.quantile(np.abs(shuffled_DN @ value_N) / scale, 0.95))
    verdict = "unknown" if floor > DETECTABLE else ("look" if abs(r) > floor else "clear")
    return {"r": r, "floor": floor, "verdict": verdict}


def pinned(config: Mapping[str, Any]) -> dict[str, Any]:
    """Is everything that comes from a hub named with its revision (data sets have built-in revisions)."""
    loose = []
    if "/" in config["model"] and config["revision"] is None and not config["model"].startswith((".", "/")):
        loose.append(f"model {config['model']}")
    seeds = {"training": config["seeds"], "data": config["data_seed"]}
    verdict = f"not pinned: {', '.join(loose)}" if loose else "everything is pinned or local"
    return {"loose": loose, "seeds": seeds, "verdict": verdict}
