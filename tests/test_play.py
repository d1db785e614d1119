"""Playing: every turn is shown what its `reads` say and nothing else, and a sample depends on its plan alone."""

import dataclasses
import threading
import time

import pytest

from model.tokenizer import ChatTokenizer
from rollout.distribution import Sampling
from rollout.episode import EpisodePlan
from rollout.play import longest_prompt, play, play_graded, problem_number
from tasks.base import Task, Turn
from tasks.talk import talk_task
from tests import tiny

SAMPLING = Sampling(0.9)


def plan(task, problem=None, episode=0, seed=1, step=0, adapter=(1.0, 1.0)):
    return EpisodePlan(task, problem or tiny.problem(), episode, seed, step, adapter)


def neural(*seeds):
    """A real tiny policy; one prompt bucket, so that few shapes are compiled."""
    return tiny.policy(tiny.adapters(seeds), prompt_buckets=(64,))


def said(episode):
    return [u.tokens.tolist() for u in episode.utterances]


@pytest.mark.parametrize(
    "arm, heard",
    [
        ("on", [{}, {0: "e7t0"}, {0: "e7t0", 1: "e7t1"}]),
        ("off", [{}, {}, {0: "e7t0"}]),
    ],
)
def test_a_turn_hears_what_it_reads(arm, heard):
    task, seen = tiny.chat_task(arm), {}

    def recording(problem, index, words):
        seen[index] = dict(words)
        return task.render(problem, index, words)

    play(tiny.ScriptedPolicy(), [[plan(dataclasses.replace(task, render=recording), episode=7)]], SAMPLING)
    assert [seen[u] for u in range(3)] == heard


def test_a_prompt_is_what_render_wrote():
    (episode,) = play(tiny.ScriptedPolicy(), [[plan(tiny.chat_task("on"), tiny.problem("q"))]], SAMPLING)[0]
    assert bytes(episode.utterances[2].prompt_tokens[1:-2].tolist()) == b"2q:e0t0|e0t1"
    assert bytes(episode.utterances[1].prompt_tokens[1:-2].tolist()) == b"1q:e0t0|"[:-1]


def test_a_round_is_one_call_for_all_cells_problems_and_episodes():
    """Two notes in round 0, a reader in round 1: 2 cells x 2 problems x 3 episodes."""
    turns = (Turn(0, 0, 4, trained=False), Turn(1, 0, 4), Turn(0, 1, 4, reads=(0, 1), graded=True))
    task = dataclasses.replace(tiny.chat_task(), turns=turns)
    plans = [plan(task, tiny.problem(p), e) for p in "ab" for e in range(3)]
    policy = tiny.ScriptedPolicy(cells=2)
    episodes_XE = play(policy, [plans, plans], SAMPLING)
    assert [[len(requests) for requests in call] for call in policy.calls] == [[12, 12], [6, 6]]
    for cell, episodes in enumerate(episodes_XE):
        assert [(e.plan.problem.id, e.plan.episode, e.cell) for e in episodes] == [
            (p, e, cell) for p in "ab" for e in range(3)
        ]
        for episode in episodes:
            assert [u.text for u in episode.utterances] == [f"e{episode.plan.episode}t{t}" for t in range(3)]
            assert [u.trained for u in episode.utterances] == [False, True, True]


def test_schedules_of_different_lengths_play_together():
    short = Task("short", "x", ("A",), (Turn(0, 0, 3, graded=True),), tiny.chat_task().render)
    policy = tiny.ScriptedPolicy(cells=2)
    (first,), (second,) = play(policy, [[plan(short, adapter=(1.0,))], [plan(tiny.chat_task())]], SAMPLING)
    assert [len(first.utterances), len(second.utterances)] == [1, 3]
    assert [[len(requests) for requests in call] for call in policy.calls] == [[1, 1], [0, 1], [0, 1]]


def test_sampled_ids_are_kept_as_sampled():
    """257 is no text and 255 is broken UTF-8: neither survives a second tokenization."""
    ids = [tiny.START, 104, 255, tiny.END]
    policy = tiny.ScriptedPolicy(tokens=lambda row: ids)
    (episode,) = play(policy, [[plan(tiny.chat_task())]], SAMPLING)[0]
    assert said(episode) == [ids] * 3
    assert episode.utterances[0].text == "h\ufffd"


def test_the_same_plan_says_the_same_whatever_else_is_played():
    task = tiny.chat_task()
    plans = [plan(task, tiny.problem(p), e) for p in "abc" for e in range(2)]
    forward = play(neural(3), [plans], SAMPLING)[0]
    backward = play(neural(3), [plans[::-1]], SAMPLING)[0][::-1]
    (alone,) = play(neural(3), [[plans[4]]], SAMPLING)[0]
    assert [said(e) for e in forward] == [said(e) for e in backward]
    assert said(alone) == said(forward[4])
    assert len({str(said(e)) for e in forward}) == len(plans)


