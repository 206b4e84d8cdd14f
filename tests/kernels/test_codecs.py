"""Codecs in plain torch: what they promise, whatever the rows; ``exp4`` of hostile units."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hcache_kernels.codecs import CODECS, SEGMENT_CODECS, Codec, Cut, UnsupportedRows, make_codec
from hcache_kernels.codecs.exp4 import reference as exp4
from hcache_kernels.codecs.exp4.reference import BLOCK_VALUES, decode_units, form_of
from tests.kernels.codec_rows import bfloat16, bits_of, exceptions_of, float_rows, full_rows
from tests.kernels.hostile_units import CHUNK, HOSTILE, exact_or_unfit, hostile_units

WIDTH = 256
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def round_trip(codec: Codec, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    encoded, ok = codec.encode(rows)
    assert encoded.shape == (len(rows), codec.row_bytes)
    return codec.decode(encoded), ok


def test_exp4_gives_back_each_of_the_65536_patterns() -> None:
    codec = make_codec("exp4", WIDTH, torch.bfloat16)
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    rows = patterns.view(256, 256).view(torch.bfloat16)  # two exponents a row
    decoded, ok = round_trip(codec, rows)
    assert ok.all()
    assert torch.equal(bits_of(decoded), bits_of(rows))


@pytest.mark.parametrize("width", [64, 256, 784, 4096, 4112, 65536])
def test_exp4_holds_as_many_exceptions_as_it_says_and_not_one_more(width: int) -> None:
    codec = make_codec("exp4", width, torch.bfloat16)
    rows = bfloat16(full_rows(width), seed=1)
    decoded, ok = round_trip(codec, rows)
    assert ok.tolist() == [True, False]
    assert torch.equal(bits_of(decoded[0]), bits_of(rows[0]))


def test_exp4_takes_at_most_49_64ths_of_the_bytes() -> None:
    for width in range(256, 65536 + 1, 16):
        size = make_codec("exp4", width, torch.bfloat16).row_bytes
        assert size <= 49 / 32 * width
        assert size % 8 == 0


@pytest.mark.parametrize(
    ("code", "row_bytes", "digest"),
    [
        ("none", 512, "2d0a8e7a10a3055e"),
        ("exp4.2", 392, "2c7c4b7480b5423f"),
        ("int8.2", 272, "4a3bbd8b19335ad1"),
    ],
)
def test_encoded_rows_are_part_of_the_page_format(code: str, row_bytes: int, digest: str) -> None:
    """What changes here must change ``code`` of the codec."""
    codec = make_codec(code.partition(".")[0], WIDTH, torch.bfloat16)
    assert codec.code == code
    rows = (torch.arange(WIDTH) - 100).float() * torch.tensor([[1.0], [2.0**-9]])
    rows[1, ::100] = 2.0**20
    encoded, _ = codec.encode(rows.bfloat16())
    assert codec.row_bytes == row_bytes
    assert hashlib.sha256(encoded.numpy().tobytes()).hexdigest()[:16] == digest


def test_no_codec_has_the_code_of_one_that_is_gone() -> None:
    """A store may have pages of it, which would be decoded to something else."""
    codes = {make_codec(name, WIDTH, torch.bfloat16).code for name in CODECS}
    for codec in SEGMENT_CODECS.values():
        codes.add(codec(Cut(WIDTH, 32), WIDTH, torch.bfloat16).code)
    assert {"int8", "int8.2"} <= codes
    assert not codes & {"fp8", "fp8.2"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 256])
def test_int8_keeps_the_error_that_it_states(width: int, dtype: torch.dtype) -> None:
    codec = make_codec("int8", width, dtype)
    rows = float_rows(dtype, width, seed=width)
    decoded, ok = round_trip(codec, rows)
    exact, got = rows[ok].double(), decoded[ok].double()
    assert got.isfinite().all()
    assert (got[exact == 0] == 0).all()
    amax = exact.abs().amax(1, keepdim=True)
    rounding = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).smallest_normal
    assert ((got - exact).abs() <= amax / 254 * 1.0001 + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_refuses_rows_that_are_not_finite_or_out_of_range(dtype: torch.dtype) -> None:
    rows = float_rows(dtype, WIDTH, seed=0)
    _, ok = make_codec("int8", WIDTH, dtype).encode(rows)
    amax = rows.double().abs().amax(1)
    in_range = (amax >= 2.0**-100) & (amax <= 2.0**100) | (amax == 0)
    assert torch.equal(ok, in_range)  # neither for NaN and infinity
    assert not ok[5] and not ok[6]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
def test_none_is_the_bytes_of_the_row(dtype: torch.dtype) -> None:
    rows = torch.arange(3 * 24 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(3, 24)
    codec = make_codec("none", 24, dtype)
    encoded, ok = codec.encode(rows)
    assert ok.all()
    assert torch.equal(encoded, rows.view(torch.uint8))
    assert torch.equal(codec.decode(encoded).view(torch.uint8), encoded)


@pytest.mark.parametrize("name", CODECS)
def test_a_row_is_encoded_and_decoded_without_the_others(name: str) -> None:
    codec = make_codec(name, WIDTH, torch.bfloat16)
    rows = float_rows(torch.bfloat16, WIDTH, seed=3)
    encoded, ok = codec.encode(rows)
    decoded = codec.decode(encoded)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    for i in order.tolist():
        alone, alone_ok = codec.encode(rows[i : i + 1])
        assert torch.equal(alone[0], encoded[i])
        assert alone_ok.item() == ok[i].item()
        assert torch.equal(bits_of(codec.decode(alone)[0]), bits_of(decoded[i]))
    none, none_ok = codec.encode(rows[:0])
    assert codec.decode(none).shape == (0, WIDTH) and len(none_ok) == 0


@pytest.mark.parametrize(
    ("name", "width", "dtype", "message"),
    [
        ("exp4", 256, torch.float32, "takes bfloat16 hidden states, not torch.float32"),
        ("exp4", 256, torch.float16, "takes bfloat16 hidden states, not torch.float16"),
        ("exp4", 264, torch.bfloat16, "a multiple of 16 and at most 65536, not 264"),
        ("exp4", 65552, torch.bfloat16, "a multiple of 16 and at most 65536, not 65552"),
        ("int8", 256, torch.float64, "takes hidden states in float32, bfloat16 or"),
        ("int8", 256, torch.int8, "bfloat16 or float16, not torch.int8"),
    ],
)
def test_rows_that_a_codec_cannot_hold_are_refused(
    name: str, width: int, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(UnsupportedRows, match="codec") as error:
        make_codec(name, width, dtype)
    assert message in str(error.value)


@pytest.mark.parametrize("name", CODECS)
def test_other_rows_than_those_it_was_made_for_are_refused(name: str) -> None:
    codec = make_codec(name, WIDTH, torch.bfloat16)
    for rows in (torch.zeros(2, WIDTH), torch.zeros(2, 128).bfloat16(), torch.zeros(WIDTH)):
        with pytest.raises(ValueError, match=r"rows: .* is not (\[n, 256\]|bfloat16)"):
            codec.encode(rows)
    with pytest.raises(ValueError, match="encoded: "):
        codec.decode(torch.zeros(2, codec.row_bytes + 8, dtype=torch.uint8))


BY_HAND = 50
"""Units of a chunk whose exceptions are counted by trying every window."""


def check_units(kind: str, n: int, chunks: range) -> tuple[int, int]:
    """Chunks of units of ``n`` values; they fit whenever they can. How many were tried, and fit."""
    count, fit = CHUNK // n, 0
    for seed in chunks:
        units = hostile_units(kind, count, n, seed)
        fits = exact_or_unfit(exp4, units)
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
    exact_or_unfit(exp4, hostile_units(kind, max(2, 20_000 // n), n, seed=0))


@pytest.mark.parametrize("kind", ["constant", "zeros", "near", "normal", "between windows"])
def test_units_of_one_scale_always_fit(kind: str) -> None:
    for n in (1024, 65536):
        assert exact_or_unfit(exp4, hostile_units(kind, 65536 // n, n, seed=1)).all()


@pytest.mark.parametrize("n", [64, BLOCK_VALUES + 16])
def test_any_flipped_bit_decodes_to_something(n: int) -> None:
    """All bits of a small unit; of a large one those of the tail and some of the codes."""
    encoded, _ = exp4.encode_units(hostile_units("full", 1, n, seed=3))
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
