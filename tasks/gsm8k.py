"""GSM8K: its problems whole, or cut into facts and a question.

A problem is cut by the published rule or by the clean one (SPEC 2.3); both are here to be compared. It reads only
the question and the gold after `####`: the worked solution is never shown to anybody. No prompts and no grading;
files, hub and choice are in `tasks.loading`.
"""

import re
from collections.abc import Callable

from tasks.base import Problem
from tasks.loading import Candidate, Loaded, Row, choose, find_files, fingerprint, normalised, read_file, read_hub

SPLIT_RULES = ("clean", "published")


def load_rows(source: str, revision: str | None = None) -> tuple[dict[str, list[Row]], str]:
    """({"train": rows, "test": rows}, fingerprint) of a hub id, a directory with both JSONL files, or one file.

    One file gives the one split "rows". A row has `question` and `answer`. The fingerprint is a hash of the rows, so
    the same data from the hub and from a file has the same one.
    """
    files = find_files(source, {split: (f"{split}.jsonl",) for split in ("train", "test")})
    if files:
        rows = {split: read_file(file) for split, file in files.items()}
    else:
        rows = {split: read_hub(source, "main", split, revision) for split in ("train", "test")}
    for split, split_rows in rows.items():
        for number, row in enumerate(split_rows, 1):
            where = f"{files.get(split, f'{source}, {split} split')}, row {number}"
            if not isinstance(row.get("question"), str) or not isinstance(row.get("answer"), str):
                raise ValueError(f"{where}: no text under `question` or `answer`")
            if gold_of(row["answer"]) is None:
                raise ValueError(f"{where}: no gold after #### in its answer")
    hashed = {split: [(row["question"], row["answer"]) for row in split_rows] for split, split_rows in rows.items()}
    return rows, fingerprint("gsm8k", hashed)


def gold_of(answer: str) -> str | None:
    """The gold: what follows the last `####`, without thousands commas; None when there is none."""
    _, mark, gold = answer.rpartition("####")
    gold = re.sub(r"(?<=\d),(?=\d{3})", "", gold.strip())
    return gold if mark and gold else None


_TITLES = set("mr mrs ms mx messrs dr prof rev hon sen rep gen col lt capt sgt gov vs v e.g i.e approx sq".split())
_UNITS = set("a.m p.m oz lb lbs ft in hr hrs min mins sec secs yd yds mi mph kg cm mm km ml etc tbsp tsp".split())
_NAMES = set("u.s u.k u.s.a d.c jr sr inc co corp ltd llc ph.d st ave blvd rd mt dept est".split())
_STARTERS = set(
    "a after all although an and another as assume at before both but by calculate during each every find finally "
    "for four from given he her his how i if in it its last later most my next no of on one only our she since so "
    "some that the their then there these they this those three to today together tomorrow two what when where "
    "which while who with yesterday you your".split()
)
_AFTER_TIME = set("et est edt pt pst pdt ct cst cdt mt mst gmt utc".split()) | {
    f"{day}day{s}" for day in "mon tues wednes thurs fri satur sun".split() for s in ("", "s")
}
_END = re.compile(r"(?P<mark>[.?!])(?P<closing>[\"'”’)\]]*)\s+(?=(?P<next>\S+))")
_QUOTED = re.compile(r"(?<!\S)\(?\"[^\"]{0,400}\"|“[^”]{0,400}”|\([^()]{0,400}\)")
_INSTRUCTION = re.compile(
    r"\(|(?:please|give|round|express|write|provide|state|answer|assume|note|remember|use|show|simplify|hint|ignore|"
    r"report|enter|leave|your answer|the answer|do not|don't|disregard|consider|suppose|recall)\b",
    re.IGNORECASE,
)


def _ends(sentence: str, end: re.Match[str]) -> bool:
    """Whether `sentence` is over at `end`, the stop after it; `end["next"]` is the word that follows."""
    following = end["next"].lstrip("\"'“‘([")
    lower = following[:1].islower()
    if end["next"].startswith("(") and end["mark"] != "?":  # brackets go with the fact they explain
        return False
    if end["closing"].strip(")]"):  # "Where's Waldo?" books
        return not lower
    if end["mark"] != ".":
        return not lower or end["mark"] == "!"
    *before, word = sentence.rstrip(".").split() or [""]
    word, capital = word.lstrip("\"'“‘(["), following[:1].isupper()
    key, next_word = word.lower(), re.sub(r"\W+$", "", following).lower()
    if key in _TITLES or next_word in ("a.m", "p.m") or (key in ("no", "nos", "fig") and following[:1].isdigit()):
        return False
    if not before and re.fullmatch(r"\d{1,2}|[A-Za-z]", word):  # the number of a list's item; J. Smith
        return False
    if key in _UNITS:
        return (capital or following[:1] == "$") and next_word not in _AFTER_TIME
    if key in _NAMES or re.fullmatch(r"(?:[A-Z]\.)+[A-Z]", word):
        return capital and next_word in _STARTERS
    if re.fullmatch(r"[A-Z]", word) and before and before[-1][:1].isupper():
        # Pond B. If ... / Farm A. Farm B ... / John F. Kennedy
        return next_word in _STARTERS or next_word in " ".join(before).lower().split()
    return not (lower and sentence.endswith(".."))


