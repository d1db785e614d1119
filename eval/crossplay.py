"""`python -m eval.crossplay RUN... --out DIR`: every saved adapter as the first copy, with every other as its partners.

Is what was learned a protocol that only those trained together share? The matrix says: row i, column j is pass@1 when
adapter i plays the first copy and adapter j all others, on the same held-out problems with the same luck. `base`
is the untrained base. All pairs are one batch of the sampler: an episode's turns are sampled in the cell of whoever
speaks. Runs may differ in arm, rule and seed; task, base model and prompts must be the same.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eval.evaluate import EVAL_SEED, format_estimate
from eval.stats import Estimate, paired_interval, ratio_estimate
from model.weights import WeightsError
from rollout.episode import EVAL_STEP, Episode, EpisodePlan
from rollout.play import play_graded
from rollout.policy import Policy
from rollout.setup import (
    ConfigError,
    PlaySettings,
    build_tasks,
    eval_sampling,
    load_adapters,
    load_base,
    load_task_problems,
    load_tokenizer,
    make_policy,
    read_settings,
)
from tasks.base import Problem, Task
from tasks.grading import Grader

BASE = "base"
SAME = "task model tokenizer revision dtype data data_seed prompt_style message_tokens answer_tokens".split()
"""Settings that all runs of one matrix share."""


@dataclass(frozen=True)
class Player:
    """One saved adapter: its name in the matrix, its files, the run it comes from."""

    name: str
    adapter: Path
    run: Path


def find_players(paths: Sequence[Path]) -> list[Player]:
    """All adapters of the run directories, or single `RUN/adapters/CELL` ones. ConfigError where there is none."""
    found = []
    for path in paths:
        if (path / "adapter_config.json").exists():
            found.append((path, path.parent.parent))
        else:
            cells = sorted(p.parent for p in path.glob("adapters/*/adapter_config.json"))
            if not cells:
                raise ConfigError(f"{path} holds no adapters: name a run directory, or one of its adapters/CELL")
            found += [(cell, path) for cell in cells]
    runs = {run for _, run in found}
    players = [Player(f"{run.name}/{cell.name}" if len(runs) > 1 else cell.name, cell, run) for cell, run in found]
    names = [player.name for player in players]
    if len(set(names)) != len(names):
        raise ConfigError(f"two adapters have one name: {', '.join(sorted({n for n in names if names.count(n) > 1}))}")
    return players


def shared_settings(players: Sequence[Player]) -> PlaySettings:
    """The first player's settings; ConfigError if another's differ in what a matrix must share."""
    first = read_settings(players[0].run)
    for player in players[1:]:
        other = read_settings(player.run)
        for name in SAME:
            if getattr(first, name) != getattr(other, name):
                raise ConfigError(
                    f"{players[0].run} has {name} {getattr(first, name)!r} and {player.run} {getattr(other, name)!r}; "
                    f"adapters of one matrix need the same"
                )
    return first


def play_pairs(
    policy: Policy,
    grader: Grader,
    task: Task,
    players: Sequence[tuple[int, float]],
    problems: Sequence[Problem],
    chats: int,
    sampling: Any,
) -> list[list[list[list[Episode]]]]:
    """`episodes[i][j][problem][chat]`: player i as the first agent, player j as all others.

    `players`: (cell, scale) each; scale 0 is the untrained base. Equal pairs have equal luck.
    """
    others = len(task.agents) - 1
    plans_X: list[list[EpisodePlan]] = [[] for _ in range(policy.cells)]
    places: list[list[tuple[int, int, int]]] = [[] for _ in range(policy.cells)]
    for i, (cell_i, scale_i) in enumerate(players):
        for j, (cell_j, scale_j) in enumerate(players):
            for p, problem in enumerate(problems):
                for chat in range(chats):
                    plans_X[cell_i].append(
                        EpisodePlan(
                            task,
                            problem,
                            chat,
                            EVAL_SEED,
                            EVAL_STEP,
                            (scale_i,) + (scale_j,) * others,
                            cells=(cell_i,) + (cell_j,) * others,
                        )
                    )
                    places[cell_i].append((i, j, p))
    out = [[[[] for _ in problems] for _ in players] for _ in players]
    for where, played in zip(places, play_graded(policy, grader, plans_X, sampling), strict=True):
        for (i, j, p), episode in zip(where, played, strict=True):
            out[i][j][p].append(episode)
    return out


def solved(episodes_PG: Sequence[Sequence[Episode]]) -> np.ndarray:
    """[P]: mean grade of each problem's answers."""
    return np.array([np.mean([c for episode in group for c in episode.correct]) for group in episodes_PG])


def matrix(episodes: list[list[list[list[Episode]]]]) -> list[list[Estimate]]:
    """pass@1 of every pair, with its 95% interval over problems."""
    return [[_estimate(episodes_PG) for episodes_PG in row] for row in episodes]


def _estimate(episodes_PG: Sequence[Sequence[Episode]]) -> Estimate:
    grades_PN = [[c for episode in group for c in episode.correct] for group in episodes_PG]
    return ratio_estimate(np.array([sum(g) for g in grades_PN]), np.array([len(g) for g in grades_PN]))


