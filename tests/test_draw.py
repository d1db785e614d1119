"""Drawing chats: who is drawn again, how often, and who plays with the adapter."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from rl.collect import Cell, Settings, credit_step, reliability
from rl.credit import ChatOptions
from rl.draw import play_step, players
from rollout.distribution import Sampling
from tasks.talk import talk_task, three_task
from tests import tiny

TASK = talk_task("channel_on", message_tokens=5, answer_tokens=9)
SETTINGS = Settings(4, 1, Sampling(0.9))
NAMES = ("never", "at once", "second round", "third round")
PROBLEMS = [tiny.problem(name, answer=name) for name in NAMES]
FIRST_RIGHT = {"never": 99, "at once": 2, "second round": 6, "third round": 11}
"""The chat of each problem in which both answers are right; no other is."""


def grader():
    """A scripted reply says "e<chat>t<turn>"."""
    return tiny.FakeGrader(lambda text, gold: float(text.startswith(f"e{FIRST_RIGHT[gold]}t")))


def step(rules, settings=SETTINGS, policy=None):
    cells = [Cell(TASK, rule, 17) for rule in rules]
    policy = policy or tiny.ScriptedPolicy(cells=len(cells))
    return policy, cells, play_step(policy, grader(), cells, [PROBLEMS] * len(cells), 0, settings)


def test_flat_problems_are_drawn_again_until_they_disagree_or_three_rounds_are_over():
    _, _, (ada, plain) = step(["reinforce_ada", "grpo"])
    assert dict(zip(NAMES, map(len, ada), strict=True)) == {
        "never": 12,
        "at once": 4,
        "second round": 8,
        "third round": 12,
    }
    assert [len(group) for group in plain] == [4] * 4
    assert [e.plan.episode for e in ada[0]] == list(range(12))  # a chat's number is its own, so its luck is too


def test_all_cells_replay_in_one_batch():
    """Two rounds more of four turns each, whatever the number of cells that want them."""
    for rules in (["reinforce_ada"], ["reinforce_ada", "ada_mixed", "grpo"]):
        policy, _, _ = step(rules)
        assert len(policy.calls) == 3 * 4


def test_a_cells_chats_do_not_depend_on_its_neighbours():
    _, _, (alone,) = step(["reinforce_ada"])
    _, _, (_, beside) = step(["grpo", "reinforce_ada"])
    texts = [[[u.text for u in e.utterances] for e in group] for group in alone]
    assert texts == [[[u.text for u in e.utterances] for e in group] for group in beside]


def test_fewer_rounds_and_other_replays():
    rounds = dataclasses.replace(SETTINGS, chat=ChatOptions(ada_rounds=2))
    assert [len(group) for group in step(["reinforce_ada"], rounds)[2][0]] == [8, 4, 8, 8]
    one = dataclasses.replace(SETTINGS, chat=ChatOptions(ada_rounds=1))
    assert [len(group) for group in step(["reinforce_ada"], one)[2][0]] == [4] * 4


def test_equal_compute_draws_as_many_as_its_twin():
    """12 + 4 + 8 + 12 = 36 chats over four problems: nine each; and the seven of another seed are no concern."""
    cells = [Cell(TASK, "grpo_equal_compute", 17), Cell(TASK, "reinforce_ada", 17), Cell(TASK, "reinforce_ada", 18)]
    episodes = play_step(tiny.ScriptedPolicy(cells=3), grader(), cells, [PROBLEMS, PROBLEMS, PROBLEMS[:2]], 0, SETTINGS)
    assert [len(group) for group in episodes[0]] == [9] * 4
    (got, _, _) = credit_step(tiny.ScriptedPolicy(cells=3), grader(), cells, episodes, 0.0, SETTINGS)
    # GRPO over all nine: problem "at once" has one right of nine.
    advantage_G = got.credits_P[1].advantage_GU[:, 0]
    np.testing.assert_allclose(advantage_G, [-1 / 9] * 2 + [8 / 9] + [-1 / 9] * 6)
    assert len(got.rows) == 36 * 4


def test_mixed_partners():
    """In the last two of every four chats B is the base: sampled without the adapter, and not trained."""
    mixed, plain = Cell(TASK, "mixed_partners", 17), Cell(TASK, "grpo", 17)
    assert [players(mixed, n, SETTINGS) for n in range(8)] == [(1, 1), (1, 1), (1, 0), (1, 0)] * 2
    assert [players(plain, n, SETTINGS) for n in range(4)] == [(1, 1)] * 4
    three = Cell(three_task("channel_on"), "mixed_partners", 17)
    assert players(three, 3, SETTINGS) == (1, 0, 0)
    policy, cells, episodes = step(["mixed_partners"])
    scales = Counter((r.row_id.turn % 2, r.scale) for r in policy.requests)
    assert scales == {(0, 1.0): 32, (1, 1.0): 16, (1, 0.0): 16}
    (got,) = credit_step(policy, grader(), cells, episodes, 0.0, SETTINGS)
    untrained = [row for row in got.rows if not row.utterance.trained]
    assert len(untrained) == 4 * 2 * 2 and all(row.utterance.turn % 2 == 1 for row in untrained)


def test_only_kept_chats_have_rows():
    _, cells, episodes = step(["reinforce_ada"])
    policy = tiny.ScriptedPolicy()
    (got,) = credit_step(policy, grader(), cells, episodes, 0.0, SETTINGS)
    assert len(got.rows) == 4 * 4 * 4 and sum(map(len, got.episodes_PG)) == 36 and not policy.requests
    assert got.summary.flat_first_frac == 0.75 and got.summary.flat_group_frac == 0.25
    won = sum(len(u.tokens) for e in got.episodes_PG[1] if e.correct == (1, 1) for u in e.utterances)
    assert won > 0 and got.summary.solved_token_frac == pytest.approx(3 / 16, abs=0.02)


def test_prefix_value_continues_every_prefix():
    """Per chat, from before turns 1, 2 and 3: 3 + 2 + 1 turns are sampled, `draws` times, each with its own key."""
    settings = dataclasses.replace(SETTINGS, draws=2)
    policy, cells, episodes = step(["prefix_value"], settings)
    first = {r.row_id for r in policy.requests}
    policy.calls.clear()
    (got,) = credit_step(policy, grader(), cells, episodes, 0.0, settings)
    again = [r.row_id for r in policy.requests]
    assert len(again) == len(set(again)) == 16 * 6 * 2 and not set(again) & first
    assert Counter(r.turn for r in again) == {1: 32, 2: 64, 3: 96}
    assert got.measured_tokens == sum(len(f"e{r.episode}t{r.turn}") + 1 for r in again)
    # No continuation is right (its number is none of FIRST_RIGHT's), but A's answer of the right chat was graded before
    # turn 3 and stays graded: that prefix is worth 1/2.
    before = got.groups_P[1].before_GU
    assert np.isnan(before[:, 0]).all() and before[2].tolist()[1:] == [0, 0, 0.5] and not before[0, 1:].any()
    np.testing.assert_allclose(got.credits_P[1].advantage_GU[2], [-0.25, 0, 0.5, 0.5])


def test_prefix_values_reliability_is_of_two_fresh_measurements():
    policy, cells, episodes = step(["prefix_value", "grpo"])
    collected = credit_step(policy, grader(), cells, episodes, 0.0, SETTINGS)
    before = {r.row_id for r in policy.requests}
    policy.calls.clear()
    found = reliability(policy, grader(), cells, collected, SETTINGS)
    fresh = [r.row_id for r in policy.requests]
    assert len(fresh) == len(set(fresh)) == 16 * 6 * 2 and not set(fresh) & before
    assert found[0] == pytest.approx(1.0) and found[1] is None  # these copies always say the same
