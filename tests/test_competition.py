"""MATH on small tables, from a stand-in for the hub and on the real data; and GSM8K whole, for the boards."""

import json

import datasets
import pytest

from tasks import competition
from tasks.competition import gold_of, level_of, load_math_problems, load_rows, load_whole_problems
from tasks.gsm8k import load_board_gsm8k, load_talk_problems
from tasks.loading import REVISIONS, choose, fingerprint


def row(number: int, level: object = 4, answer: str | None = "7", **more: object) -> dict:
    """A row of the training split, `Find the root of x = <number>.`"""
    problem = f"Find the root of $x = {number}.$"
    return {"problem": problem, "level": level, "answer": answer, "unique_id": f"train/algebra/{number}.json"} | more


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def held_out(numbers, **more) -> list[dict]:
    return [row(n, unique_id=f"test/algebra/{n}.json", **more) for n in numbers]


@pytest.fixture
def folder(tmp_path):
    """20 training rows, 9 of them usable at levels 3 to 5; 6 held-out rows, 4 usable."""
    rows = [row(n, level) for n, level in enumerate([1, 2, 3, 3, 4, 4, 5, 5, 5, 5])]
    rows += [row(10, None), row(11, answer=None), row(12, answer=""), row(13, answer="  "), row(14, answer="{")]
    rows += [row(15, answer="}{"), row(50), row(51), row(52)]
    rows += [row(16, problem="FIND the root of $x = 53$!"), row(17, answer=r"\frac{1}{2}")]
    write(tmp_path / "train_sample.jsonl", rows)
    # 52 is barred too, though it can't itself be held out at these levels; 53 is the same in other signs.
    write(tmp_path / "math500.jsonl", held_out([50, 51, 53, 54]) + held_out([52, 55], level=1))
    return tmp_path


def test_who_is_taken_and_who_is_left_out(folder):
    data = load_math_problems(str(folder), 9, 4, data_seed=0)
    assert {p.id for p in data.train} == {f"math/train/algebra/{n}.json" for n in [2, 3, 4, 5, 6, 7, 8, 9, 17]}
    assert {p.id for p in data.heldout} == {f"math/test/algebra/{n}.json" for n in [50, 51, 53, 54]}
    assert data.dropped.pop("gold cannot be read", 0) <= 2  # of those looked at until there were nine
    assert data.dropped == {"another level": 4, "no level": 1, "no answer": 3, "also held out": 4}
    half = next(p for p in data.train if p.id.endswith("/17.json"))
    assert (half.question, half.answer, half.facts) == ("Find the root of $x = 17.$", r"\frac{1}{2}", ())


def test_the_choice_is_the_seed_s(folder):
    data = load_math_problems(str(folder), 5, 3, data_seed=0)
    assert load_math_problems(str(folder), 5, 3, data_seed=0) == data
    assert load_math_problems(str(folder), 5, 3, data_seed=1).train != data.train
    assert load_math_problems(str(folder), 4, 3, data_seed=0).train == data.train[:4]


def test_levels_and_fits(folder):
    data = load_math_problems(str(folder), 4, 0, 0, levels=(5,))
    assert {p.id for p in data.train} == {f"math/train/algebra/{n}.json" for n in [6, 7, 8, 9]}
    data = load_math_problems(str(folder), 8, 4, 0, unfit=lambda problem: "17" if "17" in problem.question else None)
    assert "math/train/algebra/17.json" not in {p.id for p in data.train} and len(data.train) == 8


def test_too_few(folder):
    with pytest.raises(
        ValueError, match="levels 3, 4, 5, has 9 usable training .* 10 asked for.*gold cannot be read': 2"
    ):
        load_math_problems(str(folder), 10, 4, 0)
    with pytest.raises(ValueError, match="has 4 usable held-out problems and not the 5 asked for.*'no level': 1"):
        load_math_problems(str(folder), 1, 5, 0)


@pytest.mark.parametrize(
    ("level", "number"), [("Level 3", 3), (5, 5), ("4", 4), (2.0, 2), ("Level ?", None), (None, None), ("", None)]
)
def test_level(level, number):
    assert level_of({"level": level}) == number


