"""Note credit by hand: four copies on a ring of degree 2, unless a test says otherwise."""

from itertools import product

import numpy as np
import pytest

from rl.board_credit import OWN_WEIGHT, board_of, boards_needed
from rl.credit import Group, Needs
from rl.rules import CREDITS
from tasks.board import BoardSizes, board_task

N = np.nan
TASK = board_task("board_writers", "readers_and_writers", BoardSizes(), True, "whole", "full")
READ_BY = {0: (0, 3), 1: (0, 1), 2: (1, 2), 3: (2, 3)}


def group(notes, readers, task=TASK, progress=0.0, by_board=None):
    """One episode."""
    notes_U = np.array([turn.note for turn in task.turns])
    rounds = np.array([turn.round for turn in task.turns])
    return Group(np.array([[*notes, *readers]], float), task.reads_UU, notes_U, rounds, progress, by_board)


def notes_of(rule, *args, **kwargs):
    return CREDITS[rule].pay(group(*args, **kwargs)).advantage_GU[0, :4].tolist()


def readers_of(rule, *args, **kwargs):
    return CREDITS[rule].pay(group(*args, **kwargs)).advantage_GU[0, 4:].tolist()


def table(values):
    """by_board_GUS from {(reader, set of notes): value}."""
    out = np.full((1, 8, 16), np.nan)
    for (reader, notes), value in values.items():
        out[0, 4 + reader, sum(1 << i for i in notes)] = value
    return out


def own(reader):
    return (reader, (reader + 1) % 4)


def test_the_ring():
    """Reader j reads notes j and j + 1, so note i is read by readers i and i - 1."""
    for note, readers in READ_BY.items():
        assert np.flatnonzero(TASK.reads_UU[4:, note]).tolist() == sorted(readers)


@pytest.mark.parametrize(
    "readers, notes",
    [
        ((1, 1, 0, 0), (0, 0.5, 0, -0.5)),
        ((1, 0, 0, 0), (0.25, 0.25, -0.25, -0.25)),
        ((1, 0, 1, 0), (0, 0, 0, 0)),
        ((0, 1, 0, 1), (0, 0, 0, 0)),
        ((1, 1, 1, 0), (-0.25, 0.25, 0.25, -0.25)),
        ((1, 1, 1, 1), (0, 0, 0, 0)),
    ],
)
def test_readers_mean(readers, notes):
    assert notes_of("readers_mean", (0, 1, 0, 1), readers) == list(notes)


def test_on_the_ring_opposite_notes_have_opposite_credit():
    """A[i + 2] = -A[i], exactly, whatever the readers got; nothing about the notes' own answers enters."""
    for readers in product((0, 1), repeat=4):
        credit = notes_of("readers_mean", (0, 0, 0, 0), readers)
        assert credit[2] == -credit[0] and credit[3] == -credit[1]
        assert credit == notes_of("readers_mean", (1, 0, 1, 1), readers)


@pytest.mark.parametrize("rule", [name for name, rule in CREDITS.items() if rule.boards and name != "discounted_team"])
def test_readers_are_paid_their_own_answer_minus_the_mean(rule):
    boards = {(r, s): 0 for r in range(4) for s in [(), (own(r)[0],), (own(r)[1],), own(r)]}
    assert readers_of(rule, (0, 0, 0, 0), (1, 0, 0, 0), by_board=table(boards)) == [0.75, -0.25, -0.25, -0.25]


def test_readers_only_pays_notes_nothing():
    assert notes_of("readers_only", (1, 0, 1, 0), (1, 0, 0, 0)) == [0, 0, 0, 0]


def test_own_plus_readers_anneals():
    """w = 1/2 at first: own (1, 0, 0, 0), readers' means (1/2, 1, 1/2, 0); at the end only the readers count."""
    assert OWN_WEIGHT == 0.5
    first = notes_of("own_plus_readers", (1, 0, 0, 0), (1, 1, 0, 0))
    assert first == pytest.approx([0.75 - 0.375, 0.5 - 0.375, 0.25 - 0.375, 0 - 0.375])
    assert notes_of("own_plus_readers", (1, 0, 0, 0), (1, 1, 0, 0), progress=1.0) == [0, 0.5, 0, -0.5]


def test_leave_one_out():
    """Reader 0 (right) fails without note 1, and with note 0 gone is right in one re-reading of two."""
    boards = {(r, (n,)): 0.0 for r in range(4) for n in own(r)} | {(0, (0,)): 0.0, (0, (1,)): 0.5}
    # Readers (1, 0, 0, 0). Without note 0, reader 0 sees {1}: 1 - 0.5; without note 1, {0}: 1 - 0.
    assert notes_of("leave_one_out", (0, 0, 0, 0), (1, 0, 0, 0), by_board=table(boards)) == [0.25, 0.5, 0, 0]


