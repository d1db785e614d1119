"""What a run directory keeps of its evaluations: `evaluations/NAME.json` and its episodes, `NAME.jsonl`.

An evaluation is whole or not there: the episodes are written first, the result that marks it as finished last.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout.episode import Episode


class Kept:
    """The finished evaluations of one run directory."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder = run, run / "evaluations"

    def save(self, name: str, summary: dict[str, Any], episodes: Iterable[Episode]) -> None:
        """Keep a finished evaluation."""
        self.folder.mkdir(exist_ok=True)
        lines = "".join(json.dumps({"evaluation": name, **episode_json(e)}) + "\n" for e in episodes)
        replace(self.folder / f"{name}.jsonl", lines.encode())
        replace(self.folder / f"{name}.json", json.dumps(summary, indent=1, allow_nan=False).encode())

    def load(self, name: str) -> dict[str, Any] | None:
        """A finished evaluation's result, or None."""
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else None

    def answers(self, name: str) -> list[tuple[str, str, float]]:
        """(problem id, text, grade) of every graded turn of a kept evaluation."""
        file = self.folder / f"{name}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [
            (episode["problem"], said["text"], said["correct"])
            for episode in map(json.loads, lines)
            for said in episode["utterances"]
            if said["correct"] is not None
        ]

    def forget(self, names: Iterable[str]) -> None:
        """Make these evaluations unfinished."""
        for name in names:
            (self.folder / f"{name}.json").unlink(missing_ok=True)


def episode_json(episode: Episode) -> dict[str, Any]:
    """An episode as it is written to episodes.jsonl: who said what, read what, and how it was graded."""
    plan = episode.plan
    return {
        "problem": plan.problem.id,
        "question": plan.problem.question,
        "facts": list(plan.problem.facts),
        "gold": plan.problem.answer,
        "arm": plan.task.arm,
        "seed": plan.seed,
        "step": plan.step,
        "episode": plan.episode,
        "adapter": list(plan.adapter),
        "agents": list(plan.task.agents),
        "parts": plan.task.parts,
        "utterances": [
            {
                "turn": u.turn,
                "agent": plan.task.agents[plan.task.turns[u.turn].agent],
                "reads": list(plan.task.turns[u.turn].reads),
                "note": plan.task.turns[u.turn].note,
                "text": u.text,
                "tokens": [int(t) for t in u.tokens],
                "logp": [round(float(v), 6) for v in u.logp],
                "prompt_tokens": len(u.prompt_tokens),
                "finished": u.finished,
                "trained": u.trained,
                "correct": u.correct,
            }
            for u in episode.utterances
        ],
    }


def write_json(file: Path, value: Any) -> None:
    """A whole JSON file or nothing. ValueError for a number that is not finite."""
    replace(file, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def replace(file: Path, data: bytes) -> None:
    """Write a whole file or nothing: to another name, flushed, then renamed."""
    temporary = file.with_name(file.name + ".tmp")
    with open(temporary, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
