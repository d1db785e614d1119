"""Estimates: means by hand, intervals against an independent bootstrap, and whether 95% means 95%."""

import numpy as np
import pytest

from eval.stats import Estimate, ratio_estimate


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
