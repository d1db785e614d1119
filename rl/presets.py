"""Defaults by preset and task: the built-in wind tunnel, and the published settings."""

import dataclasses
from typing import Any

from rl.config import Config, ConfigError

TINY = Config()
HARD = dataclasses.replace(TINY, preset="tiny-hard", model="builtin-hard", data="stories-three")
QWEN = dataclasses.replace(
    TINY,
    preset="qwen2.5-1.5b",
    model="Qwen/Qwen2.5-1.5B-Instruct",
    dtype="bfloat16",
    data="openai/gsm8k",
    deal="whole",
    steps=80,
    message_tokens=160,
    answer_tokens=384,
    prompt_style="full",
    max_prompt_tokens=1280,
    lr=1e-4,
    eval_rows=200,
)
BOARD = {"problems_per_step": 8, "episodes_per_problem": 1, "eval_episodes": 1}
PRESETS: dict[tuple[str, str], Config] = {
    ("tiny", "talk_to_solve"): TINY,
    ("tiny", "talk_three"): dataclasses.replace(TINY, task="talk_three", max_prompt_tokens=208),
    ("tiny", "ask_to_solve"): dataclasses.replace(TINY, task="ask_to_solve", max_prompt_tokens=176),
    ("tiny", "message_board"): dataclasses.replace(TINY, task="message_board", **BOARD),
    ("tiny", "board_writers"): dataclasses.replace(TINY, task="board_writers", **BOARD),
    ("tiny-hard", "talk_to_solve"): HARD,
    ("tiny-hard", "talk_three"): dataclasses.replace(HARD, task="talk_three", max_prompt_tokens=208),
    ("tiny-hard", "ask_to_solve"): dataclasses.replace(HARD, task="ask_to_solve", max_prompt_tokens=176),
    ("qwen2.5-1.5b", "talk_to_solve"): QWEN,
    ("qwen2.5-1.5b", "talk_three"): dataclasses.replace(QWEN, task="talk_three", max_prompt_tokens=1792),
    ("qwen2.5-1.5b", "ask_to_solve"): dataclasses.replace(QWEN, task="ask_to_solve", message_tokens=48),
    ("qwen2.5-1.5b", "message_board"): dataclasses.replace(
        QWEN,
        task="message_board",
        **(BOARD | {"problems_per_step": 12}),
        train_problems=512,
        heldout_problems=120,
        steps=40,
        message_tokens=256,
        max_prompt_tokens=2048,
    ),
    ("qwen2.5-1.5b", "board_writers"): dataclasses.replace(
        QWEN,
        task="board_writers",
        **(BOARD | {"problems_per_step": 12}),
        data="EleutherAI/hendrycks_math",
        message_tokens=256,
        answer_tokens=512,
        max_prompt_tokens=1536,
    ),
}
"""Defaults by (preset, task); the published settings are SPEC 2's."""

STUDIES: dict[str, dict[str, Any]] = {
    "talk_to_solve": {"task": "talk_to_solve", "arms": ("channel_on", "channel_off"), "seeds": (17, 18, 19)},
    "talk_methods": {
        "task": "talk_to_solve",
        "credit": ("grpo", "reinforce_ada", "raft", "mixed_partners"),
        "seeds": (17, 18, 19),
    },
    "message_board": {"task": "message_board", "arms": ("own_note", "shared_board"), "seeds": (17, 18)},
    "board_writers": {
        "task": "board_writers",
        "arms": ("readers_only", "readers_and_writers"),
        "seeds": (17, 18, 19),
    },
}
"""The published studies whole (SPEC 2): the task, its arms or rules, and the seeds; sizes are the preset's."""


def defaults(preset: str, task: str | None, study: str | None) -> Config:
    """What every flag that isn't given is. ConfigError for an unknown study, or one of another task.

    An unknown preset or task gives the plain defaults; reading the flags then refuses it.
    """
    if study is None:
        return PRESETS.get((preset, task or "talk_to_solve"), Config())
    if study not in STUDIES:
        raise ConfigError(f"--study {study!r} is unknown; choose from {', '.join(STUDIES)}")
    if task not in (None, STUDIES[study]["task"]):
        raise ConfigError(f"--study {study} is of task {STUDIES[study]['task']}, not {task}")
    base = PRESETS.get((preset, STUDIES[study]["task"]), Config())
    return dataclasses.replace(base, **STUDIES[study])
