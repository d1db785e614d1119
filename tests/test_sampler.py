"""The sampler: what it draws, what it says about what it drew, and what may not change either."""

import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.qwen2 import init_cache
from rollout.distribution import Sampling, shaped_logits, token_logp
from rollout.episode import RowId
from rollout.policy import Policy, PromptTooLong, Request, bucket_ladder
from rollout.sampler import Rows, prefill
from tests import tiny

TRAIN = Sampling(temperature=0.9)


def request(text, episode=0, cap=8, scale=1.0, turn=0, seed=1):
    return Request(text, [tiny.START, *text.encode(), tiny.START], cap, scale, RowId(seed, 0, 5, episode, turn))


WIDTH = 32
"""Tokens of the plain forward: one shape, so one compilation. What is right of a token can't change it."""


def uncached_logp(policy, request, reply, cell, sampling):
    """The plain forward over prompt and reply, no cache, no left padding: log-probs of the reply's tokens."""
    tokens = np.zeros(WIDTH, np.int32)
    start, end = len(request.prompt_tokens), len(request.prompt_tokens) + len(reply.tokens)
    tokens[:end] = [*request.prompt_tokens, *reply.tokens]
    lora = jax.tree.map(lambda x: x[cell], policy.lora)
    scale = jnp.full((1,), request.scale * policy.lora_scale, jnp.float32)
    model = nnx.merge(policy.graph, policy.base)
    return plain_logp(model, tokens, lora, scale, sampling.arrays(), policy.allowed_V)[start - 1 : end - 1]


@jax.jit
def plain_logp(model, tokens, lora, scale, shape, allowed_V):
    """log p(tokens[1:])."""
    causal = jnp.tril(jnp.ones((WIDTH, WIDTH), bool))[None]
    hidden, _ = model.hidden(tokens[None], jnp.arange(WIDTH)[None], causal, lora, scale)
    return token_logp(shaped_logits(model.logits(hidden[0, :-1]), shape, allowed_V), tokens[1:])


@pytest.mark.parametrize(
    "sampling", [TRAIN, Sampling(0.9, top_p=0.8), Sampling(0.7, top_k=5), Sampling(1.1, top_p=0.7, top_k=20)]
)
def test_cached_log_probs_equal_the_plain_forward(sampling):
    policy = tiny.policy(tiny.adapters([0, 1]))
    requests_X = [[request(t, e) for e, t in enumerate(("a", "hello", "what is 12+3"))] for _ in range(2)]
    for cell, replies in enumerate(policy.sample(requests_X, sampling)):
        for asked, reply in zip(requests_X[cell], replies, strict=True):
            expected = uncached_logp(policy, asked, reply, cell, sampling)
            np.testing.assert_allclose(reply.logp, expected, atol=1e-4)


@pytest.mark.parametrize("cells", [1, 2])
def test_the_loop_writes_its_cache_in_place(cells):
    """A decode step touches one slot; a copy of the cache at every token was half of a CPU's time."""
    policy = tiny.policy(tiny.adapters(range(cells)), prompt_buckets=(32,))
    policy.sample([[request("a")] for _ in range(cells)], TRAIN)
    name = next(name for name in policy._executables if name[:3] == (cells, 4, 32))
    keys = init_cache(tiny.CONFIG, 4, 32 + name[3], jnp.float32)[0][0]
    shape = ",".join(map(str, keys.shape))
    made = re.findall(rf"= f32\[(?:{cells},)?{shape}\]\S* ([a-z-]+)\(", policy._executables[name][1].as_text())
    assert "dynamic-update-slice" in made and "copy" not in made


