"""The update on a tiny model: gradients, micro-batches, cells, flat steps, and the sampler's log-probs."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.batch import Row, pack
from rl.update import Learner, NonFiniteLoss, OptimConfig, gradient_name, init_state
from rollout.distribution import Sampling
from rollout.episode import RowId, Utterance
from rollout.policy import Request
from rollout.scorer import selected_count
from tests import tiny

SAMPLING = Sampling(0.9)
BUCKETS = (16, 32, 64)


EXECUTABLES = defaultdict(dict)
"""Compiled updates by (cells, remat, truncations). Sampling settings are arguments to them, so learners share them."""


def learner(sampling=SAMPLING, remat="none", cells=2):
    graph, base = tiny.base()
    allowed = jnp.asarray(tiny.ByteTokenizer().sampleable(tiny.CONFIG.vocab))
    shared = EXECUTABLES[cells, remat, sampling.truncations]
    optim = OptimConfig(lr=1e-2, steps=10)
    return Learner(graph, base, tiny.LORA.scale, allowed, optim, sampling, remat, _executables=shared)


def sampled_rows(seeds, count=8, sampling=SAMPLING):
    """Rows drawn by the sampler itself, one list a cell."""
    policy = tiny.policy(tiny.adapters(seeds), rows=(count,))
    texts = ["abc"[: 1 + i % 3] * (1 + i) for i in range(count)]
    requests = [
        [Request("r", [tiny.START, *t.encode()], 9, 1.0, RowId(s, 0, i, 0, 0)) for i, t in enumerate(texts)]
        for s in seeds
    ]
    rows_X = []
    for x, replies in enumerate(policy.sample(requests, sampling)):
        advantage = np.random.default_rng(x).normal(size=count)
        rows_X.append(
            [
                Row(Utterance(0, np.array(q.prompt_tokens), r.tokens, r.logp, "", r.finished, True), float(a), 9)
                for q, r, a in zip(requests[x], replies, advantage, strict=True)
            ]
        )
    return rows_X


def gradients(learn, lora, batches):
    grads = jax.tree.map(jnp.zeros_like, lora)
    for batch in batches:
        grads, _ = learn.accumulate(lora, grads, batch)
    return grads


def assert_close(a, b, rtol=1e-4):
    """Each number to rtol of itself, or to 2e-5 of its leaf's largest where that is more.

    A gradient's number is a float32 sum over tokens, so its error follows the size of what is summed, not of the sum,
    and the order of summing differs by processor. Measured on one with AVX2: gradients of these rows, whole and in
    micro-batches, lie up to 8e-6 of a leaf's largest number from float64's, which agree with each other to 1e-14.
    """
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=2e-5 * float(jnp.abs(y).max()))


@pytest.fixture(scope="module")
def rows_2():
    return sampled_rows([3, 4])


@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(0.8, top_p=0.8), Sampling(1.2, top_k=9)])
def test_sampled_log_probs_are_the_training_forwards(sampling):
    """The gap is zero only if temperature, truncation and barred ids are the same on both sides."""
    rows_X = sampled_rows([3, 4], sampling=sampling)
    learn = learner(sampling)
    _, stats = learn.update(init_state(tiny.adapters([3, 4]), learn.config), pack(rows_X, 8, BUCKETS).batches)
    assert (stats.gap_max < 1e-4).all() and (stats.tokens > 8).all()


def test_micro_batches_do_not_change_the_gradient(rows_2):
    learn, lora = learner(), tiny.adapters([3, 4])
    whole = gradients(learn, lora, pack(rows_2, 8, BUCKETS).batches)
    quarters = pack(rows_2, 2, BUCKETS).batches
    assert len(quarters) == 4
    assert_close(whole, gradients(learn, lora, quarters))


@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_slots_do_not_change_the_gradient(rows_2, slots):
    """Whoever's rows share a micro-batch: one slot at a time, or more slots than cells, a cell's parts side by side."""
    learn, lora = learner(), tiny.adapters([3, 4])
    batches = pack(rows_2, 2, BUCKETS, slots=slots).batches
    assert {b.tokens.shape[0] for b in batches} == {slots}
    assert_close(gradients(learn, lora, pack(rows_2, 8, BUCKETS).batches), gradients(learn, lora, batches))


@pytest.mark.parametrize("micro_rows, slots", [(8, 2), (1, 3)])
def test_packed_rows_have_the_same_gradient(rows_2, micro_rows, slots):
    """Without padding but for attention, in one micro-batch or several, a cell's parts side by side too."""
    learn, lora = learner(), tiny.adapters([3, 4])
    padded = pack(rows_2, 8, BUCKETS).batches
    batches = pack(rows_2, micro_rows, BUCKETS, slots=slots, packed=True).batches
    assert (len(batches) > 1) == (micro_rows == 1)
    assert sum(b.computed_tokens for b in padded) > sum(int((b.places < b.tokens[0].size).sum()) for b in batches)
    assert_close(gradients(learn, lora, padded), gradients(learn, lora, batches), rtol=2e-3)


def test_leaving_flat_rows_out_does_not_change_the_gradient(rows_2):
    """Against the same rows with an advantage too small to matter, which are computed."""
    learn, lora = learner(), tiny.adapters([3, 4])
    flat = [[r._replace(advantage=0.0 if i % 2 else r.advantage) for i, r in enumerate(rows)] for rows in rows_2]
    tiny_advantage = [
        [r._replace(advantage=1e-30 if i % 2 else r.advantage) for i, r in enumerate(rows)] for rows in rows_2
    ]
    assert_close(
        gradients(learn, lora, pack(flat, 8, BUCKETS).batches),
        gradients(learn, lora, pack(tiny_advantage, 8, BUCKETS).batches),
    )


