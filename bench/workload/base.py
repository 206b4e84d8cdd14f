"""How lengths and choices of a workload are drawn."""

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]


class WorkloadError(ValueError):
    """A workload that cannot be made; the message says why."""


def lognormal(source: np.random.Generator, mean: float, spread: float, count: int) -> Lengths:
    """``count`` whole numbers with a mean of ``mean`` and the tail of lengths of texts; ``spread``:
    standard deviation of the logarithm."""
    drawn = source.lognormal(np.log(mean) - spread**2 / 2, spread, count)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def zipf(source: np.random.Generator, items: int, skew: float, count: int) -> Lengths:
    """``count`` places in ``items``; place ``i`` has a share proportional to ``(i + 1) ** -skew``.
    A skew of 0 is the uniform distribution."""
    shares = np.arange(1, items + 1, dtype=np.float64) ** -skew
    return source.choice(items, count, p=shares / shares.sum())