def test_a_sample_depends_on_its_row_id_only():
    """Not on neighbours, order, padding, bucket, batch size, or the cells beside it."""
    lora = tiny.adapters([0, 1])
    texts = ["a", "bb", "ccc", "dddd", "eeeee"]
    requests = [request(t, e) for e, t in enumerate(texts)]
    together = tiny.policy(lora).sample([requests, requests], TRAIN)
    reverse = tiny.policy(lora).sample([requests[::-1], requests[::-1]], TRAIN)
    cell_1 = jax.tree.map(lambda x: x[1:], lora)
    lone = tiny.policy(cell_1, rows=(1,), prompt_buckets=(48,))
    alone = [lone.sample([[r]], TRAIN)[0][0] for r in requests]
    for i in range(len(texts)):
        for other in (reverse[1][-1 - i], alone[i]):
            np.testing.assert_array_equal(together[1][i].tokens, other.tokens)
            np.testing.assert_allclose(together[1][i].logp, other.logp, atol=1e-5)


@pytest.mark.parametrize("field", RowId._fields)
def test_every_field_of_a_row_id_changes_the_sample(field):
    """A default that made all rows alike would make every group flat."""
    policy = tiny.policy(tiny.adapters([0]))
    one = request("abc", cap=12)
    other = one._replace(row_id=one.row_id._replace(**{field: 77}))
    first, second = policy.sample([[one, other]], TRAIN)[0]
    assert first.tokens.tolist() != second.tokens.tolist()


def test_the_end_of_turn_token_is_kept_and_caps_hold():
    policy = tiny.policy(tiny.adapters([0]), rows=(32,))
    replies = policy.sample([[request("abc", e, cap=1 + e % 30) for e in range(256)]], Sampling(1.5))[0]
    for e, reply in enumerate(replies):
        cap = 1 + e % 30
        assert 1 <= len(reply.tokens) <= cap and len(reply.logp) == len(reply.tokens)
        assert reply.finished == (reply.tokens[-1] == tiny.END)
        assert tiny.END not in reply.tokens[:-1]
        assert reply.finished or len(reply.tokens) == cap
    assert any(r.finished for r in replies) and not all(r.finished for r in replies)


def test_ids_without_a_token_are_never_sampled():
    policy = tiny.policy(tiny.adapters([0]), rows=(32,))
    replies = policy.sample([[request("q", e, cap=30) for e in range(64)]], Sampling(100.0))[0]
    drawn = np.concatenate([r.tokens for r in replies])
    assert drawn.max() < tiny.ByteTokenizer.base_vocab
    assert len(np.unique(drawn)) > 200


def test_scale_zero_is_the_untrained_base():
    """A row at scale 0 draws what a fresh adapter (B = 0) draws, and the adapter does change the others."""
    fresh = jax.tree.map(jnp.zeros_like, tiny.adapters([0]))
    trained = tiny.adapters([0])
    off = tiny.policy(trained).sample([[request("abc", scale=0.0, cap=20)]], TRAIN)[0][0]
    on = tiny.policy(trained).sample([[request("abc", scale=1.0, cap=20)]], TRAIN)[0][0]
    base = tiny.policy(fresh).sample([[request("abc", scale=1.0, cap=20)]], TRAIN)[0][0]
    np.testing.assert_array_equal(off.tokens, base.tokens)
    assert on.tokens.tolist() != base.tokens.tolist()


def test_compilations_are_bounded_by_the_buckets():
    policy = tiny.policy(tiny.adapters([0]), rows=(4,), prompt_buckets=(16, 32), compile_afresh=True)
    for length in range(1, 30):
        policy.sample([[request("x" * length, cap=1 + length)]], TRAIN)
    policy.sample([[request("x", cap=3)]], Sampling(0.5, top_p=0.9, top_k=3))
    assert set(policy.compiles) == {(1, 4, 16, 32, False), (1, 4, 32, 32, False)}


