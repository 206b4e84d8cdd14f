"""``exp4`` in plain torch: whatever the units are, they come back to the bit or do not fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hcache_kernels.codecs.exp4.reference import BLOCK_VALUES, decode_units, encode_units, form_of
from tests.kernels.codec_rows import bits_of, exceptions_of
from tests.kernels.hostile_units import HOSTILE, hostile_units

CHUNK = 640_000
"""Values that are tried at once."""
BY_HAND = 50
"""Units of a chunk whose exceptions are counted by trying every window."""


def exact_or_unfit(units: torch.Tensor) -> torch.Tensor:
    """Which of the units fit, bool ``[count]``; those come back to the bit."""
    n = units.shape[1]
    encoded, fits = encode_units(units)
    assert encoded.shape == (len(units), form_of(n).size)
    same = (bits_of(decode_units(encoded, n)) == bits_of(units)).all(1)
    assert (same | ~fits).all()
    return fits


def check_units(kind: str, n: int, chunks: range) -> tuple[int, int]:
    """Chunks of units of ``n`` values; they fit whenever they can. How many were tried, and fit."""
    count, fit = CHUNK // n, 0
    for seed in chunks:
        units = hostile_units(kind, count, n, seed)
        fits = exact_or_unfit(units)
        exponents = (bits_of(units[:BY_HAND]).numpy() >> 7 & 0xFF).astype(np.int64)
        needed = [exceptions_of(unit) for unit in exponents]
        assert fits[:BY_HAND].tolist() == [most <= form_of(n).most for most in needed]
        fit += int(fits.sum())
    return len(chunks) * count, fit


@pytest.mark.parametrize("kind", HOSTILE)
def test_100_000_hostile_units_come_back_to_the_bit_or_do_not_fit(kind: str) -> None:
    check_units(kind, 64, range(1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("n", "least"), [(64, 10**6), (256, 250_000), (1024, 60_000), (4096, 15_000)]
)
def test_a_million_hostile_units_come_back_to_the_bit_or_do_not_fit(
    n: int, least: int, record_property: Callable[[str, object], None]
) -> None:
    """A million of the smallest ones; of larger ones as many values."""
    found = {kind: check_units(kind, n, range(1, 11)) for kind in HOSTILE}
    units = sum(tried for tried, _ in found.values())
    record_property("units", units)
    record_property("units_that_fit", {kind: fit for kind, (_, fit) in found.items()})
    assert units >= least
    assert 0 < sum(fit for _, fit in found.values()) < units


@pytest.mark.parametrize("n", [16, 784, BLOCK_VALUES, BLOCK_VALUES + 16, 5 * BLOCK_VALUES, 65536])
@pytest.mark.parametrize("kind", HOSTILE)
def test_units_of_many_sizes_come_back_to_the_bit_or_do_not_fit(kind: str, n: int) -> None:
    exact_or_unfit(hostile_units(kind, max(2, 20_000 // n), n, seed=0))


@pytest.mark.parametrize("kind", ["constant", "zeros", "near", "normal", "between windows"])
def test_units_of_one_scale_always_fit(kind: str) -> None:
    for n in (1024, 65536):
        assert exact_or_unfit(hostile_units(kind, 65536 // n, n, seed=1)).all()


@pytest.mark.parametrize("n", [64, BLOCK_VALUES + 16])
def test_any_flipped_bit_decodes_to_something(n: int) -> None:
    """All bits of a small unit; of a large one those of the tail and some of the codes."""
    encoded, _ = encode_units(hostile_units("full", 1, n, seed=3))
    first = 0 if n == 64 else encoded.shape[1] - form_of(n).tail - 64
    damaged = encoded.repeat(8 * (encoded.shape[1] - first), 1)
    flips = torch.arange(len(damaged))
    damaged[flips, first + flips // 8] ^= (1 << flips % 8).to(torch.uint8)
    decoded = decode_units(damaged, n)
    assert decoded.shape == (len(damaged), n)
    assert torch.equal(bits_of(decoded[5:6]), bits_of(decode_units(damaged[5:6], n)))


@pytest.mark.parametrize("n", [16, 1024, 2 * BLOCK_VALUES])
def test_any_bytes_decode_to_something(n: int) -> None:
    rng = np.random.default_rng(n)
    anything = rng.integers(0, 256, (50, form_of(n).size), dtype=np.uint8)
    anything[10:20] = 0
    anything[20:30] = 255
    assert decode_units(torch.from_numpy(anything), n).shape == (50, n)
