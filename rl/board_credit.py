"""Credit for boards (SPEC 2.2 and 3): readers are paid their own answer, notes what they did for their readers.

Every rule pays reader u its own grade minus the mean over the episode's readers; the rules differ in the notes' pay.
The group axis is the turns of one episode, so each of the G episodes stands alone. A note's readers are the answers
that are shown it, `reads_UU`. Where a note's pay is a difference from what happens without it, that counterfactual is
its baseline and nothing more is subtracted; else the mean over the episode's notes is.
"""

from collections.abc import Callable
from itertools import combinations
from math import factorial

import numpy as np

from rl.chat_credit import GAMMA
from rl.credit import Credit, Group, Needs

OWN_WEIGHT = 0.5
"""w of `own_plus_readers` when a run begins; it falls linearly to 0."""

EVIDENCE_LIMIT = 1.0
"""`evidence_gain` is cut to ± this many nats, so that a note can't outweigh a reader's ±1."""

NotePay = Callable[[Group], np.ndarray]
"""(group) -> pay [G, U]; only the notes' columns are read."""


def board_rule(note_pay: NotePay, centred: bool) -> Callable[[Group], Credit]:
    """Readers: own grade minus their mean. Notes: `note_pay`, minus the mean over the episode's notes if `centred`."""

    def pay(group: Group) -> Credit:
        notes_U = group.notes_U
        answers_GU = group.answers_GU
        pay_GU = np.asarray(note_pay(group), np.float64)
        reward_GU = np.where(notes_U[None], pay_GU, np.nan_to_num(answers_GU))
        advantage_GU = np.zeros_like(reward_GU)
        readers_U = ~np.isnan(answers_GU).all(axis=0)
        advantage_GU[:, readers_U] = reward_GU[:, readers_U] - np.nanmean(answers_GU, axis=1, keepdims=True)
        baseline_G1 = pay_GU[:, notes_U].mean(axis=1, keepdims=True) if centred else 0.0
        advantage_GU[:, notes_U] = pay_GU[:, notes_U] - baseline_G1
        return Credit(reward_GU, advantage_GU)

    return pay


def nothing(group: Group) -> np.ndarray:
    """`readers_only`: notes are in the batch and in the denominator, and are paid nothing."""
    return np.zeros_like(group.correct_GU)


def over_readers(group: Group, value_GUU: np.ndarray) -> np.ndarray:
    """[G, U]: for each note v, the mean over its readers u of value[g, u, v]; 0 for a note that nobody reads."""
    reads_UU = group.reads_UU & ~group.notes_U[:, None]
    count_U = reads_UU.sum(axis=0)
    total_GU = np.where(reads_UU[None], value_GUU, 0.0).sum(axis=1)
    return total_GU / np.maximum(count_U, 1)[None]


def readers_mean(group: Group) -> np.ndarray:
    """The mean grade of the note's readers; nothing about the note's own answer enters (the published rule).

    On the ring of degree 2 over 4 copies, centred, A[i + 2] = -A[i] exactly, and readers (1, 0, 1, 0) give zeros.
    Worked example there, readers (1, 1, 0, 0): notes are read by readers (0, 3), (0, 1), (1, 2), (2, 3), so they are
    paid (1/2, 1, 1/2, 0) and their advantages are (0, 1/2, 0, -1/2).
    """
    return over_readers(group, np.broadcast_to(group.answers_GU[:, :, None], _pairs(group)))


def own_plus_readers(group: Group) -> np.ndarray:
    """w * own answer right + (1 - w) * its readers' mean; w falls linearly from OWN_WEIGHT to 0 over the run."""
    weight = OWN_WEIGHT * (1 - group.progress)
    return weight * np.nan_to_num(group.correct_GU) + (1 - weight) * readers_mean(group)


def leave_one_out(group: Group) -> np.ndarray:
    """Mean over the note's readers of (grade with it - mean grade of m re-readings without it).

    COMA's counterfactual (Foerster et al., 2018) with the note removed instead of replaced.
    """
    return over_readers(group, group.answers_GU[:, :, None] - _without(group))


def evidence_gain(group: Group) -> np.ndarray:
    """Mean over the note's readers of log p(gold | board) - log p(gold | board without it), in nats, limited."""
    with_GU = _on_full_board(group)
    return np.clip(over_readers(group, with_GU[:, :, None] - _without(group)), -EVIDENCE_LIMIT, EVIDENCE_LIMIT)


