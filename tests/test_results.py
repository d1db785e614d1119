"""results.json: what cells cost, by hand."""

from eval.results import cost_by_cell
from rl.run_dir import RunDir


def test_what_a_cell_cost(tmp_path):
    """Step 0: 8 s of sampling, 2 of them compiling, 3 : 1 by tokens; credit 1 s, all the first's; update 4 s, 1 : 1."""
    run = RunDir(tmp_path)
    names = ("rollout/episodes", "rollout/sampled_tokens", "credit/sampled_tokens", "loss/live_rows")
    rows = {("a", 0): (4, 30, 9, 5), ("b", 0): (4, 10, 0, 5), ("a", 1): (4, 20, 0, 0), ("b", 1): (4, 20, 0, 0)}
    run.append(
        "metrics.jsonl",
        [
            {"step": s, "cell": c, "loss/trained_tokens": 7} | dict(zip(names, row, strict=True))
            for (c, s), row in rows.items()
        ],
    )
    timing = [
        {"time/collect_s": 8, "time/collect/compile_s": 2, "time/credit_s": 1, "time/update_s": 4},
        {"time/collect_s": 2, "time/credit_s": 0, "time/update_s": 2},
    ]
    run.append("timing.jsonl", [{"step": step, **line} for step, line in enumerate(timing)])
    cost = cost_by_cell(run.path, ["a", "b"])
    assert cost["a"] == {"episodes": 8, "sampled_tokens": 59, "trained_tokens": 14, "seconds": 4.5 + 1 + 2 + 1 + 1}
    assert cost["b"] == {"episodes": 8, "sampled_tokens": 30, "trained_tokens": 14, "seconds": 1.5 + 0 + 2 + 1 + 1}