def sentences(text: str) -> list[str]:
    """`text` cut into sentences, white space made single; never inside quotes or brackets."""
    text = " ".join(text.split())
    inside = [(quote.start(), quote.end()) for quote in _QUOTED.finditer(text)]
    pieces, start = [], 0
    for end in _END.finditer(text):
        stop = end.end("closing")
        if any(opened < end.start() and stop < closed for opened, closed in inside):
            continue
        if _ends(text[start : end.end("mark")], end):
            pieces.append(text[start:stop])
            start = end.end()
    return pieces + [text[start:]] if text[start:] else pieces


def _asks(sentence: str) -> bool:
    return sentence.rstrip("\"'”’)] ").endswith("?")


def _split_published(text: str) -> tuple[list[str], str] | None:
    pieces = [piece for piece in re.split(r"(?<=[.?!])\s+(?=[A-Z$])", text.strip()) if piece]
    asked = [index for index, piece in enumerate(pieces) if piece.endswith("?")]
    return (pieces[: asked[-1]] + pieces[asked[-1] + 1 :], pieces[asked[-1]]) if asked else None


def _split_clean(text: str) -> tuple[list[str], str] | None:
    """The question: the last sentences that ask, in a row, and the instructions after them."""
    pieces = sentences(text)
    asked = [index for index, piece in enumerate(pieces) if _asks(piece)]
    if not asked:
        return None
    first = last = asked[-1]
    while first > 0 and _asks(pieces[first - 1]):
        first -= 1
    after = pieces[last + 1 :]
    instructions = [piece for piece in after if _INSTRUCTION.match(piece)]
    facts = pieces[:first] + [piece for piece in after if piece not in instructions]
    return facts, " ".join(pieces[first : last + 1] + instructions)


def split_facts(text: str, rule: str) -> tuple[tuple[str, ...], str] | None:
    """(facts in order, question) by `rule`; None when there is no question, fewer than two facts, or a half of
    them (every other one) without a digit. SPEC 2.3.
    """
    if rule not in SPLIT_RULES:
        raise ValueError(f"unknown split rule {rule!r}; the rules are {', '.join(SPLIT_RULES)}")
    split = _split_clean(text) if rule == "clean" else _split_published(text)
    if split is None or len(split[0]) < 2:
        return None
    facts, question = split
    halves = (" ".join(facts[half::2]) for half in range(2))
    return (tuple(facts), question) if all(re.search("[0-9]", half) for half in halves) else None


def _load(
    source: str,
    where: str,
    make: Callable[[str, Row], Problem | str],
    counts: tuple[int, int],
    data_seed: int,
    unfit: Callable[[Problem], str | None] | None,
    revision: str | None,
) -> Loaded:
    """Problems that `make(id, row)` makes of the rows (or says why not); `counts`: of training, of held-out ones."""
    rows, data = load_rows(source, revision)
    candidates: dict[str, list[Candidate]] = {
        split: [(normalised(row["question"]), make(f"gsm8k/{split}/{i}", row)) for i, row in enumerate(split_rows)]
        for split, split_rows in rows.items()
    }
    return Loaded(*choose(where, candidates, *counts, data_seed, unfit), data)


def load_talk_problems(
    source: str,
    split_rule: str,
    n_train: int,
    n_heldout: int,
    data_seed: int,
    unfit: Callable[[Problem], str | None] | None = None,
    revision: str | None = None,
) -> Loaded:
    """Problems with split facts: training ones from the train split, held-out ones from the test split.

    `source` as for `load_rows`. Each split is taken in a shuffle seeded with `data_seed` until its count is met. A
    training problem with the words of any test problem is left out, and so is a problem for which `unfit` gives
    a reason. One JSONL file gives the held-out problems first, then the training ones. ValueError when there
    are too few.
    """

    def make(name: str, row: Row) -> Problem | str:
        split = split_facts(row["question"], split_rule)
        if split is None:
            return "cannot be split"
        return Problem(name, question=split[1], answer=gold_of(row["answer"]) or "", facts=split[0])

    where = f"{source}, by the {split_rule} split,"
    return _load(source, where, make, (n_train, n_heldout), data_seed, unfit, revision)


def load_board_gsm8k(
    source: str,
    n_train: int,
    n_heldout: int,
    data_seed: int,
    unfit: Callable[[Problem], str | None] | None = None,
    revision: str | None = None,
) -> Loaded:
    """Whole problems, for boards: the question is all of the text and there are no facts (SPEC 2.1).

    Otherwise as `load_talk_problems`; ids are the same, choices are not, since every problem can be used.
    """

    def make(name: str, row: Row) -> Problem | str:
        return Problem(name, question=row["question"].strip(), answer=gold_of(row["answer"]) or "")

    return _load(source, source, make, (n_train, n_heldout), data_seed, unfit, revision)
