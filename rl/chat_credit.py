"""Credit for chats (SPEC 2.4 and 3), beside `grpo` of rl.credit. The group axis is the G chats of a problem.

Every turn of a chat is paid the chat's team reward, but in `discounted_team` and `prefix_value`, which tell turns
apart. Which chats there are is not decided here: rl.draw draws them again, and mixes partners. `mixed_partners`,
`ada_mixed` and `grpo_equal_compute` are `grpo` and `reinforce_ada` over other chats.
"""

import numpy as np

from rl.credit import ChatOptions, Credit, Group, team_reward

GAMMA = 0.3
"""Discount of `discounted_team`, as in MAPoRL (Park et al., 2025)."""


def is_flat(reward_G: np.ndarray, options: ChatOptions) -> bool:
    """Have these chats' team rewards nothing to tell apart: all equal, or (`binary`) no full win or nothing else."""
    if options.ada_flat == "binary":
        reward_G = reward_G == 1
    return bool((reward_G == reward_G[0]).all())


def wants_more(reward_G: np.ndarray, options: ChatOptions) -> bool:
    """Is a problem with these chats so far to be drawn again."""
    return is_flat(reward_G, options) and (options.ada_replay == "flat" or not reward_G.any())


def reinforce_ada(group: Group) -> Credit:
    """GRPO on problems that disagreed at once; from a replayed pool, half of a round's chats best and half worst.

    Reinforce-Ada (Xiong et al., 2025) as SPEC 2.4 has it. Chats are sorted by team reward, equal ones in the order they
    were drawn; of a pool larger than a round of F chats, the first F // 2 and the last F - F // 2 are kept. Advantage =
    reward - mean of every chat drawn, those not kept included. A pool that stayed flat is kept at advantage 0.

    Worked example, F = 4, rewards (0, 0, 0, 0, 0, 1, 0, 0), mean 1/8: sorted, chat 5 comes first, then 0, 1, 2, 3, 4,
    6, 7; kept are 5, 0, 6 and 7, and paid +7/8, -1/8, -1/8, -1/8.
    """
    options, reward_G = group.options, team_reward(group.answers_GU)
    drawn, round_size = len(reward_G), group.first or len(reward_G)
    order = np.argsort(-reward_G, kind="stable")
    best = round_size // 2
    kept_G = np.zeros(drawn, bool)
    kept_G[order[:best]] = kept_G[order[drawn - (round_size - best) :]] = True
    baseline = reward_G.mean() if options.ada_baseline == "drawn" else reward_G[kept_G].mean()
    advantage_G = np.where(kept_G, reward_G - baseline, 0.0)
    if is_flat(reward_G, options):
        advantage_G[:] = 0.0
        kept_G &= options.ada_keep_flat
    return Credit(_all_turns(reward_G, group), _all_turns(advantage_G, group), kept_G)


def raft(group: Group) -> Credit:
    """1 for every turn of a chat whose answers are all right, else 0, without a baseline (Dong et al., 2023).

    Losers stay in the loss's denominator, so the step's size falls with the winners' share; with `win_tokens` they
    are left out, and it is supervised learning on the winners.
    """
    win_G = team_reward(group.answers_GU) == 1
    paid_GU = _all_turns(win_G.astype(np.float64), group)
    return Credit(paid_GU, paid_GU.copy(), win_G if group.options.raft_norm == "win_tokens" else None)


def discounted_chat(group: Group) -> Credit:
    """Own grade now + gamma-discounted mean of everyone's later grades, over the discounts' sum (MAPoRL).

    A message has no grade of its own and is paid the later ones alone. The baseline is the mean over the problem's
    chats of the same turn. Worked example, A, B, A, B with grades (a, b): messages (0.3 a + 0.09 b) / 0.39,
    A's answer (a + 0.3 b) / 1.3, B's answer b.
    """
    graded_U = ~np.isnan(group.correct_GU).all(axis=0)
    rounds = sorted(set(group.round_U[graded_U]))
    mean_GR = np.stack([group.correct_GU[:, graded_U & (group.round_U == r)].mean(axis=1) for r in rounds], axis=1)
    reward_GU = np.zeros_like(group.correct_GU)
    for u, now in enumerate(group.round_U):
        pay_G, total = (group.correct_GU[:, u].copy(), 1.0) if graded_U[u] else (np.zeros(len(reward_GU)), 0.0)
        for distance, r in enumerate((r for r in rounds if r > now), start=1):
            pay_G += GAMMA**distance * mean_GR[:, rounds.index(r)]
            total += GAMMA**distance
        reward_GU[:, u] = pay_G / total
    return Credit(reward_GU, reward_GU - reward_GU.mean(axis=0, keepdims=True))


def prefix_value(group: Group) -> Credit:
    """A turn's advantage = the chat's value after it - its value before it (VinePPO, Kazemnejad et al., 2024).

    The value before the first round is the mean team reward of the problem's chats, after the last turn the chat's own
    team reward, and in between the mean over m continuations (`before_GU`). Turns of one round share it. A chat's
    advantages, one a round, add up to its GRPO advantage.
    """
    if group.before_GU is None:
        raise ValueError("prefix_value needs the value before each turn, and none was measured")
    reward_G = team_reward(group.answers_GU)
    rounds = sorted(set(group.round_U))
    first_U = {r: int(np.flatnonzero(group.round_U == r)[0]) for r in rounds}
    value_GR = np.stack([group.before_GU[:, first_U[r]] for r in rounds], axis=1)
    value_GR[:, 0] = reward_G.mean()
    gain_GR = np.diff(value_GR, axis=1, append=reward_G[:, None])
    advantage_GU = gain_GR[:, [rounds.index(r) for r in group.round_U]]
    return Credit(_all_turns(reward_G, group), advantage_GU)


def _all_turns(value_G: np.ndarray, group: Group) -> np.ndarray:
    return np.repeat(value_G[:, None], group.correct_GU.shape[1], axis=1)