def test_equal_adapters_of_two_arms_draw_the_same_first_turn():
    """Arms of one seed differ by what is read, not by luck."""
    on, off = tiny.chat_task("on"), tiny.chat_task("off")
    plans_XE = [[plan(task, episode=e) for e in range(4)] for task in (on, off)]
    episodes_XE = play(neural(3, 3), plans_XE, SAMPLING)
    for a, b in zip(*episodes_XE, strict=True):
        assert said(a)[0] == said(b)[0]
    assert any(said(a)[1] != said(b)[1] for a, b in zip(*episodes_XE, strict=True))


def test_an_untrained_partner_is_the_base_and_is_not_trained():
    """In arm "off" B hears nothing, so its words can be compared: they are the base's, and A's are the adapter's."""
    task = tiny.chat_task("off", cap=8)
    adapters = ((1.0, 0.0), (0.0, 0.0), (1.0, 1.0))
    plans = [plan(task, episode=e, adapter=adapter) for adapter in adapters for e in range(4)]
    episodes = play(neural(3), [plans], SAMPLING)[0]
    mixed, base, trained = episodes[:4], episodes[4:8], episodes[8:]
    for m, b, t in zip(mixed, base, trained, strict=True):
        assert said(m)[1] == said(b)[1]
        assert said(m)[0] == said(t)[0] and said(m)[2] == said(t)[2]
        assert [u.trained for u in m.utterances] == [True, False, True]
        assert [u.trained for u in b.utterances] == [False] * 3
        assert [u.trained for u in t.utterances] == [True] * 3
    assert any(said(b)[1] != said(t)[1] for b, t in zip(base, trained, strict=True))


@pytest.mark.parametrize("arm, reads", [("channel_on", 3), ("channel_off", 1)])
def test_the_longest_prompt_holds_every_prompt_of_a_play_at_the_caps(arm, reads):
    """With one id a byte nothing merges, so the bound is what the last turn gets, and one more for each reply read."""
    task = talk_task(arm, message_tokens=5, answer_tokens=7)
    policy = tiny.ScriptedPolicy(tokens=lambda row: [55] * task.turns[row.turn].max_tokens)
    (episode,) = play(policy, [[plan(task)]], SAMPLING)[0]
    longest = max(len(u.prompt_tokens) for u in episode.utterances)
    assert longest_prompt(policy.tokenizer.encode_chat, task, tiny.problem()) == longest + reads


@pytest.mark.parametrize("token, text", [(22, "7"), (271, "\n\n"), (23811, " hello")])
def test_the_longest_prompt_with_a_merging_tokenizer(shared, token, text):
    """Qwen's " \\n" is one token where a reply is empty and two around a digit."""
    tokenizer = ChatTokenizer(shared / "tokenizer" / "qwen2.5")
    assert tokenizer.decode([token]) == text
    task = talk_task("channel_on", message_tokens=5, answer_tokens=9)
    policy = tiny.ScriptedPolicy(tokenizer=tokenizer, tokens=lambda row: [token] * task.turns[row.turn].max_tokens)
    (episode,) = play(policy, [[plan(task)]], SAMPLING)[0]
    longest = max(len(u.prompt_tokens) for u in episode.utterances)
    assert longest <= longest_prompt(tokenizer.encode_chat, task, tiny.problem())


def test_problem_numbers_are_stable():
    """Of the id alone and the same in every process: Python's own hash is neither."""
    assert problem_number(tiny.problem("gsm8k-train-7")) == 359538625
    assert problem_number(tiny.problem("a", answer="1")) == problem_number(tiny.problem("a", answer="2"))
    assert len({problem_number(tiny.problem(f"p{i}")) for i in range(5000)}) == 5000


def test_the_graded_turn_meets_its_own_problems_gold():
    task = talk_task("channel_on")
    problems = [tiny.problem("a", answer="11"), tiny.problem("b", answer="22")]
    names = {problem_number(p): p.id for p in problems}
    policy = tiny.ScriptedPolicy(lambda row: f"{names[row.problem]}{row.episode}{row.turn}", cells=2)
    grades = {"a02": 1.0, "a03": 0.0, "a12": 0.25, "a13": 0.5, "b02": 0.0, "b03": 1.0, "b12": 0.75, "b13": 1.0}
    grader = tiny.FakeGrader(lambda text, gold: grades[text])
    plans = [plan(task, p, e) for p in problems for e in range(2)]
    episodes = play_graded(policy, grader, [plans[:3], plans[3:]], SAMPLING)
    gold = {"a": "11", "b": "22"}
    assert sorted(grader.pairs) == [(text, gold[text[0]]) for text in sorted(grades)]
    assert [e.correct for part in episodes for e in part] == [(1.0, 0.0), (0.25, 0.5), (0.0, 1.0), (0.75, 1.0)]
    assert all(e.utterances[u].correct is None for part in episodes for e in part for u in (0, 1))


