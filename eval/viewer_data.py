"""Saved episodes as the JSON that the report's viewer reads, each thing written once.

The text in it is hostile: `script_json` makes a string that can stand in a script element of a page. What may be
filtered on (rescued, misled, flat group, truncated) is decided here, where it can be tested, and not in the page.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RESCUED, MISLED, FLAT, TRUNCATED = 1, 2, 4, 8
"""Bits of an episode's `flags`. A reader's own note wrong and its answer right; the other way round; every advantage of
the problem's group 0; a reply cut at its cap."""

MOST_CHARS = 150_000_000
"""Characters of messages (and 3 a token, for its quotes and comma) after which further episodes are left out, and said
to be: a browser holds about three times this."""

Saved = Mapping[str, Any]
"""One line of episodes.jsonl."""


def viewer_data(episodes: Sequence[Saved], most_chars: int = MOST_CHARS) -> dict[str, Any]:
    """{sources, problems, casts, episodes, most_advantage, left_out}.

    An episode is {source, step, problem, number, cast, flags, outcome, said}: `source`, `problem` and `cast` are
    places in those lists, `step` is None in an evaluation. `said` has a turn's [text or its pieces, advantage or None,
    grade or None, finished]. `left_out` counts the episodes for which there was no room.
    """
    flat = flat_groups(episodes)
    sources, problems, casts = _Places(), _Places(), _Places()
    out, most, chars = [], 0.0, 0
    for episode in episodes:
        said = [_said(u) for u in episode["utterances"]]
        chars += sum(len(u["text"]) + 3 * len(u.get("pieces", ())) for u in episode["utterances"])
        if chars > most_chars:
            break
        most = max([most, *(abs(one[1]) for one in said if one[1] is not None)])
        evaluation = episode.get("evaluation")
        out.append(
            {
                "source": sources.of(
                    {"name": evaluation or episode.get("cell", "unknown"), "evaluation": evaluation is not None}
                ),
                "step": None if evaluation else episode["step"],
                "problem": problems.of({key: episode[key] for key in ("problem", "question", "facts", "gold")}),
                "number": episode["episode"],
                "cast": casts.of(_cast(episode)),
                "flags": flags(episode, _group(episode) in flat),
                "outcome": outcome(episode),
                "said": said,
            }
        )
    return {
        "sources": sources.values,
        "problems": problems.values,
        "casts": casts.values,
        "episodes": out,
        "most_advantage": most,
        "left_out": len(episodes) - len(out),
    }


def flags(episode: Saved, flat: bool) -> int:
    """What an episode can be filtered on. The i-th note and the i-th answer are one copy's (eval.board)."""
    said = episode["utterances"]
    notes = [u["correct"] for u in said if u.get("note")]
    readers = [u["correct"] for u in said if not u.get("note") and u["correct"] is not None]
    pairs = list(zip(notes, readers)) if len(notes) == len(readers) else []
    found = FLAT if flat else 0
    found |= RESCUED if any(note < 1 and reader == 1 for note, reader in pairs) else 0
    found |= MISLED if any(note == 1 and reader < 1 for note, reader in pairs) else 0
    return found | (TRUNCATED if any(not u["finished"] for u in said) else 0)


def outcome(episode: Saved) -> str:
    """`all`, `some` or `none` of the answers are right; notes are graded too, and are no answers."""
    grades = [u["correct"] for u in episode["utterances"] if u["correct"] is not None and not u.get("note")]
    right = grades.count(1)
    return "none" if right == 0 else "all" if right == len(grades) else "some"


def flat_groups(episodes: Iterable[Saved]) -> set[tuple]:
    """The (cell, step, problem) of training groups in which no turn was paid anything above its baseline."""
    flat: dict[tuple, bool] = {}
    for episode in episodes:
        paid = [u.get("advantage") for u in episode["utterances"]]
        if "cell" in episode and None not in paid:
            flat[_group(episode)] = flat.get(_group(episode), True) and not any(paid)
    return {group for group, is_flat in flat.items() if is_flat}


def script_json(value: Any) -> str:
    """JSON that can't end a script element, open a comment in it or break a line of it: only ASCII, and no < > &."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _group(episode: Saved) -> tuple:
    return (episode.get("cell"), episode["step"], episode["problem"])


def _said(utterance: Mapping[str, Any]) -> list[Any]:
    """The pieces stand for the text only where they join to it."""
    pieces, text = utterance.get("pieces"), utterance["text"]
    words = pieces if pieces and "".join(pieces) == text else text
    return [words, utterance.get("advantage"), utterance["correct"], utterance["finished"]]


def _cast(episode: Saved) -> dict[str, Any]:
    """Who speaks when, and who reads whom. Runs saved before `agents` was: the speakers in order."""
    said = episode["utterances"]
    agents = episode.get("agents") or list(dict.fromkeys(u["agent"] for u in said))
    return {
        "arm": episode["arm"],
        "agents": agents,
        "parts": episode.get("parts"),
        "trained_agents": [bool(scale) for scale in episode["adapter"]],
        "turns": [
            {
                "agent": agents.index(u["agent"]),
                "reads": u["reads"],
                "note": bool(u.get("note")),
                "trained": u["trained"] and episode.get("kept", True),
            }
            for u in said
        ],
    }


class _Places:
    """A list without doubles: `of(value)` is the value's place in `values`, put there if it is new."""

    def __init__(self) -> None:
        self.values: list[dict[str, Any]] = []
        self._place: dict[str, int] = {}

    def of(self, value: dict[str, Any]) -> int:
        key = json.dumps(value)
        if key not in self._place:
            self._place[key] = len(self.values)
            self.values.append(value)
        return self._place[key]
