"""Which evaluations a study has, and which of them are played."""

from types import SimpleNamespace

import pytest

from eval.kept import Kept
from eval.suite import Subject, base_evaluations, play_missing, trained_evaluations
from rl.config import Config
from rollout.setup import build_tasks
from tests import tiny


def names(evaluations):
    return [item.name for item in evaluations]


def test_the_base_in_every_arm_and_once_without_the_channel():
    c = Config(base_evaluations=2)
    assert names(base_evaluations(c, build_tasks(c))) == [
        "base-channel_on",
        "base-channel_on-again-1",
        "base-channel_off",
    ]
    both = Config(arms=("channel_on", "channel_off"), base_evaluations=1)
    assert names(base_evaluations(both, build_tasks(both))) == ["base-channel_on", "base-channel_off"]
    board = Config(task="board_writers", base_evaluations=1)
    assert names(base_evaluations(board, build_tasks(board))) == ["base-readers_and_writers"]


def test_cells_alone_and_beside_the_base():
    c = Config(arms=("channel_on", "channel_off"))
    subjects = [Subject(f"{arm}-grpo-1", "grpo", 1, task, x) for x, (arm, task) in enumerate(build_tasks(c).items())]
    items = trained_evaluations(subjects)
    assert [(item.name, item.cell, item.adapter) for item in items] == [
        ("channel_on-grpo-1-trained", 0, (1.0, 1.0)),
        ("channel_on-grpo-1-with_untrained_partner", 0, (1.0, 0.0)),
        ("channel_off-grpo-1-trained", 1, (1.0, 1.0)),  # who hears nobody has no partner
    ]


@pytest.mark.parametrize("together, played", [(True, ["a", "b", "c"]), (False, ["b", "c"])])
def test_only_what_is_missing_is_played_unless_all_must_be_of_one_batch(tmp_path, together, played):
    task = tiny.chat_task()
    items = [SimpleNamespace(name=n, task=task, cell=None, adapter=(0.0, 0.0), repeat=i) for i, n in enumerate("abc")]
    kept, policy = Kept(tmp_path), tiny.ScriptedPolicy()
    kept.save("a", {"metrics": "old"}, [])
    c = SimpleNamespace(
        eval_episodes=1, eval_temperature=0.9, eval_top_p=1.0, eval_top_k=0, eval_repetition_penalty=1.0
    )
    calls = []
    args = (c, policy, tiny.FakeGrader(), kept, items, [tiny.problem("p"), tiny.problem("q")], together)
    assert play_missing(*args, checkpoint=lambda: calls.append(1)) == played and len(calls) == 2
    assert len(policy.calls[0][0]) == 2 * len(played)
    assert all(kept.load(name) is not None for name in "abc") and (kept.load("a") == {"metrics": "old"}) != together
    assert play_missing(*args) == []
