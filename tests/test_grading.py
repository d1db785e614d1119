"""The grader against labelled answers, and against answers that mean it harm."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from tasks.grading import Grader, check_gold, last_box

TOWER = "\\boxed{9^{9^{9^{9}}}}"


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=2) as grader:
        grader.warm()
        yield grader


def box(content: str) -> str:
    return f"So the answer is \\boxed{{{content}}}."


LABELLED = [
    # (text, gold, right)
    # plain integers, which need no mathematics
    (box("42"), "42", 1),
    (box("42"), "43", 0),
    (box(" 42 "), "42", 1),
    (box("42.00"), "42", 1),
    (box("-42"), "42", 0),
    (box("1,200"), "1200", 1),
    (box("\\$1,200"), "1200", 1),
    # how thousands are written
    (box("1\\,200"), "1200", 1),
    (box("1{,}200"), "1200", 1),
    (box("1,\\!200"), "1200", 1),
    (box("1 200"), "1200", 1),
    (box("1 200 000"), "1200000", 1),
    (box("1\\,200"), "201", 0),
    # mixed numbers, fractions, powers of ten
    (box("3 1/2"), "3.5", 1),
    (box("-3 1/2"), "-3.5", 1),
    (box("3½"), "3.5", 1),
    (box("3\\frac{1}{2}"), "3.5", 1),
    (box("3 1/2"), "2", 0),
    (box("\\frac{7}{2}"), "3.5", 1),
    (box("1.2e3"), "1200", 1),
    (box("1.2E+3"), "1200", 1),
    (box("5e-1"), "1/2", 1),
    (box("1.2 \\times 10^3"), "1200", 1),
    # units, labels, per cent, currency
    (box("20 eggs per day"), "20", 1),
    (box("12\\text{ cm}^2"), "12", 1),
    (box("12 cm^2"), "12", 1),
    (box("12/day"), "12", 1),
    (box("$12.50"), "12.5", 1),
    (box("\\$12 per hour"), "12", 1),
    (box("Total: 12"), "12", 1),
    (box("x = 12"), "12", 1),
    (box("7\\text{ hours}."), "7", 1),
    (box("50\\%"), "50", 1),
    (box("50%"), "0.5", 1),
    (box("5x"), "5", 0),
    (box("5xyz"), "5", 1),  # known: read as five of something
    (box("5xyz"), "5xyz", 1),
    (box("−12"), "-12", 1),
    # several answers are not one
    (box("5 or 6 or 7"), "5", 0),
    (box("5 or 6 or 7"), "7", 0),
    (box("5, 6"), "5", 0),
    (box("5 and 6"), "6", 0),
    (box("5 \\vee 6"), "6", 0),
    (box("5 to 6"), "5", 0),
    (box("5 6"), "11", 0),
    (box("12 apples and 3 pears"), "12", 0),
    ("The answer is 5 or 6 or 7.", "5", 0),
    ("It is 5 or 6 or 7", "7", 0),
    ("The answer is 5, 6, or 7", "5", 0),
    (box("6 or \\boxed{5}"), "5", 0),
    # several boxes: the last closed one
    ("\\boxed{4}, no: \\boxed{5}", "5", 1),
    ("\\boxed{4}, no: \\boxed{5}", "4", 0),
    ("\\boxed{5} and then \\boxed{6", "5", 1),
    # no box
    ("The answer is 12.", "12", 1),
    ("The answer is $1,200.", "1200", 1),
    ("The answer is 1.2e3.", "1200", 1),
    ("The sum of 5 and 6 is 11.", "11", 1),
    ("#### 12", "12", 1),
    ("I do not know.", "12", 0),
    ("", "12", 0),
    (box(""), "12", 0),
    # not numbers
    (box("(1,2)"), "(1,2)", 1),
    (box("(100,200)"), "(100,200)", 1),
    (box("\\left(3, \\frac{\\pi}{2}\\right)"), "\\left( 3, \\frac{\\pi}{2} \\right)", 1),
    (box("1 \\text{ or } 2"), "1, 2", 1),
    (box("\\{2,1\\}"), "1, 2", 1),
    (box("6 - 3i"), "6-3i", 1),
    (box("\\text{Evelyn}"), "\\text{Evelyn}", 1),
    (box("\\text{Briana}"), "\\text{Evelyn}", 0),
]


def test_labelled_answers(grader):
    grades = grader.grade([(text, gold) for text, gold, _ in LABELLED])
    wrong = [(row, grade) for row, grade in zip(LABELLED, grades, strict=True) if row[2] != grade]
    assert not wrong
    assert grades == grader.grade([(text, gold) for text, gold, _ in LABELLED])  # now from memory


def test_integers_decided_without_mathematics_agree_with_math_verify():
    from tasks.grading import _judge

    with Grader(workers=1) as grader:
        for answer in ("0", "7", "-7", "07", "1,200", "1200.00", "\\$12", "$12"):
            for gold in ("0", "7", "-7", "1200", "12"):
                assert grader._at_once(answer, True, gold) == _judge(answer, True, gold)[0], (answer, gold)


LAST_BOX = [
    ("\\boxed{1}", "1"),
    ("\\boxed {1}", "1"),
    ("\\boxed{\\frac{1}{2}} then", "\\frac{1}{2}"),
    ("\\boxed{1} \\boxed{2}", "2"),
    ("\\boxed{1} \\boxed{2", "1"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
    ("\\boxed{1 \\boxed{2} 3}", "1 \\boxed{2} 3"),
    ("} { \\boxed{1}", "1"),
    ("\\boxed{", None),
    ("\\fbox{1}", None),
    ("boxed 1", None),
    ("\\boxed{}", ""),
]


@pytest.mark.parametrize(("text", "content"), LAST_BOX)
def test_last_box(text, content):
    assert last_box(text) == content


def test_hostile_answers_cost_only_their_own_grade():
    hostile = [
        TOWER,
        box("10^{10^{10}}!"),
        box("{" * 900 + "5" + "}" * 900),
        box("(" * 300 + "5" + ")" * 300),
        box("(5!)!!!"),
        "\\boxed{" * 20_000,
        box("1" * 100_000),
        "\\frac{" * 300,
    ]
    good = [("a" * 100_000 + " The answer is 12.5.", "12.5"), (box("\\frac{7}{2}"), "3.5"), (box("3"), "3")]
    pairs = [pair for text in hostile for pair in [(text, "3.25"), *good]]
    with Grader(workers=2, time_limit_s=2.0) as grader:
        grades = grader.grade(pairs)
        assert grades == [0.0, 1.0, 1.0, 1.0] * len(hostile)
        assert grader.failures["timeout"] >= 1
        assert grader.grade([(box("\\frac{9}{2}"), "4.5")]) == [1.0]


def test_memory_is_limited():
    with Grader(workers=1, memory_bytes=1 << 30) as grader:
        assert grader._run(bytearray, [(2 << 30,), (3,)]) == ["memory", bytearray(3)]
        assert grader.grade([(box("\\frac{7}{2}"), "3.5")]) == [1.0]


def test_grades_from_another_thread(grader):
    grades = []
    thread = threading.Thread(
        target=lambda: grades.extend(grader.grade([(box("\\frac{11}{2}"), "5.5"), ("It is 9.", "9")]))
    )
    thread.start()
    thread.join()
    assert grades == [1.0, 1.0]


def workers_of_this_process() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.name == "pebble_pool_worker"]


def test_a_killed_worker_changes_no_other_grade():
    good = [(box(f"\\frac{{{n}}}{{2}}"), str(n / 2)) for n in range(1, 30, 2)]
    before = set(workers_of_this_process())
    with Grader(workers=2, time_limit_s=3.0) as grader:
        assert grader.grade(good[:1]) == [1.0]
        grades = []
        thread = threading.Thread(target=lambda: grades.extend(grader.grade([(TOWER, "3"), *good[1:]])))
        thread.start()
        time.sleep(0.5)
        for pid in set(workers_of_this_process()) - before:
            os.kill(pid, signal.SIGKILL)
        thread.join()
        assert grades == [0.0] + [1.0] * (len(good) - 1)
        for pid in set(workers_of_this_process()) - before:  # idle ones too
            os.kill(pid, signal.SIGKILL)
        assert grader.grade([(box("\\frac{99}{2}"), "49.5")]) == [1.0]


def watched(grader):
    """What the workers are asked from now on."""
    asked, run = [], grader._run
    grader._run = lambda function, jobs: asked.extend(jobs) or run(function, jobs)
    return asked


def until_idle(threads):
    """Every thread that was started since is done."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(t.is_alive() for t in set(threading.enumerate()) - threads):
        time.sleep(0.01)


