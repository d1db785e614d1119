"""Arms of a study across seeds: each (arm, credit rule) with its interval, and against the first of its kind.

Works on what a run directory keeps of its evaluations: one value a problem and metric. Says nothing about training.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.stats import compare, noise_band, over_seeds, seed_spread

PROBLEM_METRICS = ("pass_at_1", "notes_right", "notes_send_own", "sends_own", "uses_partner")
"""Metrics kept a problem: what arms are compared on."""

Values = Mapping[str, Mapping[str, float | None]]
"""{metric: {problem id: mean of its values, None where it has none}} of one evaluation."""


def compare_arms(
    cells: Sequence[Mapping[str, Any]],
    values: Sequence[Values],
    base: Sequence[Values] = (),
    with_base: Sequence[Values | None] = (),
) -> list[dict[str, Any]]:
    """One entry an (arm, credit), in order of appearance: its metrics over seeds, and pass@1 against the first one's.

    `cells` need `arm`, `credit`, `seed` and may have `diagnostics` (eval.results); `values[i]` are those of cell i's
    evaluation; `base` the untrained base's repeated evaluations, for the noise band; `with_base[i]` those of cell i
    beside the untrained base.
    `spread` is of the seeds' pass@1. Raises ValueError where an evaluation lacks a problem that another has.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, cell in enumerate(cells):
        groups.setdefault((cell["arm"], cell["credit"]), []).append(index)
    first = next(iter(groups.values()))
    entries = []
    for (arm, credit), members in groups.items():
        entry = {"arm": arm, "credit": credit, "seeds": [cells[i]["seed"] for i in members], "metrics": {}}
        for metric in PROBLEM_METRICS:
            value_SP = table([values[i] for i in members], metric)
            entry["metrics"][metric] = None if value_SP is None else over_seeds(value_SP)._asdict()
        solved_SP = table([values[i] for i in members], "pass_at_1")
        spread = None if solved_SP is None else seed_spread(solved_SP.mean(axis=1))
        entry["spread"] = None if spread is None else spread._asdict()
        beside_SP = table([with_base[i] or {} for i in members], "pass_at_1") if with_base else None
        entry["with_untrained_partner"] = None if beside_SP is None else over_seeds(beside_SP)._asdict()
        entry["diagnostics"] = diagnostics_over_seeds([cells[i].get("diagnostics", {}) for i in members])
        if members is not first:
            band = noise_band([np.mean(list(v["pass_at_1"].values())) for v in base], len(members), len(first))
            pairs = [table([values[i] for i in group], "pass_at_1") for group in (members, first)]
            entry["against_first"] = compare(*pairs, band)._asdict()
        entries.append(entry)
    return entries


def diagnostics_over_seeds(found_S: Sequence[Mapping[str, Mapping[str, float] | None]]) -> dict[str, Any]:
    """{name: the mean over seeds with Student's t interval, `n` seeds} of what training measured of its credit.

    None where fewer than two seeds have it: an interval over one run's steps says nothing of another run.
    """
    over: dict[str, Any] = {}
    for name in found_S[0]:
        means_S = np.array([found[name]["mean"] for found in found_S if found[name] is not None])
        over[name] = over_seeds(means_S[:, None])._asdict() if means_S.size > 1 else None
    return over


def table(values_S: Sequence[Values], metric: str) -> np.ndarray | None:
    """[seeds, problems] of one metric; problems without a value in any seed are left out; None if that is all."""
    if any(metric not in values for values in values_S):
        return None
    ids = sorted(values_S[0][metric])
    for values in values_S:
        if sorted(values[metric]) != ids:
            raise ValueError(f"evaluations of one study hold different problems: {len(values[metric])} and {len(ids)}")
    kept = [i for i in ids if all(values[metric][i] is not None for values in values_S)]
    return np.array([[values[metric][i] for i in kept] for values in values_S]) if kept else None
