"""bench.peers: whatever a subprocess did is recorded, peers' lines are read, and the table shows all of it."""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import pytest

from bench import peer_read, peer_rows, peers
from bench.peer_read import Figure, Output
from bench.peer_rows import Measurement, Places
from bench.peer_table import entry, table

FOREVER = float("inf")


def arguments(tmp_path, **changes):
    return argparse.Namespace(**{"out": tmp_path / "r.json", "work": tmp_path, "again": False} | changes)


def record(**measurements):
    empty = {"commands": ["python -m bench.peers"], "date": "2026-11-30", "commit": "abc", "versions": {"jax": "1"}}
    return empty | {"repeats": 3, "tiny": True, "measurements": measurements}


def program(code, gives=(("step", "ours"),), read=lambda output: [], **changes):
    """A measurement that runs a line of Python."""
    return Measurement("m", gives, ("-c", code), read, **{"expected_s": 0, "limit_s": 20} | changes)


def seconds_of(output):
    return [Figure("step", "ours", [line["s"] for line in output.lines])]


def cells_of(shown, label):
    """The cells of the table's line that starts with `label`, without it."""
    (line,) = (line for line in shown.splitlines() if line.startswith(f"| {label} "))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def run(measurement, tmp_path, into=None, deadline=FOREVER, **changes):
    into = into or record()
    peers.measure(measurement, into, arguments(tmp_path, **changes), deadline)
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(json.dumps(into)), "saved as it ended"
    return into["measurements"]["m"]


def test_a_run_that_ends_well(tmp_path):
    code = """import sys; open(sys.argv[1], "w").write('{"device": "D"}'); print('text\\n{"s": 1.5}\\n{broken')"""
    plan = Measurement("m", (("step", "ours"),), ("-c", code, "{report}"), seconds_of, 0, 20, runs=2)
    got = run(plan, tmp_path)
    assert got["status"] == "ok" and got["why"] is None and len(got["runs"]) == 2
    assert got["runs"][1]["figures"][0]["values"] == [1.5] and got["runs"][1]["device"] == "D"


def test_a_failing_subprocess_is_recorded_as_failed_with_its_last_line(tmp_path):
    """What it measured before it failed is kept, its other runs aren't tried, and the table says all of this."""
    code = """print('{"s": 1.5}'); raise MemoryError("no room for 66 GiB")"""
    gives = (("step", "ours"), ("gradient", "ours"))
    into = record()
    got = run(program(code, gives, seconds_of, runs=3), tmp_path, into)
    assert got["status"] == "failed" and got["why"] == "exit 1: MemoryError: no room for 66 GiB"
    assert len(got["runs"]) == 1 and got["runs"][0]["figures"][0]["values"] == [1.5]
    shown = table(into)
    assert cells_of(shown, "talk_to_solve step, s")[0] == "1.50 n=1 (2)"
    assert cells_of(shown, "gradient 16 x 1,024, s")[0] == "failed (1)"
    assert "(1) gradient, ours: exit 1: MemoryError: no room for 66 GiB" in shown


def test_an_error_of_jax_is_named_by_its_own_words(tmp_path):
    got = run(program("import jax; jax.jit(lambda x: 1 / 0)(1)"), tmp_path)
    assert got["why"] == "exit 1: ZeroDivisionError: division by zero" and "Traceback" in got["runs"][0]["tail"]


def test_a_report_cut_short_is_a_failure(tmp_path):
    code = """import sys; open(sys.argv[1], "w").write('{"device": ')"""
    got = run(Measurement("m", (("step", "ours"),), ("-c", code, "{report}"), seconds_of, 0, 20), tmp_path)
    assert got["status"] == "failed" and got["why"].startswith("its output could not be read: JSONDecodeError")


