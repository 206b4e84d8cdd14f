"""Codec kernels give the reference's bytes and values, to the bit, and write nothing else."""

import numpy as np
import pytest
import torch

from hcache_kernels.codecs import Codec, make_codec
from tests.kernels.codec_rows import bfloat16, float_rows, full_rows
from tests.kernels.hostile_units import HOSTILE, hostile_units
from tests.kernels.operations.conftest import ON_CPU

POISON = 0xA5
DEVICE = "cpu" if ON_CPU else "cuda"


def poisoned(n: int, width: int) -> torch.Tensor:
    return torch.full((n, width), POISON, dtype=torch.uint8, device=DEVICE)


def run(codec: Codec, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode and decode by the kernels, inside poisoned buffers; results on the CPU."""
    n, width = rows.shape
    encoded = poisoned(n + 2, codec.row_bytes)
    ok = poisoned(1, n + 2)[0]
    flags = ok[1:-1].view(torch.bool)
    codec.encode_launch((rows.to(DEVICE),), None, encoded[1:-1], None, 0, flags).run()
    decoded = poisoned(n + 2, width * rows.itemsize)
    codec.decode_launch(encoded[1:-1], (decoded[1:-1].view(rows.dtype),), None).run()
    for buffer in (encoded, ok, decoded):
        assert (buffer[0] == POISON).all()
        assert (buffer[-1] == POISON).all()
    ok, decoded = ok[1:-1].cpu(), decoded[1:-1].view(rows.dtype).cpu()
    return encoded[1:-1].cpu(), ok.view(torch.bool), decoded


def same_as_reference(codec: Codec, rows: torch.Tensor) -> None:
    encoded, ok, decoded = run(codec, rows)
    want, want_ok = codec.encode(rows)
    assert torch.equal(ok, want_ok)
    assert torch.equal(encoded, want)
    want_rows = codec.decode(want)
    assert torch.equal(decoded.view(torch.uint8), want_rows.view(torch.uint8))


@pytest.mark.parametrize("width", [64, 272, 4096, 4112])
def test_exp4(width: int) -> None:
    codec = make_codec("exp4", width, torch.bfloat16)
    exponents = np.repeat(full_rows(width), 2, axis=0)
    exponents[1] = np.random.default_rng(0).integers(0, 256, width)
    exponents[3, ::2] = 255
    same_as_reference(codec, bfloat16(exponents, seed=2))
    same_as_reference(codec, float_rows(torch.bfloat16, width, seed=width))


@pytest.mark.long
@pytest.mark.parametrize("n", [64, 256, 1024, 4096])
@pytest.mark.parametrize("kind", HOSTILE)
def test_exp4_of_a_million_hostile_units(kind: str, n: int) -> None:
    """As by the reference: of each of eleven kinds 100,000 of 64 values, as many values in larger
    ones. The interpreter has time for one in 250."""
    for seed in range(11, 36):
        units = hostile_units(kind, (16 if ON_CPU else 4000) * 64 // n or 1, n, seed)
        same_as_reference(make_codec("exp4", n, torch.bfloat16), units)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        *((width, torch.bfloat16) for width in (1, 256, 4112)),
        *((256, torch.float16), (4112, torch.float32)),
    ],
)
def test_int8(width: int, dtype: torch.dtype) -> None:
    codec = make_codec("int8", width, dtype)
    same_as_reference(codec, float_rows(dtype, width, seed=width))
    source = torch.Generator().manual_seed(width)
    anything = torch.randint(256, (6, width * dtype.itemsize), generator=source).byte()
    same_as_reference(codec, anything.view(dtype))


def test_every_code_of_int8_is_the_nearest() -> None:
    """Rows whose scale is 1: values around and exactly between all codes."""
    codes = torch.arange(128.0)
    between = codes[1:] - 0.5
    near = [between.nextafter(codes[1:]), between.nextafter(codes[:-1]), between, codes]
    values = torch.cat(near)
    rows = torch.cat([values, -values])[None]
    same_as_reference(make_codec("int8", rows.shape[1], torch.float32), rows)
