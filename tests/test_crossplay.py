"""Cross-play: who speaks with whose adapter, the matrix by hand, and what can't be paired."""

import json

import numpy as np
import pytest

from eval import crossplay
from eval.crossplay import Player, find_players, matrix, own_minus_others, play_pairs, shared_settings
from rl import train
from rollout.distribution import Sampling
from rollout.setup import ConfigError
from tests import tiny

TASK = tiny.chat_task()
SAMPLING = Sampling(0.9)


def test_every_turn_is_sampled_with_the_adapter_of_whoever_speaks():
    """Two adapters and the base, which is cell 0 at scale 0. A speaks turns 0 and 2, B turn 1."""
    policy = tiny.ScriptedPolicy(cells=2)
    seats = [(0, 1.0), (1, 1.0), (0, 0.0)]
    judge = tiny.FakeGrader(lambda text, gold: 1.0)
    episodes = play_pairs(policy, judge, TASK, seats, [tiny.problem("p")], 1, SAMPLING)
    assert len(policy.calls) == 3  # a call a turn, for all nine pairs
    for turn, agent in enumerate((0, 1, 0)):
        per_cell = [sorted(r.scale for r in requests) for requests in policy.calls[turn]]
        assert per_cell == [[0, 0, 0, 1, 1, 1], [1, 1, 1]], agent
    for i, (cell_i, scale_i) in enumerate(seats):
        for j, (cell_j, scale_j) in enumerate(seats):
            (plan,) = (e.plan for e in episodes[i][j][0])
            assert plan.cells == (cell_i, cell_j) and plan.adapter == (scale_i, scale_j)
    assert len({(r.row_id) for r in policy.calls[0][0]}) == 1  # all pairs have the same luck


def test_pairs_with_real_weights_are_what_each_adapter_alone_is():
    """The diagonal of the matrix is each adapter playing itself, token for token; off it, turn 0 is still i's."""
    adapters = tiny.adapters([0, 1])
    problems = [tiny.problem("p"), tiny.problem("q")]
    judge = tiny.FakeGrader(lambda text, gold: 0.0)
    policy = tiny.policy(adapters, rows=(8,))
    episodes = play_pairs(policy, judge, TASK, [(0, 1.0), (1, 1.0)], problems, 1, SAMPLING)
    swapped = play_pairs(policy, judge, TASK, [(1, 1.0), (0, 1.0)], problems, 1, SAMPLING)

    def tokens(pair):
        return [[u.tokens.tolist() for u in group[0].utterances] for group in pair]

    for i in (0, 1):
        for j in (0, 1):
            assert tokens(episodes[i][j]) == tokens(swapped[1 - i][1 - j])
    first = lambda pair: [turns[0] for turns in tokens(pair)]  # noqa: E731
    assert first(episodes[0][0]) == first(episodes[0][1]) != first(episodes[1][0])


def test_the_matrix_by_hand():
    def pair(*grades):
        return [[tiny.episode(TASK, tiny.problem(str(p)), ("a", "b", "c"), (g,))] for p, g in enumerate(grades)]

    got = matrix([[pair(1, 1, 0, 1), pair(0, 0, 0, 0)], [pair(1, 0, 0, 0), pair(1, 1, 1, 1)]])
    assert [[estimate.mean for estimate in row] for row in got] == [[0.75, 0], [0.25, 1]]
    assert got[0][0].low < 0.75 < got[0][0].high and got[0][0].n == 4


def test_own_minus_others_is_paired_by_problem():
    """Own (1, 1) and (0, 1), others (0, 1) and (1, 0): means (1/2, 1) - (1/2, 1/2) = (0, 1/2)."""
    solved = np.array([[[1, 1], [0, 1]], [[1, 0], [0, 1]]], float)
    got = own_minus_others(solved)
    assert (got.mean, got.low, got.high, got.n) == (0.25, 0.0, 0.5, 2)


def write_run(path, cells=("a", "b"), **changes):
    settings = {
        "task": "talk_to_solve",
        "model": "builtin",
        "tokenizer": None,
        "revision": None,
        "dtype": "float32",
        "data": "stories",
        "data_seed": 0,
        "prompt_style": "short",
        "message_tokens": 24,
        "answer_tokens": 28,
    }
    for cell in cells:
        (path / "adapters" / cell).mkdir(parents=True)
        (path / "adapters" / cell / "adapter_config.json").write_text("{}")
    (path / "config.json").write_text(json.dumps(settings | changes))
    return path


def test_adapters_are_found_in_runs_or_by_name(tmp_path):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", ("a",))
    assert [p.name for p in find_players([one])] == ["a", "b"]
    assert [p.name for p in find_players([one, two / "adapters/a"])] == ["one/a", "one/b", "two/a"]
    with pytest.raises(ConfigError, match="holds no adapters"):
        find_players([tmp_path])
    with pytest.raises(ConfigError, match="two adapters have one name: a"):
        find_players([one / "adapters/a", one])


def test_runs_that_do_not_belong_together(tmp_path):
    players = [
        Player("x", tmp_path, write_run(tmp_path / "one")),
        Player("y", tmp_path, write_run(tmp_path / "two", data_seed=1)),
    ]
    with pytest.raises(ConfigError, match="data_seed 0 and .* 1; adapters of one matrix need the same"):
        shared_settings(players)
    (tmp_path / "two/config.json").write_text("no json")
    with pytest.raises(ConfigError, match="is not a run directory"):
        shared_settings(players)


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    run = tmp_path / "run"
    sizes = ("--train-problems", "8", "--heldout-problems", "4", "--problems-per-step", "2", "--show-every", "0")
    assert train.main([*sizes, "--seeds", "1", "2", "--steps", "1", "--no-evaluate", "--out", str(run)]) == 0
    assert crossplay.main([str(run), "--out", str(tmp_path / "x"), "--chats", "1"]) == 0
    result = json.loads((tmp_path / "x/crossplay.json").read_text())
    assert result["players"] == ["channel_on-grpo-1", "channel_on-grpo-2", "base"]
    assert [len(row) for row in result["pass_at_1"]] == [3, 3, 3] and result["pass_at_1"][0][1]["n"] == 8
    assert {p.suffix for p in (tmp_path / "x").iterdir()} == {".json", ".svg", ".png"}
    assert "with oneself minus with another" in capsys.readouterr().out
    assert crossplay.main([str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert "holds no adapters" in capsys.readouterr().err
