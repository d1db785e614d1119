"""What a person watching a run sees, as rich renderables. Nothing here prints, and no number is made here.

Model text is hostile: it is shown as plain text with control characters replaced, never as markup.
"""

import unicodedata
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from eval.evaluate import format_estimate
from eval.report_data import METRIC_LABELS
from model.lora import parameters
from rl.study import Study
from rollout.episode import Episode

AGENT_STYLES = ("cyan", "magenta", "yellow", "green")
SHOWN = {
    name: METRIC_LABELS[name]
    for name in (
        "pass_at_1 sends_own uses_partner both_agree asks pass_at_k notes_right vote rescued misled notes_boxed "
        "notes_send_own truncated"
    ).split()
} | {"notes_boxed": "notes boxed"}  # shorter: a terminal has 80 columns


def safe(text: str, limit: int = 2000) -> str:
    """Model text fit for a terminal: control and direction characters made visible, at most `limit` characters."""
    shown = "".join(c if c in "\n" or unicodedata.category(c)[0] != "C" else "\ufffd" for c in text[:limit])
    return shown + (f" … ({len(text) - limit} more characters)" if len(text) > limit else "")


def header(study: Study, device: str, where: str) -> RenderableType:
    """What is being trained: cells, parameters, rows, tokens a step."""
    c, sizes = study.config, study.model_config
    turns = study.cells[0].task.turns
    rows = c.problems_per_step * c.episodes_per_problem
    cap = rows * sum(turn.max_tokens for turn in turns)
    table = Table.grid(padding=(0, 2))
    for name, value in (
        (
            "task",
            f"{c.task}: {len(turns)} turns, {len(study.problems.train):,} training and "
            f"{len(study.problems.heldout):,} held-out problems from {c.data}",
        ),
        ("left out", ", ".join(f"{v} {k}" for k, v in study.problems.dropped.items() if v) or "none"),
        ("cells", f"{len(study.cells)}: {', '.join(cell.name for cell in study.cells)}"),
        ("base", f"{c.model}, {sizes.parameters:,} parameters, {c.dtype}, frozen"),
        ("adapter", f"rank {c.rank}, {parameters(sizes, study.lora_config):,} parameters a cell"),
        (
            "a step",
            f"{rows} episodes a cell, {rows * len(turns)} rows, at most {cap * len(study.cells):,} sampled tokens",
        ),
        ("device", device),
        ("saved to", where),
    ):
        table.add_row(Text(name, style="bold"), Text(value))
    return Panel(table, title="training", title_align="left")


def chat(episode: Episode, title: str) -> RenderableType:
    """One whole chat: who holds which facts, every message in its agent's colour, and the grades."""
    plan = episode.plan
    agents = plan.task.agents
    lines = [Text(safe(plan.problem.question), style="bold")]
    for agent, name in enumerate(agents):
        facts = " ".join(plan.task.facts_of(plan.problem, agent))
        lines.append(Text(f"{name} knows: {safe(facts)}", style=f"dim {AGENT_STYLES[agent % 4]}"))
    for u in episode.utterances:
        agent = plan.task.turns[u.turn].agent
        grade = "" if u.correct is None else ("  [right]" if u.correct == 1 else "  [wrong]")
        cut = "" if u.finished else "  [cut at its cap]"
        lines.append(Text(f"{agents[agent]}: {safe(u.text)}{cut}{grade}", style=AGENT_STYLES[agent % 4]))
    lines.append(Text(f"gold {safe(plan.problem.answer)}", style="dim"))
    return Panel(Group(*lines), title=Text(title), title_align="left")


