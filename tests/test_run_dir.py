"""The run directory, and the config that is saved in it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from eval.kept import episode_json
from rl.collect import Cell, Collected
from rl.config import Config, ConfigError, check, differences, from_json, to_json
from rl.credit import Credit
from rl.presets import PRESETS
from rl.run_dir import LOGS, RunDir, training_episodes
from tasks.talk import talk_task
from tests import tiny

TASK = talk_task("channel_on")


def chat(word, number=0):
    return tiny.episode(TASK, tiny.problem(), (word, "b", "c", "d"), (1.0, 0.0), number=number)


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "run", Config())


# Making and opening


@pytest.mark.parametrize("name, held", [("config.json", "another run"), ("thesis.tex", "other files")])
def test_create_refuses_a_directory_that_holds_anything(tmp_path, name, held):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"holds {held}.*--resume.*--out"):
        RunDir.create(tmp_path, Config())
    assert [p.name for p in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine"


def test_create_refuses_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files"):
        RunDir.create(tmp_path / "file", Config())


def test_create_takes_an_empty_directory_and_open_finds_the_run(tmp_path):
    config = Config(seeds=(17, 18), lr=0.5, out=tmp_path)
    RunDir.create(tmp_path, config)
    run, opened = RunDir.open(tmp_path)
    assert (run.path, opened) == (tmp_path, config)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "there is no run there"),
        ("{", "damaged"),
        ("null", "damaged"),
        (json.dumps({**to_json(Config()), "lrr": 1}), "differ in fields: lrr"),
    ],
)
def test_open_says_what_is_wrong(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        RunDir.open(tmp_path)


# Logs


def test_rewind_cuts_what_was_written_after_the_checkpoint(run):
    run.append("metrics.jsonl", [{"step": 0}, {"step": 1}])
    run.append("timing.jsonl", [{"step": 0}])
    sizes = run.sizes()
    assert sizes == {"metrics.jsonl": 24, "timing.jsonl": 12, "episodes.jsonl": 0}
    run.append("metrics.jsonl", [{"step": 2}])
    run.append("episodes.jsonl", [{"late": True}])
    with open(run.path / "timing.jsonl", "a") as file:
        file.write('{"step": 1, "half a li')
    run.rewind(sizes)
    assert run.sizes() == sizes
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'
    run.append("metrics.jsonl", [{"step": 2}])
    assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_rewind_to_before_the_first_checkpoint_empties_the_logs(run):
    run.append("metrics.jsonl", [{"step": 0}])
    run.rewind({})
    assert (run.path / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("log", LOGS)
def test_a_log_that_lost_bytes_is_an_error(run, log):
    for name in LOGS:
        run.append(name, [{"step": 0}])
    sizes = run.sizes()
    (run.path / log).write_text('{"st')
    with pytest.raises(ConfigError, match=f"{log} has 4 bytes and its checkpoint remembers 12"):
        run.rewind(sizes)


def test_no_number_that_json_lacks_is_written(run):
    with pytest.raises(ValueError):
        run.append("metrics.jsonl", [{"fine": 1.0}, {"loss": float("nan")}])
    assert run.sizes()["metrics.jsonl"] == 0


# Evaluations and episodes


def test_gathering_twice_is_gathering_once(run):
    """Also after a kill half-way, and with an evaluation that came later."""
    run.append("episodes.jsonl", [{"training": 1}])
    training_bytes = run.sizes()["episodes.jsonl"]
    run.kept.save("b", {}, [chat("from b")])
    run.gather_episodes(training_bytes)
    once = (run.path / "episodes.jsonl").read_bytes()
    run.gather_episodes(training_bytes)
    assert (run.path / "episodes.jsonl").read_bytes() == once
    run.kept.save("a", {}, [chat("from a")])
    run.gather_episodes(training_bytes)
    lines = [json.loads(line) for line in (run.path / "episodes.jsonl").read_text().splitlines()]
    assert lines[0] == {"training": 1}
    assert [line["utterances"][0]["text"] for line in lines[1:]] == ["from a", "from b"]


def test_an_episode_is_written_with_its_numbers_and_who_read_what():
    got = json.loads(json.dumps(episode_json(chat("hi", 2))))
    assert (got["problem"], got["gold"], got["arm"], got["seed"], got["episode"]) == ("p", "3", "channel_on", 17, 2)
    assert got["facts"] == ["Tom has 1.", "Ann has 2."]
    by_turn = [(u["agent"], u["reads"], u["tokens"], u["correct"]) for u in got["utterances"]]
    assert by_turn == [
        ("A", [], [300, 300], None),
        ("B", [0], [301], None),
        ("A", [0, 1], [302], 1.0),
        ("B", [0, 1, 2], [303], 0.0),
    ]
    assert got["utterances"][0]["logp"] == [-0.25, -0.25]


# Config


@pytest.mark.parametrize(
    "config",
    [*PRESETS.values(), Config(out=Path("/x/y"), seeds=(1, 2, 3), prompt_buckets=(64, 160), revision="abc", lr=1e-5)],
)
def test_a_config_survives_json(config):
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_differences_name_the_fields_a_resumed_run_may_not_change():
    saved = Config(out=Path("a"), show_every=10)
    given = dataclasses.replace(saved, out=Path("b"), show_every=0, lr=0.5, problems_per_step=4)
    lines = differences(saved, given)
    assert [line.split(":")[0] for line in lines] == ["--problems-per-step", "--lr"]
    assert "0.001" in lines[1] and "0.5" in lines[1]
    assert differences(saved, saved) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_can_be_run(preset):
    check(PRESETS[preset])


BAD = [
    ({"arms": ("channel_up",)}, "--arms 'channel_up'.*channel_on, channel_off"),
    ({"credit": ("gpro",)}, "--credit 'gpro'.*grpo"),
    ({"credit": ("readers_mean",)}, "--credit readers_mean is of no use to task talk_to_solve; it takes grpo"),
    ({"task": "board_writers", "credit": ("grpo",)}, "--credit grpo is of no use to task board_writers"),
    ({"task": "board_writers", "arms": ("own_note",)}, "--arms 'own_note'.*readers_and_writers, readers_only"),
    ({"task": "board_writers", "copies": 3, "degree": 4}, "--copies 3 --degree 4: a ring of 3 copies"),
    ({"task": "board_writers", "copies": 1}, "--copies 1.*at least 2"),
    ({"arms": ("channel_on", "channel_on")}, "--arms.*none twice"),
    ({"seeds": ()}, "--seeds must name at least one"),
    ({"seeds": (17, 17)}, r"--seeds.*none twice; got \[17, 17\]"),
    ({"seeds": (-1,)}, "seed -1 "),
    ({"data_seed": 1 << 32}, "seed 4294967296 "),
    *[
        ({name: 0}, f"--{name.replace('_', '-')} is 0; it must be at least 1")
        for name in (
            "rank steps problems_per_step episodes_per_problem message_tokens answer_tokens max_prompt_tokens "
            "micro_rows train_problems heldout_problems checkpoint_every episodes_every eval_episodes "
            "normalisation_chunks rereads base_evaluations"
        ).split()
    ],
    ({"show_every": -1}, "--show-every is -1"),
    ({"eval_rows": -1}, "--eval-rows is -1"),
    ({"train_problems": 7}, "--train-problems 7 is fewer than --problems-per-step 8"),
    ({"prompt_buckets": (160, 64)}, "--prompt-buckets must ascend"),
    ({"train_buckets": (64, 64)}, "--train-buckets must ascend"),
    ({"prompt_buckets": (64, 128)}, "--prompt-buckets, 128, must hold --max-prompt-tokens 160"),
    ({"temperature": 0.0}, "--temperature is 0"),
    ({"eval_top_p": 1.5}, "--eval-top.p is 1.5"),
    ({"eval_repetition_penalty": 0.0}, "--eval-repetition.penalty is 0"),
    ({"lr": float("nan")}, "--lr is nan"),
    ({"alpha": float("inf")}, "--alpha is inf"),
    ({"clip_norm": -1.0}, "--clip-norm is -1"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[next(iter(change)) for change, _ in BAD])
def test_what_cannot_be_run_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        check(dataclasses.replace(Config(), **change))


def test_numpy_numbers_do_not_reach_the_episode_file():
    """json refuses numpy's scalars: ids and log-probs are plain numbers by then."""
    utterance = episode_json(chat("x"))["utterances"][0]
    assert not any(isinstance(v, np.generic) for v in utterance["tokens"] + utterance["logp"])


