"""Executables that are kept: later processes find them before anything is traced, and find the same numbers."""

import os
import subprocess
import sys
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from model import executables, folded
from model.executables import compile_together
from model.programs import Program
from rl.batch import Row, pack
from rl.update import Learner, OptimConfig, apply_gradients, grad_norms, init_state
from rollout.distribution import Sampling
from rollout.episode import RowId, Utterance
from rollout.policy import Request
from rollout.scorer import Forced, score
from tests import tiny
from tests.conftest import REPO

SMALL = "--train-problems 8 --heldout-problems 4 --problems-per-step 2 --steps 1 --show-every 0 --no-evaluate"
SAMPLING = Sampling(0.9)
EVENTS = Counter()
jax.monitoring.register_event_duration_secs_listener(lambda event, _, **__: EVENTS.update([event]))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where programs are kept during a test; JAX's own cache stays as it is."""
    monkeypatch.setattr(executables, "_folder", tmp_path)
    return tmp_path


def traced():
    """Functions traced so far, lowered, and compiled."""
    return tuple(EVENTS[f"/jax/core/compile/{part}_duration"] for part in TRACING)


TRACING = ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")


def fresh(seed=0):
    """A policy without executables of its own."""
    return tiny.policy(tiny.adapters([seed]), prompt_buckets=(32,), compile_afresh=True)


def sampled(policy, seed=0):
    asked = [Request("r", [tiny.START, *b"abc"], 9, 1.0, RowId(seed, 0, i, 0, 0)) for i in range(4)]
    return [(reply.tokens.tolist(), reply.logp.tolist()) for reply in policy.sample([asked], SAMPLING)[0]]


def scored(policy):
    forced = [Forced("r", [tiny.START], np.arange(length), 1.0) for length in (3, 9)]
    return [logp_T.tolist() for logp_T in score(policy, [forced])[0]]


@pytest.mark.parametrize("work", [sampled, scored])
def test_a_policy_takes_what_another_kept(folder, work):
    """Nothing is traced again, the numbers are the same, and a load is no compile."""
    first, second = fresh(), fresh()
    numbers = work(first)
    before = traced()
    assert work(second) == numbers and traced() == before
    assert len(first.compiles) == 1 and not first.loads
    assert second.loads.keys() == first.compiles.keys() and not second.compiles
    assert second.seconds["compile"] == pytest.approx(sum(second.loads.values()))
    other = fresh(seed=1)  # weights are arguments
    assert work(other) != numbers and not other.compiles


def updated():
    """(the state before, after, statistics, a learner without executables of its own)."""
    tokens = np.random.default_rng(0).integers(0, 256, (2, 8, 12)).astype(np.int32)
    rows_X = [
        [Row(Utterance(0, t[:4], t[4:], np.full(8, -5.0, np.float32), "", True, True), 1.0, 9) for t in tokens_BT]
        for tokens_BT in tokens
    ]
    graph, base = tiny.base()
    allowed = jnp.asarray(tiny.ByteTokenizer().sampleable(tiny.CONFIG.vocab))
    learner = Learner(graph, base, tiny.LORA.scale, allowed, OptimConfig(1e-2, 10), SAMPLING, "none")
    state = init_state(tiny.adapters([3, 4]), learner.config)
    return state, *learner.update(state, pack(rows_X, 8, (16,)).batches), learner


def test_an_update_takes_what_another_kept_and_still_writes_in_place(folder):
    _, after, stats, first = updated()
    state, again, same, second = updated()
    jax.tree.map(np.testing.assert_array_equal, (after, stats), (again, same))
    assert second.loads.keys() == first.compiles.keys() and not second.compiles
    assert {"norm", "apply"} < second.loads.keys() and len(second.loads) == 3
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.lora, state.opt_state)))  # donated
    for name, executable in second._executables.items():
        wanted = first._executables[name].memory_analysis().alias_size_in_bytes
        assert executable.memory_analysis().alias_size_in_bytes == wanted


def norms(width=3):
    return Program(grad_norms, ({"a": np.ones((2, width), np.float32)},))


