"""Re-readings, evidence and reliability, with scripted copies; and arms that draw the same notes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rl.board_credit import board_of
from rl.collect import Cell, Settings, credit_step, reliability
from rl.credit import Needs
from rl.draw import play_step
from rl.reread import NOTHING, Reading, measure, read_again, shape_of, showing, twice, weigh_evidence
from rollout.distribution import Sampling
from rollout.scorer import Forced, _row_count, _width, score
from tasks.board import BoardSizes, board_task
from tests import tiny

SIZES = BoardSizes(4, 2, 6, 6)
TASK = board_task("board_writers", "readers_and_writers", SIZES, True, "whole", "full")
SETTINGS = Settings(1, 1, Sampling(0.9))
PROBLEMS = [tiny.problem(f"p{i}") for i in range(3)]


class Reader(tiny.ScriptedPolicy):
    """Notes say "n0".."n3"; a reader says which notes its prompt held, so grades can be a function of the board."""

    def _reply(self, request):
        prompt = bytes(t for t in request.prompt_tokens if t < 256).decode()
        turn = request.row_id.turn
        said = f"n{turn}" if turn < 4 else "".join(str(v) for v in range(4) if f"n{v}" in prompt)
        return super()._reply(request)._replace(tokens=np.array([*said.encode(), tiny.END], np.int32))


def grader(right):
    """Right if the notes read are in `right` (strings such as "01")."""
    return tiny.FakeGrader(lambda text, gold: float(text in right))


def played(policy, judge, cells=None):
    cells = cells or [Cell(TASK, "readers_mean", 17)]
    return cells, play_step(policy, judge, cells, [PROBLEMS] * len(cells), 0, SETTINGS)


def reading(needs, policy, judge):
    _, episodes_XPG = played(policy, judge)
    return [Reading(TASK, [e for group in episodes_XPG[0] for e in group], needs)]


def test_leave_one_out_reads_each_board_without_each_note():
    """Every reader of two notes is asked again twice; the notes are the same, and no key is used twice."""
    policy, judge = Reader(), grader({"01", "0", "12", "3"})
    readings = reading(Needs.WITHOUT_ONE, policy, judge)
    first = set(r.row_id for r in policy.requests)
    policy.calls.clear()
    values = measure(policy, judge, readings, 3, Sampling(0.9))[0].by_board_EUS
    assert len(policy.requests) == 3 * 4 * 2 * 3  # problems, readers, boards, draws
    assert all(r.row_id.turn >= 4 for r in policy.requests)
    again = set(r.row_id for r in policy.requests)
    assert len(again) == len(policy.requests) and not again & first
    # Reader 0 reads notes 0 and 1: right with 0 alone, wrong with 1 alone. Reader 2: wrong with 2, right with 3.
    assert values[0, 4, [0b01, 0b10]].tolist() == [1, 0] and values[0, 6, [0b0100, 0b1000]].tolist() == [0, 1]
    assert np.isnan(values[0, 4, 0b11]) and np.isnan(values[0, :4]).all()


def test_leave_one_out_credit_end_to_end():
    """Readers are right with note 0 on the board and wrong without: note 0's two readers each owe it 1."""
    policy = Reader()
    judge = tiny.FakeGrader(lambda text, gold: float("0" in text and not text.startswith("n")))
    cells, episodes = played(policy, judge, [Cell(TASK, "leave_one_out", 17)])
    (got,) = credit_step(policy, judge, cells, episodes, 0.0, SETTINGS)
    for credit in got.credits_P:
        assert credit.advantage_GU[0].tolist() == [1, 0, 0, 0, 0.5, -0.5, -0.5, 0.5]


def test_shapley_reads_every_subset_of_its_own_notes():
    policy, judge = Reader(), grader(set())
    readings = reading(Needs.SUBSETS, policy, judge)
    policy.calls.clear()
    values = measure(policy, judge, readings, 1, Sampling(0.9))[0].by_board_EUS
    assert len(policy.requests) == 3 * 4 * 4
    assert np.flatnonzero(~np.isnan(values[0, 7])).tolist() == [0b0000, 0b0001, 0b1000, 0b1001]


def test_nothing_is_asked_for_rules_that_need_nothing():
    policy, judge = Reader(), grader(set())
    readings = reading(Needs.GRADES, policy, judge)
    policy.calls.clear()
    assert measure(policy, judge, readings, 1, Sampling(0.9)) == [NOTHING] and not policy.requests


def test_showing_keeps_the_readers_order():
    """Reader 3 reads note 3 before note 0."""
    full = tuple(board_of(shape_of(TASK), u) for u in TASK.answers)
    assert showing(TASK, full).turns == TASK.turns
    assert showing(TASK, (0, 0b1111, 0b1000, 0b1001)).turns[7].reads == (3, 0)