def test_a_training_episode_is_written_with_its_pieces_and_advantages():
    """The turn's own advantage, whatever the order in which utterances come; the ids' text, cut where tokens meet."""
    cell = Cell(TASK, "grpo", 17)
    groups_PG = [[chat("one", 0), chat("two", 1)]]
    advantage_GU = np.array([[0.1, 0.2, 0.3, 0.4], [0, 0, -1 / 3, 0]])
    credit = Credit(np.zeros((2, 4)), advantage_GU, np.array([True, False]))
    got = Collected(groups_PG, [], [credit], [], None)
    first, second = training_episodes([cell], [got], lambda tokens: "".join(f"<{t}>" for t in tokens))
    assert (first["cell"], first["episode"], second["episode"]) == ("channel_on-grpo-17", 0, 1)
    assert [u["advantage"] for u in first["utterances"]] == [0.1, 0.2, 0.3, 0.4]
    assert second["utterances"][2]["advantage"] == -0.333333
    assert first["utterances"][0]["pieces"] == ["<100>"] * 3 and second["utterances"][1]["pieces"] == ["<201>"]
    assert first["kept"] is True and second["kept"] is False
    assert first["agents"] == ["A", "B"] and first["parts"] == 2
    assert not any(u["note"] for u in first["utterances"])
    json.dumps(first, allow_nan=False)
