"""Credit rules: from the grades of one problem's group to what each turn is paid.

A rule is a function of plain arrays, `(Group) -> Credit`, and names its own group axis: over the G episodes of a
problem (chats: `grpo` here, the others in rl.chat_credit), or over the turns within one episode (boards,
rl.board_credit). Three names stay apart: `correct` is a grade, `reward` what a rule pays, `advantage` the reward minus
its baseline. No masks here: whether a turn is trained is not a matter of its advantage. To add a rule, write the
function and name it in rl.rules with what it needs measured (`Needs`), how it draws chats (`Draw`) and the kind of task
it is for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np


@dataclass(frozen=True)
class ChatOptions:
    """Choices of the chat rules; the defaults are the published ones (SPEC 2.4).

    `ada_rounds`: draws of a problem at most, the first included. `ada_flat`: a pool of chats is flat if all team
    rewards are `equal`, or if none or all of them are a full win (`binary`). `ada_replay`: which flat problems are
    drawn again, all (`flat`) or those without any reward (`all_wrong`). `ada_keep_flat`: problems that stay flat keep
    their place in the loss's denominator. `ada_baseline`: the mean of every chat `drawn`, or of those `kept`.
    `raft_norm`: the loss is divided by the tokens of all chats (`tokens`) or of the winners (`win_tokens`).
    """

    ada_rounds: int = 3
    ada_flat: Literal["equal", "binary"] = "equal"
    ada_replay: Literal["flat", "all_wrong"] = "flat"
    ada_keep_flat: bool = True
    ada_baseline: Literal["drawn", "kept"] = "drawn"
    raft_norm: Literal["tokens", "win_tokens"] = "tokens"


class Group(NamedTuple):
    """One problem's G episodes of U turns.

    `correct_GU` fp64: the grade of each graded turn, NaN where a turn is not graded. `reads_UU` bool: turn u is shown
    turn v. `notes_U` bool: the turn is a note. `round_U`: the turn's round. `progress` in [0, 1): share of the run
    that is done, for rules that anneal. `by_board_GUS` [G, U, 2^notes]: what reader u makes of other boards, if the
    rule asked for it (see `Needs`), NaN where it wasn't measured; the last index is the set of notes shown, bit i for
    the i-th note. `before_GU`: the value of an episode just before a turn, if the rule asked for it; NaN before the
    first round. `first`: how many of the episodes were drawn before any was drawn again; 0: all.
    """

    correct_GU: np.ndarray
    reads_UU: np.ndarray
    notes_U: np.ndarray
    round_U: np.ndarray
    progress: float = 0.0
    by_board_GUS: np.ndarray | None = None
    before_GU: np.ndarray | None = None
    first: int = 0
    options: ChatOptions = ChatOptions()

    @property
    def answers_GU(self) -> np.ndarray:
        """Grades of the turns that are the episode's outcome; NaN for notes and for turns that are not graded."""
        return np.where(self.notes_U[None], np.nan, self.correct_GU)


class Credit(NamedTuple):
    """`reward_GU`: what each turn is paid; `advantage_GU`: that minus its baseline. `kept_G` bool: the episodes that
    go into the batch, and so into the loss's denominator; None: all."""

    reward_GU: np.ndarray
    advantage_GU: np.ndarray
    kept_G: np.ndarray | None = None

    @property
    def kept(self) -> np.ndarray:
        """`kept_G`, spelled out."""
        return np.ones(len(self.reward_GU), bool) if self.kept_G is None else self.kept_G


class Needs(Enum):
    """What a rule needs besides the grades: each reader's mean grade, or log-evidence, on other boards."""

    GRADES = "grades"
    WITHOUT_ONE = "grades when re-reading without each of its notes"
    SUBSETS = "grades when re-reading every subset of its notes"
    EVIDENCE = "log-probability of the gold on its board and without each of its notes"
    PREFIXES = "mean team reward of continuations from before each turn"


class Draw(Enum):
    """How many chats of each problem a rule draws in a step."""

    ONCE = "one round"
    REPLAY = "another round while all its chats so far are alike"
    AS_REPLAYED = "as many in all as the reinforce_ada cell of its arm and seed, spread evenly over the problems"


@dataclass(frozen=True)
class CreditRule:
    """`pay` is the rule; `boards`: is it for boards or for chats (None: both); `needs` what must be measured for it.

    `varies`: False if note credit is zero whatever happens, so there is no reliability to measure. `draw`: how many
    chats. `mixed`: in half of every round's chats all copies but the first are the untrained base.
    """

    pay: Callable[[Group], Credit]
    boards: bool | None
    needs: Needs = Needs.GRADES
    varies: bool = True
    draw: Draw = Draw.ONCE
    mixed: bool = False

    def serves(self, boards: bool) -> bool:
        """Is it of use to this kind of task."""
        return self.boards in (None, boards)


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

    `reward` mean team reward of the first round's episodes; `flat_first_frac` share of problems whose first round is
    flat; `flat_group_frac` share of problems with all-zero credit; `mean_abs_U` mean |advantage| by turn of the
    episodes kept; `own_correlation` of a graded turn's advantage with its own grade, over notes if there are any,
    else over answers (None when either is constant); `flat_notes_frac` share of problems whose notes all have zero
    credit; `solved_token_frac` share of the kept episodes' tokens that are of full wins (None: no episode was kept).
    """

    reward: float
    flat_first_frac: float
    flat_group_frac: float
    mean_abs_U: np.ndarray
    own_correlation: float | None
    flat_notes_frac: float | None
    solved_token_frac: float | None = None


def summarise(
    groups_P: list[Group], credits_P: list[Credit], tokens_PG: Sequence[Sequence[int]] | None = None
) -> CreditSummary:
    """Diagnostics of one step's credit, for the log. `tokens_PG`: each episode's trained tokens."""
    correct = np.concatenate([g.correct_GU[c.kept] for g, c in zip(groups_P, credits_P, strict=True)])
    advantage = np.concatenate([c.advantage_GU[c.kept] for c in credits_P])
    first_P = [team_reward(g.answers_GU)[: g.first or None] for g in groups_P]
    notes_U = groups_P[0].notes_U
    of_interest = ~np.isnan(correct) & (notes_U[None] if notes_U.any() else True)
    return CreditSummary(
        reward=float(np.mean([first.mean() for first in first_P])),
        flat_first_frac=float(np.mean([np.ptp(first) == 0 for first in first_P])),
        flat_group_frac=float(np.mean([not c.advantage_GU.any() for c in credits_P])),
        mean_abs_U=np.abs(advantage).mean(axis=0) if len(advantage) else np.zeros(len(notes_U)),
        own_correlation=correlation(correct[of_interest], advantage[of_interest]),
        flat_notes_frac=float(np.mean([not c.advantage_GU[:, notes_U].any() for c in credits_P]))
        if notes_U.any()
        else None,
        solved_token_frac=None if tokens_PG is None else _solved_share(groups_P, credits_P, tokens_PG),
    )


def _solved_share(groups_P: list[Group], credits_P: list[Credit], tokens_PG: Sequence[Sequence[int]]) -> float | None:
    won = total = 0
    for group, credit, tokens in zip(groups_P, credits_P, tokens_PG, strict=True):
        kept_G = np.asarray(tokens) * credit.kept
        total += int(kept_G.sum())
        won += int(kept_G[team_reward(group.answers_GU) == 1].sum())
    return won / total if total else None


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Pearson's, or None when either is constant."""
    if a.size < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])