def progress() -> Progress:
    """The bar of a run; `status` is filled in each step."""
    return Progress(
        TextColumn("[bold]step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )


def status(reward: float, flat: float, tokens_per_s: float) -> str:
    """The part of a progress line that changes: mean reward, share of flat groups, sampled tokens a second."""
    return f"reward {reward:.2f}  flat groups {flat:.2f}  {tokens_per_s:,.0f} tokens/s"


COLUMNS_AT_ONCE = 3
"""Evaluations side by side in one table: what 80 columns hold."""


def results_table(results: dict[str, Any]) -> RenderableType:
    """Before and after, a column an evaluation, each number with its 95% interval."""
    columns = rows_of(results)
    tables = []
    for start in range(0, len(columns), COLUMNS_AT_ONCE):
        table = Table(title="held out: mean and 95% interval, bootstrap over problems", title_justify="left")
        table.add_column("", no_wrap=True)
        part = columns[start : start + COLUMNS_AT_ONCE]
        for name, _ in part:
            table.add_column(Text(name, overflow="fold"), justify="right", min_width=len("0.00 [0.00, 0.00]"))
        table.add_row("graded answers", *(f"{metrics['pass_at_1']['n']:,}" for _, metrics in part))
        for key, label in SHOWN.items():
            if not any(key in metrics for _, metrics in part):
                continue  # another kind of task's metric
            table.add_row(label, *(format_estimate(metrics.get(key)) for _, metrics in part))
        tables.append(table)
    return Group(*tables)


def arms_table(arms: list[dict[str, Any]]) -> RenderableType:
    """Every (arm, credit rule) across its seeds, how far those lie apart, and its difference from the first."""
    table = Table(title="across seeds: mean and 95% interval (problems and seeds)", title_justify="left")
    for name in ("rule", "team solves it", "against the first"):
        table.add_column(name, no_wrap=True)
    for entry in arms:
        against, spread = entry.get("against_first"), entry.get("spread")
        lines = [format_estimate(entry["metrics"]["pass_at_1"])]
        if spread is not None:
            lines.append(f"sd {spread['sd']:.2f} [{spread['low']:.2f}, {spread['high']:.2f}]")
            lines.append(f"seeds {spread['worst']:.2f} to {spread['best']:.2f}")
        table.add_row(
            f"{entry['credit']}\n{entry['arm']}\n{len(entry['seeds'])} seeds",
            "\n".join(lines),
            ""
            if against is None
            else f"{against['delta']:+.2f} [{against['low']:+.2f}, {against['high']:+.2f}]\n{against['verdict']}",
        )
    return table


RELIABILITY = "credit/split_half_reliability"


def notes_table(arms: list[dict[str, Any]]) -> RenderableType | None:
    """What every rule's notes are worth, and how well their credit repeats itself; None where neither was measured."""
    names = [name for name in ("notes_send_own", "notes_right") if any(entry["metrics"][name] for entry in arms)]
    repeats = any(entry["diagnostics"].get(RELIABILITY) for entry in arms)
    if not names and not repeats:
        return None
    title = "across seeds: notes and their credit, mean and 95% interval"
    table = Table(title=title, title_justify="left", collapse_padding=True, pad_edge=False)
    table.add_column("rule", overflow="fold")
    several = len({entry["arm"] for entry in arms}) > 1
    for label in [METRIC_LABELS[name] for name in names] + ["credit repeats"] * repeats:
        table.add_column(label, no_wrap=True)
    for entry in arms:
        found = [entry["metrics"][name] for name in names] + [entry["diagnostics"].get(RELIABILITY)] * repeats
        rule = entry["credit"] + f"\n{entry['arm']}" * several
        table.add_row(rule, *map(format_estimate, found))
    return table


def rows_of(results: dict[str, Any]) -> Sequence[tuple[str, dict[str, Any]]]:
    """(label of a few short lines, metrics) of every evaluation in a results file."""
    rows = [(f"{arm}\nuntrained", metrics) for arm, metrics in results["base"].items()]
    for cell in results["cells"]:
        for name, metrics in cell["evaluations"].items():
            label = f"{cell['arm']}\n{cell['credit']} {cell['seed']}\n{name.replace('with_', '').replace('_', ' ')}"
            rows.append((label, metrics))
    return rows


def seconds_table(seconds: dict[str, float], compiles: dict[str, float]) -> RenderableType:
    """Seconds by phase (indented: parts of the line above), and how much was compiled."""
    table = Table(title="seconds by phase", title_justify="left", show_header=False)
    for name, value in seconds.items():
        table.add_row("  " + name.split("/")[1] if "/" in name else name, f"{value:.1f}")
    return Group(table, Text(f"{len(compiles)} shapes compiled in {sum(compiles.values()):.1f} s", style="dim"))
