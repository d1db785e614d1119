"""Defaults by preset and task: the built-in wind tunnel, and the published settings."""

import dataclasses

from rl.config import Config

TINY = Config()
HARD = dataclasses.replace(TINY, preset="tiny-hard", model="builtin-hard", data="stories-three")
QWEN = dataclasses.replace(
    TINY,
    preset="qwen2.5-1.5b",
    model="Qwen/Qwen2.5-1.5B-Instruct",
    dtype="bfloat16",
    remat=True,
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
