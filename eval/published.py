"""The published figures of the studies that this project repeats, and each task's question.

They are of Qwen2.5-1.5B-Instruct, trained with TRL 0.19.1 on an H100 (message_board: an L40S). A run on another base,
other problems or other hardware is not a repetition of them, so they are only ever shown as a labelled comparison. Data
alone: nothing here is computed.
"""

from dataclasses import dataclass, field

NOTE = (
    "Published figures are of Qwen2.5-1.5B-Instruct, trained with TRL 0.19.1 on other hardware (an H100; "
    "message_board: an L40S). They are shown beside this run for orientation; on another base or other problems the "
    "two are not comparable."
)

QUESTIONS = {
    "talk_to_solve": (
        "Two copies of one model hold half of a problem's facts each. Does reinforcement learning teach them to send "
        "what only they know, and to use what they are sent?"
    ),
    "talk_three": (
        "Three copies of one model hold a third of a problem's facts each. Does reinforcement learning teach them to "
        "send what only they know, and to use what they are sent?"
    ),
    "ask_to_solve": "Does reinforcement learning teach a copy to ask for what it lacks, and another to tell it?",
    "message_board": "Does reinforcement learning teach a copy to make use of the notes that other copies posted?",
    "board_writers": "Does paying a note by what its readers make of it teach copies to write notes that help?",
}


@dataclass(frozen=True)
class Row:
    """One line of a published table. `values`: {metric: one number, or one a seed}; `interval`: the 95% interval of
    pass_at_1 where it was published. `stage`, `arm` and `credit` (None: any) say which of ours are like it."""

    label: str
    stage: str
    arm: str | None
    values: dict[str, tuple[float, ...]]
    credit: str | None = None
    interval: tuple[float, float] | None = None
    minutes: int | None = None
    """GPU minutes a seed."""


@dataclass(frozen=True)
class Study:
    """A published study: the task it plays and its table."""

    name: str
    task: str
    rows: tuple[Row, ...] = field(repr=False)

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(metric for row in self.rows for metric in row.values))


def _talk(solves: tuple[float, ...], sends: float, uses: float, agree: float, asks: float) -> dict:
    return {
        "pass_at_1": solves,
        "sends_own": (sends,),
        "uses_partner": (uses,),
        "both_agree": (agree,),
        "asks": (asks,),
    }


def _method(name: str, solves: tuple[float, ...], partner: tuple[float, ...], minutes: int) -> tuple[Row, Row]:
    return (
        Row(name, "trained", "channel_on", {"pass_at_1": solves}, name, minutes=minutes),
        Row(f"{name}, untrained partner", "with_untrained_partner", "channel_on", {"pass_at_1": partner}, name),
    )


def _writers(solves: tuple[float, ...], boxed: float, chars: float, vote: float, rescued: float) -> dict:
    return {
        "pass_at_1": solves,
        "notes_boxed": (boxed,),
        "note_chars": (chars,),
        "vote": (vote,),
        "rescued": (rescued,),
    }


def _board(solves: tuple[float, ...], right: float, vote: float, rescued: float, misled: float) -> dict:
    return {
        "pass_at_1": solves,
        "notes_right": (right,),
        "vote": (vote,),
        "rescued": (rescued,),
        "misled": (misled,),
    }


ON, OFF, PARTNER = "channel_on", "channel_off", "with_untrained_partner"

STUDIES = (
    Study(
        "talk_to_solve",
        "talk_to_solve",
        (
            Row("untrained, channel off", "untrained", OFF, _talk((0.03,), 0.72, 0.08, 0.00, 0.25)),
            Row("untrained, chat", "untrained", ON, _talk((0.11,), 0.67, 0.30, 0.16, 0.24), interval=(0.09, 0.14)),
            Row("trained, channel off", "trained", OFF, _talk((0.04, 0.03, 0.02), 0.79, 0.05, 0.00, 0.07), "grpo"),
            Row("trained, chat", "trained", ON, _talk((0.40, 0.15, 0.35), 0.96, 0.79, 0.30, 0.00), "grpo"),
            Row("trained A, untrained B", PARTNER, ON, _talk((0.14, 0.10, 0.16), 0.70, 0.43, 0.19, 0.14), "grpo"),
        ),
    ),
    Study(
        "talk_methods",
        "talk_to_solve",
        (
            *_method("grpo", (0.40, 0.15, 0.35), (0.14, 0.10, 0.16), 105),
            *_method("reinforce_ada", (0.40, 0.39, 0.36), (0.21, 0.19, 0.13), 209),
            *_method("raft", (0.31, 0.10, 0.35), (0.20, 0.09, 0.15), 96),
            *_method("mixed_partners", (0.21, 0.46, 0.25), (0.15, 0.22, 0.14), 99),
        ),
    ),
    Study(
        "board_writers",
        "board_writers",
        (
            Row(
                "base",
                "untrained",
                None,
                _writers((0.26,), 0.26, 628, 0.14, 0.19),
                interval=(0.23, 0.30),
            ),
            Row(
                "readers_only",
                "trained",
                None,
                _writers((0.32, 0.33, 0.35), 0.31, 627, 0.23, 0.18),
                "readers_only",
                minutes=56,
            ),
            Row(
                "readers_and_writers",
                "trained",
                None,
                _writers((0.30, 0.23, 0.34), 0.08, 744, 0.12, 0.24),
                "readers_mean",
                minutes=58,
            ),
        ),
    ),
    Study(
        "message_board",
        "message_board",
        (
            Row("base, own note", "untrained", "own_note", _board((0.52,), 0.30, 0.38, 0.25, 0.03)),
            Row("base, shared board", "untrained", "shared_board", _board((0.57,), 0.30, 0.37, 0.32, 0.04)),
            Row("trained, own note", "trained", "own_note", _board((0.65, 0.68), 0.57, 0.63, 0.13, 0.04)),
            Row("trained, shared board", "trained", "shared_board", _board((0.68, 0.67), 0.41, 0.48, 0.29, 0.02)),
        ),
    ),
)
