"""The chat rules by hand."""

import dataclasses

import numpy as np
import pytest

from rl.chat_credit import discounted_chat, is_flat, prefix_value, raft, reinforce_ada, wants_more
from rl.credit import ChatOptions, Group, grpo, team_reward
from rl.rules import CREDITS

N = np.nan
PAIRS = {0: (0, 0), 0.5: (1, 0), 1: (1, 1)}
READS = np.tril(np.ones((4, 4), bool), -1)


def chats(*rewards, first=4, before=None, **options):
    """A, B, A, B, of which the last two are graded; `rewards` are team rewards, in the order of drawing."""
    return Group(
        np.array([[N, N, *PAIRS[r]] for r in rewards]),
        READS,
        np.zeros(4, bool),
        np.arange(4),
        before_GU=before,
        first=first,
        options=ChatOptions(**options),
    )


def by_chat(credit):
    """One advantage a chat: every turn's is the same."""
    assert (credit.advantage_GU == credit.advantage_GU[:, :1]).all()
    return credit.advantage_GU[:, 0].tolist()


# Rewards in order of drawing -> which chats are kept, and what they are paid.
ADA = {
    "one high in eight": ((0, 0, 0, 0, 0, 1, 0, 0), [0, 5, 6, 7], [-1 / 8, 7 / 8, -1 / 8, -1 / 8]),
    "the high one first": ((0, 0, 0, 0, 1, 0, 0, 0), [0, 4, 6, 7], [-1 / 8, 7 / 8, -1 / 8, -1 / 8]),
    "one low in eight": ((1, 1, 1, 1, 1, 1, 0, 1), [0, 1, 6, 7], [1 / 8, 1 / 8, -7 / 8, 1 / 8]),
    "three values": ((0.5, 0.5, 0.5, 0.5, 1, 0, 0.5, 1), [4, 5, 6, 7], [7 / 16, -9 / 16, -1 / 16, 7 / 16]),
    "halves among wrong": ((0, 0, 0, 0, 0.5, 0, 0, 0.5), [4, 5, 6, 7], [3 / 8, -1 / 8, -1 / 8, 3 / 8]),
    "twelve, two high": ((0,) * 8 + (0, 1, 0, 1), [8, 9, 10, 11], [-1 / 6, 5 / 6, -1 / 6, 5 / 6]),
    "flat after three rounds": ((0,) * 12, [0, 1, 10, 11], [0, 0, 0, 0]),
    "all one half, three rounds": ((0.5,) * 12, [0, 1, 10, 11], [0, 0, 0, 0]),
    "all right, three rounds": ((1,) * 12, [0, 1, 10, 11], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("rewards, kept, paid", ADA.values(), ids=ADA)
def test_reinforce_ada(rewards, kept, paid):
    credit = reinforce_ada(chats(*rewards))
    assert np.flatnonzero(credit.kept).tolist() == kept
    advantage_G = np.array(by_chat(credit))
    np.testing.assert_allclose(advantage_G[kept], paid, rtol=0, atol=1e-12)
    assert not np.delete(advantage_G, kept).any()


def test_advantages_use_the_mean_of_all_drawn():
    """The kept four of (0 x 7, 1) have mean 1/4; the baseline is 1/8, the mean of eight. Recentred, it is 1/4."""
    rewards = (0, 0, 0, 0, 0, 1, 0, 0)
    assert by_chat(reinforce_ada(chats(*rewards)))[5] == 7 / 8
    recentred = by_chat(reinforce_ada(chats(*rewards, ada_baseline="kept")))
    assert recentred == [-1 / 4, 0, 0, 0, 0, 3 / 4, -1 / 4, -1 / 4] and sum(recentred) == 0


@pytest.mark.parametrize("rewards", [(1, 0, 0, 0.5), (1, 1, 1, 0), (0, 0, 0, 0), (0.5,) * 4])
def test_ada_without_a_replay_is_grpo(rewards):
    ada, plain = reinforce_ada(chats(*rewards)), grpo(chats(*rewards))
    np.testing.assert_array_equal(ada.advantage_GU, plain.advantage_GU)
    assert ada.kept.all()


def test_flat_problems_may_be_dropped():
    assert not reinforce_ada(chats(*(0,) * 12, ada_keep_flat=False)).kept.any()
    assert not reinforce_ada(chats(*(1,) * 4, ada_keep_flat=False)).kept.any()
    assert reinforce_ada(chats(0, 0, 0, 1, ada_keep_flat=False)).kept.all()


def test_what_counts_as_flat():
    equal, binary = ChatOptions(), ChatOptions(ada_flat="binary")
    for rewards, is_equal, is_binary in [
        ((0, 0, 0, 0), True, True),
        ((0.5,) * 4, True, True),
        ((0, 0.5, 0, 0), False, True),  # no full win
        ((1, 0.5, 1, 1), False, False),
        ((1, 1, 1, 1), True, True),
    ]:
        assert is_flat(np.array(rewards), equal) == is_equal and is_flat(np.array(rewards), binary) == is_binary
    # Flat by `binary` after all rounds: kept at advantage 0, though rewards differ.
    assert not reinforce_ada(chats(0, 0.5, *(0,) * 10, ada_flat="binary")).advantage_GU.any()


def test_which_flat_problems_are_drawn_again():
    wrong_only = ChatOptions(ada_replay="all_wrong")
    for rewards, any_flat, only_wrong in [
        ((0, 0, 0, 0), True, True),
        ((0.5,) * 4, True, False),
        ((1,) * 4, True, False),
        ((0, 0, 0, 1), False, False),
    ]:
        assert wants_more(np.array(rewards), ChatOptions()) == any_flat
        assert wants_more(np.array(rewards), wrong_only) == only_wrong


def test_raft_pays_full_wins_alone():
    credit = raft(chats(1, 0.5, 0, 1))
    assert by_chat(credit) == [1, 0, 0, 1] and credit.kept.all()
    winners = raft(chats(1, 0.5, 0, 1, raft_norm="win_tokens"))
    assert by_chat(winners) == [1, 0, 0, 1] and winners.kept.tolist() == [True, False, False, True]
    assert not raft(chats(0.5, 0, 0, 0)).advantage_GU.any()


def test_discounted_chat():
    """Grades (1, 0) and (0, 0): messages (0.3 x 1 + 0.09 x 0) / 0.39, A's answer 1 / 1.3, B's answer 0; and zeros."""
    credit = discounted_chat(chats(0.5, 0))
    np.testing.assert_allclose(credit.reward_GU[0], [0.3 / 0.39, 0.3 / 0.39, 1 / 1.3, 0])
    np.testing.assert_array_equal(credit.reward_GU[1], 0)
    np.testing.assert_allclose(credit.advantage_GU, [[5 / 13, 5 / 13, 5 / 13, 0], [-5 / 13, -5 / 13, -5 / 13, 0]])
    whole = discounted_chat(chats(1, 1))
    np.testing.assert_allclose(whole.reward_GU, 1)
    assert CREDITS["discounted_team"].serves(True) and CREDITS["discounted_team"].serves(False)


def test_prefix_value():
    """Team rewards (1, 0), mean 1/2. Chat 0 was worth 0.7, 0.6, 0.9 before its turns 1, 2, 3; chat 1 0.4, 0.5, 0."""
    before = np.array([[N, 0.7, 0.6, 0.9], [N, 0.4, 0.5, 0.0]])
    credit = prefix_value(chats(1, 0, before=before))
    np.testing.assert_allclose(credit.advantage_GU, [[0.2, -0.1, 0.3, 0.1], [-0.1, 0.1, -0.5, 0.0]])
    # A chat's turns add up to its GRPO advantage.
    np.testing.assert_allclose(credit.advantage_GU.sum(axis=1), [0.5, -0.5])
    with pytest.raises(ValueError, match="none was measured"):
        prefix_value(chats(1, 0))


def test_every_rule_is_zero_where_nothing_differs():
    before = np.full((4, 4), 0.5)
    before[:, 0] = N
    for name, rule in CREDITS.items():
        if rule.serves(False) and name != "raft":
            credit = rule.pay(chats(*(0.5,) * 4, before=before))
            assert not credit.advantage_GU.any(), name


def test_the_published_choices_are_the_defaults():
    assert dataclasses.asdict(ChatOptions()) == {
        "ada_rounds": 3,
        "ada_flat": "equal",
        "ada_replay": "flat",
        "ada_keep_flat": True,
        "ada_baseline": "drawn",
        "raft_norm": "tokens",
    }
    assert team_reward(chats(0, 0.5, 1).answers_GU).tolist() == [0, 0.5, 1]