def built(program):
    jax.clear_caches()  # jit's own memory, which a new process hasn't
    (one,) = compile_together([program])
    np.testing.assert_allclose(one.executable(*program.args), [3**0.5] * 2, rtol=1e-6)
    return one


def test_each_program_is_looked_up_by_itself(folder):
    """Of a call's programs some are loaded and some compiled, in their places."""
    built(norms())
    lora = {"a": jnp.ones((1, 3))}
    config = OptimConfig(1e-3, 10)
    apply = Program(partial(apply_gradients, config), (lora, init_state(lora, config).opt_state, lora))
    assert [one.loaded for one in compile_together([apply, norms(), norms(4)])] == [False, True, False]
    assert [one.loaded for one in compile_together([norms(), norms(4), apply])] == [True, True, True]


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("of", "damage"),
    [
        ("executable", flip),
        ("executable", lambda path: os.truncate(path, 100)),
        ("executable", lambda path: os.truncate(path, 0)),
        ("executable", lambda path: path.unlink()),
        ("name", lambda path: path.write_bytes(b"\xff\xfe/../x")),
        ("name", lambda path: os.truncate(path, 5)),
    ],
    ids="flipped cut emptied gone garbled shortened".split(),
)
def test_a_damaged_file_is_compiled_again(folder, of, damage):
    built(norms())
    files = {"executable" if path.suffix else "name": path for path in folder.iterdir()}
    damage(files[of])
    with pytest.warns(UserWarning, match="can't be used, so its program is compiled again") as said:
        built(norms())
    assert len(said) == 1
    assert built(norms()).loaded  # mended


def test_an_edit_that_leaves_the_code_leaves_the_executable(folder, monkeypatch):
    """Another name, the same lowered code: traced once more, not compiled; after that not traced either."""
    built(norms())
    monkeypatch.setattr(folded, "FOLD", False)  # in every name, and nothing to this program
    before = traced()
    assert built(norms()).loaded
    assert [now - then for now, then in zip(traced(), before)][1:] == [1, 0]
    before = traced()
    assert built(norms()).loaded and traced() == before
    assert len(list(folder.glob("*.executable"))) == 1 and len(list(folder.iterdir())) == 3


def test_source_edited_since_the_start_is_not_kept(folder, monkeypatch):
    monkeypatch.setattr(executables, "source_digest", lambda root: "edited")
    assert not built(norms()).loaded and not list(folder.iterdir())


def test_a_program_without_a_name_is_compiled_and_not_kept(folder):
    program = norms()
    nameless = Program(lambda grads: grad_norms(grads), program.args)
    assert not built(nameless).loaded and not built(nameless).loaded and not list(folder.iterdir())


def test_a_full_disk_brings_a_warning(folder, monkeypatch):
    def full(path, write):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(executables, "replace_file", full)
    with pytest.warns(UserWarning, match="can't be kept: .*No space left"):
        assert not built(norms()).loaded


def test_what_comes_from_jax_own_cache_is_not_kept(folder, tmp_path_factory):
    """A CPU's executable from there serialises, loads, and fails when it is run."""
    changed = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax"))}
    changed |= {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}
    before = {name: getattr(jax.config, name) for name in changed}
    try:
        for name, value in changed.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        built(norms())
        kept = set(folder.iterdir())
        for path in kept:
            path.unlink()
        assert len(kept) == 2 and not built(norms()).loaded
        assert not list(folder.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.slow
def test_a_second_run_compiles_nothing_anew(tmp_path):
    kept, held = tmp_path / "kept", []
    for name in ("one", "two"):
        command = [sys.executable, "-m", "rl.train", *SMALL.split(), "--compile-cache", kept, "--out", tmp_path / name]
        printed = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
        held.append({file.relative_to(kept) for file in kept.rglob("*") if not file.name.endswith("-atime")})
        assert ("0 shapes compiled" in printed) == (name == "two")
    assert len(list(kept.glob("programs/*.executable"))) >= 4 and held[0] == held[1]
    assert (tmp_path / "one/metrics.jsonl").read_bytes() == (tmp_path / "two/metrics.jsonl").read_bytes()
