"""MATH (Hendrycks et al., 2021, arXiv:2103.03874), for the boards; held out: MATH-500 (Lightman et al., 2023).

A problem is its whole text; there are no facts to split. The worked solution is read only for a gold that no field
gives, and is never shown to anybody. No prompts and no grading; files, hub and choice are in `tasks.loading`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection

from tasks.base import Problem
from tasks.grading import last_box
from tasks.gsm8k import load_board_gsm8k
from tasks.loading import Candidate, Loaded, Row, choose, find_files, fingerprint, normalised, read_file, read_hub

FILES = {"train": ("train.jsonl", "train_sample.jsonl"), "test": ("math500.jsonl", "test.jsonl")}
HELD_OUT = "HuggingFaceH4/MATH-500"
SUBJECTS = {
    "EleutherAI/hendrycks_math": (
        "algebra",
        "counting_and_probability",
        "geometry",
        "intermediate_algebra",
        "number_theory",
        "prealgebra",
        "precalculus",
    )
}
"""The configurations of a data set on the hub that has one a subject; others are read without naming any."""

_LEVEL = re.compile(r"(?:Level )?([1-9])(?:\.0)?")
_BARE_BOX = re.compile(r"\\boxed\s+([0-9])(?![0-9])")


def level_of(row: Row) -> int | None:
    """The level, of `Level 3` or 3; None where it isn't known (`Level ?`, null)."""
    match = _LEVEL.fullmatch(str(row["level"]).strip())
    return int(match[1]) if match else None


def gold_of(row: Row) -> str | None:
    """The row's `answer`, else what the last box of its `solution` holds; None when that is empty or missing.

    Two solutions of the training split have a box without braces around their one digit, `\\boxed 2`.
    """
    gold, solution = row.get("answer"), row.get("solution") or ""
    if gold is None:
        gold = last_box(solution)
    if gold is None:
        gold = next(reversed(_BARE_BOX.findall(solution)), None)
    return str(gold).strip() or None if gold is not None else None


def _check(where: str, rows: list[Row]) -> None:
    """ValueError when a column or a text is missing, or two rows have one id."""
    columns = sorted({column for row in rows for column in row})
    for names in (("problem",), ("level",), ("answer", "solution")):
        if rows and not any(name in columns for name in names):
            missing = " or ".join(f"`{name}`" for name in names)
            raise ValueError(f"{where} has no {missing} column; its columns are {', '.join(columns)}")
    for number, row in enumerate(rows, 1):
        if not isinstance(row["problem"], str) or not row["problem"].strip():
            raise ValueError(f"{where}, row {number}: no text under `problem`")
    ids = Counter(row["unique_id"] for row in rows)
    if twice := [name for name, count in ids.items() if count > 1]:
        raise ValueError(f"{where}: {len(twice)} ids are of several rows, among them {twice[0]}")


def load_rows(source: str, revision: str | None = None) -> tuple[dict[str, list[Row]], str]:
    """({"train": rows, "test": rows}, fingerprint) of a hub id, a directory with FILES, or one JSONL file ("rows").

    A row has `problem`, `level` (3 or `Level 3`), `answer` or `solution`, and `unique_id`; without an id it gets
    its subject's name on the hub and its place. A hub id gives the training split; the held-out one is MATH-500
    at its pinned revision. The fingerprint is a hash of every row's problem, level and gold.
    """
    files = find_files(source, FILES)
    if files:
        parts = [(split, "", file, read_file(file)) for split, file in files.items()]
    else:
        parts = [
            ("train", f"{subject}/" if subject else "", source, read_hub(source, subject, "train", revision))
            for subject in SUBJECTS.get(source, (None,))
        ]
        parts.append(("test", "", HELD_OUT, read_hub(HELD_OUT, None, "test")))
    rows: dict[str, list[Row]] = {}
    for split, subject, where, part in parts:
        ids = [row.get("unique_id") for row in part]
        ids = [f"{subject}{place}" if name is None else str(name) for place, name in enumerate(ids)]
        named = [row | {"unique_id": name} for row, name in zip(part, ids)]
        _check(f"{where}, {subject.rstrip('/') or split}", named)
        rows.setdefault(split, []).extend(named)
    hashed = {
        split: [(row["problem"], str(level_of(row)), gold_of(row) or "") for row in split_rows]
        for split, split_rows in rows.items()
    }
    return rows, fingerprint("math", hashed)


def _make(name: str, row: Row, levels: Collection[int]) -> Problem | str:
    """The row's problem, or why it makes none."""
    level, gold = level_of(row), gold_of(row)
    if level is None:
        return "no level"
    if level not in levels:
        return "another level"
    return "no answer" if gold is None else Problem(name, question=row["problem"].strip(), answer=gold)


def load_math_problems(
    source: str,
    n_train: int,
    n_heldout: int,
    data_seed: int,
    levels: Collection[int] = (3, 4, 5),
    unfit: Callable[[Problem], str | None] | None = None,
    revision: str | None = None,
) -> Loaded:
    """Problems of `levels` (SPEC 2.2): training ones from the train split, held-out ones from MATH-500.

    `source` and `revision` (of `source`, not of MATH-500) as for `load_rows`. Each split is taken in a shuffle
    seeded with `data_seed` until its count is met. Left out, and counted in `dropped`: rows without a known level,
    of another level, without an answer; training rows with the words of any row of MATH-500; of the rows looked at,
    those with a gold that Math-Verify can't read, and those for which `unfit` gives a reason. ValueError when there are
    too few. Ids are `math/train/<unique_id>` and `math/test/<unique_id>`, the split named once. Near duplicates are
    not looked for here.
    """
    rows, data = load_rows(source, revision)
    candidates: dict[str, list[Candidate]] = {
        split: [
            (
                normalised(row["problem"]),
                _make(f"math/{split}/{row['unique_id'].removeprefix(f'{split}/')}", row, levels),
            )
            for row in split_rows
        ]
        for split, split_rows in rows.items()
    }
    where = f"{source}, at levels {', '.join(map(str, levels))},"
    return Loaded(*choose(where, candidates, n_train, n_heldout, data_seed, unfit), data)


def _is_gsm8k(source: str) -> bool:
    """Whether `source` holds GSM8K: by its name on the hub, in a file by a first row that has a `question`."""
    files = find_files(source, {"train": FILES["train"]})
    if not files:
        return "gsm8k" in source.lower()
    with open(next(iter(files.values())), encoding="utf-8") as lines:
        try:
            return "question" in json.loads(lines.readline())
        except (ValueError, TypeError):
            return False  # the loader of the other says what is wrong


def load_whole_problems(
    source: str,
    n_train: int,
    n_heldout: int,
    data_seed: int,
    unfit: Callable[[Problem], str | None] | None = None,
    revision: str | None = None,
) -> Loaded:
    """Problems for a board, of MATH (levels 3 to 5) or of GSM8K, whichever `source` holds."""
    load = load_board_gsm8k if _is_gsm8k(source) else load_math_problems
    return load(source, n_train, n_heldout, data_seed, unfit=unfit, revision=revision)