def test_what_was_begun_ahead_is_not_asked_again():
    pairs = [(box(f"\\frac{{{n}}}{{2}}"), str(n / 2 if n % 4 == 1 else n)) for n in range(1, 21, 2)]
    with Grader(workers=2) as grader:
        asked = watched(grader)
        grader.ahead(pairs[:4])
        grader.ahead(pairs[2:6])
        assert grader.grade(pairs) == [1.0, 0.0] * 5
        assert len(asked) == len(set(asked)) == len(pairs)
        assert grader.grade(pairs) == [1.0, 0.0] * 5 and len(asked) == len(pairs)


def test_what_was_begun_ahead_starts_no_worker_after_the_end():
    threads, grader = set(threading.enumerate()), Grader(workers=1)
    asked = watched(grader)
    with grader._lock:  # it can't begin before this one is closed
        grader.ahead([(box("\\frac{1}{2}"), "0.5")])
        grader.close()
    until_idle(threads)
    assert asked == [] and grader._pool is None


def test_workers_do_not_import_the_main_module_or_jax(grader):
    grader.grade([(box("\\frac{13}{2}"), "6.5")])
    for pid in workers_of_this_process():
        with open(f"/proc/{pid}/maps") as maps:
            assert "jaxlib" not in maps.read()


def test_golds(grader):
    golds = ["12", "1,200", "-3", "\\frac{1}{2}", "(1,2)", "7\\text{ hours}.", "\\text{Evelyn}", "", "a +", "\\frac{"]
    readable = [True] * 7 + [False] * 3
    assert grader.check_golds(golds) == readable
    assert [check_gold(gold) for gold in golds] == readable


def test_every_gold_of_the_real_data_is_readable_and_right(shared, grader):
    import json

    lines = (shared / "data/math/math500.jsonl").read_text().splitlines()
    golds = [json.loads(line)["answer"] for line in lines]
    assert all(grader.check_golds(golds))
    grades = grader.grade([(box(gold), gold) for gold in golds])
    assert [gold for gold, grade in zip(golds, grades, strict=True) if grade != 1.0] == []
