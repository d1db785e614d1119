"""The report's figures, by matplotlib: for the page as SVG without styles, for papers as files.

Text is drawn as paths, so a figure looks the same everywhere; the page's captions and tables say in words what it
shows. Nothing is estimated here: points, intervals and bands are of the numbers in the run directory.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

# Building its font list, matplotlib logs a line on a machine's first use; that is no news to a person who trains.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

from matplotlib import rc_context  # noqa: E402 - after the line above
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from eval.published import STUDIES, Row, Study  # noqa: E402
from eval.report_data import METRIC_LABELS, Evaluated, Run, by_rule, seconds_by_phase, split_cell  # noqa: E402

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#000000", "#8c564b")
"""Okabe and Ito's, told apart by colour-blind readers, its yellow darkened for white ground."""
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "svg.fonttype": "path",
    "svg.hashsalt": "copies",  # equal runs, equal bytes
    "figure.constrained_layout.use": True,
}
DPI = 160
STAGES = {"untrained": "o", "trained": "s", "with_untrained_partner": "^"}


@dataclass(frozen=True)
class Drawn:
    """A figure and its words: `name` of its files, `title`, `caption`, and `svg` for the page."""

    name: str
    title: str
    caption: str
    figure: Figure
    svg: str


def draw_all(run: Run) -> dict[str, Drawn]:
    """Every figure for which the run holds numbers, by name."""
    found: dict[str, Drawn] = {}
    with rc_context(STYLE):
        for name, draw in FIGURES.items():
            drawn = draw(run)
            if drawn is not None:
                figure, title, caption = drawn
                found[name] = Drawn(name, title, caption, figure, page_svg(figure, name, f"{title}. {caption}"))
        for study in studies_of(run):
            figure, title, caption = published(run, study)
            name = f"published_{study.name}"
            found[name] = Drawn(name, title, caption, figure, page_svg(figure, name, f"{title}. {caption}"))
    return found


def save_all(drawn: Mapping[str, Drawn], folder: Path) -> list[Path]:
    """Write NAME.svg and NAME.png of every figure."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with rc_context(STYLE):
        for one in drawn.values():
            for file in (folder / f"{one.name}.svg", folder / f"{one.name}.png"):
                metadata = {"Date": None} if file.suffix == ".svg" else {}
                one.figure.savefig(file, dpi=DPI, metadata=metadata)
                files.append(file)
    return files


Parts = tuple[Figure, str, str]
"""A figure, its title and its caption."""


def reward_curves(run: Run) -> Parts | None:
    """Mean reward of the training episodes by step."""
    return _curves(run, "reward", "Reward by training step", "mean reward")


def flat_curves(run: Run) -> Parts | None:
    """The share of problems that teach nothing, by step."""
    return _curves(run, "credit/flat_group_frac", "Problems without credit by training step", "share of flat groups")


def _curves(run: Run, metric: str, title: str, label: str) -> Parts | None:
    rules = {rule: by_seed for rule, by_seed in by_rule(run, metric).items() if any(by_seed.values())}
    if not rules:
        return None
    figure = Figure(figsize=(7, 3.2))
    axes = figure.add_subplot()
    for (arm, credit), by_seed in rules.items():
        index = rules_of(run).index((arm, credit))
        steps = sorted(set.intersection(*(set(values) for values in by_seed.values())))
        value_SN = np.array([[values[step] for step in steps] for values in by_seed.values()])
        colour = COLOURS[index % len(COLOURS)]
        line = ("-", "--", ":")[index // len(COLOURS) % 3]
        name = f"{arm}, {credit}" + (f" ({len(by_seed)} seeds)" if len(by_seed) > 1 else " (1 seed)")
        axes.plot(steps, value_SN.mean(axis=0), line, color=colour, linewidth=1.5, label=_plain(name))
        if len(by_seed) > 1:
            axes.fill_between(steps, value_SN.min(axis=0), value_SN.max(axis=0), color=colour, alpha=0.18, linewidth=0)
    axes.set(xlabel="step", ylabel=label, ylim=(-0.02, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    caption = (
        "Line: mean over a rule's seeds; band: from its lowest to its highest seed (not an interval). Each point is of "
        f"{_episodes_a_step(run)} training episodes a seed, sampled while training."
    )
    return figure, title, caption


def _episodes_a_step(run: Run) -> str:
    """'32', or '32 to 96' where a rule draws more for some problems."""
    planned = run.config.get("problems_per_step", 0) * run.config.get("episodes_per_problem", 0)
    counts = [line.get("rollout/episodes", planned) for line in run.metrics]
    return f"{min(counts)}" + (f" to {max(counts)}" if max(counts) > min(counts) else "")


def evaluations(run: Run) -> Parts | None:
    """pass@1 of every held-out evaluation with its interval, grouped by arm and rule."""
    shown = [(e, e.metrics["pass_at_1"]) for e in run.evaluations if e.metrics.get("pass_at_1")]
    if not shown:
        return None
    figure = Figure(figsize=(7, 0.9 + 0.24 * len(shown)))
    axes = figure.add_subplot()
    rules = rules_of(run)
    for y, (evaluated, value) in enumerate(shown):
        place = (evaluated.arm, evaluated.credit)
        colour = COLOURS[rules.index(place) % len(COLOURS)] if place in rules else "#666666"
        _dot(axes, value, y, colour, STAGES.get(evaluated.stage, "o"))
    axes.set_yticks(range(len(shown)), [_plain(e.label) for e, _ in shown])
    axes.set(xlim=(-0.02, 1.02), ylim=(len(shown) - 0.5, -0.5), xlabel=METRIC_LABELS["pass_at_1"] + " (pass@1)")
    axes.grid(axis="x", alpha=0.3)
    caption = "Point: mean over graded answers; line: 95% interval, bootstrap over problems. The table gives each n."
    return figure, "Held-out problems: who solves them", caption


def rules_of(run: Run) -> list[tuple[str, str]]:
    """Every (arm, credit rule) of the run, in one order for all figures: the place is the colour."""
    logged = [split_cell(line["cell"])[:2] for line in run.metrics]
    return list(dict.fromkeys([*logged, *((e.arm, e.credit) for e in run.evaluations if e.credit)]))


def phases(run: Run) -> Parts | None:
    """Seconds by phase; parts of a phase (named phase/part), compilation and the total are left to the table."""
    seconds = {k: v for k, v in seconds_by_phase(run).items() if "/" not in k and k not in ("total", "compile")}
    if not seconds:
        return None
    figure = Figure(figsize=(7, 0.8 + 0.26 * len(seconds)))
    axes = figure.add_subplot()
    bars = axes.barh(list(map(_plain, seconds)), list(seconds.values()), color=COLOURS[4])
    axes.bar_label(bars, fmt="%.1f s", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("seconds")
    whole = "the process that finished the run" if run.results else "the steps that were logged"
    return figure, "Time by phase", f"Wall-clock seconds of {whole}, compilation included."


FIGURES: dict[str, Callable[[Run], Parts | None]] = {
    "reward": reward_curves,
    "evaluations": evaluations,
    "flat_groups": flat_curves,
    "seconds": phases,
}


def studies_of(run: Run) -> list[Study]:
    """The published studies of this task in which at least one line has its like in this run."""
    task = run.config.get("task")
    return [s for s in STUDIES if s.task == task and any(alike(row, run.evaluations) for row in s.rows)]


def alike(row: Row, evaluated: Sequence[Evaluated]) -> list[Evaluated]:
    """Those of our evaluations that are of a published row's stage, arm and credit rule."""
    return [
        e
        for e in evaluated
        if e.stage == row.stage
        and row.arm in (None, e.arm)
        and (row.credit is None or e.credit is None or e.credit == row.credit)
    ]


