"""``exp3`` in plain torch: every bit comes back or the unit does not fit, and what fits."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch

from hcache_kernels.codecs import LATENT, Cut, UnsupportedRows, make_codec, make_segment_codec
from hcache_kernels.codecs.exp3 import Exp3
from hcache_kernels.codecs.exp3 import reference as exp3
from hcache_kernels.codecs.exp3.reference import form_of
from tests.kernels.codec_rows import bfloat16, bits_of
from tests.kernels.hostile_units import CHUNK, HOSTILE, exact_or_unfit, hostile_units

SHAPES = [(32, 64), (64, 64), (40, 48), (64, 256), (256, 8)]


def lowest_of(channel: list[int]) -> int:
    """The lowest exponent of the window of a channel."""
    run = len(channel) // 8
    runs = [max(channel[at : at + run]) for at in range(0, len(channel), run)]
    second, top = sorted(runs)[-2:]
    top = second if top - second >= 2 else top
    counted = channel[:: -(-len(channel) // 64)]
    lower = counted.count(top - 7) > counted.count(top)
    return max(top - lower, 6) - 6


def bytes_needed(exponents: np.ndarray) -> int:
    """Of the pool by a unit's exponents ``[tokens, width]``, one value after the other."""
    lowest = [lowest_of(channel.tolist()) for channel in exponents.T]
    above = exponents.astype(int) - lowest
    out, whole = (above < 0) | (above >= 7), (above + 12) % 256 >= 22  # taken modulo 256
    in_blocks = [int(block.sum()) for block in np.split(out.ravel(), range(4096, out.size, 4096))]
    return sum(-(-count // 2) for count in in_blocks) + int((out & whole).sum())


def check_units(kind: str, tokens: int, width: int, seeds: range) -> tuple[int, int]:
    """Chunks of hostile units; they fit whenever they can. How many were tried, and fit."""
    count, fit, pool = CHUNK // (tokens * width), 0, form_of(tokens, width).most
    for seed in seeds:
        units = hostile_units(kind, count, tokens * width, seed, window=7).view(-1, tokens, width)
        fits = exact_or_unfit(exp3, units)
        exponents = bits_of(units[:3]).numpy() >> 7 & 0xFF
        assert fits[:3].tolist() == [bytes_needed(unit) <= pool for unit in exponents]
        fit += int(fits.sum())
    return len(seeds) * count, fit


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_units_come_back_to_the_bit_or_do_not_fit(kind: str) -> None:
    for tokens, width in SHAPES:
        check_units(kind, tokens, width, range(1))


@pytest.mark.long
def test_a_million_hostile_units_come_back_to_the_bit_or_do_not_fit(
    record_property: Callable[[str, object], None],
) -> None:
    found = {kind: check_units(kind, 32, 16, range(1, 75)) for kind in HOSTILE}
    units = sum(tried for tried, _ in found.values())
    record_property("units", units)
    record_property("units_that_fit", {kind: fit for kind, (_, fit) in found.items()})
    assert units >= 10**6


def test_each_of_the_65536_patterns_comes_back() -> None:
    """An exponent a channel."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(512, 128)
    assert exact_or_unfit(exp3, patterns.T.contiguous().view(torch.bfloat16)[None]).all()


def nearly_full(tokens: int, width: int, *, whole: bool) -> np.ndarray:
    """Exponents of two units: as many exceptions as there is room for, and one more."""
    order = np.random.default_rng(1).permutation(tokens * width)

    def unit(exceptions: int) -> np.ndarray:
        row = np.full(tokens * width, 120)
        row[order[:exceptions]] = 20 if whole else 110
        return row.reshape(tokens, width)

    most, counts = form_of(tokens, width).most, range(tokens * width // 8)
    too_many = bisect_right(counts, most, key=lambda count: bytes_needed(unit(count)))
    return np.stack([unit(too_many - 1), unit(too_many)])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(64, 64), (64, 192), (64, 1024), (32, 2048)])
def test_a_unit_has_as_many_exceptions_as_it_has_room_for_and_not_one_more(
    tokens: int, width: int, whole: bool
) -> None:
    units = bfloat16(nearly_full(tokens, width, whole=whole), seed=1)
    assert exact_or_unfit(exp3, units).tolist() == [True, False]


def test_a_unit_of_64_tokens_takes_at_most_0_72_of_its_bytes() -> None:
    for width in range(2, 1024 + 1, 2):
        form = form_of(64, width)
        assert form.size <= 0.72 * 2 * 64 * width
        assert form.size % 8 == 0


def test_a_token_that_stands_out_costs_its_own_values_only() -> None:
    values = torch.randn((64, 64, 64), generator=torch.Generator().manual_seed(0))
    values[:, 5] *= 2.0**20
    assert exact_or_unfit(exp3, values.bfloat16()).all()


@pytest.mark.parametrize(("tokens", "digest"), [(32, "bbaeb5ae488e373b"), (64, "a503bbb01244e78f")])
def test_encoded_units_are_part_of_the_page_format(tokens: int, digest: str) -> None:
    """Stored pages hold them: what changes here must change ``code`` of the codec."""
    codec = make_segment_codec("exp3", Cut(64, tokens), 64, torch.bfloat16)
    assert codec.code == "exp3"
    at = torch.arange(tokens * 64).view(1, tokens, 64)
    unit = ((at * 7919 % 1009) / 64 - 8) * 2.0 ** (at % 64 % 9)
    unit[0, 3, ::5], unit[0, 9, ::7] = 2.0**40, 2.0**-40
    encoded, fits = exp3.encode_units(unit.bfloat16())
    assert fits.all()
    assert hashlib.sha256(encoded.numpy().tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("cut", "dtype", "message"),
    [
        (Cut(64, 64), torch.float16, "takes K and V in bfloat16, not torch.float16"),
        (Cut(64, 16), torch.bfloat16, "multiple of 8 and at least 32, .* not 16 times 64"),
        (Cut(64, 36), torch.bfloat16, "multiple of 8 and at least 32, .* not 36 times 64"),
        (Cut(63, 64), torch.bfloat16, "an even number of values per token and group, not 63"),
        (Cut(2, 40), torch.bfloat16, "a multiple of 64 and at least 512, not 40 times 2"),
        (Cut(6, 64), torch.bfloat16, "a multiple of 64 and at least 512, not 64 times 6"),
        (Cut(2048, 64), torch.bfloat16, "at most 65536, not 131072"),
    ],
)
def test_units_that_it_does_not_take_have_exp4(cut: Cut, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(UnsupportedRows, match=message):
        Exp3(cut, 2, dtype)
    with suppress(UnsupportedRows):
        assert make_segment_codec("exp3", cut, 2, dtype).name == "exp4"
        assert dtype == torch.bfloat16


def test_rows_and_latents_have_exp4() -> None:
    with pytest.raises(UnsupportedRows, match="not latents"):
        Exp3(Cut(512, 64), 2, torch.bfloat16, LATENT)
    assert make_segment_codec("exp3", Cut(512, 64), 2, torch.bfloat16, LATENT).name == "exp4"
    assert make_codec("exp3", 256, torch.bfloat16).name == "exp4"
