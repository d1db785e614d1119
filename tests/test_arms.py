"""Arms across seeds: hand-worked differences, intervals that hold, and pairs that don't exist."""

import numpy as np
import pytest
from scipy.stats import t as student_t

from eval.arms import compare_arms, diagnostics_over_seeds, table
from eval.stats import compare, noise_band, over_seeds, seed_half_width, seed_spread, verdict


def test_a_difference_by_hand():
    """Problems differ by (1, 0, 1, 0), so delta is 1/2; both seeds of both arms have equal means, so only problems
    are uncertain: resampling four values of 0 and 1 gives 0 to 1."""
    a, b = np.array([[1, 0, 1, 0], [1, 0, 1, 0]]), np.zeros((2, 4))
    got = compare(a, b)
    assert (got.delta, got.low, got.high, got.seeds) == (0.5, 0.0, 1.0, 2)
    assert got.verdict == "flat"


def test_seeds_widen_by_students_t():
    """Arm means (0.2, 0.4) and (0.1, 0.1): sd 0.1414 and 0, n 2 each, df 2."""
    expected = student_t.ppf(0.975, 2) * np.sqrt(0.02 / 2)
    assert seed_half_width(np.array([0.2, 0.4]), np.array([0.1, 0.1])) == pytest.approx(expected)
    a = np.array([[0.2] * 3, [0.4] * 3])
    got = compare(a, np.full((2, 3), 0.1))
    assert got.delta == pytest.approx(0.2) and got.high - got.delta == pytest.approx(expected)
    assert got.problem_low == pytest.approx(0.2) and got.verdict == "flat"


@pytest.mark.parametrize(
    "delta, problems, both, seeds, band, expected",
    [
        (0.2, (0.1, 0.3), (0.05, 0.35), 3, 0.1, "moved"),
        (0.2, (0.1, 0.3), (0.05, 0.35), 3, 0.25, "flat"),  # within the noise of evaluation
        (0.2, (0.1, 0.3), (-0.05, 0.45), 3, 0.1, "flat"),  # seeds disagree
        (0.2, (-0.1, 0.5), (0.05, 0.35), 3, None, "flat"),
        (-0.2, (-0.3, -0.1), (-0.35, -0.05), 3, None, "moved the wrong way"),
        (0.9, (0.8, 1.0), (0.8, 1.0), 1, None, "unresolved"),
    ],
)
def test_verdicts(delta, problems, both, seeds, band, expected):
    assert verdict(delta, problems, both, seeds, band) == expected


def test_noise_band_by_hand():
    """Base 0.1, 0.2, 0.3: sd 0.1, t(2) = 4.303."""
    assert noise_band(np.array([0.1, 0.2, 0.3]), 2, 3) == pytest.approx(4.302653 * 0.1 * np.sqrt(5 / 6), rel=1e-5)
    assert noise_band(np.array([0.1]), 2, 3) is None


def test_missing_and_unequal_are_errors():
    with pytest.raises(ValueError, match="misses 1 of 4"):
        compare(np.array([[1, 0], [np.nan, 1]]), np.zeros((2, 2)))
    with pytest.raises(ValueError, match="2 and 3 problems"):
        compare(np.zeros((2, 2)), np.zeros((2, 3)))
    with pytest.raises(ValueError, match="different problems"):
        table([{"m": {"a": 1.0}}, {"m": {"b": 1.0}}], "m")


def test_the_interval_covers_the_difference_with_seed_noise():
    """400 studies of 4 seeds and 60 problems, true delta 0.1, seeds' sd 0.03: 93-99% hold it (quadrature of a
    bootstrap and a t is a little wide), and leaving the seeds out would hold it far less often."""
    rng, held, problems_only = np.random.default_rng(0), 0, 0
    for _ in range(400):
        difficulty = rng.uniform(0.2, 0.6, 60)
        arms = []
        for shift in (0.1, 0.0):
            p = difficulty + shift + rng.normal(0, 0.03, (4, 1))
            arms.append(rng.binomial(4, np.clip(p, 0, 1)) / 4)
        got = compare(*arms)
        held += got.low <= 0.1 <= got.high
        problems_only += got.problem_low <= 0.1 <= got.problem_high
    assert 0.93 <= held / 400 <= 0.995
    assert problems_only / 400 < held / 400 - 0.05


def test_over_seeds():
    got = over_seeds(np.array([[1, 0, 1, 0], [1, 0, 1, 0]]))
    assert (got.mean, got.low, got.high, got.n) == (0.5, 0.0, 1.0, 8)


def test_arms_of_a_study():
    cells = [{"arm": "ring", "credit": c, "seed": s} for c in ("readers_only", "rescue") for s in (1, 2)]
    values = [
        {"pass_at_1": {"p": a, "q": b}, "notes_right": {"p": None, "q": 1.0}}
        for a, b in ((0.0, 0.5), (0.0, 0.5), (1.0, 0.5), (1.0, 1.0))
    ]
    first, second = compare_arms(cells, values)
    assert first["credit"] == "readers_only" and "against_first" not in first and first["seeds"] == [1, 2]
    assert first["metrics"]["pass_at_1"]["mean"] == 0.25 and second["metrics"]["pass_at_1"]["mean"] == 0.875
    assert second["against_first"]["delta"] == 0.625
    assert first["metrics"]["notes_right"]["n"] == 2 and first["metrics"]["sends_own"] is None


def test_credit_over_seeds_by_hand():
    """Seeds 0.5 and 0.7: mean 0.6, sd 0.1 * sqrt(2), so 12.706 * 0.1 on each side; one seed has no interval."""
    found = [{"reliable": {"mean": 0.5}, "flat": None}, {"reliable": {"mean": 0.7}, "flat": {"mean": 0.1}}]
    got = diagnostics_over_seeds(found)
    assert got["reliable"]["mean"] == pytest.approx(0.6) and got["reliable"]["n"] == 2
    assert got["reliable"]["high"] - 0.6 == pytest.approx(1.2706, rel=1e-4) and got["flat"] is None


def test_the_spread_of_seeds_by_hand():
    """Means 0.1, 0.2, 0.3: sd 0.1; chi2(2) has quantiles 0.0506 and 7.378."""
    spread = seed_spread(np.array([0.2, 0.1, 0.3]))
    assert spread.sd == pytest.approx(0.1) and (spread.worst, spread.best, spread.n) == (0.1, 0.3, 3)
    assert spread.low == pytest.approx(0.1 * np.sqrt(2 / 7.377759), rel=1e-5)
    assert spread.high == pytest.approx(0.1 * np.sqrt(2 / 0.0506356), rel=1e-5)
    assert seed_spread(np.array([0.2])) is None