def test_reliability_of_a_rule_that_is_sure_and_of_one_that_is_noise():
    """Readers who always answer alike give credit that repeats; coin flips give none that does."""
    policy = Reader()
    problems = [tiny.problem(f"q{i}") for i in range(60)]
    cells = [Cell(TASK, "readers_mean", 17)]
    sure = tiny.FakeGrader(lambda text, gold: float("0" in text))
    coin = np.random.default_rng(0)
    noise = tiny.FakeGrader(lambda text, gold: float(coin.integers(2)))
    found = []
    for judge in (sure, noise):
        episodes = play_step(policy, judge, cells, [problems], 0, SETTINGS)
        collected = credit_step(policy, judge, cells, episodes, 0.0, SETTINGS)
        found += reliability(policy, judge, cells, collected, SETTINGS)
    assert found[0] == pytest.approx(1) and abs(found[1]) < 0.2


def test_rules_without_note_credit_have_no_reliability():
    policy, judge = Reader(), grader(set())
    cells, episodes = played(policy, judge, [Cell(TASK, "readers_only", 17)])
    collected = credit_step(policy, judge, cells, episodes, 0.0, SETTINGS)
    policy.calls.clear()
    assert reliability(policy, judge, cells, collected, SETTINGS) == [None] and not policy.requests


def test_the_two_halves_share_no_draw():
    policy, judge = Reader(), grader(set())
    readings = reading(Needs.WITHOUT_ONE, policy, judge)
    policy.calls.clear()
    twice(policy, judge, readings, 2, Sampling(0.9))
    ids = [r.row_id for r in policy.requests]
    assert len(set(ids)) == len(ids) == 2 * 3 * 4 * 3 * 2


def test_a_rereading_of_the_same_board_is_a_fresh_draw():
    """With the real sampler: same notes, another answer."""
    policy = tiny.policy(tiny.adapters([0]), rows=(16,), prompt_buckets=(512,))
    policy.tokenizer = tiny.ByteTokenizer()
    judge = tiny.FakeGrader()
    cells, episodes = played(policy, judge)
    readings = [Reading(TASK, [e for group in episodes[0] for e in group], Needs.GRADES)]
    full = tuple(board_of(shape_of(TASK), u) for u in TASK.answers)
    seen = []
    judge.judge = lambda text, gold: seen.append(text) or 0.0
    read_again(policy, judge, readings, [[full]], 1, 1, Sampling(0.9))
    answers = [e.utterances[u].text for group in episodes[0] for e in group for u in TASK.answers]
    assert len(seen) == len(answers) == 12 and sum(a != b for a, b in zip(seen, answers, strict=True)) > 9


def test_scores_are_the_plain_forwards_log_probs():
    """Teacher-forced log-probs, batched and padded, equal one row at a time; scale 0 is the base."""
    policy = tiny.policy(tiny.adapters([0, 1]), prompt_buckets=(32, 64), compile_afresh=True)
    rows = [Forced("r", [tiny.START, *b"ab"[:n], 7], list(b"xyz"[: 1 + n]), float(n != 1)) for n in range(3)]
    together = score(policy, [rows, rows[::-1]])
    for cell, order in enumerate((rows, rows[::-1])):
        for row, got in zip(order, together[cell], strict=True):
            alone = score(policy, [[row], []] if cell == 0 else [[], [row]])[cell][0]
            assert got.shape == (len(row.tokens),) and (got < 0).all()
            np.testing.assert_allclose(got, alone, atol=1e-5)
    np.testing.assert_allclose(together[0][1], together[1][1], atol=1e-5)  # the row at scale 0: cells are alike
    assert np.abs(together[0][0] - together[1][2]).max() > 1e-3


def test_the_shapes_that_are_scored():
    """At most a quarter of padding, few row counts, and a last call no larger than what is left asks for."""
    assert [_width(n) for n in (3, 64, 65, 128, 129, 321, 1023)] == [64, 64, 96, 128, 160, 384, 1024]
    assert [_row_count(fits, 100) for fits in (0, 1, 7, 40, 130)] == [1, 1, 6, 32, 128]
    assert [_row_count(40, left) for left in (1, 5, 30, 33)] == [1, 6, 32, 32]


