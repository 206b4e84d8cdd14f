"""Rows that are hard on a codec."""

import numpy as np
import torch

from hcache_kernels.codecs.exp4.reference import WINDOW, form_of


def bits_of(rows: torch.Tensor) -> torch.Tensor:
    """The bits of 16-bit rows: equality that tells NaNs and zeros apart."""
    return rows.view(torch.int16)


def bfloat16(exponents: np.ndarray, seed: int) -> torch.Tensor:
    """bfloat16 values of these exponents, with random signs and mantissas."""
    rest = np.random.default_rng(seed).integers(0, 256, exponents.shape)
    bits = (rest & 0x80) << 8 | exponents.astype(np.int64) << 7 | rest & 0x7F
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def exceptions_of(exponents: np.ndarray) -> int:
    """Exceptions of ``exp4`` in one unit of at most four blocks, by trying every window."""
    counts = np.bincount(exponents, minlength=256)
    inside = [int(counts[low : low + WINDOW].sum()) for low in range(256 - WINDOW + 1)]
    low = inside.index(max(inside))
    outside = np.delete(counts, slice(low, low + WINDOW))
    return int(outside.sum() - outside.max())


def full_rows(width: int) -> np.ndarray:
    """Exponents of two rows: as many exceptions as ``exp4`` has room for, and one more."""
    rows = np.full((2, width), 120)
    for more, row in enumerate(rows):
        exceptions = form_of(width).most + more
        row[-exceptions:] = 40
        row[:exceptions] = 1  # as frequent and lower: the extra exponent
    return rows


def float_rows(dtype: torch.dtype, width: int, seed: int) -> torch.Tensor:
    """Eleven rows: a normal one, and zeros, NaN, infinity, out of range, ties, an outlier."""
    source = torch.Generator().manual_seed(seed)
    rows = torch.randn((11, width), generator=source)
    rows[1] = 0
    rows[2] *= 2.0**101
    rows[3] *= 2.0**-130
    rows[4, ::3] = 0
    rows[5, width // 2] = float("nan")
    rows[6, -1] = float("-inf")
    rows[7] *= torch.logspace(-12, 0, width)
    rows[8] = torch.arange(width) / 2 - width / 4
    rows[9, width // 3] = 50.0
    rows[10] *= 2.0**90
    return rows.to(dtype)