def own_minus_others(solved_IJP: np.ndarray) -> Estimate:
    """Mean of the diagonal minus mean of all else, paired by problem: how much playing with oneself is worth.

    0: a partner from another run is as good, so what was learned is no private protocol.
    """
    players = len(solved_IJP)
    same = np.eye(players, dtype=bool)
    delta_P = solved_IJP[same].mean(axis=0) - solved_IJP[~same].mean(axis=0)
    low, high = paired_interval(delta_P)
    return Estimate(float(delta_P.mean()), low, high, delta_P.size)


def cross_play(paths: Sequence[Path], problems: int | None, chats: int, arm: str | None) -> dict[str, Any]:
    """The whole matrix as JSON values; see the module."""
    players = find_players(paths)
    settings = shared_settings(players)
    tasks = build_tasks(settings)
    if arm is not None and arm not in tasks:
        raise ConfigError(f"--arm {arm}: these runs have {', '.join(tasks)}")
    task = tasks[arm] if arm else next(iter(tasks.values()))
    if task.notes or len(task.agents) < 2:
        raise ConfigError(f"{task.name} is no chat of two or more copies; cross-play pairs copies that talk")
    tokenizer, directory = load_tokenizer(settings)
    heldout = load_task_problems(settings, tokenizer, list(tasks.values())).heldout[:problems]
    base = load_base(settings, directory, tokenizer)
    lora, config = load_adapters([player.adapter for player in players], base[0])
    policy = make_policy(settings, base, lora, config.scale, tokenizer, [task])
    seats = [(x, 1.0) for x in range(len(players))] + [(0, 0.0)]
    with Grader() as grader:
        grader.warm()
        episodes = play_pairs(policy, grader, task, seats, heldout, chats, eval_sampling(settings))
    trained = np.array([[solved(pair) for pair in row[:-1]] for row in episodes[:-1]])
    return {
        "schema": 1,
        "task": task.name,
        "arm": task.arm,
        "players": [*(player.name for player in players), BASE],
        "pass_at_1": [[estimate._asdict() for estimate in row] for row in matrix(episodes)],
        "own_minus_others": own_minus_others(trained)._asdict() if len(players) > 1 else None,
        "problems": len(heldout),
        "chats": chats,
        "sampling": vars(eval_sampling(settings)),
    }


def table_of(result: dict[str, Any]) -> Table:
    """The matrix for a terminal: means, a row the first copy, a column its partners, by number (see `legend`)."""
    table = Table(title=f"{result['task']}: pass@1 by first copy (row) and partner (column)", title_justify="left")
    table.add_column("")
    for number in range(len(result["players"])):
        table.add_column(str(number), justify="right")
    for number, row in enumerate(result["pass_at_1"]):
        table.add_row(str(number), *(f"{cell['mean']:.2f}" for cell in row))
    return table


def legend(result: dict[str, Any]) -> str:
    """Who the numbers are, and how many answers a pair has."""
    names = "\n".join(f"{number}  {name}" for number, name in enumerate(result["players"]))
    return f"{names}\nn = {result['pass_at_1'][0][0]['n']} answers a pair; intervals are in the figure and the JSON"


def figure_of(result: dict[str, Any], path: Path) -> None:
    """The matrix as a picture, `path`.svg and .png: colour and number are pass@1, the interval stands below it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, values = result["players"], result["pass_at_1"]
    means = np.array([[cell["mean"] for cell in row] for row in values])
    size = 2.5 + 0.75 * len(names)
    figure, axes = pyplot.subplots(figsize=(size + 1.5, size), layout="constrained")
    image = axes.imshow(means, vmin=0, vmax=1, cmap="viridis")
    for i, row in enumerate(values):
        for j, cell in enumerate(row):
            text = f"{cell['mean']:.2f}\n[{cell['low']:.2f}, {cell['high']:.2f}]"
            axes.text(j, i, text, ha="center", va="center", fontsize=7, color="white" if means[i, j] < 0.6 else "black")
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("its partners")
    axes.set_ylabel("the first copy")
    axes.set_title(f"{result['task']}, {result['arm']}: pass@1, n = {values[0][0]['n']} answers a pair", fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.8)
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, or 2 for a user's error."""
    parser = argparse.ArgumentParser(prog="python -m eval.crossplay", description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or single adapters (RUN/adapters/CELL)")
    parser.add_argument("--out", type=Path, required=True, help="directory for crossplay.json, .svg and .png")
    parser.add_argument("--arm", help="arm to play; by default the first run's first")
    parser.add_argument("--problems", type=int, help="held-out problems, count; by default the run's")
    parser.add_argument("--chats", type=int, default=2, help="episodes of each problem and pair")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    console = Console(highlight=False)
    try:
        result = cross_play(args.runs, args.problems, args.chats, args.arm)
    except (ConfigError, WeightsError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "crossplay.json").write_text(json.dumps(result, indent=1))
    figure_of(result, args.out / "crossplay")
    console.print(table_of(result))
    console.print(legend(result), markup=False)
    if result["own_minus_others"]:
        console.print(f"with oneself minus with another: {format_estimate(result['own_minus_others'])}", markup=False)
    console.print(f"saved: {args.out}/crossplay.json, .svg, .png", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
