"""Presets and published studies: whole, runnable, and refused where they don't fit."""

import pytest

from rl.config import ConfigError, check
from rl.presets import PRESETS, STUDIES, defaults
from rl.train import parse


@pytest.mark.parametrize("preset, task", PRESETS)
def test_every_preset_passes_its_own_checks(preset, task):
    config = PRESETS[preset, task]
    assert (config.preset, config.task) == (preset, task)
    check(config)


@pytest.mark.parametrize("preset", ["tiny", "qwen2.5-1.5b"])
@pytest.mark.parametrize("study", STUDIES)
def test_every_study_passes_its_checks(preset, study):
    check(defaults(preset, None, study))


def test_a_study_from_the_command_line():
    """What is published: four rules, three seeds, 80 steps of 8 problems x 4 chats; a flag still overrides."""
    config, resuming = parse(["--study", "talk_methods", "--preset", "qwen2.5-1.5b", "--steps", "7"])
    assert config.credit == ("grpo", "reinforce_ada", "raft", "mixed_partners") and config.seeds == (17, 18, 19)
    assert (config.problems_per_step, config.episodes_per_problem, config.train_problems) == (8, 4, 1024)
    assert (config.steps, config.lr, config.base_evaluations, resuming) == (7, 1e-4, 3, False)
    board, _ = parse(["--study", "message_board", "--preset", "qwen2.5-1.5b"])
    assert (board.task, board.arms, board.seeds) == ("message_board", ("own_note", "shared_board"), (17, 18))
    assert (board.steps, board.problems_per_step, board.train_problems, board.heldout_problems) == (40, 12, 512, 120)


def test_studies_that_are_refused():
    with pytest.raises(ConfigError, match="'talk' is unknown; choose from talk_to_solve, talk_methods"):
        parse(["--study", "talk"])
    with pytest.raises(ConfigError, match="board_writers is of task board_writers, not talk_to_solve"):
        parse(["--study", "board_writers", "--task", "talk_to_solve"])
