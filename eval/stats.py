"""Estimates with their intervals: numbers that are reported are `Estimate`s. Pure functions of arrays."""

from typing import NamedTuple

import numpy as np
from scipy.stats import bootstrap

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
    interval = bootstrap(
        (total_P, count_P),
        lambda total, count, axis: total.sum(axis=axis) / count.sum(axis=axis),
        paired=True,
        n_resamples=BOOTSTRAP_DRAWS,
        method="percentile",
        rng=np.random.default_rng(BOOTSTRAP_SEED),
    ).confidence_interval
    return Estimate(mean, float(interval.low), float(interval.high), n)
