"""`python -m eval.compare A B`: is A better than B? Paired by problem, across seeds, with an interval and a verdict.

A and B are groups of evaluations that run directories keep: `RUN` (all of its trained cells, if they are of one arm and
credit rule), `RUN:ARM-CREDIT` (such as runs/m:channel_on-grpo), `RUN:CELL`, or `RUN:base-ARM` for the untrained base.
Seeds of a group are its rows. Both must hold the same problems, each once; nothing is dropped.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from eval.stats import compare, noise_band
from rollout.setup import ConfigError

TRAINED = "-trained"


@dataclass(frozen=True)
class Side:
    """One side of a comparison: [seeds, problems] values, the problems' ids, and where they come from."""

    label: str
    value_SP: np.ndarray
    problems: tuple[str, ...]
    evaluations: tuple[str, ...]


def read_side(text: str, metric: str) -> Side:
    """The evaluations that `RUN` or `RUN:SELECTION` names. ConfigError says what there is to choose from."""
    run, _, selection = text.partition(":")
    folder = Path(run) / "evaluations"
    names = sorted(path.stem for path in folder.glob("*.json"))
    if not names:
        raise ConfigError(f"{run} keeps no evaluations ({folder} has none); run `python -m eval.run {run}`")
    groups = sorted({n.removesuffix(TRAINED).rpartition("-")[0] for n in names if n.endswith(TRAINED)})
    if not selection:
        if len(groups) != 1:
            choices = ", ".join(f"{run}:{group}" for group in groups) or f"{run}:{names[0]}"
            raise ConfigError(f"{run} holds several groups; name one: {choices}")
        selection = groups[0]
    chosen = [n for n in names if n in (selection, selection + TRAINED)] or [
        n for n in names if n.endswith(TRAINED) and n.removesuffix(TRAINED).rpartition("-")[0] == selection
    ]
    if not chosen:
        raise ConfigError(f"{run} has no {selection!r}; choose from {', '.join([*groups, *names])}")
    tables = [_values(folder / f"{name}.json", metric) for name in chosen]
    problems = tuple(sorted(tables[0]))
    for name, table in zip(chosen, tables, strict=True):
        if tuple(sorted(table)) != problems:
            raise ConfigError(f"{folder}/{name}.json and {chosen[0]}.json hold different problems: not one group")
    value_SP = np.array([[table[p] for p in problems] for table in tables])
    return Side(f"{run}:{selection}", value_SP, problems, tuple(chosen))


def _values(path: Path, metric: str) -> dict[str, float]:
    """{problem: value} of one evaluation; ConfigError where a value is missing, not finite, or given twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ConfigError(f"{path} has {', '.join(map(repr, twice[:3]))} twice")
        return dict(pairs)

    try:
        kept = json.loads(path.read_text(), object_pairs_hook=once)["problems"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is no kept evaluation: {error!r}") from error
    if metric not in kept:
        raise ConfigError(f"{path} has no metric {metric!r}; choose from {', '.join(kept)}")
    bad = [p for p, v in kept[metric].items() if v is None or not np.isfinite(v)]
    if bad or not kept[metric]:
        raise ConfigError(f"{path} has no finite {metric} for {len(bad)} problems, such as {(bad or ['any'])[0]!r}")
    return kept[metric]


def base_noise(runs: set[Path], metric: str, n_a: int, n_b: int) -> float | None:
    """The re-evaluation noise band, from the repeated base evaluations of the first arm of these runs (the widest)."""
    bands = []
    for run in sorted(runs):
        by_arm: dict[str, list[float]] = {}
        for path in sorted((run / "evaluations").glob("base-*.json")):
            arm = path.stem.removeprefix("base-").partition("-again-")[0]
            by_arm.setdefault(arm, []).append(float(np.mean(list(_values(path, metric).values()))))
        bands += [noise_band(np.array(means), n_a, n_b) for means in by_arm.values()]
    return max((band for band in bands if band is not None), default=None)


def compare_sides(a: str, b: str, metric: str = "pass_at_1") -> dict[str, Any]:
    """The whole comparison as JSON values; see the module. Raises ConfigError where the two can't be paired."""
    sides = [read_side(text, metric) for text in (a, b)]
    if sides[0].problems != sides[1].problems:
        only = [len(set(x.problems) - set(y.problems)) for x, y in (sides, sides[::-1])]
        raise ConfigError(
            f"{sides[0].label} and {sides[1].label} hold different problems ({only[0]} and {only[1]} are on one side "
            f"only); a paired comparison needs the same"
        )
    seeds = [len(side.value_SP) for side in sides]
    band = base_noise({Path(text.partition(":")[0]) for text in (a, b)}, metric, *seeds)
    found = compare(sides[0].value_SP, sides[1].value_SP, band)
    return {
        "metric": metric,
        "a": sides[0].label,
        "b": sides[1].label,
        "mean_a": float(sides[0].value_SP.mean()),
        "mean_b": float(sides[1].value_SP.mean()),
        "seeds_a": seeds[0],
        "seeds_b": seeds[1],
        "problems": len(sides[0].problems),
        "noise_band": band,
        **found._asdict(),
    }


def sentence(found: dict[str, Any]) -> str:
    """The comparison in a few lines for a terminal."""
    band = "not measured (evaluate the base 3 times)" if found["noise_band"] is None else f"{found['noise_band']:.3f}"
    return (
        f"A  {found['a']}: {found['mean_a']:.3f} ({found['seeds_a']} seeds)\n"
        f"B  {found['b']}: {found['mean_b']:.3f} ({found['seeds_b']} seeds)\n"
        f"A - B, {found['metric']}: {found['delta']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}] over problems "
        f"and seeds\n      [{found['problem_low']:+.3f}, {found['problem_high']:+.3f}] over problems alone; "
        f"{found['problems']} problems, paired\n"
        f"re-evaluation noise band: {band}\n"
        f"verdict: {found['verdict']}"
    )


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, or 2 for a user's error."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", help="RUN or RUN:SELECTION")
    parser.add_argument("b", help="RUN or RUN:SELECTION")
    parser.add_argument("--metric", default="pass_at_1", help="a metric that is kept by problem")
    parser.add_argument("--json", type=Path, help="write the comparison here too")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        found = compare_sides(args.a, args.b, args.metric)
    except (ConfigError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    Console(highlight=False).print(sentence(found), markup=False, soft_wrap=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
