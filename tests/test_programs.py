"""A program's name: the same in every process for the same executable, and another for any other."""

import shutil
from functools import partial
from threading import Lock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model import folded, programs
from model.programs import Program, source_digest
from rl.update import OptimConfig, add_gradient, apply_gradients, grad_norms
from rollout.sampler import decode, prefill
from tests import tiny
from tests.conftest import REPO

GRADS = {"a": np.ones((2, 3), np.float32), "b": np.ones((2, 4), np.float32)}


def norms(grads=GRADS, donate=(), function=grad_norms):
    return Program(function, (grads,), donate)


def test_a_name_says_nothing_of_values():
    assert norms().name() == norms(jax.tree.map(np.zeros_like, GRADS)).name()
    assert len(norms().name()) == 64


@pytest.mark.parametrize(
    "other",
    [
        norms(GRADS | {"b": np.ones((2, 5), np.float32)}),
        norms(GRADS | {"b": np.ones((2, 4), np.float16)}),
        norms({"a": GRADS["a"], "c": GRADS["b"]}),
        norms(list(GRADS.values())),
        norms(GRADS, donate=(0,)),
        norms(function=partial(grad_norms)),
        norms(GRADS | {"b": 1.0}),
        Program(grad_norms, (norms(),)),
    ],
    ids="shape dtype key container donated function weak result".split(),
)
def test_another_program_has_another_name(other):
    assert other.name() not in (None, norms().name())


def test_a_weak_type_is_another_type():
    assert norms([jnp.float32(1)]).name() != norms([jnp.asarray(1.0)]).name() != norms([np.float32(1)]).name()


def test_what_is_bound_is_in_the_name():
    """Every setting of the optimiser, the graph's sizes, and what the result of another program depends on."""
    configs = [
        OptimConfig(1e-3, 10),
        OptimConfig(1e-3, 11),
        OptimConfig(2e-3, 10),
        OptimConfig(1e-3, 10, clip_norm=2.0),
    ]
    names = {Program(partial(apply_gradients, config), (GRADS,)).name() for config in configs}
    assert len(names) == 4 and None not in names
    graph, base = tiny.base()
    first = [Program(partial(prefill, graph, new_slots=n, penalised=False), (base,)) for n in (32, 64)]
    names = {
        Program(partial(decode, graph, fused=fused), (base, one)).name() for one in first for fused in (True, False)
    }
    assert len(names) == 4 and None not in names
    wider, _ = tiny.base(config=tiny.CONFIG.__class__(**vars(tiny.CONFIG) | {"norm_eps": 1e-5}))
    clip = (0.2, 0.28)
    assert len({Program(partial(add_gradient, g, clip, "none"), (base,)).name() for g in (graph, wider)}) == 2


def test_what_surrounds_a_program_is_in_its_name(monkeypatch):
    names = [norms().name()]
    with jax.default_matmul_precision("highest"):  # this thread's alone
        names.append(norms().name())
    for change in (
        lambda patch: patch.setattr(programs, "SOURCE", "edited"),
        lambda patch: patch.setattr(folded, "FOLD", False),
        lambda patch: patch.setattr(programs, "_versions", lambda: {"jax": "0.0"}),
        lambda patch: patch.setattr(programs, "_device", lambda: ("gpu", "cuda 1", "another card")),
        lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            names.append(norms().name())
    assert len(set(names)) == 7 and None not in names
    assert norms().name() == names[0]


def test_versions_are_those_of_what_compiles():
    assert {"python", "jax", "jaxlib", "flax", "optax", "numpy"} <= programs._versions().keys()
    assert programs._versions()["optax"] == optax.__version__


def test_any_edit_of_code_that_may_be_traced_shows(tmp_path):
    """Every file that may be traced, one after the other; text beside the code doesn't count."""
    for package in (*programs.TRACED, "tasks"):
        shutil.copytree(REPO / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    seen = {source_digest(REPO)}
    assert source_digest(tmp_path) in seen
    for name in ("model/qwen2.py", "rollout/sampler.py", "rl/loss.py", "model/tiles.py"):
        path = tmp_path / name
        path.write_text(path.read_text().replace("1", "2", 1))
        assert source_digest(tmp_path) not in seen
        seen.add(source_digest(tmp_path))
    (tmp_path / "rollout/new.py").write_text("")
    assert source_digest(tmp_path) not in seen
    seen.add(source_digest(tmp_path))
    (tmp_path / "tasks/stories.py").write_text("")
    (tmp_path / "model/builtin/config.json").write_text("{}")
    assert source_digest(tmp_path) in seen


def ours(grads):
    return grads


@pytest.mark.parametrize(
    "function",
    [
        lambda grads: grads,
        ours,
        partial(grad_norms, ours),
        partial(grad_norms, jnp.ones(3)),
        partial(grad_norms, Lock()),
    ],
    ids="closure elsewhere bound array live".split(),
)
def test_what_cannot_be_named_exactly_has_no_name(function):
    """A closure's values, code outside the packages that are hashed, arrays: nothing says when these change."""
    assert norms(function=function).name() is None