def test_a_truncation_is_another_shape_on_a_gpu_and_its_value_is_not(monkeypatch):
    """A CPU has one program for all: compiling another takes it longer than asking as it runs."""
    names = []
    monkeypatch.setattr(Policy, "executable", lambda policy, name, programs: names.append(name) or (None, None))
    for backend, kinds in (("cpu", {()}), ("gpu", {("top_p", "top_k"), ("top_k",), ()})):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        policy = tiny.policy(tiny.adapters([0]), prompt_buckets=(32,), fused=False)
        for truncation in ((0.9, 3), (0.5, 2), (1.0, 3), (1.0, 0)):
            list(policy._calls([[request("x", cap=3)]], Sampling(0.5, *truncation)))
        assert set(names) == {(1, 4, 32, 32, False, *kind) for kind in kinds}
        names.clear()


@pytest.mark.parametrize("sampling", [TRAIN, Sampling(0.9, top_p=0.8, top_k=5)])
def test_a_gpu_asks_seldom_whether_rows_run_and_draws_the_same(sampling, monkeypatch):
    """Once in eight tokens, and nothing else in a token's program asks the host: it would wait, and the GPU for it."""
    requests_X = [[request("ab" * e, e, cap=1 + 7 * e) for e in range(4)]]
    often = tiny.policy(tiny.adapters([0]), compile_afresh=True, fused=False)
    before = often.sample(requests_X, sampling)[0]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    seldom = tiny.policy(tiny.adapters([0]), compile_afresh=True, fused=False)
    for one, other in zip(before, seldom.sample(requests_X, sampling)[0], strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)
    assert often.decode_steps == max(len(reply.tokens) for reply in before)
    assert seldom.decode_steps == -(-often.decode_steps // 8) * 8
    ((_, decode),) = seldom._executables.values()
    assert "conditional(" not in decode.as_text() and '"known_trip_count":{"n":"8"}' in decode.as_text()


def test_a_cpus_calls_run_side_by_side_and_draw_what_they_draw_one_by_one(monkeypatch):
    """The same bits in the same places, and no more seconds than passed; one by one where caches are large."""
    lora, requests_X = tiny.adapters([0, 1]), [[request("ab" * (e % 9), e) for e in range(n)] for n in (11, 6)]
    prepare, threads, sampled = Policy._call, [], []

    def meeting(call, others):
        def run():
            threads.append(threading.current_thread())
            others.wait(60)
            return call()

        return run

    monkeypatch.setattr("os.cpu_count", lambda: 3)
    for at_once, room in ((1, 0), (3, 1 << 30)):
        others = threading.Barrier(at_once)
        monkeypatch.setattr(Policy, "_call", lambda *args, others=others: meeting(prepare(*args), others))
        monkeypatch.setattr("rollout.policy.SIDE_BY_SIDE_BYTES", room)
        policy, started = tiny.policy(lora, rows=(2,), prompt_buckets=(32,)), time.perf_counter()
        replies_X = policy.sample(requests_X, TRAIN)
        assert policy.seconds["prefill"] + policy.seconds["decode"] <= time.perf_counter() - started
        drawn = [[(r.tokens.tolist(), r.logp.tolist(), r.finished) for r in replies] for replies in replies_X]
        sampled.append((drawn, policy.sampled_tokens, policy.decode_steps))
    assert sampled[0] == sampled[1]
    assert [len(rows) for rows in drawn] == [11, 6] and len(threads) == 12
    assert set(threads[:6]) == {threading.current_thread()} and len(set(threads[6:])) == 3


def test_an_accelerator_takes_one_call_after_the_other(monkeypatch):
    requests_X = [[request("a", e) for e in range(5)]]
    settings = {"rows": (2,), "prompt_buckets": (32,), "fused": False, "compile_afresh": True}
    before = [r.tokens.tolist() for r in tiny.policy(tiny.adapters([0]), **settings).sample(requests_X, TRAIN)[0]]
    monkeypatch.setattr("rollout.policy.ThreadPoolExecutor", None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    after = tiny.policy(tiny.adapters([0]), **settings).sample(requests_X, TRAIN)[0]
    assert [r.tokens.tolist() for r in after] == before


def test_a_prompt_too_long_names_the_problem():
    with pytest.raises(PromptTooLong, match="problem p9.*202 tokens.*64"):
        tiny.policy(tiny.adapters([0])).sample([[request("y" * 200)._replace(name="problem p9, turn 1")]], TRAIN)


def test_repetition_penalty_follows_its_definition():
    """With a huge penalty no id of the prompt or of the reply comes back."""
    policy = tiny.policy(tiny.adapters([0]), rows=(16,), force_length=True)
    replies = policy.sample([[request("abcdef", e, cap=20) for e in range(16)]], Sampling(0.9, 1.0, 0, 1e6))[0]
    for reply in replies:
        assert len(set(reply.tokens.tolist())) == 20
        assert not set(reply.tokens.tolist()) & {*b"abcdef", tiny.START}


def test_bucket_ladder():
    assert bucket_ladder(160) == (64, 96, 128, 160)
    assert bucket_ladder(1280, 256) == (256, 384, 512, 768, 1024, 1280)
    assert bucket_ladder(40) == (64,)


def test_idle_cells_are_left_out_and_change_nothing():
    """With one busy cell of four, only that cell is run; its sample is what it was beside busy neighbours."""
    policy = tiny.policy(tiny.adapters([0, 1, 2, 3]), compile_afresh=True)
    one = [request("abc"), request("de", 1)]
    (_, _, alone, _) = policy.sample([[], [], one, []], TRAIN)
    assert [key[0] for key in policy.compiles] == [1]
    (_, _, beside, _) = policy.sample([one] * 4, TRAIN)
    for a, b in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)


@pytest.mark.parametrize("tokens_at_once", [1 << 16, 2 * 13])
def test_prefill_equals_the_plain_forward(monkeypatch, tokens_at_once):
    """Rows of any length in one left-padded batch: the last token's state, and keys and values in the slots at the
    right, are those of the masked forward without moving anything; nothing is NaN, in the padding neither."""
    monkeypatch.setattr("rollout.sampler.PREFILL_TOKENS", tokens_at_once)
    slots, new, lengths = 13, 5, np.array([[1, 7, 13, 6], [12, 3, 1, 5]], np.int32)
    graph, base = tiny.base()
    lora = tiny.adapters([0, 1])
    tokens = np.random.default_rng(0).integers(0, 200, (2, 4, slots)).astype(np.int32)
    scale = np.array([[2, 0, 2, 1], [2, 2, 0, 1]], np.float32)
    rows = Rows(tokens, lengths, np.full((2, 4), new), scale, np.zeros((2, 4, 5), np.uint32))
    state = jax.jit(lambda lora, rows: prefill(graph, base, lora, rows, new, False))(lora, rows)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((state.hidden, state.cache)))

    real = np.arange(slots) >= slots - lengths[..., None]
    mask = real[:, :, None] & np.tril(np.ones((slots, slots), bool))
    where = np.maximum(np.arange(slots) - (slots - lengths[..., None]), 0)

    @jax.jit
    def masked(lora, tokens, where, mask, scale):
        cache = init_cache(tiny.CONFIG, 4, slots, jnp.float32)
        return nnx.merge(graph, base).hidden(tokens, where, mask, lora, scale, cache)

    for x in range(2):
        cell = jax.tree.map(lambda leaf, x=x: leaf[x], lora)
        hidden, cache = masked(cell, tokens[x], where[x], mask[x], scale[x])
        np.testing.assert_allclose(state.hidden[x], hidden[:, -1], atol=1e-5)
        for got, expected in zip(jax.tree.leaves(state.cache), jax.tree.leaves(cache), strict=True):
            assert got.shape[3] == slots + new and not got[x, :, :, slots:].any()
            for b, length in enumerate(lengths[x]):
                kept = slice(slots - length, slots)
                np.testing.assert_allclose(got[x, b, :, kept], expected[b, :, kept], atol=1e-5)
