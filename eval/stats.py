"""Estimates with their intervals: numbers that are reported are `Estimate`s. Pure functions of arrays."""

from math import comb
from typing import NamedTuple

import numpy as np
import scipy  # not scipy.stats, which takes a second to import: scipy imports it where it is first used

BOOTSTRAP_DRAWS = 2000
BOOTSTRAP_SEED = 0


class Estimate(NamedTuple):
    """A mean with its 95% interval; `n` is how many values (not problems) it is the mean of."""

    mean: float
    low: float
    high: float
    n: int


def ratio_estimate(total_P: np.ndarray, count_P: np.ndarray) -> Estimate | None:
    """sum(total) / sum(count) with a 95% percentile interval from resampling problems (Efron, 1979).

    `total_P`: each problem's sum of values; `count_P`: how many values it has (a problem with none is left out). A
    problem is the unit: its chats share their luck, so resampling single answers would make the interval too
    narrow. With equal counts this is the mean over problems of problem means. None when there is no value.
    """
    total_P, count_P = np.asarray(total_P, np.float64), np.asarray(count_P, np.float64)
    assert total_P.ndim == 1 and total_P.shape == count_P.shape, (total_P.shape, count_P.shape)
    if not np.isfinite(total_P).all():
        raise ValueError(
            f"{int((~np.isfinite(total_P)).sum())} of {total_P.size} problems have a value that is not finite"
        )
    total_P, count_P = total_P[count_P > 0], count_P[count_P > 0]
    if total_P.size == 0:
        return None
    mean, n = float(total_P.sum() / count_P.sum()), int(count_P.sum())
    ratio_P = total_P / count_P
    if total_P.size == 1 or np.ptp(ratio_P) == 0:
        # Nothing varies between problems: the resamples are all alike and the interval is the point.
        return Estimate(mean, mean, mean, n)
    interval = scipy.stats.bootstrap(
        (total_P, count_P),
        lambda total, count, axis: total.sum(axis=axis) / count.sum(axis=axis),
        paired=True,
        n_resamples=BOOTSTRAP_DRAWS,
        method="percentile",
        rng=np.random.default_rng(BOOTSTRAP_SEED),
    ).confidence_interval
    return Estimate(mean, float(interval.low), float(interval.high), n)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that any of k answers is right, from n of which c are: 1 - C(n - c, k) / C(n, k)
    (Chen et al., 2021). ValueError unless 1 <= k <= n and 0 <= c <= n."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {c} right among {n} is not defined")
    return 1 - comb(n - c, k) / comb(n, k)


class Comparison(NamedTuple):
    """Arm `a` minus arm `b`: `delta` of arm means with its 95% interval; `problem_low/high`: the part of the interval
    that comes from the choice of problems; `seeds` in each arm; `verdict`, see `verdict`."""

    delta: float
    low: float
    high: float
    problem_low: float
    problem_high: float
    seeds: int
    verdict: str