def numbers(call):
    """The episodes of a call's rows, cell by cell."""
    return [[request.row_id.episode for request in requests] for requests in call]


def test_what_takes_several_calls_is_played_in_two_halves_that_take_turns():
    """2 rows a call: 5 chats of one cell and 2 of the other take 3 calls a round, 2 for the first half and 1 then."""
    task, policy = tiny.chat_task(), tiny.ScriptedPolicy(cells=2, row_buckets=(1, 2))
    plans_XE = [[plan(task, episode=e) for e in range(5)], [plan(task, episode=e) for e in range(2)]]
    episodes_XE = play(policy, plans_XE, SAMPLING)
    assert [numbers(call) for call in policy.calls] == [[[0, 1, 2, 3], [0, 1]], [[4], []]] * 3
    whole = play(tiny.ScriptedPolicy(cells=2), plans_XE, SAMPLING)
    assert [[said(e) for e in episodes] for episodes in episodes_XE] == [[said(e) for e in x] for x in whole]
    assert [[e.plan.episode for e in episodes] for episodes in episodes_XE] == [[0, 1, 2, 3, 4], [0, 1]]


def test_a_split_that_would_take_another_call_is_not_made():
    """Of 4 chats only two have their first turn still to say: one call of 2 rows, or two of one."""
    task, policy = tiny.chat_task(), tiny.ScriptedPolicy(row_buckets=(2,))
    given = {0: play(policy, [[plan(task)]], SAMPLING)[0][0].utterances[0]}
    policy.calls.clear()
    plans = [dataclasses.replace(plan(task, episode=e), given={} if e % 2 else given) for e in range(4)]
    play(policy, [plans], SAMPLING)
    assert [numbers(call) for call in policy.calls] == [[[1, 3]], [[0, 1, 2, 3]], [[0, 1, 2, 3]]]


def test_halves_draw_the_same_in_the_same_shapes():
    plans = [plan(tiny.chat_task(), episode=e) for e in range(7)]
    # Nothing is shared with other tests, so that every shape is compiled here.
    halves = tiny.policy(tiny.adapters([3]), rows=(2,), prompt_buckets=(64,), compile_afresh=True)
    split, whole = play(halves, [plans], SAMPLING), play(neural(3), [plans], SAMPLING)
    assert [said(e) for e in split[0]] == [said(e) for e in whole[0]]
    assert {name[:3] for name in halves.compiles} == {(1, 2, 64)} and len(halves.compiles) == 1


def test_one_halfs_prompts_are_written_while_the_other_half_is_sampled():
    """Sampling the second half's first turns lasts until the first half's second turns are asked for."""
    written = threading.Event()

    def render(problem, index, heard):
        if index == 1:
            time.sleep(0.1)
            written.set()
        return tiny.chat_task().render(problem, index, heard)

    class Slow(tiny.ScriptedPolicy):
        def sample(self, requests_X, sampling):
            if len(self.calls) == 1:
                assert written.wait(20), "nobody wrote while the device worked"
            return super().sample(requests_X, sampling)

    policy = Slow(row_buckets=(2,))
    play(policy, [[plan(dataclasses.replace(tiny.chat_task(), render=render), episode=e) for e in range(4)]], SAMPLING)
    assert len(policy.calls) == 6 and policy.text.seconds["text_hidden"] > 0.05  # one of its two prompts


def test_what_goes_wrong_in_the_text_work_is_raised():
    def render(problem, index, heard):
        raise ZeroDivisionError(problem.id)

    with pytest.raises(ZeroDivisionError, match="p"):
        play(tiny.ScriptedPolicy(), [[plan(dataclasses.replace(tiny.chat_task(), render=render))]], SAMPLING)


def test_the_grader_knows_of_an_answer_while_the_next_round_is_sampled():
    """Turn 2's answer, before turn 3 is asked for; all are graded in one call at the end."""
    grader, known = tiny.FakeGrader(), []

    class Watching(tiny.ScriptedPolicy):
        def sample(self, requests_X, sampling):
            known.append([text for text, _ in grader.foreseen])
            assert not grader.pairs
            return super().sample(requests_X, sampling)

    play_graded(Watching(), grader, [[plan(talk_task("channel_on"), tiny.problem(answer="t3"))]], SAMPLING)
    assert known == [[], [], [], ["e0t2"]]
    assert grader.foreseen == grader.pairs == [("e0t2", "t3"), ("e0t3", "t3")]