@pytest.mark.parametrize("remat", ["products", "all"])
def test_remat_does_not_change_the_gradient(rows_2, remat):
    lora, batches = tiny.adapters([3, 4]), pack(rows_2, 8, BUCKETS).batches
    assert_close(gradients(learner(), lora, batches), gradients(learner(remat=remat), lora, batches))


def test_a_cells_numbers_do_not_depend_on_its_neighbours(rows_2):
    both, batches = tiny.adapters([3, 4]), pack(rows_2, 4, BUCKETS).batches
    learn = learner()
    state, stats = learn.update(init_state(both, learn.config), batches)
    alone = jax.tree.map(lambda x: x[1:], tiny.adapters([3, 4]))
    single = learner(cells=1)
    state_1, stats_1 = single.update(init_state(alone, single.config), pack(rows_2[1:], 4, BUCKETS).batches)
    assert_close(jax.tree.map(lambda x: x[1:], state.lora), state_1.lora, rtol=1e-3)
    np.testing.assert_allclose(stats.loss[1:], stats_1.loss, rtol=1e-4)
    np.testing.assert_allclose(stats.grad_norm[1:], stats_1.grad_norm, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1024, 40])
def test_the_gradient_is_a_finite_difference(rows_2, monkeypatch, chunk):
    """The whole path, from adapter to weighted loss, in the direction of a random adapter; logits in chunks too."""
    from flax import nnx

    from rl.update import batch_loss

    monkeypatch.setattr("rollout.scorer.LOGIT_CHUNK", chunk)
    learn, lora = learner(), jax.tree.map(lambda x: x[0], tiny.adapters([3]))
    (batch,) = pack(rows_2[:1], 8, BUCKETS).batches
    cell = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    direction = jax.tree.map(lambda x: x[0], tiny.adapters([9]))
    model = nnx.merge(learn.graph, learn.base)

    @jax.jit
    def loss(size):
        moved = jax.tree.map(lambda a, d: a + size * d, lora, direction)
        args = cell, selected_count(cell.select), SAMPLING.arrays(), learn.allowed_V, (0.2, 0.28), "none"
        return batch_loss(model, moved, jnp.float32(2.0), *args)[0]

    slope = float(jax.grad(loss)(jnp.float32(0)))
    difference = (float(loss(jnp.float32(5e-4))) - float(loss(jnp.float32(-5e-4)))) / 1e-3
    assert slope == pytest.approx(difference, rel=2e-2)
    assert abs(slope) > 1e-2


def test_sums_adapters_and_optimiser_are_written_in_place(rows_2):
    """Donated and taken: a gradient's sums in its own buffers, the step's adapters and moments in the old ones'."""
    learn, state = learner(), init_state(tiny.adapters([3, 4]), learner().config)
    lora, moments = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (state.lora, state.opt_state))
    batches = pack(rows_2, 8, BUCKETS).batches
    learn.update(state, batches)
    for name, size in ((gradient_name(batches[0]), lora), ("apply", lora + moments)):
        assert learn._executables[name].memory_analysis().alias_size_in_bytes == size


def test_a_flat_step_gives_zeros():
    learn = learner()
    before = jax.device_get(tiny.adapters([3, 4]))
    state, stats = learn.update(init_state(tiny.adapters([3, 4]), learn.config), [])
    assert stats.loss.tolist() == [0, 0] and stats.grad_norm.tolist() == [0, 0]
    assert int(state.step) == 1
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.lora), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_cell_with_nothing_to_train_beside_one_with(rows_2):
    """No NaN from 0/0, and only the other cell moves."""
    flat = [rows_2[0], [r._replace(advantage=0.0) for r in rows_2[1]]]
    learn = learner()
    before = jax.device_get(tiny.adapters([3, 4]))
    state, stats = learn.update(init_state(tiny.adapters([3, 4]), learn.config), pack(flat, 4, BUCKETS).batches)
    assert np.isfinite(stats.loss).all() and stats.grad_norm[1] == 0 and stats.grad_norm[0] > 0
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.lora), strict=True):
        np.testing.assert_array_equal(a[1], b[1])
        assert (np.asarray(a[0]) != np.asarray(b[0])).any()


def test_a_non_finite_loss_stops_before_the_update(rows_2):
    learn = learner()
    state = init_state(tiny.adapters([3, 4]), learn.config)
    broken = [[r._replace(advantage=float("inf")) for r in rows] for rows in rows_2]
    with pytest.raises(NonFiniteLoss, match="step 0.*not applied"):
        learn.update(state, pack(broken, 8, BUCKETS).batches)
    for a, b in zip(jax.tree.leaves(tiny.adapters([3, 4])), jax.tree.leaves(state.lora), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_learning_rate_falls_linearly_to_zero():
    from rl.update import optimiser

    config = OptimConfig(lr=0.5, steps=4)
    transform = optimiser(config)
    value, moves = jnp.zeros(1), []
    opt_state = transform.init(value)
    for _ in range(5):
        with jax.numpy_dtype_promotion("standard"):
            update, opt_state = transform.update(jnp.ones(1), opt_state, value)
        moves.append(float(update[0]))
    # A constant gradient makes Adam's step -lr; the fifth is at lr 0.
    np.testing.assert_allclose(moves, [-0.5, -0.375, -0.25, -0.125, 0], atol=1e-4)


def test_training_with_a_repetition_penalty_is_refused():
    with pytest.raises(ValueError, match="repetition penalty"):
        learner(Sampling(0.9, repetition_penalty=1.1))
