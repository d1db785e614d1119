"""GSM8K: reading it, cutting each problem into facts and a question, and choosing training and held-out problems.

Rows come through `datasets`, from its hub or from JSONL files, and are fingerprinted by their content. A problem is
cut by the published rule or by the clean one (SPEC 2.3); both are here to be compared. It reads only the question
and the gold after `####`: the worked solution is never shown to anybody. No prompts and no grading.
"""

import hashlib
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.base import Problem
from tasks.grading import check_gold

SPLIT_RULES = ("clean", "published")
REVISIONS = {"openai/gsm8k": "e53f048856ff4f594e959d75785d2c2d37b678ee"}
"""The revision read when none is asked for; other data sets on the hub must name theirs."""

Row = dict[str, str]


@dataclass(frozen=True)
class TalkData:
    """`dropped`: how many of the rows looked at were left out, by reason. `fingerprint`: hash of all rows read."""

    train: list[Problem]
    heldout: list[Problem]
    dropped: dict[str, int]
    fingerprint: str


def load_rows(source: str, revision: str | None = None) -> tuple[dict[str, list[Row]], str]:
    """({"train": rows, "test": rows}, fingerprint) of a hub id, a directory with both JSONL files, or one file.

    One file gives the one split "rows". A row has `question` and `answer`. The fingerprint is a hash of the rows, so
    the same data from the hub and from a file has the same one.
    """
    import datasets  # here, because it takes seconds to import

    path = Path(source).expanduser()
    if path.is_dir():
        files = {split: str(path / f"{split}.jsonl") for split in ("train", "test")}
        for file in files.values():
            if not Path(file).is_file():
                raise FileNotFoundError(f"{path} is a directory without {Path(file).name}")
    elif path.is_file():
        files = {"rows": str(path)}
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not source.startswith("."):
        files = {}
    else:
        raise FileNotFoundError(f"{source!r} is neither a file, nor a directory, nor a hub id such as openai/gsm8k")
    datasets.disable_progress_bars()  # only entry points talk to the terminal
    if files:
        # Its cache of local files would go to the home directory, which may be read-only.
        with tempfile.TemporaryDirectory() as cache:
            verbosity = datasets.logging.get_verbosity()
            datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it then raises
            try:
                loaded = datasets.load_dataset("json", data_files=files, cache_dir=cache)
            except datasets.exceptions.DatasetGenerationError as error:
                names = " or ".join(files.values())
                raise ValueError(f"{names} is not JSON, one object a line: {error.__cause__ or error}") from error
            finally:
                datasets.logging.set_verbosity(verbosity)
            rows = {split: loaded[split].to_list() for split in files}
    else:
        revision = revision or REVISIONS.get(source)
        if revision is None:
            raise ValueError(f"name the revision of {source} to read: a data set on the hub may change")
        loaded = datasets.load_dataset(source, "main", revision=revision)
        rows = {split: loaded[split].to_list() for split in ("train", "test")}
    content = hashlib.sha256()
    for split, split_rows in rows.items():
        for number, row in enumerate(split_rows, 1):
            where = f"{files.get(split, f'{source}, {split} split')}, row {number}"
            if not isinstance(row.get("question"), str) or not isinstance(row.get("answer"), str):
                raise ValueError(f"{where}: no text under `question` or `answer`")
            if gold_of(row["answer"]) is None:
                raise ValueError(f"{where}: no gold after #### in its answer")
            content.update(f"{split}\0{row['question']}\0{row['answer']}\0".encode())
    return rows, f"gsm8k sha256:{content.hexdigest()[:16]}"


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


def normalised(text: str) -> str:
    """Words and numbers only, lower case: two texts that differ in nothing else are the same problem."""
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def _take(
    candidates: Sequence[tuple[str, Row]],
    count: int,
    rule: str,
    barred: set[str],
    fits: Callable[[Problem], bool] | None,
    dropped: Counter[str],
) -> list[Problem]:
    """The first `count` of `candidates` (id, row) that make a problem; those left out go into `dropped`."""
    problems: list[Problem] = []
    for name, row in candidates:
        if len(problems) == count:
            break
        split, gold = split_facts(row["question"], rule), gold_of(row["answer"]) or ""
        if normalised(row["question"]) in barred:
            dropped["also held out"] += 1
        elif split is None:
            dropped["cannot be split"] += 1
        elif not check_gold(gold):
            dropped["gold cannot be read"] += 1
        else:
            problem = Problem(name, question=split[1], answer=gold, facts=split[0])
            if fits is None or fits(problem):
                problems.append(problem)
            else:
                dropped["too long"] += 1
    return problems


def load_talk_problems(
    source: str,
    split_rule: str,
    n_train: int,
    n_heldout: int,
    data_seed: int,
    fits: Callable[[Problem], bool] | None = None,
    revision: str | None = None,
) -> TalkData:
    """Problems with split facts: training ones from the train split, held-out ones from the test split.

    Each split is taken in a shuffle seeded with `data_seed` until its count is met. A training problem with the
    words of any test problem is left out, and so is a problem for which `fits` is false ("too long"). One JSONL
    file gives the held-out problems first, then the training ones. ValueError when there are too few.
    """
    rows, fingerprint = load_rows(source, revision)
    shuffled = {}
    for split, split_rows in rows.items():
        shuffled[split] = [(f"gsm8k/{split}/{index}", row) for index, row in enumerate(split_rows)]
        random.Random(data_seed).shuffle(shuffled[split])
    dropped: Counter[str] = Counter()
    pool = shuffled.get("test", shuffled.get("rows", []))
    heldout = _take(pool, n_heldout, split_rule, set(), fits, dropped)
    if "rows" in shuffled:
        ids = {problem.id for problem in heldout}
        barred = {normalised(row["question"]) for name, row in pool if name in ids}
        # Rows passed over for the held-out set would only be passed over again.
        start = 1 + max((i for i, (name, _) in enumerate(pool) if name in ids), default=-1)
        train = _take(pool[start:], n_train, split_rule, barred, fits, dropped)
    else:
        barred = {normalised(row["question"]) for _, row in pool}
        train = _take(shuffled["train"], n_train, split_rule, barred, fits, dropped)
    for kind, problems, asked in (("held-out", heldout, n_heldout), ("training", train, n_train)):
        if len(problems) < asked:
            raise ValueError(
                f"{source} has {len(problems)} usable {kind} problems by the {split_rule} split, not the {asked} "
                f"asked for; left out: {dict(dropped)}"
            )
    return TalkData(train, heldout, dict(dropped), fingerprint)
