"""``exp3`` in plain torch: every bit comes back or the unit does not fit, and what fits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hcache_kernels.codecs import AUTOMATIC, Cut, UnsupportedRows, make_codec, make_segment_codec
from hcache_kernels.codecs.exp3.reference import decode_units, encode_units, form_of
from tests.kernels.codec_rows import bfloat16, bits_of
from tests.kernels.hostile_units import HOSTILE, hostile_units

CHUNK = 640_000
"""Values that are tried at once."""
SHAPES = [(32, 64), (64, 64), (40, 48), (64, 256), (256, 8)]


def lowest_of(channel: list[int]) -> int:
    """The lowest exponent of the window of a channel."""
    run = len(channel) // 8
    runs = [max(channel[at : at + run]) for at in range(0, len(channel), run)]
    second, top = sorted(runs)[-2:]
    top = second if top - second >= 2 else top
    counted = channel[:: -(-len(channel) // 128)]
    held = [sum((end - value) % 256 < 7 for value in counted) for end in (top, top - 1)]
    return max(top - (held[1] > held[0]), 6) - 6


def bytes_needed(exponents: np.ndarray) -> int:
    """Of the pool by a unit's exponents ``[tokens, width]``, one value after the other."""
    tokens, width = exponents.shape
    lowest = [lowest_of(channel.tolist()) for channel in exponents.T]
    shorts, needed = dict[tuple[int, int], int](), 0
    for token in range(tokens):
        for channel in range(width):
            above = int(exponents[token, channel]) - lowest[channel]
            if not 0 <= above < 7:
                column = (token % (tokens // 8), channel // 2)
                shorts[column] = shorts.get(column, 0) + 1
                needed += (above + 12) % 256 >= 22  # exponents are taken modulo 256
    return needed + sum(-(-count // 2) for count in shorts.values())


def exact_or_unfit(units: torch.Tensor) -> torch.Tensor:
    """Which of the units fit, bool ``[count]``; those come back to the bit."""
    encoded, fits = encode_units(units)
    assert encoded.shape == (len(units), form_of(*units.shape[1:]).size)
    same = (bits_of(decode_units(encoded, *units.shape[1:])) == bits_of(units)).flatten(1).all(1)
    assert (same | ~fits).all()
    return fits


def check_units(kind: str, tokens: int, width: int, seeds: range) -> tuple[int, int]:
    """Chunks of hostile units; they fit whenever they can. How many were tried, and fit."""
    count, fit, pool = CHUNK // (tokens * width), 0, form_of(tokens, width).pool
    for seed in seeds:
        units = hostile_units(kind, count, tokens * width, seed, window=7).view(-1, tokens, width)
        fits = exact_or_unfit(units)
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
    assert exact_or_unfit(patterns.T.contiguous().view(torch.bfloat16)[None]).all()


def nearly_full(tokens: int, width: int, *, whole: bool) -> np.ndarray:
    """Exponents of two units: as many exceptions as there is room for, and one more."""
    pool, rows = form_of(tokens, width).pool, np.full((2, tokens * width), 120)
    for more, row in enumerate(rows):
        # One each of as many columns: no channel has so many that its window moves.
        left = pool + more
        for column in range(tokens * width // 16):
            token, pair = divmod(column, width // 2)
            takes = 2 if whole else 1
            if left < takes:
                break
            row[token * width + 2 * pair] = 20 if whole else 110
            left -= takes
        if left:
            row[(tokens // 8) * width - 2] = 110
    return rows.reshape(2, tokens, width)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(64, 64), (64, 192), (64, 1024), (32, 2048)])
def test_a_unit_has_as_many_exceptions_as_it_has_room_for_and_not_one_more(
    tokens: int, width: int, whole: bool
) -> None:
    units = bfloat16(nearly_full(tokens, width, whole=whole), seed=1)
    assert exact_or_unfit(units).tolist() == [True, False]


def test_a_unit_of_64_tokens_takes_at_most_0_725_of_its_bytes() -> None:
    for width in range(2, 1024 + 1, 2):
        form = form_of(64, width)
        assert form.size <= 0.725 * 2 * 64 * width
        assert form.size % 8 == 0


def test_a_token_that_stands_out_costs_its_own_values_only() -> None:
    values = torch.randn((64, 64, 64), generator=torch.Generator().manual_seed(0))
    values[:, 5] *= 2.0**20
    assert exact_or_unfit(values.bfloat16()).all()


@pytest.mark.parametrize(("tokens", "digest"), [(32, "95de27555f6227af"), (64, "e054aef950cd5475")])
def test_encoded_units_are_part_of_the_page_format(tokens: int, digest: str) -> None:
    """Stored pages hold them: what changes here must change ``code`` of the codec."""
    codec = make_segment_codec("exp3", Cut(64, tokens), 64, torch.bfloat16)
    assert codec.code == "exp3"
    at = torch.arange(tokens * 64).view(1, tokens, 64)
    unit = ((at * 7919 % 1009) / 64 - 8) * 2.0 ** (at % 64 % 9)
    unit[0, 3, ::5], unit[0, 9, ::7] = 2.0**40, 2.0**-40
    encoded, fits = encode_units(unit.bfloat16())
    assert fits.all()
    assert hashlib.sha256(encoded.numpy().tobytes()).hexdigest()[:16] == digest


def test_rows_beside_it_have_the_code_of_four_bits() -> None:
    assert make_codec("exp3", 256, torch.bfloat16).name == AUTOMATIC[-1] == "exp4"


@pytest.mark.parametrize(
    ("cut", "dtype", "message"),
    [
        (Cut(64, 64), torch.float16, "takes K and V in bfloat16, not torch.float16"),
        (Cut(64, 16), torch.bfloat16, "multiple of 8 and at least 32, not 16"),
        (Cut(64, 36), torch.bfloat16, "multiple of 8 and at least 32, not 36"),
        (Cut(63, 64), torch.bfloat16, "an even number for each token, .* not 64 times 63"),
        (Cut(2, 40), torch.bfloat16, "a multiple of 64, .* not 40 times 2"),
        (Cut(6, 64), torch.bfloat16, "512 to 65536 in all, not 64 times 6"),
        (Cut(2048, 64), torch.bfloat16, "512 to 65536 in all, not 64 times 2048"),
    ],
)
def test_units_that_it_does_not_take_are_refused(
    cut: Cut, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(UnsupportedRows, match=message):
        make_segment_codec("exp3", cut, 2, dtype)