@pytest.mark.parametrize(
    "code, why",
    [
        ("print('all is well')", "it ended well and gave no step"),
        ("""print('{"s": 1, "ok": true}'); print('{"s": 1, "ok": false}')""", "1 of 2 checks are wrong"),
        ("""print('{"t": 1}')""", "its output could not be read: KeyError('s')"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit -9: it printed nothing"),
    ],
)
def test_what_else_is_a_failure(code, why, tmp_path):
    got = run(program(code, read=seconds_of), tmp_path)
    assert (got["status"], got["why"]) == ("failed", why)


def test_a_time_limit_ends_all_that_was_started(tmp_path):
    child = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    got = run(program(child, limit_s=1.0), tmp_path)
    pid = (tmp_path / "m-0.out").read_text().strip()
    assert got["why"] == f"stopped after 1 s: {pid}"
    state = Path(f"/proc/{pid}/stat")
    for _ in range(50):
        if not state.exists() or state.read_text().split(")")[-1].split()[0] == "Z":
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still there")


def test_nothing_is_started_without_time_or_what_it_needs(tmp_path):
    touch = f"open({str(tmp_path / 'ran')!r}, 'w')"
    soon = time.monotonic() + 5
    assert "no time: about 60 s are needed" in run(program(touch, expected_s=60), tmp_path, deadline=soon)["why"]
    assert run(program(touch, skip="no --peers"), tmp_path)["why"] == "no --peers"
    assert run(program(touch, after=("cold", "cache-0")), tmp_path)["why"].startswith("it needs cold first")
    assert not (tmp_path / "ran").exists()


def test_going_on_keeps_what_went_well(tmp_path):
    plan = program("""import time; print('{"s": %f}' % time.time())""", read=seconds_of, runs=2)
    into = record()
    first = run(plan, tmp_path, into)["runs"]
    assert run(plan, tmp_path, into)["runs"] == first
    del into["measurements"]["m"]["runs"][1]
    again = run(plan, tmp_path, into)["runs"]
    assert again[0] == first[0] and again[1] != first[1]
    assert run(plan, tmp_path, into, again=True)["runs"][0] != first[0]


def test_a_later_call_may_ask_for_more_repeats(tmp_path, monkeypatch, capsys):
    plan = program("""import time; print('{"s": %f}' % time.time())""", read=seconds_of)
    monkeypatch.setattr(peers, "measurements", lambda places, few, many, tiny: [dataclasses.replace(plan, runs=many)])
    values = []
    for times in ("1", "2", "2"):
        assert peers.main(["--out", str(tmp_path / "r.json"), "--commit", "a", "--long-repeats", times]) == 0
        kept = json.loads((tmp_path / "r.json").read_text())["measurements"]["m"]["runs"]
        values.append([run["figures"][0]["values"] for run in kept])
    assert values[0] == values[1][:1] and len(values[1]) == 2 and values[2] == values[1]


def test_the_command_refuses_to_mix_commits(tmp_path, capsys):
    out = str(tmp_path / "r.json")
    assert peers.main(["--tiny", "--out", out, "--only", "methods", "--commit", "a", "--budget-s", "0"]) == 0
    assert cells_of(capsys.readouterr().out, "talk_methods, min")[0] == "not run (1)"
    assert peers.main(["--tiny", "--out", out, "--only", "methods", "--commit", "b", "--budget-s", "0"]) == 2
    assert "has commit a and this is b" in capsys.readouterr().err


TUNIX = [
    {"stage": "sample", "part": "prefill", "first_call_s": 9.0, "best_s": 0.11, "all_s": [0.13, 0.11, 0.12]},
    {"stage": "sample", "part": "full", "first_call_s": 9.0, "best_s": 1.0, "all_s": [1.02, 1.12, 1.22]},
    {"stage": "sample", "part": "summary", "gen": 101, "ms_per_step": 9.1, "peak_gib": 5.0},
]
HF = [
    {"stage": "env", "torch": "2"},
    {"stage": "rollout", "seconds": 102.7},
    {"stage": "train", "seconds": 5.6, "tokens": 81920, "tokens_per_s": 16384.0},
    {"stage": "step", "seconds": 108.3},
]


def test_reading_the_peers():
    """Tunix: (1.02 - 0.12) s over 100 steps are 9 ms. HF: 16 x 1,024 tokens at 16,384 a second are 1 s."""
    (got,) = peer_read.read_tunix_decode("decode_128")(Output(TUNIX, {}, 0.0))
    assert (got.row, got.column) == ("decode_128", "tunix") and got.values == pytest.approx([9, 10, 11])
    (got,) = peer_read.read_tunix_prefill(Output(TUNIX, {}, 0.0))
    assert got.values == [0.13, 0.11, 0.12]
    line = {"stage": "train", "part": "loss_and_grad", "best_s": 0.38, "peak_gib": 66.0}
    (got,) = peer_read.read_tunix_gradient(Output([line | {"part": "logps_forward", "best_s": 9}, line], {}, 0.0))
    assert got.values == [0.38] and got.note == "each the best of its process's repeats"
    gradient, step = peer_read.read_hf_step(Output(HF, {}, 0.0))
    assert gradient.values == [1.0] and step.values == [108.3]
    assert step.beside == {"rollout_s": 102.7, "train_s": 5.6}
    assert peer_read.read_hf_step(Output(HF[:2], {}, 0.0)) == [], "stopped half way: no figure, no error"
    lines = [
        {"stage": "decode", "how": how, "ms_per_step": ms} for how, ms in (("adapter unmerged", 90), ("merged", 20))
    ]
    (got,) = peer_read.read_hf_decode(Output(lines, {}, 0.0))
    assert (got.column, got.values) == ("hf", [90])


def test_reading_our_own():
    steps = [{"step_s": s, "decode_s": s / 2, "sampling_logp_gap": s, "sampling_logp_gap_max": s} for s in (9, 3, 2, 4)]
    (got,) = peer_read.read_steps(Output([], {"steps": steps, "peak_gib": 11.0}, 0.0))
    assert got.values == [2, 4] and got.beside["decode_s"] == 1.5 and got.beside["sampling_logp_gap_max"] == 4
    (got,) = peer_read.read_methods(Output([], {"steps": steps, "peak_gib": 11.0}, 0.0))
    assert got.row == "methods" and got.values == pytest.approx([80 * 3 / 60, 80 * 2 / 60, 80 * 4 / 60])
    assert got.note == "80 x a step of 3.0 s"
    first = {"ended_at": 1090.0, "compile_s": 60.0, "step_s": 7.0}
    (got,) = peer_read.read_startup("startup_cold")(Output([], {"steps": [first], "setup_s": 12.0}, 1000.0))
    assert got.values == [90.0]
    traced = {"span_ms": 4000.0, "busy_ms": 3800.0, "longest_gaps": [{"duration": 41.2}, {"duration": 9.0}]}
    traced |= {"kernels": [["gemm", 2000.0, 5]], "step": {"decode_s": 2.1, "decode_ms_per_step": 1.9}}
    (got,) = peer_read.read_busy(Output([], {"traced": traced}, 0.0))
    assert got.values == pytest.approx([95]) and got.beside == {"decode_s": 2.1, "kernels": [["gemm", 2000.0, 5]]}
    assert got.note == "3.80 of 4.00 s, slowed by the profiler; the longest gaps 41, 9 ms"


def test_the_table_by_hand():
    assert entry([2.446, 2.46, 2.442], 2, 3) == "2.45 [2.44, 2.46]"
    assert entry([2.4], 2, 3) == "2.40 n=1" and entry([2.4], 2, 1) == "2.40"

    def run(row, column, values, note="", lines=(), **beside):
        figures = [{"row": row, "column": column, "values": values, "note": note, "beside": beside}] if row else []
        return {"seconds": 20.0, "device": "H200", "figures": figures, "lines": list(lines)}

    def of(row, column, *runs, status="ok", why=None):
        return {"status": status, "why": why, "gives": [[row, column]], "runs": list(runs)}

    checks = [{"name": "mlp", "max_err": 0.5, "ok": False}, {"name": "qkv", "max_err": 0.01, "ok": True}]
    kernels = [["nvjet", 812.4, 10], ["attend", 130.0, 4]]
    told = {"sampling_logp_gap": 0.011, "sampling_logp_gap_max": 0.07, "peak_gib": 9.0, "kernels": kernels}
    ours = run("decode_32", "ours", [2.4, 2.5, 2.6], **told)
    shown = table(
        record(
            a=of("decode_32", "ours", ours),
            b=of("decode_32", "tunix", *[run("decode_32", "tunix", [v], "whole calls") for v in (2.1, 2.2, 2.0)]),
            c=of("prefill", "tunix", status="skipped", why="no --peers"),
            checks=of("checks", "ours", run(None, None, None, lines=checks), status="failed", why="exit 1: mlp"),
        )
    )
    lines = shown.splitlines()
    assert lines[0] == "H200; tiny shapes, which stand for nothing; commit abc, 2026-11-30"
    (head,) = (i for i, line in enumerate(lines) if "floor" in line and line.startswith("| "))
    assert [c.strip() for c in lines[head].split("|")[1:-1]] == ["", "ours", "floor", "goal", "Tunix"]
    decode = ["2.50 [2.40, 2.60]", "0.94", "1.3", "2.10 [2.00, 2.20] (1)"]
    assert cells_of(shown, "decode, 32 rows, ms a step") == decode
    assert cells_of(shown, "prefill 32 x 256, s") == ["not run", "0.032", "0.045", "not run (2)"]
    assert "(1) whole calls\n(2) prefill, Tunix: no --peers" in shown
    assert "- decode_32, ours: log-probs 0.0110 nats from the training forward's, at most 0.0700; peak 9.0" in shown
    assert " GiB; longest kernels, ms in all: nvjet 812, attend 130\n" in shown
    assert "checks: 1 ok, 1 wrong, largest error 0.5; wrong: mlp 0.5; failed: exit 1: mlp" in shown
    assert "a 20, b 60, checks 20; 100 in all" in shown
    assert len({len(line) for line in lines[head : head + 12]}) == 1, "the columns line up"


def test_every_row_is_measured_by_us_and_names_no_second_thing():
    found = peer_rows.measurements(Places(Path("p"), Path("w"), "t", "d"), 3, 1, tiny=False)
    assert len({m.name for m in found}) == len(found)
    gives = [place for m in found for place in m.gives]
    assert len(set(gives)) == len(gives)
    assert {row for row, column in gives if column == "ours"} == {*(r.name for r in peer_rows.ROWS), "checks"}
    names = [m.name for m in found]
    assert names.index("startup_cold ours") < names.index("startup_warm ours")
    many = {m.name: m for m in peer_rows.measurements(Places(Path("p"), Path("w"), "t", "d"), 3, 3, tiny=False)}
    assert {name for name, m in many.items() if m.runs == 3} == {
        *("hf decode", "hf step", "gradient tunix", "startup_cold ours", "startup_warm ours")
    }
    assert names[-1] == "hf step", "it takes longest"
    for few in (1, 2, 3, 4):  # however many cold starts there are, three steps or more after those that warm up
        (cold,) = (m for m in peer_rows.measurements(Places(None, None, "t", "d"), 3, few, False) if "cold" in m.name)
        assert 3 <= few * (int(cold.argv[cold.argv.index("--steps") + 1]) - 2) < 3 + few
    bare = peer_rows.measurements(Places(None, None, None, None), 3, 1, tiny=False)
    assert {m.name for m in bare if m.skip is None} - {"checks"} == {
        f"{row} ours" for row in ("decode_32", "decode_32_top_p", "decode_128", "prefill", "cells", "gradient")
    }


@pytest.mark.slow
def test_two_rows_in_small(tmp_path):
    out = tmp_path / "r.json"
    assert peers.main(["--tiny", "--repeats", "2", "--out", str(out), "--only", "prefill", "gradient"]) == 0
    found = json.loads(out.read_text())["measurements"]
    assert {name: m["status"] for name, m in found.items() if "ours" in name} == {
        "prefill ours": "ok",
        "gradient ours": "ok",
    }
    assert "exit" not in out.with_suffix(".md").read_text()


def test_a_later_call_may_bring_the_peers_but_not_another_jax(tmp_path, monkeypatch, capsys):
    out = str(tmp_path / "r.json")
    command = ["--tiny", "--out", out, "--only", "methods", "--commit", "a", "--budget-s", "0"]
    for versions, status in (
        ({"jax": "1", "tunix": "absent"}, 0),
        ({"jax": "1", "tunix": "0.1.7"}, 0),
        ({"jax": "1", "tunix": "absent"}, 0),  # a call that measures only ours
        ({"jax": "2", "tunix": "0.1.7"}, 2),
        ({"jax": "1", "tunix": "0.1.8"}, 2),
    ):
        monkeypatch.setattr(peers, "versions", lambda wheels, versions=versions: versions)
        assert peers.main(command) == status, versions
    assert json.loads((tmp_path / "r.json").read_text())["versions"] == {"jax": "1", "tunix": "0.1.7"}
