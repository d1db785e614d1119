"""Collecting: which problems a step plays, and which episode and turn each row's advantage comes from."""

import numpy as np
import pytest

from rl.collect import Cell, Settings, credit_step, groups_of, pay, problems_at
from rl.draw import play_step
from rl.reread import shape_of
from rollout.distribution import Sampling
from tasks.talk import talk_task
from tests import tiny

PROBLEMS = [tiny.problem(f"p{i}") for i in range(10)]
TASK = talk_task("channel_on", message_tokens=5, answer_tokens=9)
CELL = Cell(TASK, "grpo", 17)
SETTINGS = Settings(4, 1, Sampling(0.9))


def ids(seed=17, data_seed=0, steps=range(5), per_step=4):
    return [[p.id for p in problems_at(PROBLEMS, seed, data_seed, step, per_step)] for step in steps]


@pytest.mark.parametrize("per_step", [1, 4, 10, 25])
def test_every_pass_covers_every_problem_once(per_step):
    """Also when a step lies across two passes, or holds more than one."""
    steps = 100 // per_step
    flat = [name for step in ids(steps=range(steps), per_step=per_step) for name in step]
    passes = [flat[start : start + 10] for start in range(0, 100, 10)]
    assert all(sorted(one) == sorted(p.id for p in PROBLEMS) for one in passes)
    assert len({tuple(one) for one in passes}) == 10


def test_problems_are_a_function_of_the_step_alone():
    in_order = ids()
    assert [ids(steps=[step])[0] for step in (3, 0, 4, 1, 2)] == [in_order[step] for step in (3, 0, 4, 1, 2)]


def test_problems_differ_by_seed():
    assert ids(seed=17) != ids(seed=18) and ids(data_seed=0) != ids(data_seed=1)
    assert ids(seed=17, data_seed=18) != ids(seed=18, data_seed=17)


def test_a_cells_name_holds_all_it_is():
    assert CELL.name == "channel_on-grpo-17"
    names = {
        Cell(talk_task(arm), c, s).name for arm in ("channel_on", "channel_off") for c in ("x", "y") for s in (1, 2)
    }
    assert len(names) == 8


def test_each_row_is_paid_its_own_chats_advantage():
    """Team rewards (1, 1/2, 0, 1/2) of a, mean 1/2; (1, 0, 0, 0) of b, mean 1/4. Ids: 100 x (chat + 1) + turn."""
    grades = {"a": [(1, 1), (0, 1), (0, 0), (1, 0)], "b": [(1, 1), (0, 0), (0, 0), (0, 0)]}
    episodes_PG = [
        [tiny.episode(TASK, tiny.problem(p), [p] * 4, pair, number=g) for g, pair in enumerate(pairs)]
        for p, pairs in grades.items()
    ]
    got = pay(CELL, episodes_PG, SETTINGS)
    table = [(row.utterance.text, int(row.utterance.tokens[0]), row.advantage, row.cap) for row in got.rows]
    paid = {"a": [0.5, 0, -0.5, 0], "b": [0.75, -0.25, -0.25, -0.25]}
    assert table == [
        (p, 100 * (g + 1) + turn, paid[p][g], (5, 5, 9, 9)[turn]) for p in "ab" for g in range(4) for turn in range(4)
    ]
    assert got.summary.reward == 0.375 and got.summary.flat_group_frac == 0
    assert got.episodes_PG is episodes_PG


def test_a_frozen_partners_rows_are_there_paid_and_not_trained():
    """Whether a turn is trained is not a matter of its advantage."""
    adapters = [(1.0, 1.0), (1.0, 0.0)]
    group = [
        tiny.episode(TASK, tiny.problem(), "wxyz", pair, number=g, adapter=adapter)
        for g, (pair, adapter) in enumerate(zip([(1, 1), (0, 0)], adapters, strict=True))
    ]
    rows = pay(CELL, [group], SETTINGS).rows
    assert [row.utterance.trained for row in rows] == [True] * 4 + [True, False, True, False]
    assert [row.advantage for row in rows] == [0.5] * 4 + [-0.5] * 4


def test_a_groups_grades_stand_under_their_turns():
    group = [tiny.episode(TASK, tiny.problem(), "wxyz", pair) for pair in [(0.25, 0.5), (0.75, 1.0)]]
    (got,) = groups_of(shape_of(TASK), [group])
    np.testing.assert_array_equal(got.correct_GU, [[np.nan, np.nan, 0.25, 0.5], [np.nan, np.nan, 0.75, 1.0]])
    np.testing.assert_array_equal(got.reads_UU, np.tril(np.ones((4, 4), bool), -1))
    assert not got.notes_U.any() and got.round_U.tolist() == [0, 1, 2, 3]


def test_a_step_plays_every_cell_with_its_own_seed_and_task():
    """A step's keys are its cell's seed, the step, the problem and the chat; all of them differ."""
    cells = [Cell(TASK, "grpo", 17), Cell(talk_task("channel_off"), "grpo", 18)]
    policy, grader = tiny.ScriptedPolicy(cells=2), tiny.FakeGrader(lambda text, gold: float(text.startswith("e0")))
    episodes = play_step(policy, grader, cells, [PROBLEMS[:2], PROBLEMS[3:5]], 6, SETTINGS)
    got = credit_step(policy, grader, cells, episodes, 0.0, SETTINGS)
    assert len({r.row_id for r in policy.requests}) == len(policy.requests) == 2 * 2 * 4 * 4
    for cell, (name, seed) in enumerate([("channel_on", 17), ("channel_off", 18)]):
        rows = [r for call in policy.calls for r in call[cell]]
        assert {(r.row_id.seed, r.row_id.step, r.scale) for r in rows} == {(seed, 6, 1.0)}
        assert {e.plan.task.arm for group in got[cell].episodes_PG for e in group} == {name}
    assert [[e.problem_id for e in group] for group in got[1].episodes_PG] == [["p3"] * 4, ["p4"] * 4]
    # Only chat 0 was right: 1 - 1/4, and 0 - 1/4 for the others.
    assert [row.advantage for row in got[0].rows] == ([0.75] * 4 + [-0.25] * 12) * 2
