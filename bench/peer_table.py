"""The table of `bench.peers`, from what it recorded. Pure text: nothing is measured or read here.

A record's `measurements` hold, by name, `status` ("ok", "failed" or "skipped"), `why`, `gives` ([row, column] pairs)
and `runs`, each with its `seconds`, `device`, `lines` (JSON it printed) and `figures` (see bench.peer_read.Figure).
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from bench.peer_rows import CHECKS, COLUMNS, ROWS, Row

NOT_RUN = "not run"


class Footnotes:
    """Numbers remarks in the order in which they are first made; a remark made twice has one number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        """' (2)' for the second remark; '' for an empty one."""
        if not text:
            return ""
        if text not in self.texts:
            self.texts.append(text)
        return f" ({self.texts.index(text) + 1})"


def figures_of(record: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """By (row, column): all runs' values together, with the first's note and the last's `beside`."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for measurement in record["measurements"].values():
        for run in measurement["runs"]:
            for figure in run["figures"]:
                place = found.setdefault((figure["row"], figure["column"]), {"values": [], "note": figure["note"]})
                place["values"] += figure["values"]
                place["beside"] = figure["beside"]
    return found


def entry(values: Sequence[float], digits: int, repeats: int) -> str:
    """'2.45 [2.44, 2.46]'; without a range where there is one value, and with n where it isn't `repeats`."""
    text = f"{statistics.median(values):.{digits}f}"
    if len(values) > 1:
        text += f" [{min(values):.{digits}f}, {max(values):.{digits}f}]"
    return text if len(values) == repeats else f"{text} n={len(values)}"


def table(record: dict[str, Any]) -> str:
    """The whole as Markdown that also reads well in a terminal."""
    footnotes, found = Footnotes(), figures_of(record)
    given = {tuple(place): m for m in record["measurements"].values() for place in m["gives"]}
    body = []
    for row in ROWS:
        entries = [_entry(row, column, found, given, record["repeats"], footnotes) for column in COLUMNS]
        limits = ["" if limit is None else f"{limit:g}" for limit in (row.floor, row.goal)]
        body.append([row.label, entries[0] or NOT_RUN, *limits, *entries[1:]])
    parts = [
        _heading(record),
        _markdown(["", "ours", "floor", "goal", *list(COLUMNS.values())[1:]], body),
        "\n".join(f"({i}) {text}" for i, text in enumerate(footnotes.texts, 1)),
        "\n".join(_beside(found)),
        _checks(record),
        _seconds(record),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _entry(row: Row, column: str, found, given, repeats: int, footnotes: Footnotes) -> str:
    place, measurement = (row.name, column), given.get((row.name, column))
    if measurement is None:
        return ""
    figure, why = found.get(place), measurement["why"]
    remark = f"{row.name}, {COLUMNS[column]}: {why}" if measurement["status"] != "ok" else ""
    if figure is None:
        return ("failed" if measurement["status"] == "failed" else NOT_RUN) + footnotes.mark(remark)
    return entry(figure["values"], row.digits, repeats) + footnotes.mark(figure["note"]) + footnotes.mark(remark)


def _heading(record: dict[str, Any]) -> str:
    devices = sorted({r["device"] for m in record["measurements"].values() for r in m["runs"] if r["device"]})
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    shape = "tiny shapes, which stand for nothing" if record["tiny"] else "Qwen2.5-1.5B shape, random bf16 weights"
    return (
        f"{' and '.join(devices) or 'no device yet'}; {shape}; commit {record['commit']}, {record['date']}\n"
        f"{versions}\n"
        + "".join(f"`{command}`\n" for command in record["commands"])
        + f"Median [lowest, highest] of {record['repeats']}, and n where it is another count. HF compiled: adapter\n"
        "merged, static cache. Floors and goals are as published for one H200."
    )


def _markdown(head: list[str], body: Iterable[list[str]]) -> str:
    """A table with its columns lined up; columns without any entry are left out."""
    rows = [head, *body]
    kept = [c for c in range(len(head)) if any(row[c] for row in rows[1:])]
    widths = {c: max(3, *(len(row[c]) for row in rows)) for c in kept}
    lines = ["| " + " | ".join(row[c].ljust(widths[c]) for c in kept) + " |" for row in rows]
    rule = "|" + "|".join("-" * (widths[c] + 2) for c in kept) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _beside(found: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """Seconds by phase, how far log-probs are apart, and memory, a line a row and column."""
    out = []
    for (row, column), figure in found.items():
        beside, parts = figure["beside"], []
        phases = [f"{name[:-2]} {value:.2f}" for name, value in beside.items() if name.endswith("_s")]
        if phases:
            parts.append(f"{', '.join(phases)} s")
        if "sampling_logp_gap" in beside:
            mean, most = beside["sampling_logp_gap"], beside["sampling_logp_gap_max"]
            parts.append(f"log-probs {mean:.4f} nats from the training forward's, at most {most:.4f}")
        if beside.get("bandwidth_share"):
            parts.append(f"{beside['bandwidth_share']:.0%} of the memory's speed")
        if beside.get("peak_gib"):
            parts.append(f"peak {beside['peak_gib']:.1f} GiB")
        if beside.get("kernels"):
            longest = ", ".join(f"{name[:40]} {ms:.0f}" for name, ms, _ in beside["kernels"][:8])
            parts.append(f"longest kernels, ms in all: {longest}")
        if parts:
            out.append(f"- {row}, {COLUMNS[column]}: {'; '.join(parts)}")
    return out


def _checks(record: dict[str, Any]) -> str:
    """What bench.kernels said of its results."""
    checks = record["measurements"].get(CHECKS)
    if checks is None:
        return f"checks: {NOT_RUN}"
    lines = [line for run in checks["runs"] for line in run["lines"] if "ok" in line]
    errors = {line.get("name", "?"): line.get("max_err", float("nan")) for line in lines}
    wrong = [f"{name} {errors[name]:.3g}" for name in (line.get("name", "?") for line in lines if not line["ok"])]
    said = []
    if lines:
        said.append(f"{len(lines) - len(wrong)} ok, {len(wrong)} wrong, largest error {max(errors.values()):.3g}")
    if wrong:
        said.append("wrong: " + ", ".join(wrong))
    if checks["status"] != "ok":
        said.append(f"{checks['status']}: {checks['why']}")
    return "checks: " + "; ".join(said)


def _seconds(record: dict[str, Any]) -> str:
    """What each measurement took, start included, for planning the next."""
    spent: dict[str, float] = defaultdict(float)
    for name, measurement in record["measurements"].items():
        for run in measurement["runs"]:
            spent[name] += run["seconds"]
    if not spent:
        return ""
    each = ", ".join(f"{name} {seconds:.0f}" for name, seconds in spent.items())
    return f"seconds, process starts and compilation included: {each}; {sum(spent.values()):.0f} in all"