@pytest.mark.parametrize(
    ("fields", "gold"),
    [
        ({"answer": " 7 ", "solution": r"\boxed{8}"}, "7"),
        ({"answer": 7}, "7"),
        ({"answer": None, "solution": r"so \boxed{1} or $\boxed{\frac{1}{2}}.$"}, r"\frac{1}{2}"),
        ({"solution": r"the answer is $\boxed 2$."}, "2"),
        ({"solution": r"There are $\boxed{}$ primes."}, None),
        ({"solution": "There are none."}, None),
        ({"answer": ""}, None),
        ({"answer": None}, None),
        ({"answer": None, "solution": None}, None),
    ],
)
def test_gold(fields, gold):
    assert gold_of(fields) == gold


def test_names_of_the_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="without train.jsonl or train_sample.jsonl"):
        load_rows(str(tmp_path))
    write(tmp_path / "train.jsonl", [row(1), row(2)])
    with pytest.raises(FileNotFoundError, match="without math500.jsonl or test.jsonl"):
        load_rows(str(tmp_path))
    write(tmp_path / "test.jsonl", held_out([3]))
    assert {split: len(rows) for split, rows in load_rows(str(tmp_path))[0].items()} == {"train": 2, "test": 1}
    write(tmp_path / "mine.jsonl", [row(n) for n in range(6)])
    data = load_math_problems(str(tmp_path / "mine.jsonl"), 4, 2, 0)
    assert len({p.id for p in data.train + data.heldout}) == 6


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("level", "train.jsonl, train has no `level` column; its columns are answer, problem, unique_id"),
        ("problem", "no `problem` column; its columns are answer, level, unique_id"),
        ("answer", "no `answer` or `solution` column; its columns are level, problem, unique_id"),
    ],
)
def test_a_missing_column(tmp_path, column, message):
    write(tmp_path / "train.jsonl", [{k: v for k, v in row(1).items() if k != column}])
    write(tmp_path / "test.jsonl", held_out([3]))
    with pytest.raises(ValueError, match=message):
        load_rows(str(tmp_path))


def test_rows_that_are_wrong(tmp_path):
    write(tmp_path / "test.jsonl", held_out([3]))
    write(tmp_path / "train.jsonl", [row(1), row(2, problem=None)])
    with pytest.raises(ValueError, match="row 2: no text under `problem`"):
        load_rows(str(tmp_path))
    write(tmp_path / "train.jsonl", [row(1), row(2, unique_id=row(1)["unique_id"])])
    with pytest.raises(ValueError, match="1 ids are of several rows, among them train/algebra/1.json"):
        load_rows(str(tmp_path))
    (tmp_path / "train.jsonl").write_text("{")
    with pytest.raises(ValueError, match="train.jsonl is not JSON"):
        load_rows(str(tmp_path))


