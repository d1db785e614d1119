"""Reading rows and choosing problems from them: what every dataset shares.

Rows come through `datasets`, from its hub at a pinned revision or from JSONL files, and are fingerprinted by their
content. What a row means (its gold, its facts, its level) is the business of the dataset's own module.
"""

import hashlib
import logging
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.base import Problem
from tasks.grading import check_gold

REVISIONS = {
    "openai/gsm8k": "e53f048856ff4f594e959d75785d2c2d37b678ee",
    "EleutherAI/hendrycks_math": "21a5633873b6a120296cce3e2df9d5550074f4a3",
    "HuggingFaceH4/MATH-500": "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
}
"""The revision read when none is asked for; other data sets on the hub must name theirs."""

Row = dict[str, Any]
Candidate = tuple[str, Problem | str]
"""(the row's words by `normalised`, the problem it makes or the reason why it makes none)."""


@dataclass(frozen=True)
class Loaded:
    """Problems chosen from a dataset. `fingerprint`: hash of all rows read.

    `dropped`: how many rows were left out, by reason. Those that make no problem are counted over all rows; "too
    long" and "gold cannot be read" over the rows looked at until the count was met.
    """

    train: list[Problem]
    heldout: list[Problem]
    dropped: dict[str, int]
    fingerprint: str


def find_files(source: str, names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """{split: file}: of a directory, for each split of `names` the first of its file names that is there; of one
    file, {"rows": file}; of a hub id, {}. FileNotFoundError when `source` is none of these.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = {}
        for split, choices in names.items():
            found = [str(path / name) for name in choices if (path / name).is_file()]
            if not found:
                raise FileNotFoundError(f"{path} is a directory without {' or '.join(choices)}")
            files[split] = found[0]
        return files
    if path.is_file():
        return {"rows": str(path)}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not source.startswith("."):
        return {}
    raise FileNotFoundError(f"{source!r} is neither a file, nor a directory, nor a hub id such as openai/gsm8k")


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """These loggers say nothing inside: only entry points talk to the terminal."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    try:
        for name in loggers:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def read_file(file: str) -> list[Row]:
    """The rows of a JSONL file; a field that only some rows have is None in the others. ValueError if not JSON."""
    import datasets  # here, because it takes seconds to import

    datasets.disable_progress_bars()
    # Its cache of local files would go to the home directory, which may be read-only. It logs what it then raises.
    with tempfile.TemporaryDirectory() as cache, _quiet("datasets"):
        try:
            return datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache).to_list()
        except datasets.exceptions.DatasetGenerationError as error:
            raise ValueError(f"{file} is not JSON, one object a line: {error.__cause__ or error}") from error


def read_hub(source: str, config: str | None, split: str, revision: str | None = None) -> list[Row]:
    """The rows of one split on the hub, at `revision` or the one of REVISIONS; ValueError when there is neither."""
    import datasets

    revision = revision or REVISIONS.get(source)
    if revision is None:
        raise ValueError(f"name the revision of {source} to read: a data set on the hub may change")
    datasets.disable_progress_bars()
    return datasets.load_dataset(source, config, split=split, revision=revision).to_list()


def fingerprint(name: str, rows: Mapping[str, Iterable[Sequence[str]]]) -> str:
    """`name sha256:...` over the fields of every row, {split: rows}; the same from the hub and from a file."""
    content = hashlib.sha256()
    for split, split_rows in rows.items():
        for fields in split_rows:
            content.update("".join(f"{field}\0" for field in (split, *fields)).encode())
    return f"{name} sha256:{content.hexdigest()[:16]}"


def normalised(text: str) -> str:
    """Words and numbers only, lower case: two texts that differ in nothing else count as the same problem."""
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def _take(
    candidates: Iterator[Candidate], count: int, unfit: Callable[[Problem], str | None] | None, dropped: Counter[str]
) -> list[Problem]:
    """The first `count` problems that can be used, and no candidate after them; others go into `dropped`."""
    problems: list[Problem] = []
    while len(problems) < count and (candidate := next(candidates, None)) is not None:
        _, problem = candidate
        if not check_gold(problem.answer):
            dropped["gold cannot be read"] += 1
        elif unfit is not None and (reason := unfit(problem)) is not None:
            dropped[reason] += 1
        else:
            problems.append(problem)
    return problems


def choose(
    where: str,
    candidates: Mapping[str, Sequence[Candidate]],
    n_train: int,
    n_heldout: int,
    data_seed: int,
    unfit: Callable[[Problem], str | None] | None = None,
) -> tuple[list[Problem], list[Problem], dict[str, int]]:
    """(training problems, held-out problems, how many rows were left out by reason; see `Loaded.dropped`).

    Training problems come from the split "train", held-out ones from "test"; of the one split "rows" first the
    held-out, then the training ones. Each split is taken in a shuffle seeded with `data_seed` until its count is
    met. A training candidate with the words of any row of "test", usable or not, is left out, and so is a problem
    for which `unfit` gives a reason. ValueError when there are too few; `where` names the data in it.
    """
    dropped: Counter[str] = Counter()
    pools: dict[str, Iterator[Candidate]] = {}
    for split, split_candidates in candidates.items():
        shuffled = list(split_candidates)
        random.Random(data_seed).shuffle(shuffled)
        dropped.update(made for _, made in shuffled if isinstance(made, str))
        pools[split] = iter([candidate for candidate in shuffled if not isinstance(candidate[1], str)])
    with _quiet("math_verify"):  # it warns that its time-out is off
        heldout = _take(pools["rows" if "rows" in pools else "test"], n_heldout, unfit, dropped)
        if "rows" in pools:
            chosen = {problem.id for problem in heldout}
            barred = {words for words, made in candidates["rows"] if isinstance(made, Problem) and made.id in chosen}
        else:
            barred = {words for words, _ in candidates["test"]}
        rest = list(pools["rows" if "rows" in pools else "train"])
        apart = [candidate for candidate in rest if candidate[0] not in barred]
        dropped["also held out"] += len(rest) - len(apart)
        train = _take(iter(apart), n_train, unfit, dropped)
    left_out = {reason: count for reason, count in dropped.items() if count}
    for kind, problems, asked in (("held-out", heldout, n_heldout), ("training", train, n_train)):
        if len(problems) < asked:
            found = f"{where} has {len(problems)} usable {kind} problems"
            raise ValueError(f"{found} and not the {asked} asked for; left out: {left_out}")
    return train, heldout, left_out
