"""Packing: integers show where every number came from. Prompt ids are 1-9, sampled ids 100 and up."""

import numpy as np
import pytest

from rl.batch import Row, pack
from rollout.episode import Utterance


def row(prompt, sampled, advantage, trained=True, cap=8):
    logp = -np.asarray(sampled, np.float32) / 100
    return Row(Utterance(0, np.array(prompt), np.array(sampled), logp, "", True, trained), advantage, cap)


def test_provenance():
    rows = [row([1, 2, 3], [101, 102], 0.5), row([4], [201, 202, 203], -0.25)]
    plan = pack([rows], micro_rows=2, buckets=(6,), reply_bucket=4)
    (batch,) = plan.batches
    # Longest first; both have... five and four tokens.
    np.testing.assert_array_equal(batch.tokens[0], [[1, 2, 3, 101, 102, 0], [4, 201, 202, 203, 0, 0]])
    np.testing.assert_array_equal(batch.loss_mask[0], [[0, 0, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(batch.advantage[0], [[0, 0, 0, 0.5, 0.5, 0], [0, -0.25, -0.25, -0.25, 0, 0]])
    np.testing.assert_allclose(batch.old_logp[0], [[0, 0, 0, -1.01, -1.02, 0], [0, -2.01, -2.02, -2.03, 0, 0]])
    np.testing.assert_allclose(batch.weight[0], np.where(batch.loss_mask[0], 1 / 5, 0), rtol=1e-6)
    np.testing.assert_array_equal(batch.select[0], [3, 4, 7, 8, 9, 0, 0, 0])
    np.testing.assert_array_equal(batch.tokens[0].reshape(-1)[batch.select[0][:5]], [101, 102, 201, 202, 203])


def test_the_end_of_turn_token_is_trained():
    (batch,) = pack([[row([1], [101, 102, 999], 1.0)]], 1, (8,)).batches
    assert batch.loss_mask[0, 0, list(batch.tokens[0, 0]).index(999)]


def test_flat_rows_are_left_out_of_the_compute_and_kept_in_the_denominator():
    rows = [row([1], [101, 102], 1.0), row([2], [201, 202, 203], 0.0), row([3], [301], -1.0)]
    plan = pack([rows], 4, (8,))
    (batch,) = plan.batches
    assert 201 not in batch.tokens and plan.live_rows_X[0] == 2
    assert plan.trained_tokens_X[0] == 6
    assert set(np.unique(batch.weight)) == {np.float32(0), np.float32(1 / 6)}


def test_a_frozen_partner_is_neither_trained_nor_counted():
    """The mask is not `advantage != 0`: this row has an advantage and is not trained."""
    plan = pack([[row([1], [101, 102], 1.0), row([2], [201, 202], 1.0, trained=False)]], 2, (8,))
    assert plan.trained_tokens_X[0] == 2
    assert 201 not in plan.batches[0].tokens
    assert set(np.unique(plan.batches[0].weight)) == {np.float32(0), np.float32(1 / 2)}


def test_all_flat_gives_no_batches():
    plan = pack([[row([1], [101], 0.0)], [row([1], [101], 0.0)]], 2, (8,))
    assert plan.batches == [] and plan.trained_tokens_X.tolist() == [1, 1]


def test_parts_of_like_length_share_a_micro_batch():
    """Cell 0 is cut into rows of (4, 3) and (2) tokens, cell 1 has one live row of 5. Each has its own denominator."""
    cells = [
        [row([1], [101] * n, 1.0) for n in (1, 2, 3)],
        [row([2], [201] * 4, 1.0), row([2], [202], 0.0)],
    ]
    plan = pack(cells, 2, (4, 8))
    assert [b.tokens.shape for b in plan.batches] == [(2, 2, 8), (2, 2, 4)]
    assert plan.batches[0].loss_mask.sum(axis=(1, 2)).tolist() == [5, 4]
    assert plan.batches[1].loss_mask.sum(axis=(1, 2)).tolist() == [1, 0]
    assert plan.batches[0].weight[0].max() == np.float32(1 / 6)
    assert plan.batches[0].weight[1].max() == np.float32(1 / 5)
    assert [b.cells.tolist() for b in plan.batches] == [[0, 1], [0, 0]]


def test_fewer_slots_than_cells():
    """Five parts, longest first: cell 1's 7 and 6 tokens, cell 2's 5, cell 0's 4, cell 1's 3; two at a time. An empty
    slot is cell 0's and weighs nothing."""
    cells = [
        [row([1], [11] * 3, 1.0)],
        [row([1], [21] * n, 1.0) for n in (2, 6, 5)],
        [row([1], [31] * 4, -1.0)],
    ]
    plan = pack(cells, 1, (3, 5, 8), slots=2)
    assert [b.cells.tolist() for b in plan.batches] == [[1, 1], [0, 2], [1, 0]]
    assert [b.tokens.shape for b in plan.batches] == [(2, 1, 8), (2, 1, 5), (2, 1, 3)]
    assert [b.loss_mask.sum(axis=(1, 2)).tolist() for b in plan.batches] == [[6, 5], [3, 4], [2, 0]]
    assert plan.live_rows_X.tolist() == [1, 3, 1] and not plan.batches[2].weight[1].any()


def test_a_row_longer_than_the_buckets_is_an_error():
    with pytest.raises(ValueError, match="9 tokens.*holds 8"):
        pack([[row([1] * 6, [101] * 3, 1.0)]], 1, (8,))


def test_packed_rows():
    """Room for 1 x 8 tokens a part, and two rows of 8 places: the row of 5 takes the one of 2 with it, since the one of
    4 doesn't fit; that and the one of 1 are the second part."""
    rows = [row([n], [100 * n + i for i in range(n - 1)], 1.0) for n in (2, 5, 4)] + [row([], [900], 1.0)]
    first, second = pack([rows], 1, (4, 8), packed=True).batches
    assert first.tokens.shape == (1, 2, 8) and first.places.tolist() == [[0, 1, 2, 3, 4, 8, 9, 16]]
    np.testing.assert_array_equal(first.tokens[0], [[5, 500, 501, 502, 503, 0, 0, 0], [2, 200, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(first.select[0], [1, 2, 3, 4, 9, 0, 0, 0])
    assert second.tokens.shape == (1, 4, 4) and second.places.tolist() == [[0, 1, 2, 3, 4, 16, 16, 16]]
    np.testing.assert_array_equal(second.tokens[0, :2], [[4, 400, 401, 402], [900, 0, 0, 0]])


def test_packed_parts_of_different_lengths():
    """Cell 1's long row decides how wide rows are padded, cell 0's short ones how many there may be."""
    cells = [[row([1], [11], 1.0) for _ in range(8)], [row([1], [21] * 15, 1.0)]]
    (batch,) = pack(cells, 1, (2, 4, 16), packed=True).batches
    assert batch.tokens.shape == (2, 16, 16)
    assert [int((p < 256).sum()) for p in batch.places] == [16, 16]


def test_packing_wastes_little_and_needs_few_shapes():
    """A step's 128 rows of a chat's four lengths, 87,040 tokens, in eight parts with room for 11,264; padded to their
    buckets they would be 106,496."""
    lengths = [250] * 32 + [410] * 32 + [830] * 32 + [1230] * 32
    rows = [row([1] * (n - 2), [1, 1], 1.0) for n in lengths]
    batches = pack([rows], 8, (512, 896, 1408), packed=True).batches
    computed = sum(b.computed_tokens for b in batches)
    assert len(batches) == 8 and computed == 8 * 11_264 <= 1.04 * sum(lengths)
    assert {b.tokens.shape for b in batches} == {(1, 16, 1408), (1, 26, 896), (1, 44, 512)}
    assert sum(int((b.places < b.tokens[0].size).sum()) for b in batches) == sum(lengths)


def test_packed_shapes_are_bounded_by_the_buckets():
    """Whatever rows a step has: one size, as wide as the longest row of a micro-batch, with room for the shortest."""
    rng, buckets, shapes = np.random.default_rng(0), (16, 24, 32), set()
    for _ in range(40):
        cells = [
            [row([1] * int(n), [2, 3], 1.0) for n in rng.integers(1, 31, int(rng.integers(0, 60)))] for _ in range(3)
        ]
        for batch in pack(cells, 4, buckets, packed=True, slots=2).batches:
            shapes.add((batch.tokens.shape, batch.places.shape, batch.select.shape))
    widest = {(tokens[2], tokens[1]) for tokens, _, _ in shapes}
    assert {places for _, places, _ in shapes} == {(2, 4 * 32)} and {select for _, _, select in shapes} == {(2, 4 * 32)}
    assert widest <= {(wide, -(-2 * 4 * 32 // narrow)) for wide in buckets for narrow in buckets if narrow <= wide}
