"""`python -m bench.peers`: ours beside the peers on one GPU, in one run, each number three times, with its checks.

Every measurement is a subprocess of its own, one after the other, so that a crash or a full memory spoils nothing else.
What is finished is in the --out file at once, and the same command with the same --out goes on from there. The peers'
scripts and wheels are not part of this repository: --peers and --tunix-wheels say where they lie.

    python -m bench.peers --peers DIR --tunix-wheels DIR --tokenizer DIR --data DIR --out peers.json --budget-s 560
    python -m bench.peers --tiny --out tiny.json          # the same in small, on a CPU
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.peer_read import Figure, Output
from bench.peer_rows import CHECKS, ROWS, Measurement, Places, measurements
from bench.peer_table import table

REPO = Path(__file__).resolve().parents[1]
PACKAGES = ("jax", "flax", "torch", "transformers", "peft")


def versions(wheels: Path | None) -> dict[str, str]:
    """What is installed, and which peers the wheels bring: `google_tunix-0.1.7-...whl` is tunix 0.1.7."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    for name, stem in (("tunix", "google_tunix"), ("qwix", "qwix")):
        files = sorted(wheels.glob(f"{stem}-*.whl")) if wheels else []
        found[name] = files[-1].name.split("-")[1] if files else "absent"
    return found


