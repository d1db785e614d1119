"""Episodes for the page: hostile text stays text, filters' facts are right, and nothing is written twice."""

import json
import re

import pytest

from eval.viewer_data import FLAT, MISLED, RESCUED, TRUNCATED, flags, flat_groups, outcome, script_json, viewer_data
from tests.runs import board, chat, evaluated

HOSTILE = {
    "a script": "<script>alert(1)</script>",
    "the end of the block": '"}</script><script>alert(1)</script>',
    "a comment that swallows the end": "<!--<script>",
    "an entity": "&lt;b&gt; &amp;",
    "broken UTF-8": "\ufffd\ufffd",
    "half a surrogate pair": "\ud83d",
    "line separators": "a\u2028b\u2029c",
    "right to left": "\u202e evil \u2066 \u200f",
    "a formula": '=HYPERLINK("http://x";"y")',
    "nul": "a\0b",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_comes_back_as_it_was_and_never_leaves_the_block(text):
    block = script_json(viewer_data([chat((text, text, text, text), question=text, facts=[text], gold=text)]))
    assert block.isascii() and not re.search(r"[<>&\n]", block)
    got = json.loads(block)
    assert got["episodes"][0]["said"][0][0] == list(text)
    assert got["problems"] == [{"problem": "stories/1", "question": text, "facts": [text], "gold": text}]


@pytest.mark.parametrize(
    "notes, readers, expected",
    [
        ((0.0, 0.0), (1.0, 0.0), RESCUED),
        ((1.0, 1.0), (1.0, 0.0), MISLED),
        ((0.0, 1.0), (1.0, 0.0), RESCUED | MISLED),
        # A reader is compared with its own note, not with any note.
        ((1.0, 0.0), (1.0, 0.0), 0),
    ],
)
def test_rescued_and_misled(notes, readers, expected):
    assert flags(board(notes, readers), False) == expected


def test_a_chat_rescues_nobody_and_says_when_it_was_cut():
    assert flags(chat(correct=(None, None, 1.0, 0.0)), False) == 0
    cut = chat()
    cut["utterances"][1]["finished"] = False
    assert flags(cut, True) == FLAT | TRUNCATED


@pytest.mark.parametrize("grades, expected", [((1.0, 1.0), "all"), ((1.0, 0.0), "some"), ((0.0, 0.5), "none")])
def test_the_outcome_is_of_the_answers_alone(grades, expected):
    assert outcome(chat(correct=(None, None, *grades))) == expected
    assert outcome(board((1.0, 0.0), grades)) == expected


def test_a_group_is_flat_if_none_of_its_turns_was_paid():
    """Problem 1 has one chat with credit; problem 2 none; another step and an evaluation are other groups."""
    lines = [
        chat(advantage=0.0, problem="1"),
        chat(advantage=0.5, problem="1", episode=1),
        chat(advantage=0.0, problem="2"),
        chat(advantage=0.0, problem="1", step=5),
        evaluated(),
    ]
    assert flat_groups(lines) == {("channel_on-grpo-17", 0, "2"), ("channel_on-grpo-17", 5, "1")}


def test_what_repeats_is_written_once():
    data = viewer_data([chat(), chat(episode=1, advantage=-0.75), evaluated(), board((1.0, 0.0), (1.0, 0.0))])
    assert [e["source"] for e in data["episodes"]] == [0, 0, 1, 2]
    assert data["sources"][:2] == [
        {"name": "channel_on-grpo-17", "evaluation": False},
        {"name": "base-channel_on", "evaluation": True},
    ]
    assert len(data["problems"]) == 1 and len(data["casts"]) == 2
    assert data["most_advantage"] == 0.75
    assert [e["step"] for e in data["episodes"]] == [0, 0, None, 0]
    assert [turn["reads"] for turn in data["casts"][1]["turns"]] == [[], [], [0, 1], [1, 0]]


def test_an_episode_that_was_drawn_and_left_out_of_the_batch_is_not_trained_on():
    casts = viewer_data([chat(kept=True), chat(kept=False)])["casts"]
    assert [{turn["trained"] for turn in cast["turns"]} for cast in casts] == [{True}, {False}]


def test_pieces_that_are_not_the_text_are_not_shown():
    wrong = chat()
    wrong["utterances"][0]["pieces"] = ["on", "E"]
    del wrong["utterances"][1]["pieces"], wrong["utterances"][1]["advantage"]
    said = viewer_data([wrong])["episodes"][0]["said"]
    assert said[0] == ["one", 0.25, None, True] and said[1] == ["two", None, None, True]


def test_too_many_episodes_are_counted_and_not_dropped_silently():
    data = viewer_data([chat(episode=number) for number in range(9)], most_chars=400)
    assert 0 < len(data["episodes"]) < 9 and len(data["episodes"]) + data["left_out"] == 9


def test_runs_saved_before_agents_and_notes_were():
    old = chat()
    del old["agents"], old["parts"]
    for utterance in old["utterances"]:
        del utterance["note"]
    cast = viewer_data([old])["casts"][0]
    assert (cast["agents"], cast["parts"]) == (["A", "B"], None)
