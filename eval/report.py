"""`python -m eval.report RUN`: one self-contained page about a run, and its figures as files.

The page opens from disk and asks the network for nothing: its policy allows its own script and style by their hashes
and forbids all else. What a model wrote reaches the page as JSON and is shown by the script as text, never as markup;
everything else goes through Jinja2's autoescape. A number is shown with its interval and n; what a run lacks is named.
"""

import argparse
import base64
import hashlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval.figures import Drawn, alike, draw_all, save_all, studies_of
from eval.published import NOTE, QUESTIONS, Study
from eval.report_data import METRIC_LABELS, Evaluated, ReportError, Run, read_run
from eval.viewer_data import FLAT, MISLED, RESCUED, TRUNCATED, script_json, viewer_data

TEMPLATES = Path(__file__).parent / "templates"
FILTERS = {"rescued": RESCUED, "misled": MISLED, "flat group": FLAT, "truncated": TRUNCATED}


def write_report(path: Path, out: Path | None = None) -> Path:
    """Write the report of the run in `path` to `out` (by default RUN/report.html) and its figures to RUN/figures.

    Returns the page's path. Raises ReportError where there is no run, or a file of it is damaged.
    """
    run = read_run(path)
    drawn = draw_all(run)
    save_all(drawn, path / "figures")
    out = out or path / "report.html"
    temporary = out.with_name(out.name + ".tmp")
    # Half of a surrogate pair, which JSON can hold, has no UTF-8.
    temporary.write_text(page(run, drawn), encoding="utf-8", errors="replace")
    temporary.replace(out)
    return out


def report_or_say(path: Path) -> str:
    """`write_report` at the end of a run, whose results are saved by now: whatever fails in drawing must not fail the
    run. Returns the line to show; an error's whole traceback goes to stderr."""
    try:
        return f"report: {write_report(path)}"
    except Exception as error:
        traceback.print_exc()
        return f"error: no report ({error}); the results are saved: try python -m eval.report {path}"


def page(run: Run, drawn: Mapping[str, Drawn]) -> str:
    """The whole page as HTML."""
    env = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {"estimate": estimate, "number": number, "plain": plain, "signed": signed}
    env.tests["grid"] = is_grid
    # Ours, and trusted: the script, the style, and SVG that matplotlib wrote.
    script, style = (Markup((TEMPLATES / name).read_text(encoding="utf-8")) for name in ("viewer.js", "report.css"))
    shown = viewer_data(run.episodes)
    return env.get_template("report.html.j2").render(
        run=run,
        task=run.config.get("task", "unknown"),
        question=QUESTIONS.get(run.config.get("task", ""), "What do copies of one model learn to do for each other?"),
        verdicts=verdicts(run),
        rules=credit_by_rule(run),
        by_cell=[(cell["name"], cell["diagnostics"]) for cell in run.results["cells"]] if run.results else [],
        columns=columns(run.evaluations),
        labels=METRIC_LABELS,
        figures={name: (one, Markup(one.svg)) for name, one in drawn.items()},
        studies=[(study, published_table(run, study)) for study in studies_of(run)],
        published_note=NOTE,
        filters=FILTERS,
        left_out=shown["left_out"],
        episodes=len(shown["episodes"]),
        viewer=Markup(script_json(shown)),
        script=script,
        style=style,
        policy=policy(script, style),
    )


