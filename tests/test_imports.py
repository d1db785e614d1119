"""The import direction is one way, only entry points talk to the terminal, and no file names a registry."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]

MAY_IMPORT = {
    "tasks": {"tasks"},
    "model": {"model"},
    "rollout": {"rollout", "tasks", "model"},
    "eval": {"eval", "rollout", "tasks", "model"},
    "rl": {"rl", "eval", "rollout", "tasks", "model"},
}
PACKAGES = {*MAY_IMPORT, "bench", "tests"}
# Tasks are text: whoever reads one needs to know nothing of arrays on a device.
FORBIDDEN = {"tasks": {"jax", "jaxlib", "flax", "optax", "orbax"}}
# rl/display.py and rl/saving.py talk to the terminal of rl/train.py.
ENTRY_POINTS = re.compile(r"rl/(train|warmstart|display|saving)\.py|eval/\w+\.py|rollout/profile\.py")
ARGUMENT_PARSERS = {"argparse", "tyro", "rich", "click", "typer"}

SOURCES = [path for package in sorted(MAY_IMPORT) for path in sorted((REPO / package).rglob("*.py"))]


def each_source(test):
    return pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(REPO).as_posix())(test)


def imported(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """(top-level name, line) of every import, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0] if node.level == 0 else package, node.lineno


@each_source
def test_import_direction(path: Path):
    package = path.relative_to(REPO).parts[0]
    barred = (PACKAGES - MAY_IMPORT[package]) | FORBIDDEN.get(package, set())
    wrong = [f"line {line}: {name}" for name, line in imported(ast.parse(path.read_text()), package) if name in barred]
    assert not wrong, f"{package} may import only {sorted(MAY_IMPORT[package])}; {path.name} has {wrong}"


@each_source
def test_only_entry_points_parse_arguments_or_print(path: Path):
    name = path.relative_to(REPO).as_posix()
    if ENTRY_POINTS.fullmatch(name):
        return
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    wrong = [f"line {node.lineno}: print" for node in calls if node.func.id == "print"]
    wrong += [f"line {line}: {module}" for module, line in imported(tree, "") if module in ARGUMENT_PARSERS]
    assert not wrong, f"{name} is not an entry point, but has {wrong}"


def test_each_package_was_found():
    assert {path.relative_to(REPO).parts[0] for path in SOURCES} == set(MAY_IMPORT)


def test_no_file_names_a_package_registry():
    # Written in pieces, or this file would be the first to be found.
    hosts = re.compile(
        "|".join(["py" + r"pi\.org", "python" + "hosted", "npm" + r"js\.(org|com)", "deb" + r"ian\.org"])
    )
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=REPO, capture_output=True
    )
    if listing.returncode:
        pytest.skip("NOT TESTED: this is not a git checkout, so there is no list of tracked files")
    wrong = []
    for name in filter(None, listing.stdout.decode().split("\0")):
        try:
            text = (REPO / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue  # not text, or deleted but not yet committed
        wrong += [f"{name}:{number}" for number, line in enumerate(text.splitlines(), 1) if hosts.search(line)]
    assert not wrong, f"these lines name a package registry's host: {wrong}"
