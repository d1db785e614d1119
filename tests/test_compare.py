"""Comparing groups of kept evaluations: which are meant, what they say, and what can't be paired."""

import json

import pytest

from eval import compare
from eval.compare import compare_sides
from rollout.setup import ConfigError

PROBLEMS = [f"p{i}" for i in range(4)]


def keep(run, **evaluations):
    """`name=[values by problem]`, underscores standing for dashes."""
    (run / "evaluations").mkdir(parents=True, exist_ok=True)
    for name, values in evaluations.items():
        kept = {"metrics": {}, "problems": {"pass_at_1": dict(zip(PROBLEMS, values, strict=False))}}
        (run / "evaluations" / f"{name.replace('_', '-')}.json").write_text(json.dumps(kept))
    return run


def study(run):
    return keep(
        run,
        on_grpo_1_trained=[0, 0, 1, 0],
        on_grpo_2_trained=[0, 0, 0, 1],
        on_raft_1_trained=[1, 1, 1, 0],
        on_raft_2_trained=[1, 1, 0, 1],
        on_raft_1_with_untrained_partner=[0, 0, 0, 0],
        base_on=[0, 0, 0, 0],
    )


def test_groups_across_seeds_by_hand(tmp_path):
    """Means of seeds by problem: raft (1, 1, 1/2, 1/2), grpo (0, 0, 1/2, 1/2): delta (1, 1, 0, 0)."""
    run = study(tmp_path / "run")
    found = compare_sides(f"{run}:on-raft", f"{run}:on-grpo")
    assert (found["delta"], found["mean_a"], found["mean_b"]) == (0.5, 0.75, 0.25)
    assert (found["seeds_a"], found["seeds_b"], found["problems"]) == (2, 2, 4)
    assert (found["problem_low"], found["problem_high"]) == (0.0, 1.0) and found["verdict"] == "flat"
    back = compare_sides(f"{run}:on-grpo", f"{run}:on-raft")
    assert back["delta"] == -0.5


def test_one_cell_one_seed_is_unresolved(tmp_path):
    run = study(tmp_path / "run")
    assert compare_sides(f"{run}:on-raft-1", f"{run}:on-grpo-2")["verdict"] == "unresolved"
    assert compare_sides(f"{run}:on-raft", f"{run}:base-on")["seeds_b"] == 1


def test_a_run_of_one_group_needs_no_selection(tmp_path):
    one = keep(tmp_path / "one", on_grpo_1_trained=[0, 0, 1, 0])
    two = keep(tmp_path / "two", on_grpo_1_trained=[1, 1, 1, 0])
    assert compare_sides(str(two), str(one))["delta"] == 0.5


def test_the_noise_band_is_of_the_bases_repeated_evaluations(tmp_path):
    run = keep(
        study(tmp_path / "run"),
        base_on_again_1=[1, 0, 0, 0],
        base_on_again_2=[1, 1, 0, 0],
    )
    found = compare_sides(f"{run}:on-raft", f"{run}:on-grpo")
    assert found["noise_band"] == pytest.approx(4.302653 * 0.25)  # sd 0.25, two seeds a side: sqrt(1/2 + 1/2)
    assert "noise band: 1.076" in compare.sentence(found)


def test_what_cannot_be_compared(tmp_path):
    run = study(tmp_path / "run")
    for text, message in (
        (str(tmp_path / "nowhere"), "keeps no evaluations"),
        (str(run), "several groups; name one: .*:on-grpo, .*:on-raft"),
        (f"{run}:on-ada", "has no 'on-ada'; choose from on-grpo"),
    ):
        with pytest.raises(ConfigError, match=message):
            compare_sides(text, f"{run}:on-grpo")
    with pytest.raises(ConfigError, match="no metric 'vote'; choose from pass_at_1"):
        compare_sides(f"{run}:on-grpo", f"{run}:on-raft", "vote")
    fewer = keep(tmp_path / "fewer", on_raft_1_trained=[1, 1, 1])
    with pytest.raises(ConfigError, match="different problems .0 and 1 are on one side only"):
        compare_sides(str(fewer), f"{run}:on-grpo")
    with pytest.raises(ConfigError, match="hold different problems: not one group"):
        compare_sides(str(keep(fewer, on_raft_2_trained=[1, 1, 1, 0])), f"{run}:on-grpo")


@pytest.mark.parametrize("value, message", [("NaN", "no finite"), ("null", "no finite"), ("Infinity", "no finite")])
def test_values_that_are_missing_or_not_finite_are_errors(tmp_path, value, message):
    run = study(tmp_path / "run")
    path = run / "evaluations/on-raft-2-trained.json"
    path.write_text('{"problems": {"pass_at_1": {"p0": 1, "p1": VALUE, "p2": 0, "p3": 1}}}'.replace("VALUE", value))
    with pytest.raises(ConfigError, match=f"{message} pass_at_1 for 1 problems, such as 'p1'"):
        compare_sides(f"{run}:on-raft", f"{run}:on-grpo")


def test_a_problem_given_twice_is_an_error(tmp_path):
    run = study(tmp_path / "run")
    path = run / "evaluations/on-raft-2-trained.json"
    path.write_text('{"problems": {"pass_at_1": {"p0": 1, "p1": 0, "p0": 0, "p3": 1}}}')
    with pytest.raises(ConfigError, match="has 'p0' twice"):
        compare_sides(f"{run}:on-raft", f"{run}:on-grpo")
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is no kept evaluation"):
        compare_sides(f"{run}:on-raft", f"{run}:on-grpo")


def test_the_command(tmp_path, capsys):
    run = study(tmp_path / "run")
    assert compare.main([f"{run}:on-raft", f"{run}:on-grpo", "--json", str(tmp_path / "c.json")]) == 0
    assert "verdict: flat" in capsys.readouterr().out
    assert json.loads((tmp_path / "c.json").read_text())["delta"] == 0.5
    assert compare.main([str(run), str(run)]) == 2 and "several groups" in capsys.readouterr().err