def rescue(group: Group) -> np.ndarray:
    """To a foreign reader: reader right - reader's own note right (+1 rescued, -1 misled); to itself: own right - mean.

    A reader's own note is the one its copy wrote; the i-th note and the i-th answer are one copy's.
    """
    notes, answers = np.flatnonzero(group.notes_U), _readers(group)
    own_GU = np.nan_to_num(group.correct_GU)
    value_GUU = np.zeros(_pairs(group))
    for u, own_note in zip(answers, notes, strict=True):
        value_GUU[:, u, :] = (own_GU[:, u] - own_GU[:, own_note])[:, None]
        value_GUU[:, u, own_note] = own_GU[:, own_note] - own_GU[:, notes].mean(axis=1)
    return over_readers(group, value_GUU)


def shapley(group: Group) -> np.ndarray:
    """The note's Shapley value of the readers' mean grade, exact over all subsets (Shapley, 1953).

    A reader's grade depends on the notes it reads alone, so its game is over those (2^degree boards, not 2^n), and the
    value of the mean is the mean of the readers' values: a note that a reader doesn't read is a null player there.
    """
    notes, answers = np.flatnonzero(group.notes_U), _readers(group)
    value_GU = np.zeros_like(group.correct_GU)
    for u in answers:
        read = [i for i, v in enumerate(notes) if group.reads_UU[u, v]]
        for i in read:
            others = [k for k in read if k != i]
            for size in range(len(others) + 1):
                weight = factorial(size) * factorial(len(others) - size) / factorial(len(read))
                for subset in combinations(others, size):
                    board = sum(1 << k for k in subset)
                    gain_G = group.by_board_GUS[:, u, board | 1 << i] - group.by_board_GUS[:, u, board]
                    value_GU[:, notes[i]] += weight * gain_G / len(answers)
    return value_GU


def discounted_board(group: Group) -> Credit:
    """Own grade now + gamma-discounted mean of everyone's later grades, over the discounts' sum (MAPoRL).

    For every graded turn; the baseline is the mean over the episode's graded turns of the same round.
    """
    correct_GU = group.correct_GU
    reward_GU, advantage_GU = np.zeros_like(correct_GU), np.zeros_like(correct_GU)
    graded_U = ~np.isnan(correct_GU).all(axis=0)
    for now in np.unique(group.round_U[graded_U]):
        here_U = graded_U & (group.round_U == now)
        pay_GU, total = correct_GU[:, here_U].copy(), 1.0
        for distance, later in enumerate(sorted({r for r in group.round_U[graded_U] if r > now}), start=1):
            pay_GU += GAMMA**distance * correct_GU[:, graded_U & (group.round_U == later)].mean(axis=1, keepdims=True)
            total += GAMMA**distance
        reward_GU[:, here_U] = pay_GU / total
        advantage_GU[:, here_U] = reward_GU[:, here_U] - reward_GU[:, here_U].mean(axis=1, keepdims=True)
    return Credit(reward_GU, advantage_GU)


def board_of(group: Group, reader: int) -> int:
    """The set of notes that a reader is shown, as bits in the order of the notes."""
    return sum(1 << i for i, v in enumerate(np.flatnonzero(group.notes_U)) if group.reads_UU[reader, v])


def boards_needed(group: Group, reader: int, needs: Needs) -> list[int]:
    """The sets of notes on which a reader must be measured for a rule, ascending."""
    full = board_of(group, reader)
    without = [full & ~(1 << i) for i in range(int(group.notes_U.sum())) if full >> i & 1]
    if needs is Needs.WITHOUT_ONE:
        return sorted(without)
    if needs is Needs.EVIDENCE:
        return sorted([full, *without])
    if needs is Needs.SUBSETS:
        return [board for board in range(full + 1) if board & ~full == 0]
    return []


def _readers(group: Group) -> np.ndarray:
    return np.flatnonzero(~np.isnan(group.answers_GU).all(axis=0))


def _pairs(group: Group) -> tuple[int, int, int]:
    episodes, turns = group.correct_GU.shape
    return episodes, turns, turns


def _on_full_board(group: Group) -> np.ndarray:
    """[G, U]: what was measured on each reader's own board."""
    value_GU = np.zeros_like(group.correct_GU)
    for u in _readers(group):
        value_GU[:, u] = group.by_board_GUS[:, u, board_of(group, u)]
    return value_GU


def _without(group: Group) -> np.ndarray:
    """[G, U, U]: what was measured for reader u on its board without note v; 0 where it doesn't read v."""
    value_GUU = np.zeros(_pairs(group))
    for u in _readers(group):
        for i, v in enumerate(np.flatnonzero(group.notes_U)):
            if group.reads_UU[u, v]:
                value_GUU[:, u, v] = group.by_board_GUS[:, u, board_of(group, u) & ~(1 << i)]
    return value_GUU
