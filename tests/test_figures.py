"""Figures show the run's own numbers, and their SVG holds nothing that a strict page would refuse."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from eval.figures import (
    alike,
    draw_all,
    evaluations,
    page_svg,
    published,
    reward_curves,
    rules_of,
    save_all,
    studies_of,
)
from eval.published import STUDIES, Row
from eval.report_data import Evaluated, read_run
from tests.runs import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(write_run(tmp_path_factory.mktemp("figures") / "run"))


@pytest.fixture(scope="module")
def drawn(run):
    return draw_all(run)


def test_a_whole_run_has_every_figure(drawn):
    assert list(drawn) == [
        "reward",
        "evaluations",
        "flat_groups",
        "seconds",
        "published_talk_to_solve",
        "published_talk_methods",
    ]


def test_a_curve_is_the_mean_over_seeds_and_its_band_their_range(run):
    lines = run.metrics
    shifted = [{**line, "reward": line["reward"] + (0.2 if "18" in line["cell"] else 0.0)} for line in lines]
    figure, _, caption = reward_curves(type(run)(**{**vars(run), "metrics": shifted}))
    axes = figure.axes[0]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [0.1, 0.2])
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([heights.min(), heights.max()], [0.0, 0.3])
    assert "32 training episodes" in caption and "not an interval" in caption


def test_a_rule_has_one_colour_in_all_figures(run):
    """An unfinished run lists its evaluations in another order than its metrics."""
    other = type(run)(**{**vars(run), "evaluations": run.evaluations[::-1]})
    assert rules_of(other) == rules_of(run) == [("channel_on", "grpo"), ("channel_off", "grpo")]
    curve, dot = reward_curves(other)[0].axes[0].lines[1], evaluations(other)[0].axes[0].lines[0]
    assert curve.get_label().startswith("channel_off") and curve.get_color() == dot.get_color()


def test_intervals_are_those_of_the_results(run):
    axes = evaluations(run)[0].axes[0]
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [0.4, 0.6])
    np.testing.assert_allclose(axes.lines[1].get_xdata(), [0.43])


@pytest.mark.parametrize("name", ["reward", "evaluations", "flat_groups", "seconds", "published_talk_to_solve"])
def test_the_svg_has_no_style_no_script_and_ids_of_its_own(drawn, name):
    root = ElementTree.fromstring(drawn[name].svg)
    assert root.tag == "svg" and root.get("role") == "img" and drawn[name].title in root.get("aria-label")
    ids = {e.get("id") for e in root.iter() if e.get("id")}
    assert ids and all(one.startswith(f"{name}-") for one in ids)
    for element in root.iter():
        assert element.tag not in ("style", "script", "metadata", "image") and element.get("style") is None
        for key, value in element.attrib.items():
            assert not key.startswith("on")
            for target in re.findall(r"url\(#(.+?)\)", value) + ([value[1:]] if key == "href" else []):
                assert target in ids


def test_equal_runs_give_equal_bytes(run, drawn):
    assert draw_all(run)["reward"].svg == drawn["reward"].svg


def test_labels_hold_no_formulas_and_no_markup():
    from matplotlib.figure import Figure

    figure = Figure()
    svg = page_svg(figure, "x", 'a "quoted" <b> & label')
    assert ElementTree.fromstring(svg).get("aria-label") == 'a "quoted" <b> & label' and "<b>" not in svg


def test_files_for_papers(tmp_path, drawn):
    files = save_all({"reward": drawn["reward"]}, tmp_path / "figures")
    assert [file.name for file in files] == ["reward.svg", "reward.png"]
    assert files[0].read_bytes()[:5] == b"<?xml" and files[1].read_bytes()[:4] == b"\x89PNG"


def test_a_run_without_numbers_has_no_figures(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").write_text('{"task": "talk_to_solve"}')
    assert draw_all(read_run(path)) == {}


def test_published_rows_are_matched_by_stage_arm_and_rule():
    ours = [
        Evaluated("untrained", "channel_on", None, None, {}),
        Evaluated("trained", "channel_on", "grpo", 17, {}),
        Evaluated("trained", "channel_on", "raft", 17, {}),
        Evaluated("trained", "channel_off", "grpo", 17, {}),
    ]
    assert alike(Row("x", "trained", "channel_on", {}, "grpo"), ours) == [ours[1]]
    assert alike(Row("x", "untrained", "channel_on", {}), ours) == [ours[0]]
    assert alike(Row("x", "trained", None, {}), ours) == ours[1:]


def test_published_figures_are_of_this_task_alone(run):
    assert [study.name for study in studies_of(run)] == ["talk_to_solve", "talk_methods"]
    other = type(run)(**{**vars(run), "config": {"task": "ask_to_solve"}})
    assert studies_of(other) == []
    figure, title, caption = published(run, STUDIES[0])
    assert len(figure.axes) == 5 and "published" in title and "Hollow" in caption
