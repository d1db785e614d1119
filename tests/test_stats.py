"""Estimates: means by hand, intervals against an independent bootstrap, and whether 95% means 95%."""

import itertools

import numpy as np
import pytest

from eval.stats import Estimate, compare, noise_band, over_seeds, pass_at_k, ratio_estimate


@pytest.mark.parametrize(
    "total, count, mean, n",
    [
        ([1, 3], [2, 4], 4 / 6, 6),  # not the mean of 1/2 and 3/4
        ([0, 1, 2], [2, 2, 2], 1 / 2, 6),
        ([1, 0, 5], [1, 0, 5], 1, 6),  # a problem with no value is left out
    ],
)
def test_a_mean_over_all_values(total, count, mean, n):
    got = ratio_estimate(np.array(total), np.array(count))
    assert (got.mean, got.n) == (pytest.approx(mean), n)
    assert got.low <= got.mean <= got.high


def test_two_problems_by_hand():
    """Resamples of {0, 1} are 00, 01, 10, 11: the mean is 0, 1/2 or 1, and 95% holds all of them."""
    assert ratio_estimate(np.array([0.0, 1.0]), np.array([1, 1])) == Estimate(0.5, 0.0, 1.0, 2)


@pytest.mark.parametrize("total, count, mean", [([2, 4, 6], [2, 4, 6], 1), ([0, 0], [3, 1], 0), ([1], [4], 0.25)])
def test_nothing_varies(total, count, mean):
    got = ratio_estimate(np.array(total), np.array(count))
    assert got == Estimate(mean, mean, mean, sum(count))


@pytest.mark.parametrize("count", [[], [0, 0]])
def test_no_values_is_no_estimate(count):
    assert ratio_estimate(np.zeros(len(count)), np.array(count)) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_an_error(bad):
    with pytest.raises(ValueError, match="1 of 3 problems"):
        ratio_estimate(np.array([1, bad, 0]), np.array([1, 1, 1]))


def clustered(rng, problems, answers):
    """Right answers by problem: a problem is easy or hard, and its answers share that. The true rate is 1/2."""
    return rng.binomial(answers, rng.beta(0.5, 0.5, problems))


def test_the_interval_is_the_percentile_bootstrap_over_problems():
    rng = np.random.default_rng(5)
    count = rng.integers(1, 5, 80)
    total = np.array([rng.binomial(n, 0.3) for n in count])
    draws = rng.integers(0, 80, (20_000, 80))
    low, high = np.quantile(total[draws].sum(1) / count[draws].sum(1), [0.025, 0.975])
    got = ratio_estimate(total, count)
    assert got.low == pytest.approx(low, abs=0.01) and got.high == pytest.approx(high, abs=0.01)
    assert ratio_estimate(total, count) == got


def test_95_percent_means_95_percent():
    """Of 400 studies of 60 problems the interval covers the truth in about 380; one that takes the four answers of a
    problem for independent is too narrow and covers far fewer."""
    rng = np.random.default_rng(0)
    covered, naive = 0, 0
    for _ in range(400):
        right = clustered(rng, 60, 4)
        got = ratio_estimate(right, np.full(60, 4))
        covered += got.low <= 0.5 <= got.high
        naive += abs(got.mean - 0.5) <= 1.96 * np.sqrt(got.mean * (1 - got.mean) / got.n)
    assert 0.92 <= covered / 400 <= 0.98
    assert naive / 400 < 0.88


def test_pass_at_k_by_hand_and_by_enumeration():
    """Of 4 answers 1 is right: any 2 of them hold it in 3 of 6 pairs."""
    assert pass_at_k(4, 1, 2) == 0.5 and pass_at_k(4, 0, 4) == 0 and pass_at_k(4, 3, 2) == 1
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                picks = list(itertools.combinations([1] * c + [0] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, picks)) / len(picks))
    for bad in ((4, 5, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match="not defined"):
            pass_at_k(*bad)


def graded(rng, rate_P, answers=4):
    """Rows as the `whileai` package wants them, and the same as our [1, P] table."""
    grades_PN = rng.binomial(1, rate_P[:, None], (len(rate_P), answers))
    rows = [{"task_id": f"t{p}", "passed": bool(g), "reward": float(g)} for p, row in enumerate(grades_PN) for g in row]
    return rows, grades_PN.mean(axis=1)[None]


def test_a_seed_pair_agrees_with_an_independent_package():
    """Delta, its paired interval, and the noise band of three evaluations, on the same rows."""
    whileai = pytest.importorskip("whileai", reason="NOT COMPARED with the whileai package: it is not installed")
    from whileai.simulations.score.stats import eval_variance

    rng = np.random.default_rng(0)
    rate = rng.uniform(0.2, 0.6, 150)
    (before, before_SP), (after, after_SP) = graded(rng, rate), graded(rng, np.clip(rate + 0.15, 0, 1))
    theirs = whileai.compare(before, after, target="pass_at_1")["metrics"]["pass_at_1"]
    ours = compare(after_SP, before_SP)
    assert theirs["delta"] == pytest.approx(ours.delta, abs=1e-4) and theirs["n_paired"] == 150
    assert theirs["ci95"] == pytest.approx((ours.problem_low, ours.problem_high), abs=0.012)
    runs = [graded(rng, rate) for _ in range(3)]
    band = eval_variance(*(rows for rows, _ in runs))["noise_band"]
    assert band == pytest.approx(noise_band(np.array([table.mean() for _, table in runs]), 1, 1), rel=2e-3)


@pytest.mark.slow
def test_the_interval_covers_93_to_97_percent_of_2000_studies_with_seed_noise():
    """Three seeds an arm, 100 problems, 4 answers; problems differ in difficulty (0.2-0.6) and in how much training
    helps (sd 0.15), seeds by sd 0.08. True: delta 0.1, arm 0.4.

    Without any seed noise both parts hold the luck of sampling and the interval is wider than it must be (98.7%).
    """
    rng, held, arm_held = np.random.default_rng(0), 0, 0
    for _ in range(2000):
        difficulty_P, gain_P = rng.uniform(0.2, 0.6, 100), rng.normal(0.1, 0.15, 100)
        arms = []
        for gains in (gain_P, 0.0):
            rate_SP = difficulty_P + gains + rng.normal(0, 0.08, (3, 1))
            arms.append(rng.binomial(4, np.clip(rate_SP, 0, 1)) / 4)
        got, arm = compare(*arms), over_seeds(arms[1])
        held += got.low <= 0.1 <= got.high
        arm_held += arm.low <= 0.4 <= arm.high
    assert 0.93 <= held / 2000 <= 0.97 and 0.93 <= arm_held / 2000 <= 0.97, (held, arm_held)