def commit() -> str:
    """The checkout's commit, marked where files differ from it; 'unknown' outside a checkout."""
    try:
        git = ["git", "-C", str(REPO)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


def json_lines(text: str) -> list[dict[str, Any]]:
    """The lines that are JSON objects; anything else a program prints is passed over."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def last_line(*texts: str) -> str:
    """The last line with anything on it, of the first text that has one."""
    for text in texts:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if lines:
            return lines[-1][:300]
    return "it printed nothing"


def execute(argv: list[str], out: Path, err: Path, limit_s: float) -> str | None:
    """Run to the end or to `limit_s`; its whole process group is gone afterwards. None, or why it failed."""
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    env["JAX_TRACEBACK_FILTERING"] = "off"  # or an error's last line is a remark on hidden frames, not the error
    with out.open("w") as stdout, err.open("w") as stderr:
        # A group, not a session: a machine that ends this command by its session must end this too.
        process = subprocess.Popen(argv, stdout=stdout, stderr=stderr, cwd=REPO, env=env, process_group=0)
        try:
            status = f"exit {code}" if (code := process.wait(limit_s)) else None
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit_s:.0f} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # and what it started, such as a compiler's workers
            except ProcessLookupError:
                pass
            process.wait()
    return status and f"{status}: {last_line(err.read_text(errors='replace'), out.read_text(errors='replace'))}"


def run_once(measurement: Measurement, run: int, work: Path, limit_s: float) -> dict[str, Any]:
    """One process of a measurement: its record, with `why` where it failed. Figures it gave before failing are kept."""
    stem = work / f"{measurement.name.replace(' ', '-')}-{run}"
    report = stem.with_suffix(".json")
    report.unlink(missing_ok=True)
    filled = {"{report}": str(report), "{work}": str(work), "{run}": str(run)}
    argv = [sys.executable]
    for arg in measurement.argv:
        for mark, value in filled.items():
            arg = arg.replace(mark, value)
        argv.append(arg)
    started = time.time()
    why = execute(argv, stem.with_suffix(".out"), stem.with_suffix(".err"), limit_s)
    seconds = time.time() - started
    lines = json_lines(stem.with_suffix(".out").read_text(errors="replace"))
    found: dict[str, Any] = {}
    figures: list[Figure] = []
    try:
        found = json.loads(report.read_text()) if report.exists() else {}
        figures = [figure for figure in measurement.read(Output(lines, found, started)) if figure.values]
    except (LookupError, ValueError, TypeError, ArithmeticError) as error:
        why = why or f"its output could not be read: {error!r}"
    missing = {place for place in measurement.gives if place[0] != CHECKS} - {(f.row, f.column) for f in figures}
    if missing and why is None:
        why = f"it ended well and gave no {', '.join(sorted(row for row, _ in missing))}"
    checked = [line["ok"] for line in lines if "ok" in line]
    if not all(checked):
        why = why or f"{checked.count(False)} of {len(checked)} checks are wrong"
    elif not checked and measurement.name == CHECKS:
        why = why or "it printed no check"
    said = (line["device"] for line in lines if ":" not in line.get("device", ":"))  # 'cuda:0' says nothing
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(started)),
        "seconds": seconds,
        "why": why,
        "device": found.get("device") or next(said, None),
        "argv": argv[1:],
        "figures": [dataclasses.asdict(figure) for figure in figures],
        "lines": lines[:100],
        "tail": stem.with_suffix(".err").read_text(errors="replace")[-4000:] if why else "",
    }


def measure(measurement: Measurement, record: dict[str, Any], args: argparse.Namespace, deadline: float) -> None:
    """All processes of one measurement that --out doesn't hold yet, saved as they end.

    The first failure is the last process: the next would fail too. What isn't run is recorded with the reason.
    """
    kept = record["measurements"].get(measurement.name, {"runs": []})["runs"]
    runs = [] if args.again else [run for run in kept if run["why"] is None]
    entry = {"status": "skipped", "why": why_not(measurement, record, args.work), "gives": measurement.gives}
    record["measurements"][measurement.name] = entry | {"runs": runs}
    entry = record["measurements"][measurement.name]
    while entry["why"] is None and len(runs) < measurement.runs:
        left = deadline - time.monotonic()
        if left < measurement.expected_s:
            entry["why"] = f"no time: about {measurement.expected_s} s are needed and {left:.0f} were left"
            break
        if measurement.fills:
            shutil.rmtree(args.work / f"{measurement.fills}-{len(runs)}", ignore_errors=True)
        runs.append(run_once(measurement, len(runs), args.work, min(measurement.limit_s, left)))
        entry["why"] = runs[-1]["why"]
        entry["status"] = "failed" if entry["why"] else "ok" if len(runs) == measurement.runs else "skipped"
        save(record, args.out)
        said = f"{measurement.name} {len(runs)}/{measurement.runs}: {entry['why'] or 'ok'}, {runs[-1]['seconds']:.0f} s"
        print(said, flush=True)
    if entry["status"] == "skipped":
        print(f"{measurement.name}: {entry['why']}", flush=True)
    save(record, args.out)


def why_not(measurement: Measurement, record: dict[str, Any], work: Path) -> str | None:
    """Why a measurement can't be run, or None."""
    if measurement.skip is None and measurement.after:
        name, folder = measurement.after
        if record["measurements"].get(name, {}).get("status") != "ok" or not (work / folder).is_dir():
            return f"it needs {name} first, with the same --work"
    return measurement.skip


def save(record: dict[str, Any], out: Path) -> None:
    """The record and its table, each whole or not there."""
    for path, text in ((out, json.dumps(record, indent=1)), (out.with_suffix(".md"), table(record))):
        part = path.with_suffix(path.suffix + ".part")
        part.write_text(text)
        part.replace(path)


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """A new record, or the one in --out to go on with; ValueError where that one is of another commit or sizes."""
    command = "python -m bench.peers " + " ".join(args.argv)
    record = {
        "commands": [command],
        "date": time.strftime("%Y-%m-%d"),
        "commit": args.commit or commit(),
        "versions": versions(args.tunix_wheels),
        "repeats": args.repeats,
        "tiny": args.tiny,
        "measurements": {},
    }
    if args.out.exists():
        kept = json.loads(args.out.read_text())
        # The peers' wheels may come with a later call.
        known, now = kept["versions"], record["versions"]
        known.update({name: version for name, version in now.items() if known.get(name, "absent") == "absent"})
        record["versions"] = known | {name: version for name, version in now.items() if version != "absent"}
        for name in ("commit", "versions", "repeats", "tiny"):
            if kept[name] != record[name]:
                raise ValueError(f"{args.out} has {name} {kept[name]} and this is {record[name]}; name another --out")
        if command not in kept["commands"]:
            kept["commands"].append(command)
        return kept
    return record


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*(row.name for row in ROWS), CHECKS]
    parser.add_argument("--out", type=Path, required=True, help="JSON; the table goes beside it, as .md")
    parser.add_argument("--only", nargs="+", choices=names, metavar="ROW", help=f"these rows: {', '.join(names)}")
    parser.add_argument("--methods", action="store_true", help="the row `methods` too, which takes minutes")
    parser.add_argument("--peers", type=Path, help="folder of hf_peft_step.py and tunix_bench.py")
    parser.add_argument("--tunix-wheels", type=Path, help="folder of the wheels that tunix_bench.py names")
    parser.add_argument("--tokenizer", help="tokenizer directory, for whole steps")
    parser.add_argument("--data", help="GSM8K directory, likewise")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement")
    long = "of what HF does, of Tunix's gradient and of a cold start"
    parser.add_argument("--long-repeats", type=int, default=1, help=long)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which nothing is started")
    parser.add_argument("--again", action="store_true", help="measure again what --out holds already")
    parser.add_argument("--commit", help="by default git's; for a copy that has no history")
    parser.add_argument("--work", type=Path, help="folder of outputs and caches; by default beside --out")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the command on a CPU")
    args = parser.parse_args(argv)
    args.argv, args.work = argv, (args.work or args.out.with_suffix(".work")).resolve()
    for name in ("peers", "tunix_wheels"):
        path = getattr(args, name)
        if path is not None and not path.is_dir():
            parser.error(f"--{name.replace('_', '-')} {path} is not a folder")
        setattr(args, name, path and path.resolve())
    for name in ("tokenizer", "data"):  # measurements run in the repository, wherever this was started
        given = getattr(args, name)
        setattr(args, name, str(Path(given).resolve()) if given and Path(given).is_dir() else given)
    return args


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0; 1 where a measurement failed; 2 for a user's error."""
    args = parse(sys.argv[1:] if argv is None else argv)
    deadline = time.monotonic() + args.budget_s
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a measurement in progress is ended with us
    try:
        record = begin(args)
    except (ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.work.mkdir(parents=True, exist_ok=True)
    places = Places(args.peers, args.tunix_wheels, args.tokenizer, args.data)
    for measurement in measurements(places, args.repeats, args.long_repeats, args.tiny):
        rows = {row for row, _ in measurement.gives}
        wanted = rows & set(args.only) if args.only else args.methods or "methods" not in rows
        kept = record["measurements"].get(measurement.name, {"status": "", "runs": []})
        done = kept["status"] == "ok" and len(kept["runs"]) >= measurement.runs  # more may be asked for by now
        if wanted and (args.again or not done):
            measure(measurement, record, args, deadline)
    save(record, args.out)
    print("\n" + table(record))
    return int(any(m["status"] == "failed" for m in record["measurements"].values()))


if __name__ == "__main__":
    sys.exit(main())