def test_from_the_hub(monkeypatch):
    """Every subject, at pinned revisions, held out from MATH-500; a stand-in for the hub gives the rows."""
    asked = []

    def load_dataset(source, config, split, revision):
        asked.append((source, config, split, revision))
        if source == "HuggingFaceH4/MATH-500":
            return datasets.Dataset.from_list(held_out([50, 0]))
        number = 10 * competition.SUBJECTS[source].index(config)
        rows = [(number, "Level 3"), (number + 1, "Level ?"), (number + 2, "Level 1")]
        return datasets.Dataset.from_list(
            [{"problem": row(n)["problem"], "level": l, "type": config, "solution": r"\boxed{7}"} for n, l in rows]
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load_math_problems("EleutherAI/hendrycks_math", 5, 2, 0)
    subjects = competition.SUBJECTS["EleutherAI/hendrycks_math"]
    pin, held_pin = REVISIONS["EleutherAI/hendrycks_math"], REVISIONS["HuggingFaceH4/MATH-500"]
    assert asked == [("EleutherAI/hendrycks_math", s, "train", pin) for s in subjects] + [
        ("HuggingFaceH4/MATH-500", None, "test", held_pin)
    ]
    # Both the first row of algebra (0) and that of prealgebra (50) are held out.
    wanted = {f"math/train/{s}/0" for s in subjects if s not in ("algebra", "prealgebra")}
    assert {p.id for p in data.train} == wanted and all(p.answer == "7" for p in data.train)
    assert data.dropped == {"no level": 7, "another level": 7, "also held out": 2}
    load_rows("EleutherAI/hendrycks_math", revision="abc")
    assert asked[8][3] == "abc" and asked[-1][3] == held_pin
    with pytest.raises(ValueError, match="name the revision of somebody/math"):
        load_rows("somebody/math")


def test_fingerprint_tells_rows_and_splits_apart():
    one = fingerprint("math", {"train": [("a", "b")], "test": []})
    others = [{"train": [("ab", "")]}, {"train": [], "test": [("a", "b")]}, {"train": [("a", "b"), ("a", "b")]}]
    assert one.startswith("math sha256:") and all(fingerprint("math", rows) != one for rows in others)


def test_choose_nothing():
    assert choose("nowhere", {"train": [], "test": []}, 0, 0, 0) == ([], [], {})


def test_gsm8k_whole(tmp_path):
    rows = [{"question": f" Al has {n} cats. How many?\n", "answer": "so\n#### 1,007"} for n in range(12)]
    write(tmp_path / "train.jsonl", rows[:8])
    write(tmp_path / "test.jsonl", rows[7:])
    data = load_board_gsm8k(str(tmp_path), 7, 5, 0)
    assert {p.id for p in data.train} == {f"gsm8k/train/{n}" for n in range(7)}
    assert all(p.facts == () and p.answer == "1007" for p in data.train + data.heldout)
    assert next(p for p in data.train if p.id == "gsm8k/train/3").question == "Al has 3 cats. How many?"
    assert data.dropped == {"also held out": 1}
    assert load_whole_problems(str(tmp_path), 7, 5, 0) == data
    with pytest.raises(ValueError, match="has 7 usable training problems"):
        load_board_gsm8k(str(tmp_path), 8, 5, 0)


def test_rows_of_the_real_data(shared):
    rows, _ = load_rows(str(shared / "data/math"))
    levels = {split: [level_of(r) for r in rows[split]] for split in rows}
    counts = {split: [levels[split].count(level) for level in (1, 2, 3, 4, 5, None)] for split in rows}
    assert counts == {"train": [22, 78, 412, 466, 624, 2], "test": [43, 90, 105, 128, 134, 0]}
    assert [gold_of(r) is None for r in rows["train"]].count(True) == 2
    # What the hub gives is the solution alone; its gold is the same.
    both = rows["train"] + rows["test"]
    assert [gold_of(r) for r in both] == [gold_of({"solution": r["solution"]}) for r in both]


def test_problems_of_the_real_data(shared):
    """The counts of SPEC 2.2."""
    data = load_math_problems(str(shared / "data/math"), 1024, 300, 0)
    assert len({p.id for p in data.train}) == 1024 and len({p.id for p in data.heldout}) == 300
    assert all(p.id.startswith("math/train/") for p in data.train)
    assert all(p.id.startswith("math/test/") for p in data.heldout)
    assert "math/train/precalculus/474.json" not in {p.id for p in data.train}
    expected = {"another level": 233, "no level": 2, "no answer": 2, "also held out": 1}
    assert {k: v for k, v in data.dropped.items() if k != "gold cannot be read"} == expected
    assert load_whole_problems(str(shared / "data/math"), 1, 1, 0).train == data.train[:1]


def test_gsm8k_whole_on_the_real_data(shared):
    data = load_board_gsm8k(str(shared / "data/gsm8k"), 512, 120, 0)
    assert len(data.train) == 512 and len(data.heldout) == 120 and data.dropped == {}
    talk = load_talk_problems(str(shared / "data/gsm8k"), "clean", 1, 1, 0)
    assert data.fingerprint == talk.fingerprint
