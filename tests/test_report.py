"""The page's parts that need no browser: escapes, policy, numbers with their n, and what is missing said in words."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from eval import report
from eval.report_data import read_run
from tests.runs import chat, results, write_run

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>&\"'"


class Page(HTMLParser):
    """Tags with their attributes, and the text of scripts, styles and everything else."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.inside, self.texts = [], [], {}
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        key = self.inside[-1] if self.inside and self.inside[-1] in ("script", "style") else "text"
        self.texts.setdefault(key, []).append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts["text"]).split())


def page_of(path):
    return Page(report.write_report(path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of a run with nothing special in it."""
    return page_of(write_run(tmp_path_factory.mktemp("plain") / "run"))


def hash_of(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_the_policy_allows_this_script_and_this_style_alone(page):
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    _, script = page.texts["script"]
    assert f"script-src '{hash_of(script)}'" in policy
    assert f"style-src '{hash_of(page.texts['style'][0])}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for tag, attributes in page.tags:
        assert tag not in ("iframe", "object", "base", "img") and not any(name.startswith("on") for name in attributes)
        assert "style" not in attributes and "src" not in attributes
        assert attributes.get("href", "#")[:1] == "#" or attributes["href"] == "data:,"


def test_hostile_text_becomes_no_element(tmp_path):
    """In episodes, in the config, in names and in checks: the page has the elements of a harmless run."""
    calm = page_of(write_run(tmp_path / "calm", checks={"note": "fine"}))
    episode = chat([HOSTILE] * 4, question=HOSTILE, facts=[HOSTILE], gold=HOSTILE, problem=HOSTILE)
    path = write_run(tmp_path / "evil", [episode], checks={"note": HOSTILE}, device=HOSTILE)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model": HOSTILE, "data": HOSTILE}))
    evil = page_of(path)
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in calm.tags]
    assert evil.text.count(HOSTILE) >= 4


def test_half_a_surrogate_pair_does_not_break_the_file(tmp_path):
    path = write_run(tmp_path / "run", [chat(["\ud83d"] * 4)], device="\ud83d")
    assert "Device: ?" in page_of(path).text


def test_the_verdict_comes_first_and_numbers_have_their_n(page):
    text = page.text
    order = ["talk_to_solve", "Verdict", "Held-out evaluations", "Learning curves", "Published figures", "Cell by cell"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert (
        "0.50 [0.40, 0.60], n 1,200" in text
        and "−0.31 [−0.41, −0.21], n 600 problems" in text
        and "moved the wrong way" in text
    )
    assert "channel_off-grpo-18 64 12,345 7.50" in text
    assert "0.40 / 0.15 / 0.35" in text and "Qwen2.5-1.5B-Instruct" in text
    estimates = re.findall(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\](, n \d)?", text.replace("published 0.11 [0.09, 0.14]", ""))
    assert estimates and all(estimates)


def test_what_a_run_lacks_is_said_on_the_page(tmp_path):
    text = page_of(write_run(tmp_path / "run", [], finished=False, steps=0)).text
    assert "What this report lacks" in text and "no results.json" in text
    for said in ("no verdict", "no held-out evaluations", "No training step was logged", "No episodes were saved"):
        assert said in text


def test_checks_are_shown_whatever_they_hold(tmp_path):
    checks = {
        "talk_needed": {"mean": 0.1, "low": 0.0, "high": 0.2, "n": 40},
        "overlap": {"exact": 0, "names": ["a", "b"], "nothing": {}, "empty": [], "unknown": None},
        "rows": [{"x": 1}, {"x": 2}],
        "passed": True,
        "talk": {
            "verdict": "yes, clearly",
            "features": {"long": {"r": 0.766666, "floor": None}, "short": {"r": 0.5, "floor": 2}},
        },
    }
    text = page_of(write_run(tmp_path / "run", checks=checks)).text
    assert "0.10 [0.00, 0.20], n 40" in text and "a , b" in text.replace("a,", "a ,") and "passed True" in text
    assert "talk: yes, clearly" in text and "r floor long 0.7667 none short 0.5 2" in text
    assert "nothing none" in text and "unknown none" in text
    path = write_run(tmp_path / "none")
    unchecked = {key: value for key, value in results().items() if key != "checks"}
    (path / "results.json").write_text(json.dumps(unchecked))
    assert "This run holds no checks" in page_of(path).text


def test_a_study_with_one_arm(tmp_path):
    text = page_of(write_run(tmp_path / "run", arms=results()["arms"][:1])).text
    assert "nothing is compared" in text


def test_the_team_with_an_untrained_partner_has_a_column_where_it_was_measured(tmp_path, page):
    first, second = results()["arms"]
    measured = {**first, "with_untrained_partner": {"mean": 0.21, "low": 0.11, "high": 0.31, "n": 600}}
    text = page_of(write_run(tmp_path / "run", arms=[measured, second])).text
    assert "with an untrained partner against" in text and "0.21 [0.11, 0.31], n 600" in text
    assert "with an untrained partner against" not in page.text


def test_credit_by_rule_where_seeds_measured_it(tmp_path, page):
    first, second = results()["arms"]
    reliable = {"mean": 0.64, "low": 0.5, "high": 0.78, "n": 5}
    notes = {**first["metrics"], "notes_send_own": {"mean": 0.95, "low": 0.91, "high": 0.99, "n": 600}}
    arms = [
        {**first, "metrics": notes, "diagnostics": {"credit/split_half_reliability": reliable, "reward": None}},
        {**second, "diagnostics": {"credit/split_half_reliability": None, "reward": None}},
    ]
    text = page_of(write_run(tmp_path / "run", arms=arms)).text
    assert "rule notes send own split half reliability channel_on, grpo 0.95 [0.91, 0.99], n 600 0.64" in text
    assert "channel_off, grpo – – " in text
    assert "rule notes send own" not in page.text


def test_a_run_that_was_not_evaluated(tmp_path):
    cells = [{**cell, "evaluations": {}} for cell in results()["cells"]]
    text = page_of(write_run(tmp_path / "run", arms=[], base={}, cells=cells)).text
    assert "Nothing was evaluated, so there is no verdict" in text and "There are no held-out evaluations." in text


@pytest.mark.parametrize(
    "value, shown",
    [
        (None, "–"),
        (0.125, "0.12"),
        (-0.001, "0.00"),
        (12.345, "12.35"),
        (1200, "1,200"),
        (1234.5, "1,234"),
        (True, "True"),
        ("x", "x"),
    ],
)
def test_numbers(value, shown):
    assert report.number(value) == shown


def test_signs():
    assert (report.signed(0.4), report.signed(-0.4)) == ("+0.40", "−0.40")


def test_the_command(tmp_path, capsys):
    path = write_run(tmp_path / "run")
    assert report.main([str(path), "--out", str(tmp_path / "other.html")]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'other.html'}; figures: {path / 'figures'}\n"
    assert (tmp_path / "other.html").exists() and not (path / "report.html").exists()
    assert {file.suffix for file in (path / "figures").iterdir()} == {".svg", ".png"}
    assert report.main([str(tmp_path / "nowhere")]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_a_report_that_fails_is_said_and_does_not_raise(tmp_path, capsys, monkeypatch):
    path = write_run(tmp_path / "run")
    assert report.report_or_say(path) == f"report: {path / 'report.html'}"

    def broken(run):
        raise RuntimeError("no ink")

    monkeypatch.setattr(report, "draw_all", broken)
    said = report.report_or_say(path)
    assert said.startswith("error: no report (no ink)") and f"python -m eval.report {path}" in said
    assert "RuntimeError: no ink" in capsys.readouterr().err
    assert read_run(path).missing == []