def paired_interval(delta_P: np.ndarray) -> tuple[float, float]:
    """95% percentile interval of the mean of paired differences, from resampling problems."""
    delta_P = np.asarray(delta_P, np.float64)
    if delta_P.size < 2 or np.ptp(delta_P) == 0:
        return float(delta_P.mean()), float(delta_P.mean())
    interval = scipy.stats.bootstrap(
        (delta_P,),
        np.mean,
        n_resamples=BOOTSTRAP_DRAWS,
        method="percentile",
        rng=np.random.default_rng(BOOTSTRAP_SEED),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def seed_half_width(means_S: np.ndarray, *others_S: np.ndarray) -> float:
    """t(df) * sqrt(sum of sd^2 / n) over arms of seeds' means, df = sum of (n - 1); 0 for single seeds."""
    arms = [np.asarray(means, np.float64) for means in (means_S, *others_S)]
    degrees = sum(arm.size - 1 for arm in arms)
    if degrees == 0:
        return 0.0
    variance = sum(arm.var(ddof=1) / arm.size for arm in arms if arm.size > 1)
    return float(scipy.stats.t.ppf(0.975, degrees) * np.sqrt(variance))


def over_seeds(value_SP: np.ndarray) -> Estimate:
    """The mean over seeds and problems; its half-width joins the problems' and the seeds' in quadrature (SPEC 5)."""
    value_SP = _checked(value_SP, "values")
    mean = float(value_SP.mean())
    low, high = paired_interval(value_SP.mean(axis=0))
    seeds = seed_half_width(value_SP.mean(axis=1))
    return Estimate(mean, mean - np.hypot(mean - low, seeds), mean + np.hypot(high - mean, seeds), value_SP.size)


def compare(a_SP: np.ndarray, b_SP: np.ndarray, noise_band: float | None = None) -> Comparison:
    """Two arms on the same problems, row s one seed: paired by problem, and across seeds.

    half-width = sqrt(h_problem^2 + t(df)^2 * sum of seed sd^2 / n) (SPEC 5), on each side. Raises ValueError unless
    both arms have every problem; a missing value is never dropped.
    """
    a_SP, b_SP = _checked(a_SP, "a"), _checked(b_SP, "b")
    if a_SP.shape[1] != b_SP.shape[1]:
        raise ValueError(f"the arms have {a_SP.shape[1]} and {b_SP.shape[1]} problems; a pair needs the same ones")
    delta_P = a_SP.mean(axis=0) - b_SP.mean(axis=0)
    delta = float(delta_P.mean())
    problem_low, problem_high = paired_interval(delta_P)
    seeds = seed_half_width(a_SP.mean(axis=1), b_SP.mean(axis=1))
    low, high = delta - np.hypot(delta - problem_low, seeds), delta + np.hypot(problem_high - delta, seeds)
    fewest = min(len(a_SP), len(b_SP))
    said = verdict(delta, (problem_low, problem_high), (low, high), fewest, noise_band)
    return Comparison(delta, float(low), float(high), problem_low, problem_high, fewest, said)


class Spread(NamedTuple):
    """How far seeds lie apart: `sd` of their means with its 95% interval, the `worst` and the `best` of `n`."""

    sd: float
    low: float
    high: float
    worst: float
    best: float
    n: int


def seed_spread(means_S: np.ndarray) -> Spread | None:
    """Spread of seeds' means; the interval is chi-squared's, sd * sqrt((n - 1) / chi2(n - 1)), so it takes them to be
    normal. None for fewer than 2 seeds."""
    means_S = np.asarray(means_S, np.float64)
    n = means_S.size
    if n < 2:
        return None
    sd = float(means_S.std(ddof=1))
    low, high = (sd * np.sqrt((n - 1) / scipy.stats.chi2.ppf(q, n - 1)) for q in (0.975, 0.025))
    return Spread(sd, float(low), float(high), float(means_S.min()), float(means_S.max()), n)


def noise_band(base_R: np.ndarray, n_a: int, n_b: int) -> float | None:
    """How far two arms of n_a and n_b evaluations differ by sampling alone: t(R - 1) * sd * sqrt(1/n_a + 1/n_b).

    `base_R`: the untrained base's mean in R evaluations with fresh draws. None for R < 2.
    """
    base_R = np.asarray(base_R, np.float64)
    if base_R.size < 2:
        return None
    return float(scipy.stats.t.ppf(0.975, base_R.size - 1) * base_R.std(ddof=1) * np.sqrt(1 / n_a + 1 / n_b))


def verdict(
    delta: float, problems: tuple[float, float], both: tuple[float, float], seeds: int, band: float | None
) -> str:
    """`moved`: both intervals clear 0 and the delta exceeds the noise band (if measured); `moved the wrong way`: the
    same, below 0; `flat`: not; `unresolved`: fewer than 2 seeds."""
    if seeds < 2:
        return "unresolved"
    if min(problems[0], both[0]) > 0 and delta > (band or 0):
        return "moved"
    if max(problems[1], both[1]) < 0 and -delta > (band or 0):
        return "moved the wrong way"
    return "flat"


def _checked(value_SP: np.ndarray, name: str) -> np.ndarray:
    value_SP = np.asarray(value_SP, np.float64)
    if value_SP.ndim != 2 or 0 in value_SP.shape:
        raise ValueError(f"{name} has shape {value_SP.shape}; it needs [seeds, problems]")
    if not np.isfinite(value_SP).all():
        raise ValueError(f"{name} misses {int((~np.isfinite(value_SP)).sum())} of {value_SP.size} values")
    return value_SP
