"""Codecs in plain torch: what they promise, whatever the rows."""

from __future__ import annotations

import hashlib

import pytest
import torch

from hcache_kernels.codecs import CODECS, Codec, UnsupportedRows, make_codec
from tests.kernels.codec_rows import bfloat16, bits_of, float_rows, full_rows

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
        ("fp8.2", 272, "f4f1a5342d06f470"),
    ],
)
def test_encoded_rows_are_part_of_the_page_format(code: str, row_bytes: int, digest: str) -> None:
    """Stored pages hold them: what changes here must change ``code`` of the codec."""
    codec = make_codec(code.partition(".")[0], WIDTH, torch.bfloat16)
    assert codec.code == code
    rows = (torch.arange(WIDTH) - 100).float() * torch.tensor([[1.0], [2.0**-9]])
    rows[1, ::100] = 2.0**20
    encoded, _ = codec.encode(rows.bfloat16())
    assert codec.row_bytes == row_bytes
    assert make_codec("exp4", 4096, torch.bfloat16).row_bytes == 6272
    assert hashlib.sha256(encoded.numpy().tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 256])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_scaled_codecs_keep_the_error_that_they_state(
    name: str, width: int, dtype: torch.dtype
) -> None:
    codec = make_codec(name, width, dtype)
    rows = float_rows(dtype, width, seed=width)
    decoded, ok = round_trip(codec, rows)
    exact, got = rows[ok].double(), decoded[ok].double()
    assert got.isfinite().all()
    assert (got[exact == 0] == 0).all()
    amax = exact.abs().amax(1, keepdim=True)
    bound = amax / 254 if name == "int8" else (exact.abs() / 16).clamp_min(amax / 448 / 1024)
    rounding = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).smallest_normal
    assert ((got - exact).abs() <= bound * 1.0001 + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_scaled_codecs_refuse_rows_that_are_not_finite_or_out_of_range(
    name: str, dtype: torch.dtype
) -> None:
    rows = float_rows(dtype, WIDTH, seed=0)
    _, ok = make_codec(name, WIDTH, dtype).encode(rows)
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
        ("fp8", 256, torch.int8, "bfloat16 or float16, not torch.int8"),
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
