"""Credit by hand."""

import numpy as np
import pytest

from rl.credit import Group, grpo, summarise, team_reward

N = np.nan
READS = np.zeros((4, 4), bool)


def chats(*pairs):
    """A, B, A, B: only the last two turns are graded."""
    return Group(np.array([[N, N, a, b] for a, b in pairs]), READS, np.zeros(4, bool), np.arange(4))


@pytest.mark.parametrize(
    "pairs, rewards, advantages",
    [
        (((1, 1), (1, 0), (0, 0), (0, 1)), [1, 0.5, 0, 0.5], [0.5, 0, -0.5, 0]),
        (((1, 1), (0, 0), (0, 0), (0, 0)), [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        (((1, 1),) * 4, [1, 1, 1, 1], [0, 0, 0, 0]),
        (((1, 0), (0, 1), (1, 0), (0, 1)), [0.5] * 4, [0, 0, 0, 0]),
        (((0, 0),) * 4, [0] * 4, [0, 0, 0, 0]),
        # No division by the standard deviation: a group that hardly differs is paid hardly anything.
        (((1, 1), (1, 1), (1, 1), (1, 0)), [1, 1, 1, 0.5], [0.125, 0.125, 0.125, -0.375]),
    ],
)
def test_grpo(pairs, rewards, advantages):
    credit = grpo(chats(*pairs))
    np.testing.assert_array_equal(credit.reward_GU, np.repeat(np.array(rewards)[:, None], 4, 1))
    np.testing.assert_array_equal(credit.advantage_GU, np.repeat(np.array(advantages)[:, None], 4, 1))


def test_advantages_of_a_group_sum_to_zero():
    rng = np.random.default_rng(0)
    for _ in range(50):
        group = chats(*rng.integers(0, 2, (4, 2)).tolist())
        assert abs(grpo(group).advantage_GU.sum()) < 1e-12


def test_one_chat_has_no_advantage():
    assert not grpo(chats((1, 0))).advantage_GU.any()


def test_an_episode_without_a_grade_is_an_error():
    with pytest.raises(ValueError, match="no graded turn"):
        team_reward(np.array([[N, N], [N, 1.0]]))


def test_summary_counts_flat_groups():
    groups = [chats((1, 1), (0, 0)), chats((1, 0), (0, 1)), chats((0, 0), (0, 0)), chats((1, 1), (1, 1))]
    summary = summarise(groups, [grpo(g) for g in groups])
    assert summary.reward == pytest.approx((0.5 + 0.5 + 0 + 1) / 4)
    assert summary.flat_group_frac == 0.75
    np.testing.assert_allclose(summary.mean_abs_U, [0.125] * 4)
    assert summary.own_correlation == pytest.approx(
        np.corrcoef([1, 1, 0, 0] + [1, 0, 0, 1] + [0] * 4 + [1] * 4, [0.5, 0.5, -0.5, -0.5] + [0] * 12)[0, 1]
    )


def test_summary_of_constant_grades_has_no_correlation():
    groups = [chats((1, 1), (1, 1))]
    assert summarise(groups, [grpo(g) for g in groups]).own_correlation is None
