"""What is shown: model text is hostile, and no number stands without its interval."""

import io
import unicodedata

import pytest
from rich.console import Console

from rl import display
from tasks.base import Problem
from tasks.talk import talk_task
from tests import tiny

HOSTILE = {
    "clear the screen": "\x1b[2J\x1b[H",
    "set the title": "\x1b]0;owned\x07",
    "a link": "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "one-byte CSI": "\x9b31m",
    "back over the line": "right\rwrong\b\b\b",
    "right to left": "\u202e18 \u2066x\u2069 \u200f",
    "invisible": "a\u200bb\u2060c\ufeff",
    "tag characters": "x\U000e0041\U000e0042",
    "half a character": "\ud800",
    "nul": "a\0b",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_control_or_direction_character_is_left(text):
    shown = display.safe(text)
    assert len(shown) == len(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn") for c in shown)
    assert "\ufffd" in shown


@pytest.mark.parametrize("text", ["It is 3 + 4 = 7.\nNext line.", "café, 日本, 😀, \\boxed{½}", "[red]x[/red]", ""])
def test_ordinary_text_is_shown_as_it_is(text):
    assert display.safe(text) == text


def test_long_text_is_cut_and_says_so():
    shown = display.safe("x" * 100_000)
    assert shown == "x" * 2000 + " … (98000 more characters)"
    assert display.safe("x" * 2000) == "x" * 2000


def rendered(renderable, colour=False):
    """As a terminal of 100 columns gets it, with or without its escape sequences for colour."""
    console = Console(record=True, force_terminal=True, width=100, file=io.StringIO(), color_system="truecolor")
    console.print(renderable)
    return console.export_text(styles=colour)


def chat(*texts, problem=None):
    return tiny.episode(talk_task("channel_on"), problem or tiny.problem(), texts, (1.0, 0.0), finished=False)


def test_a_hostile_chat_cannot_steer_the_terminal():
    """In messages, facts, question and gold alike; the only escape sequences are the colours rich writes itself."""
    evil = "".join(c for text in HOSTILE.values() for c in text)
    problem = Problem("p", evil, evil, (evil, evil))
    shown = display.chat(chat(evil, evil, evil, evil, problem=problem), "step 1")
    plain, coloured = rendered(shown), rendered(shown, colour=True)
    assert "\x1b" not in plain and "\x9b" not in plain and "\u202e" not in plain
    sequences = [part.split("m")[0] for part in coloured.split("\x1b")[1:]]
    assert sequences and all(set(s) <= set("[0123456789;") for s in sequences)


def test_markup_in_a_message_is_text():
    plain = rendered(display.chat(chat("[red]x[/red]", "[/]", "[link=http://evil]y", "[right]"), "t"))
    for written in ("[red]x[/red]", "B: [/]", "[link=http://evil]y"):
        assert written in plain


def test_a_chat_shows_who_knew_said_and_got_what():
    plain = rendered(display.chat(chat("one", "two", "three", "four"), "step 7, channel_on-grpo-17"))
    for written in (
        "step 7, channel_on-grpo-17",
        "A knows: Tom has 1.",
        "B knows: Ann has 2.",
        "A: one  [cut at its cap]",
        "A: three  [cut at its cap]  [right]",
        "B: four  [cut at its cap]  [wrong]",
        "gold 3",
    ):
        assert written in plain


def estimate(mean):
    return {"mean": mean, "low": mean - 0.05, "high": mean + 0.05, "n": 1200}


def test_tables_show_intervals_and_counts():
    """Nothing measured is a dash; four evaluations take two tables."""
    metrics = {name: estimate(0.1 * i + 0.1) for i, name in enumerate(display.SHOWN)} | {"asks": None}
    cell = {
        "arm": "channel_on",
        "credit": "grpo",
        "seed": 17,
        "evaluations": {"trained": metrics, "with_untrained_partner": metrics},
    }
    results = {"base": {"channel_on": metrics, "channel_off": metrics}, "cells": [cell]}
    plain = rendered(display.results_table(results))
    (solves, *_) = [line for line in plain.splitlines() if "team solves it" in line]
    assert solves.count("0.10 [0.05, 0.15]") == 3 and plain.count("0.10 [0.05, 0.15]") == 4
    assert plain.count("1,200") == 4 and plain.count("team solves it") == 2
    (asks, *_) = [line for line in plain.splitlines() if "asks at first" in line]
    assert not any(c.isdigit() for c in asks) and "-" in asks


def test_labels_of_a_results_file():
    cell = {"arm": "on", "credit": "grpo", "seed": 17, "evaluations": {"with_untrained_partner": {}}}
    labels = [label.split("\n") for label, _ in display.rows_of({"base": {"on": {}}, "cells": [cell]})]
    assert labels == [["on", "untrained"], ["on", "grpo 17", "untrained partner"]]


def test_arms_show_their_difference_and_verdict():
    against = {"delta": 0.44, "low": 0.36, "high": 0.52, "verdict": "moved"}
    first = {"arm": "ring", "credit": "readers_only", "seeds": [1, 2], "metrics": {"pass_at_1": estimate(0.3)}}
    plain = rendered(display.arms_table([first, first | {"credit": "rescue", "against_first": against}]))
    assert "+0.44 [+0.36, +0.52]" in plain and "moved" in plain and plain.count("0.30 [0.25, 0.35]") == 2
    assert max(map(len, plain.splitlines())) <= 80


def test_notes_and_their_credit_by_rule():
    """A rule whose credit was not measured has a dash; a study without notes or re-readings has no table."""
    metrics = {"notes_send_own": estimate(0.96), "notes_right": None}
    credited = {"arm": "readers_and_writers", "credit": "rescue", "metrics": metrics}
    measured = credited | {"diagnostics": {display.RELIABILITY: estimate(0.77)}}
    plain = rendered(display.notes_table([credited | {"diagnostics": {display.RELIABILITY: None}}, measured]))
    first, second = (line for line in plain.splitlines() if "rescue" in line)
    assert "0.96 [0.91, 1.01]" in first and "0.77" not in first and "0.77 [0.72, 0.82]" in second
    assert "notes send own" in plain and "notes right" not in plain and max(map(len, plain.splitlines())) <= 80
    chat = {"metrics": dict.fromkeys(metrics), "diagnostics": {}}
    assert display.notes_table([credited | chat]) is None