def test_leave_one_outs_expectation_by_enumeration():
    """Readers right with probability p(board): the mean credit over all outcomes is the difference of the p's."""
    p = {(0, (0, 1)): 0.9, (0, (0,)): 0.2, (0, (1,)): 0.6}
    mean = np.zeros(4)
    for with_both, without_0, without_1 in product((0, 1), repeat=3):
        chance = 1.0
        for outcome, board in ((with_both, (0, 1)), (without_0, (1,)), (without_1, (0,))):
            chance *= p[0, board] if outcome else 1 - p[0, board]
        boards = {(r, (n,)): 0.0 for r in range(4) for n in own(r)} | {(0, (1,)): without_0, (0, (0,)): without_1}
        mean += chance * np.array(notes_of("leave_one_out", (0,) * 4, (with_both, 0, 0, 0), by_board=table(boards)))
    # Each note has two readers, and the other one never changes its mind.
    np.testing.assert_allclose(mean, [(0.9 - 0.6) / 2, (0.9 - 0.2) / 2, 0, 0], atol=1e-12)


def test_evidence_gain_is_limited():
    """log p falls by 0.5 without note 0 and by 7 without note 1; the latter counts as 1."""
    boards = {(r, s): -3.0 for r in range(4) for s in [own(r), *((n,) for n in own(r))]}
    boards |= {(0, (0, 1)): -1.0, (0, (1,)): -1.5, (0, (0,)): -8.0}
    assert notes_of("evidence_gain", (0,) * 4, (0,) * 4, by_board=table(boards)) == [0.25, 1.0, 0, 0]


def test_rescue():
    """Notes (1, 0, 0, 0), readers (1, 1, 0, 0). To its own reader a note is paid own - mean (0.25); to the foreign one
    that reader's answer minus that reader's own note: reader 3 reads note 0 (0 - 0), reader 0 reads note 1 (1 - 1),
    reader 1 reads note 2 (1 - 0: rescued), reader 2 reads note 3 (0 - 0)."""
    expected = [(0.75 + 0) / 2, (-0.25 + 0) / 2, (-0.25 + 1) / 2, (-0.25 + 0) / 2]
    assert notes_of("rescue", (1, 0, 0, 0), (1, 1, 0, 0)) == expected


def shapley_reward(boards, task=TASK):
    return CREDITS["shapley"].pay(group((0,) * 4, (0,) * 4, task, by_board=boards)).reward_GU[0, :4]


def test_shapley_by_hand():
    """Reader 0 needs both notes: each gets half of it, over four readers. Reader 2 needs note 3 only."""
    boards = {(r, s): 0 for r in range(4) for s in [(), (own(r)[0],), (own(r)[1],), own(r)]}
    boards |= {(0, (0, 1)): 1, (2, (3,)): 1, (2, (2, 3)): 1}
    np.testing.assert_allclose(shapley_reward(table(boards)), [1 / 8, 1 / 8, 0, 1 / 4])


def test_shapley_is_efficient_and_symmetric():
    """Random games on a shared board: values sum to v(all) - v(none); equals are paid alike; a null note nothing."""
    shared = board_task("message_board", "shared_board", BoardSizes(), True, "whole", "full")
    rng = np.random.default_rng(0)
    for _ in range(20):
        boards = np.full((1, 8, 16), np.nan)
        boards[0, 4:] = rng.uniform(size=(4, 16))
        value = shapley_reward(boards, shared)
        assert value.sum() == pytest.approx((boards[0, 4:, 15] - boards[0, 4:, 0]).mean())
        by_count = np.array([bin(s & 0b0111).count("1") for s in range(16)])
        boards[0, 4:] = rng.uniform(size=4)[by_count]  # depends on how many of notes 0..2 are there; note 3 is null
        value = shapley_reward(boards, shared)
        np.testing.assert_allclose(value[:3], value[0])
        assert value[3] == pytest.approx(0)


def test_discounted_team():
    """(own + 0.3 * mean of readers) / 1.3 for notes; readers their own; each round has its own baseline."""
    credit = CREDITS["discounted_team"].pay(group((1, 0, 0, 0), (1, 1, 0, 0)))
    np.testing.assert_allclose(credit.reward_GU[0], [1.15 / 1.3, *[0.15 / 1.3] * 3, 1, 1, 0, 0])
    np.testing.assert_allclose(credit.advantage_GU[0], [0.75 / 1.3, *[-0.25 / 1.3] * 3, 0.5, 0.5, -0.5, -0.5])


def test_which_boards_are_read_again():
    g = group((0,) * 4, (0,) * 4)
    assert board_of(g, 4) == 0b0011 and board_of(g, 7) == 0b1001
    assert boards_needed(g, 7, Needs.WITHOUT_ONE) == [0b0001, 0b1000]
    assert boards_needed(g, 7, Needs.EVIDENCE) == [0b0001, 0b1000, 0b1001]
    assert boards_needed(g, 7, Needs.SUBSETS) == [0, 0b0001, 0b1000, 0b1001]
    assert boards_needed(g, 7, Needs.GRADES) == []


def test_each_episode_stands_alone():
    """The group axis is the turns of one episode: two episodes side by side are paid as each alone."""
    first, second = group((1, 0, 0, 0), (1, 1, 0, 0)), group((0, 0, 1, 1), (0, 1, 0, 0))
    both = first._replace(correct_GU=np.concatenate([first.correct_GU, second.correct_GU]))
    for rule in ("readers_only", "readers_mean", "own_plus_readers", "rescue", "discounted_team"):
        pay = CREDITS[rule].pay
        np.testing.assert_array_equal(
            pay(both).advantage_GU, np.concatenate([pay(first).advantage_GU, pay(second).advantage_GU])
        )
