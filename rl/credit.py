"""Credit rules: from the graded answers of one problem's group to what each turn is paid.

A rule is a function of plain arrays, `(Group) -> Credit`, and names its own group axis: over the G episodes of a
problem (chats), or over the readers within one episode. Three names stay apart: `correct` is a grade, `reward` what a
rule pays, `advantage` the reward minus its baseline. No masks here: whether a turn is trained is not a matter of its
advantage. To add a rule, write the function and put it in `CREDITS`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Group(NamedTuple):
    """One problem's G episodes of U turns.

    `correct_GU` fp64: the grade of each graded turn, NaN where a turn is not graded. `reads_UU` bool: turn u is shown
    turn v.
    """

    correct_GU: np.ndarray
    reads_UU: np.ndarray


class Credit(NamedTuple):
    """`reward_GU`: what each turn is paid; `advantage_GU`: that minus its baseline."""

    reward_GU: np.ndarray
    advantage_GU: np.ndarray


def team_reward(correct_GU: np.ndarray) -> np.ndarray:
    """[G]: the mean grade of an episode's graded turns; in {0, 1/2, 1} for two of them."""
    assert correct_GU.ndim == 2, f"correct_GU has shape {correct_GU.shape}; it needs [G, U]"
    if np.isnan(correct_GU).all(axis=1).any():
        raise ValueError("an episode has no graded turn, so its team reward is undefined")
    return np.nanmean(correct_GU, axis=1)


def grpo(group: Group) -> Credit:
    """Every turn of an episode is paid its team reward, minus the mean over the problem's episodes.

    Group Relative Policy Optimization (Shao et al., 2024, eq. 3) without the division by the group's standard
    deviation (Liu et al., 2025). Group axis: the G episodes of a problem.

    Worked example, four chats of two graded answers: team rewards (1, 1/2, 0, 1/2), mean 1/2, so every turn of chat 0
    has advantage +1/2, of chat 2 -1/2, and of the other two 0.
    """
    reward_G = team_reward(group.correct_GU)
    reward_GU = np.broadcast_to(reward_G[:, None], group.correct_GU.shape)
    return Credit(reward_GU, reward_GU - reward_G.mean())


CREDITS: dict[str, Callable[[Group], Credit]] = {"grpo": grpo}


class CreditSummary(NamedTuple):
    """A rule's diagnostics over the P groups of one step (SPEC 3).

    `mean_abs_U` mean |advantage| by turn; `flat_group_frac` share of problems with all-zero credit; `own_correlation`
    of a graded turn's advantage with its own grade (None when either is constant); `reward` mean team reward.
    """

    reward: float
    flat_group_frac: float
    mean_abs_U: np.ndarray
    own_correlation: float | None


def summarise(groups_P: list[Group], credits_P: list[Credit]) -> CreditSummary:
    """Diagnostics of one step's credit, for the log."""
    correct = np.concatenate([g.correct_GU for g in groups_P])
    advantage = np.concatenate([c.advantage_GU for c in credits_P])
    graded = ~np.isnan(correct)
    own, paid = correct[graded], advantage[graded]
    varies = own.size > 1 and own.std() > 0 and paid.std() > 0
    return CreditSummary(
        reward=float(np.mean([team_reward(g.correct_GU).mean() for g in groups_P])),
        flat_group_frac=float(np.mean([not c.advantage_GU.any() for c in credits_P])),
        mean_abs_U=np.abs(advantage).mean(axis=0),
        own_correlation=float(np.corrcoef(own, paid)[0, 1]) if varies else None,
    )
