"""Codec kernels give the reference's bytes and values, to the bit, and write nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hcache_kernels.codecs import Codec, make_codec
from tests.kernels.codec_rows import bfloat16, bits_of, float_rows, full_rows
from tests.kernels.hostile_units import HOSTILE, hostile_units
from tests.kernels.operations.conftest import INTERPRETED

POISON = 0xA5
DEVICE = "cpu" if INTERPRETED else "cuda"


def poisoned(n: int, width: int) -> torch.Tensor:
    return torch.full((n, width), POISON, dtype=torch.uint8, device=DEVICE)


def run(codec: Codec, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode and decode by the kernels, inside poisoned buffers; results on the CPU."""
    n, width = rows.shape
    encoded = poisoned(n + 2, codec.row_bytes)
    ok = poisoned(1, n + 2)[0]
    codec.encode_launch(rows.to(DEVICE), encoded[1:-1], ok[1:-1].view(torch.bool)).run()
    decoded = poisoned(n + 2, width * rows.itemsize)
    codec.decode_launch(encoded[1:-1], decoded[1:-1].view(rows.dtype)).run()
    for buffer in (encoded, ok, decoded):
        assert (buffer[0] == POISON).all()
        assert (buffer[-1] == POISON).all()
    ok, decoded = ok[1:-1].cpu(), decoded[1:-1].view(rows.dtype).cpu()
    return encoded[1:-1].cpu(), ok.view(torch.bool), decoded


def same_as_reference(codec: Codec, rows: torch.Tensor) -> None:
    encoded, ok, decoded = run(codec, rows)
    want, want_ok = codec.encode_reference(rows)
    assert torch.equal(ok, want_ok)
    assert torch.equal(encoded, want)
    want_rows = codec.decode_reference(want)
    assert torch.equal(decoded.view(torch.uint8), want_rows.view(torch.uint8))


@pytest.mark.parametrize("width", [64, 256, 272, 784, 4096, 4112])
def test_exp4(width: int) -> None:
    codec = make_codec("exp4", width, torch.bfloat16)
    exponents = np.repeat(full_rows(width), 2, axis=0)
    exponents[1] = np.random.default_rng(0).integers(0, 256, width)
    exponents[3, ::2] = 255
    same_as_reference(codec, bfloat16(exponents, seed=2))
    same_as_reference(codec, float_rows(torch.bfloat16, width, seed=width))


@pytest.mark.long
@pytest.mark.parametrize("kind", HOSTILE)
def test_exp4_of_hostile_units(kind: str) -> None:
    """More than a million of all kinds, as by the reference, on a GPU. The interpreter takes 20 ms
    for each, which is six hours for a million: it gets 1,000 of each kind."""
    for seed in range(11, 12 if INTERPRETED else 111):
        units = hostile_units(kind, 1000, 64, seed)
        same_as_reference(make_codec("exp4", 64, torch.bfloat16), units)


def test_exp4_gives_back_each_of_the_65536_patterns() -> None:
    codec = make_codec("exp4", 1024, torch.bfloat16)
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    rows = patterns.view(64, 1024).view(torch.bfloat16)  # eight exponents a row
    _, ok, decoded = run(codec, rows)
    assert ok.all()
    assert torch.equal(bits_of(decoded), bits_of(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 100, 256, 4112])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_scaled_codecs(name: str, width: int, dtype: torch.dtype) -> None:
    same_as_reference(make_codec(name, width, dtype), float_rows(dtype, width, seed=width))


def test_every_code_of_fp8_is_the_nearest() -> None:
    """Rows whose scale is 1: values around and exactly between all codes."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (codes[1:] + codes[:-1]) / 2
    near = [between.nextafter(codes[1:]), between.nextafter(codes[:-1]), between, codes]
    values = torch.cat(near)
    rows = torch.cat([values, -values, torch.tensor([448.0])])[None]
    same_as_reference(make_codec("fp8", rows.shape[1], torch.float32), rows)