@pytest.mark.parametrize("tokens_at_once", [1024, 2 * 96])
def test_scores_are_log_softmax(monkeypatch, tokens_at_once):
    """By the plain forward, row by row, whatever shares a call: odd lengths, one cell with more rows than the other."""
    monkeypatch.setattr("rollout.scorer.CPU_TOKENS_AT_ONCE", tokens_at_once)
    policy = tiny.policy(tiny.adapters([0, 1]), prompt_buckets=(32, 128), compile_afresh=True)
    draw = np.random.default_rng(0)
    lengths = ([(3, 1), (90, 5), (41, 33), (20, 2), (7, 7)], [(12, 4), (64, 1)])
    ids = lambda count: draw.integers(0, 200, count).tolist()  # noqa: E731
    rows_X = [[Forced("r", ids(n), ids(m), float(n != 20)) for n, m in cell] for cell in lengths]
    scored_X = score(policy, rows_X)
    assert len(policy.compiles) == (1 if tokens_at_once == 1024 else 2), policy.compiles
    model, allowed = nnx.merge(policy.graph, policy.base), policy.allowed_V

    @jax.jit
    def log_softmax(lora, tokens_T, scale):
        hidden, _ = model.hidden(
            tokens_T[None], jnp.arange(96)[None], jnp.tril(jnp.ones((1, 96, 96), bool)), lora, scale
        )
        return jax.nn.log_softmax(jnp.where(allowed[None], model.logits(hidden[0]), -jnp.inf))

    for x, (rows, scored) in enumerate(zip(rows_X, scored_X)):
        lora = jax.tree.map(lambda leaf, x=x: leaf[x], policy.lora)
        for row, logp in zip(rows, scored):
            given = np.array([*row.prompt_tokens, *row.tokens])
            table = log_softmax(lora, np.pad(given, (0, 96 - len(given))), jnp.float32([row.scale * policy.lora_scale]))
            where = np.arange(len(row.prompt_tokens), len(given))
            np.testing.assert_allclose(logp, table[where - 1, given[where]], atol=1e-4)


def test_evidence_is_about_the_gold_on_each_board():
    """The prompt is the reader's with those notes; what is scored is the gold and its closing brace."""
    policy = tiny.policy(tiny.adapters([0]), rows=(16,), prompt_buckets=(640,), compile_afresh=True)
    judge = tiny.FakeGrader()
    _, episodes = played(policy, judge)
    readings = [Reading(TASK, episodes[0][0], Needs.EVIDENCE)]
    (values,) = weigh_evidence(policy, readings, [[(0b0011, 0b0110, 0b1100, 0b1001), (0b0001, 0b0010, 0b0100, 0b1000)]])
    episode = episodes[0][0][0]
    prompt = policy.tokenizer.encode_chat(TASK.render(episode.plan.problem, 4, {0: episode.utterances[0].text}))
    forced = Forced("r", [*prompt, *b"The answer is \\boxed{"], list(b"3}"), 1.0)
    assert values[0, 4, 0b0001] == pytest.approx(score(policy, [[forced]])[0][0].sum(), abs=1e-4)
    assert np.isfinite(values[0, 4:]).sum() == 8 and np.isnan(values[0, :4]).all()


def test_arms_of_one_seed_draw_the_same_notes_while_their_adapters_are_equal():
    """The published comparison leans on it: own note, shared board and both rings start from the same notes."""
    names = [("message_board", "own_note"), ("message_board", "shared_board"), ("board_writers", "readers_and_writers")]
    tasks = [board_task(name, arm, SIZES, True, "whole", "full") for name, arm in names]
    policy = tiny.policy(tiny.adapters([5, 5, 5]), rows=(16,), prompt_buckets=(512,))
    cells = [Cell(task, "readers_mean", 17) for task in tasks]
    _, episodes_XPG = played(policy, tiny.FakeGrader(), cells)
    notes = [[[u.tokens.tolist() for u in e.utterances[:4]] for group in cell for e in group] for cell in episodes_XPG]
    assert notes[0] == notes[1] == notes[2]
    answers = [[u.tokens.tolist() for group in cell for e in group for u in e.utterances[4:]] for cell in episodes_XPG]
    assert answers[0] != answers[1] != answers[2]


def test_evidence_is_not_drawn_again():
    """Its reliability is that of equal numbers, whatever the readers then say."""
    policy = tiny.policy(tiny.adapters([0]), rows=(16,), prompt_buckets=(640,))
    coin = np.random.default_rng(0)
    judge = tiny.FakeGrader(lambda text, gold: float(coin.integers(2)))
    cells, episodes = played(policy, judge, [Cell(TASK, "evidence_gain", 17)])
    collected = credit_step(policy, judge, cells, episodes, 0.0, SETTINGS)
    assert reliability(policy, judge, cells, collected, SETTINGS) == [pytest.approx(1)]


def test_a_long_gold_fits_behind_the_longest_prompt():
    """Evidence is scored behind prompts that may fill the longest bucket."""
    policy = tiny.policy(tiny.adapters([0]), prompt_buckets=(32,), compile_afresh=True)
    row = Forced("r", [tiny.START] * 32 + [*b"The answer is \\boxed{"], list(b"x" * 70), 1.0)
    (got,) = score(policy, [[row]])[0]
    assert got.shape == (70,) and np.isfinite(got).all()
