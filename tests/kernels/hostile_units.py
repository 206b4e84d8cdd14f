"""Units that are hard on ``exp4`` and ``exp3``, as bits of bfloat16: int16 ``[count, n]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hcache_kernels.codecs.exp4.reference import WINDOW, form_of

Make = Callable[[np.random.Generator, int, int, int], np.ndarray]
"""Exponents, or whole bits where they are 16-bit integers, of ``[count, n]``; the last argument is
the number of exponents of a window."""


def _near(rng: np.random.Generator, count: int, n: int, window: int) -> np.ndarray:
    low = rng.integers(0, 256 - window + 1, (count, 1), dtype=np.uint8)
    return low + rng.integers(0, window, (count, n), dtype=np.uint8)


def _any_bits(rng: np.random.Generator, count: int, n: int, window: int) -> np.ndarray:
    return rng.integers(0, 1 << 16, (count, n), dtype=np.uint16)


def _normal(rng: np.random.Generator, count: int, n: int, window: int) -> np.ndarray:
    """Values as K and V have them, of any scale."""
    values = rng.standard_normal((count, n), dtype=np.float32)
    values *= np.exp2(rng.integers(-60, 60, (count, 1))).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _constant(rng: np.random.Generator, count: int, n: int, window: int) -> np.ndarray:
    return np.repeat(rng.integers(0, 1 << 16, (count, 1), dtype=np.uint16), n, axis=1)


def _one_outlier(rng: np.random.Generator, count: int, n: int, window: int) -> np.ndarray:
    exponents = _near(rng, count, n, window)
    exponents[np.arange(count), rng.integers(0, n, count)] = rng.integers(0, 256, count)
    return exponents


def _zeros_and_denormals(rng: np.random.Generator, count: int, n: int, window: int) -> np.ndarray:
    """Exponent 0 with any mantissa and sign, or half of it, among a window."""
    exponents = _near(rng, count, n, window)
    exponents[rng.random((count, n)) < rng.choice([0.02, 0.5, 1.0], (count, 1))] = 0
    return exponents


def _zeros(rng: np.random.Generator, count: int, n: int, window: int) -> np.ndarray:
    return rng.integers(0, 2, (count, n), dtype=np.uint16) << 15


def _infinities(rng: np.random.Generator, count: int, n: int, window: int) -> np.ndarray:
    """Infinities, and NaNs with any payload, among a window."""
    exponents = _near(rng, count, n, window)
    exponents[rng.random((count, n)) < 0.05] = 255
    return exponents


def _full(rng: np.random.Generator, count: int, n: int, window: int) -> np.ndarray:
    """About as many exceptions as there is room for, at places of any kind."""
    exponents = np.full((count, n), 120, dtype=np.uint8)
    exponents += rng.integers(0, window, (count, n), dtype=np.uint8)
    outside = form_of(n).most + rng.integers(-1, 2, count)
    for unit, most in zip(exponents, outside, strict=True):
        places = rng.permutation(n)[: 2 * most] if rng.random() < 0.5 else np.arange(2 * most)
        unit[places[:most]] = rng.integers(0, 100)
        unit[places[most:]] = 200  # as frequent: the extra exponent
    return exponents


def _between_windows(rng: np.random.Generator, count: int, n: int, window: int) -> np.ndarray:
    """One exponent more than a window has, and its neighbours at both ends of the range."""
    low = rng.choice([0, 1, 100, 255 - window], (count, 1)).astype(np.uint8)
    return low + rng.integers(0, window + 1, (count, n), dtype=np.uint8)


def _two_windows(rng: np.random.Generator, count: int, n: int, window: int) -> np.ndarray:
    """Two windows, one of them with few values."""
    share = rng.choice([0.01, 0.03, 0.5], (count, 1))
    return np.where(
        rng.random((count, n)) < share, _near(rng, count, n, window), _near(rng, count, n, window)
    )


HOSTILE: dict[str, Make] = {
    make.__name__.strip("_").replace("_", " "): make
    for make in (
        _any_bits,
        _normal,
        _near,
        _constant,
        _one_outlier,
        _zeros_and_denormals,
        _zeros,
        _infinities,
        _full,
        _between_windows,
        _two_windows,
    )
}


def hostile_units(kind: str, count: int, n: int, seed: int, window: int = WINDOW) -> torch.Tensor:
    """Units of a kind of :data:`HOSTILE`; signs and mantissas are random where they are free."""
    rng = np.random.default_rng([seed, n, *kind.encode()])
    made = HOSTILE[kind](rng, count, n, window)
    if made.dtype != np.uint16:
        rest = rng.integers(0, 256, (count, n), dtype=np.uint8).astype(np.uint16)
        made = (rest & 0x80) << 8 | made.astype(np.uint16) << 7 | rest & 0x7F
    return torch.from_numpy(made.view(np.int16)).view(torch.bfloat16)


CHUNK = 640_000
"""Values that are tried at once."""


def exact_or_unfit(code: Any, units: torch.Tensor) -> torch.Tensor:
    """Which of the units ``[count, *shape]`` fit by a code's reference; those come back to the
    bit."""
    shape = units.shape[1:]
    encoded, fits = code.encode_units(units)
    assert encoded.shape == (len(units), code.form_of(*shape).size)
    decoded = code.decode_units(encoded, *shape)
    same = (decoded.view(torch.int16) == units.view(torch.int16)).flatten(1).all(1)
    assert (same | ~fits).all()
    return fits