def published(run: Run, study: Study) -> Parts:
    """A panel a metric, a line a published row: published values hollow, ours filled."""
    rows, metrics = study.rows, study.metrics
    figure = Figure(figsize=(2.6 + 1.7 * len(metrics), 1.3 + 0.34 * len(rows)))
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        for y, row in enumerate(rows):
            theirs = row.values.get(metric, ())
            axes.plot(theirs, [y - 0.15] * len(theirs), "D", color="#666666", markersize=5, fillstyle="none")
            if metric == "pass_at_1" and row.interval:
                axes.plot(row.interval, [y - 0.15] * 2, color="#666666", linewidth=1)
            for evaluated in alike(row, run.evaluations):
                value = evaluated.metrics.get(metric)
                if value is not None:
                    _dot(axes, value, y + 0.15, COLOURS[0], "o")
        axes.set_title(METRIC_LABELS[metric])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="x", alpha=0.3)
        if metric != "note_chars":
            axes.set_xlim(-0.04, 1.04)
    panels[0].set_yticks(range(len(rows)), [_plain(row.label) for row in rows])
    caption = (
        "Hollow grey diamonds: published, one a seed where seeds were published (line: its 95% interval). "
        "Blue dots with 95% intervals: this run, one a seed."
    )
    return figure, f"{study.name}: published figures and this run", caption


def _dot(axes: Axes, value: Mapping[str, float], y: float, colour: str, marker: str) -> None:
    axes.plot([value["low"], value["high"]], [y, y], color=colour, linewidth=1.5)
    axes.plot([value["mean"]], [y], marker, color=colour, markersize=5)


def _plain(text: str) -> str:
    """A label in which a dollar sign starts no formula."""
    return text.replace("$", r"\$")


def page_svg(figure: Figure, name: str, label: str) -> str:
    """A figure's SVG for a page whose policy forbids styles: style attributes become attributes of their own names,
    ids get `name` in front so that several figures fit on one page, and `label` says what is seen."""
    out = StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(out.getvalue())
    for parent in root.iter():
        for child in [c for c in parent if c.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]
        attributes = {key.partition("}")[2] or key: value for key, value in element.attrib.items()}
        for declaration in filter(str.strip, attributes.pop("style", "").split(";")):
            key, _, value = declaration.partition(":")
            attributes[key.strip()] = value.strip()
        if "id" in attributes:
            attributes["id"] = f"{name}-{attributes['id']}"
        attributes = {k: re.sub(r"^#|(?<=url\()#", f"#{name}-", v) if _refers(k) else v for k, v in attributes.items()}
        element.attrib.clear()
        element.attrib.update(attributes)
    # What matplotlib's style element said of every shape.
    root.attrib.update({"stroke-linejoin": "round", "stroke-linecap": "butt", "role": "img", "aria-label": label})
    return ElementTree.tostring(root, encoding="unicode")


def _refers(attribute: str) -> bool:
    return attribute in ("href", "clip-path")
