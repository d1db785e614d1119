"""Credit rules: from the grades of one problem's group to what each turn is paid.

A rule is a function of plain arrays, `(Group) -> Credit`, and names its own group axis: over the G episodes of a
problem (chats, here), or over the turns within one episode (boards, rl.board_credit). Three names stay apart: `correct`
is a grade, `reward` what a rule pays, `advantage` the reward minus its baseline. No masks here: whether a turn is
trained is not a matter of its advantage. To add a rule, write the function and name it in rl.rules with what it needs
measured (`Needs`) and the kind of task it is for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np


class Group(NamedTuple):
    """One problem's G episodes of U turns.

    `correct_GU` fp64: the grade of each graded turn, NaN where a turn is not graded. `reads_UU` bool: turn u is shown
    turn v. `notes_U` bool: the turn is a note. `round_U`: the turn's round. `progress` in [0, 1): share of the run
    that is done, for rules that anneal. `by_board_GUS` [G, U, 2^notes]: what reader u makes of other boards, if the
    rule asked for it (see `Needs`), NaN where it wasn't measured; the last index is the set of notes shown, bit i for
    the i-th note.
    """

    correct_GU: np.ndarray
    reads_UU: np.ndarray
    notes_U: np.ndarray
    round_U: np.ndarray
    progress: float = 0.0
    by_board_GUS: np.ndarray | None = None

    @property
    def answers_GU(self) -> np.ndarray:
        """Grades of the turns that are the episode's outcome; NaN for notes and for turns that are not graded."""
        return np.where(self.notes_U[None], np.nan, self.correct_GU)


class Credit(NamedTuple):
    """`reward_GU`: what each turn is paid; `advantage_GU`: that minus its baseline."""

    reward_GU: np.ndarray
    advantage_GU: np.ndarray


class Needs(Enum):
    """What a rule needs besides the grades: each reader's mean grade, or log-evidence, on other boards."""

    GRADES = "grades"
    WITHOUT_ONE = "grades when re-reading without each of its notes"
    SUBSETS = "grades when re-reading every subset of its notes"
    EVIDENCE = "log-probability of the gold on its board and without each of its notes"


@dataclass(frozen=True)
class CreditRule:
    """`pay` is the rule; `needs` what must be measured for it; `boards` is it for boards or for chats; `varies`:
    False if note credit is zero whatever happens, so there is no reliability to measure."""

    pay: Callable[[Group], Credit]
    boards: bool
    needs: Needs = Needs.GRADES
    varies: bool = True


def team_reward(answers_GU: np.ndarray) -> np.ndarray:
    """[G]: the mean grade of an episode's answers; in {0, 1/2, 1} for two of them. NaN marks turns that are none."""
    assert answers_GU.ndim == 2, f"answers_GU has shape {answers_GU.shape}; it needs [G, U]"
    if np.isnan(answers_GU).all(axis=1).any():
        raise ValueError("an episode has no graded turn, so its team reward is undefined")
    return np.nanmean(answers_GU, axis=1)


def grpo(group: Group) -> Credit:
    """Every turn of an episode is paid its team reward, minus the mean over the problem's episodes.

    Group Relative Policy Optimization (Shao et al., 2024, eq. 3) without the division by the group's standard
    deviation (Liu et al., 2025). Group axis: the G episodes of a problem.

    Worked example, four chats of two graded answers: team rewards (1, 1/2, 0, 1/2), mean 1/2, so every turn of chat 0
    has advantage +1/2, of chat 2 -1/2, and of the other two 0.
    """
    reward_G = team_reward(group.answers_GU)
    reward_GU = np.broadcast_to(reward_G[:, None], group.correct_GU.shape)
    return Credit(reward_GU, reward_GU - reward_G.mean())


class CreditSummary(NamedTuple):
    """A rule's diagnostics over the P groups of one step (SPEC 3).

    `reward` mean team reward; `flat_group_frac` share of problems with all-zero credit; `mean_abs_U` mean |advantage|
    by turn; `own_correlation` of a graded turn's advantage with its own grade, over notes if there are any, else over
    answers (None when either is constant); `flat_notes_frac` share of problems whose notes all have zero credit.
    """

    reward: float
    flat_group_frac: float
    mean_abs_U: np.ndarray
    own_correlation: float | None
    flat_notes_frac: float | None


def summarise(groups_P: list[Group], credits_P: list[Credit]) -> CreditSummary:
    """Diagnostics of one step's credit, for the log."""
    correct = np.concatenate([g.correct_GU for g in groups_P])
    advantage = np.concatenate([c.advantage_GU for c in credits_P])
    notes_U = groups_P[0].notes_U
    of_interest = ~np.isnan(correct) & (notes_U[None] if notes_U.any() else True)
    return CreditSummary(
        reward=float(np.mean([team_reward(g.answers_GU).mean() for g in groups_P])),
        flat_group_frac=float(np.mean([not c.advantage_GU.any() for c in credits_P])),
        mean_abs_U=np.abs(advantage).mean(axis=0),
        own_correlation=correlation(correct[of_interest], advantage[of_interest]),
        flat_notes_frac=float(np.mean([not c.advantage_GU[:, notes_U].any() for c in credits_P]))
        if notes_U.any()
        else None,
    )


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Pearson's, or None when either is constant."""
    if a.size < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])