def policy(script: str, style: str) -> str:
    """The page's Content-Security-Policy: this script and this style; no request, no frame, no form, no base."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def verdicts(run: Run) -> list[dict[str, Any]]:
    """A line for each arm and rule: pass@1 before and after, and, but for the first, the difference from the first."""
    untrained = {e.arm: e.metrics.get("pass_at_1") for e in run.evaluations if e.stage == "untrained"}
    return [
        {
            "rule": rule_of(entry),
            "seeds": len(entry["seeds"]),
            "untrained": untrained.get(entry["arm"]),
            "value": entry["metrics"]["pass_at_1"],
            "beside_base": entry.get("with_untrained_partner"),
            "spread": entry.get("spread"),
            "against": entry.get("against_first"),
            # n counts seeds x problems (eval.stats.over_seeds), and a comparison is paired by problem.
            "problems": entry["metrics"]["pass_at_1"]["n"] // len(entry["seeds"]),
        }
        for entry in run.arms
    ]


def credit_by_rule(run: Run) -> list[tuple[str, dict[str, Any]]]:
    """(rule, {name: estimate}) of each: held-out metrics but pass@1, then diagnostics of training; what no rule has is
    left out. Empty where no rule has two seeds."""
    rows = []
    for entry in run.arms:
        held_out = {METRIC_LABELS[name]: got for name, got in entry["metrics"].items() if name != "pass_at_1"}
        rows.append((rule_of(entry), held_out, entry.get("diagnostics", {})))
    if not any(any(trained.values()) for _, _, trained in rows):
        return []
    rows = [(rule, {**held_out, **trained}) for rule, held_out, trained in rows]
    names = [name for name in rows[0][1] if any(found.get(name) for _, found in rows)]
    return [(rule, {name: found.get(name) for name in names}) for rule, found in rows]


def rule_of(entry: Mapping[str, Any]) -> str:
    """'channel_on, grpo': one of eval.arms' entries."""
    return f"{entry['arm']}, {entry['credit']}"


def columns(evaluated: Sequence[Evaluated]) -> list[str]:
    """The metrics of the summary table: those with a label that any evaluation measured."""
    return [name for name in METRIC_LABELS if any(e.metrics.get(name) for e in evaluated)]


def published_table(run: Run, study: Study) -> list[dict[str, Any]]:
    """A published row's values beside ours, a list a metric: published numbers as text, and our evaluations."""
    return [
        {
            "label": row.label,
            "minutes": row.minutes,
            "cells": [
                {
                    "published": _published(row.values.get(metric), row.interval if metric == "pass_at_1" else None),
                    "ours": [(e.seed, e.metrics.get(metric)) for e in alike(row, run.evaluations)],
                }
                for metric in study.metrics
            ],
        }
        for row in study.rows
    ]


def _published(values: Sequence[float] | None, interval: tuple[float, float] | None) -> str:
    """'0.40 / 0.15 / 0.35', one a seed; the interval where there was one."""
    said = " / ".join(map(number, values or ()))
    return said + (f" [{number(interval[0])}, {number(interval[1])}]" if interval else "")


def number(value: Any) -> str:
    """Two decimals; large numbers with commas and none; None is a dash; anything that is no number as it is."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{round(value, 2) + 0.0:.2f}"  # no "-0.00"


def plain(value: Any) -> str:
    """A value that may be anything: a float by four digits, None in words."""
    if not isinstance(value, float):
        return "none" if value is None else str(value)
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"


def is_grid(value: Mapping[str, Any]) -> bool:
    """Are a mapping's values all mappings with the same keys, so that a table shows them in less room?"""
    rows = list(value.values())
    return len(rows) > 1 and all(isinstance(row, Mapping) and row and list(row) == list(rows[0]) for row in rows)


def signed(value: float) -> str:
    """'+0.40', '−0.40'."""
    return f"{value:+.2f}".replace("-", "−")


def estimate(value: Mapping[str, float] | None) -> str:
    """'0.40 [0.37, 0.43], n 1,200' (its space one that doesn't break); a dash where there was nothing to measure."""
    if value is None:
        return "–"
    return f"{number(value['mean'])} [{number(value['low'])}, {number(value['high'])}], n\u00a0{int(value['n']):,}"


def main(argv: list[str] | None = None) -> int:
    """The command line. Exit status 2: there is no run, or a file of it is damaged."""
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=write_report.__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory, such as runs/talk")
    parser.add_argument("--out", type=Path, help="the page's file; by default RUN/report.html")
    given = parser.parse_args(argv)
    try:
        out = write_report(given.run, given.out)
    except (ReportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report: {out}; figures: {given.run / 'figures'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
