"""Evaluation: who plays, with which draws, and in which order the episodes come back."""

import json

import pytest

from eval.evaluate import EVAL_SEED, Evaluation, evaluate, format_estimate, summarise
from rl.collect import Cell, Settings
from rl.draw import play_step
from rollout.distribution import Sampling
from rollout.episode import EVAL_STEP
from tasks.base import Problem
from tasks.talk import talk_task
from tests import tiny

SAMPLING = Sampling(0.9, top_p=0.95)
PROBLEMS = [tiny.problem(name) for name in "abc"]
ON, OFF = tiny.chat_task("on"), tiny.chat_task("off")
BASE = Evaluation("base", ON, None, (0.0, 0.0))


def neural(*seeds):
    return tiny.policy(tiny.adapters(seeds), prompt_buckets=(64,))


def run(policy, *evaluations, chats=2, grader=None):
    return evaluate(policy, grader or tiny.FakeGrader(), evaluations, PROBLEMS, chats, SAMPLING)


def said(episodes_PG, turns=(0, 1, 2)):
    return [[[e.utterances[u].tokens.tolist() for u in turns] for e in group] for group in episodes_PG]


@pytest.mark.slow
def test_the_base_is_the_same_over_one_cell_or_two():
    """Its problems are dealt to whichever cell has least to do, and no adapter is felt."""
    (alone,) = run(neural(5), BASE)
    (spread,) = run(neural(6, 7), BASE)
    assert {e.cell for group in spread for e in group} == {0, 1}
    assert said(alone) == said(spread)
    assert not any(u.trained for group in spread for e in group for u in e.utterances)


def test_a_trained_cell_plays_with_its_own_adapter():
    evaluations = [Evaluation(f"cell {x}", ON, x, (1.0, 1.0)) for x in (0, 1)]
    first, second = run(neural(5, 6), *evaluations)
    assert said(first) == said(run(neural(5), evaluations[0])[0])
    assert said(second) == said(run(neural(6), evaluations[0])[0])
    assert said(first) != said(second)


def test_the_untrained_partner_is_the_second_copy():
    """In arm "off" nobody hears the other: A speaks as trained, B as the base, with the same draws."""
    trained = Evaluation("trained", OFF, 0, (1.0, 1.0))
    mixed = Evaluation("with_untrained_partner", OFF, 0, (1.0, 0.0))
    base = Evaluation("base", OFF, None, (0.0, 0.0))
    got = run(neural(5), trained, mixed, base)
    assert said(got[1], (0, 2)) == said(got[0], (0, 2)) != said(got[2], (0, 2))
    assert said(got[1], (1,)) == said(got[2], (1,)) != said(got[0], (1,))


def test_another_repeat_is_another_draw_and_the_same_repeat_the_same():
    again = Evaluation("again", ON, None, (0.0, 0.0), repeat=1)
    first, same, other = run(neural(5), BASE, BASE, again)
    assert said(first) == said(same) != said(other)


def test_episodes_come_back_by_evaluation_problem_and_chat():
    """Whatever order they were played in: the base's are played last and are first here."""
    evaluations = [BASE, Evaluation("one", OFF, 1, (1.0, 1.0)), Evaluation("zero", ON, 0, (1.0, 0.0), repeat=3)]
    grader = tiny.FakeGrader(lambda text, gold: float(text == "e1t2"))
    got = run(tiny.ScriptedPolicy(cells=2), *evaluations, grader=grader)
    for item, episodes_PG in zip(evaluations, got, strict=True):
        for problem, group in zip(PROBLEMS, episodes_PG, strict=True):
            assert [e.plan.episode for e in group] == [0, 1]
            assert [e.correct for e in group] == [(0.0,), (1.0,)]
            for e in group:
                assert (e.plan.problem, e.plan.task, e.plan.adapter) == (problem, item.task, item.adapter)
                assert (e.plan.seed, e.plan.step) == (EVAL_SEED, EVAL_STEP + item.repeat)
                assert item.cell in (None, e.cell)


def test_the_bases_work_fills_up_the_cell_with_least():
    """Cell 0 has 3 problems of its own; the base's go to cell 1 until it has as many."""
    policy = tiny.ScriptedPolicy(cells=2)
    run(policy, BASE, Evaluation("zero", ON, 0, (1.0, 1.0)))
    assert [[len(requests) for requests in call] for call in policy.calls] == [[6, 6]] * 3


def test_no_evaluation_shares_a_key_with_training():
    """Even of a cell whose seed is the evaluation's, on the same problems."""
    policy = tiny.ScriptedPolicy()
    run(policy, BASE, Evaluation("again", ON, None, (0.0, 0.0), repeat=1))
    evaluated = {request.row_id for request in policy.requests}
    policy.calls.clear()
    for step in range(3):
        cells = [Cell(ON, "grpo", EVAL_SEED)]
        play_step(policy, tiny.FakeGrader(), cells, [PROBLEMS], step, Settings(2, 1, SAMPLING))
    trained = {request.row_id for request in policy.requests}
    assert len(evaluated) == 2 * 3 * 2 * 3 and len(trained) == 3 * 3 * 2 * 3
    assert not evaluated & trained and all(row.step >= EVAL_STEP for row in evaluated)


def test_the_base_has_no_adapter():
    with pytest.raises(ValueError, match="base.*nobody's adapter"):
        Evaluation("base", ON, None, (1.0, 0.0))


def test_summarise_by_hand():
    task = talk_task("channel_on")
    problem = Problem("p", "How many?", "18", ("Tom has pens.", "Ann has caps."))
    half, point_five = "It is \\boxed{1/2}", "\\boxed{0.5}"
    episodes_PG = [
        [tiny.episode(task, problem, ("a", "b", half, point_five), (1.0, 1.0))] * 2,
        [tiny.episode(task, problem, ("a", "b", half, "0.5"), (0.0, 0.0))] * 2,
    ]
    grader = tiny.FakeGrader(lambda text, gold: 1.0)
    got = summarise(episodes_PG, grader)
    assert grader.pairs == [(half, "0.5")] * 2  # the second problem's have one box: no pair, and no agreement
    assert got["agree_graded"] == {"mean": 0.5, "low": 0.0, "high": 1.0, "n": 4}
    assert got["pass_at_1"] == {"mean": 0.5, "low": 0.0, "high": 1.0, "n": 8}
    assert got["both_agree"]["mean"] == 0 and got["boxed"]["mean"] == 0.75
    assert got["sends_own"] is None
    assert json.loads(json.dumps(got, allow_nan=False)) == got


def test_a_reported_number_has_its_interval():
    assert format_estimate({"mean": 0.4, "low": 0.374, "high": 0.436, "n": 9}) == "0.40 [0.37, 0.44]"
    assert format_estimate(None) == "-"
