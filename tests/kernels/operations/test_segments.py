"""The kernels of K and V give the reference's bytes and values, and touch nothing else."""

from itertools import product

import pytest
import torch

from hcache_kernels.codecs import Cut, make_codec, make_segment_codec
from hcache_kernels.codecs.exp4.reference import BLOCK_VALUES, WINDOW, decode_units, form_of
from tests.kernels.codec_rows import bits_of
from tests.kernels.hostile_units import HOSTILE, hostile_units
from tests.kernels.operations.conftest import finish, host
from tests.kernels.operations.test_codecs import same_as_reference

POISON = 0xA5
OFFSET = 24
"""Of the segments in a page."""
DIM = 16

CUTS = {
    "one group": Cut(64, 16),
    "three groups": Cut(48, 16, groups=3),
    "groups and pieces": Cut(64, 8, groups=2, pieces=2),
    "several blocks": Cut(96, 64, groups=2),
}
LOSSY = list(product(("int8", "fp8"), (torch.bfloat16, torch.float16)))


def planes_of(
    cut: Cut, pages: int, seed: int, dtype: torch.dtype, window: int = WINDOW
) -> list[torch.Tensor]:
    """K and V of a pool of ``pages`` pages, each of another kind; the last one has values of many
    scales, which every codec holds."""
    kinds, row = list(HOSTILE), cut.groups * cut.width
    values = cut.tokens * cut.pieces * row
    source = torch.Generator().manual_seed(seed)
    planes = []
    for first in (seed, seed + pages):
        units = [
            hostile_units(kinds[n % len(kinds)], 1, values, n, window=window)
            for n in range(first, first + pages)
        ]
        usual = torch.randn((values // row, row), generator=source)
        units[-1] = (usual * torch.randn(row, generator=source).exp()).bfloat16().view(1, -1)
        planes.append(torch.cat(units).view(-1, row // DIM, DIM).to(dtype))
    return planes


@pytest.mark.parametrize(
    ("name", "dtype", "seed"),
    [
        *(("exp4", torch.bfloat16, seed) for seed in (0, 4, 8)),
        *((*kind, 4 * number) for number, kind in enumerate(LOSSY)),
    ],
)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_encoded_segments(cut: Cut, name: str, dtype: torch.dtype, seed: int, device: str) -> None:
    codec = make_segment_codec(name, cut, DIM, dtype)
    planes = planes_of(cut, 4, seed, dtype)
    items, pages = torch.tensor([3, 1, 0]), torch.tensor([0, 4, 2])
    length = codec.segment_bytes
    memory = host(5, OFFSET + length + 8, value=POISON)
    fits = host(5, codec.flags, value=POISON)
    arguments = ([p.to(device) for p in planes], items.to(device), memory, pages.to(device))
    codec.encode_launch(*arguments, OFFSET, fits[1:4].view(torch.bool)).run()
    finish()
    want, want_fits = codec.encode_reference(planes, items)
    assert want_fits[0]
    assert torch.equal(fits[1:4].view(torch.bool).all(1), want_fits)
    assert torch.equal(memory[pages, OFFSET : OFFSET + length], want)
    memory[pages, OFFSET : OFFSET + length] = POISON
    fits[1:4] = POISON
    assert (memory == POISON).all()
    assert (fits == POISON).all()


@pytest.mark.parametrize("kind", ["encoded", "any bytes"])
@pytest.mark.parametrize(("name", "dtype"), [("exp4", torch.bfloat16), *LOSSY])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_decoded_segments(cut: Cut, name: str, dtype: torch.dtype, kind: str, device: str) -> None:
    codec = make_segment_codec(name, cut, DIM, dtype)
    items = torch.tensor([3, 0])
    if kind == "encoded":
        encoded, _ = codec.encode_reference(planes_of(cut, 4, 1, dtype), items)
    else:
        encoded = torch.randint(0, 256, (2, codec.segment_bytes), dtype=torch.uint8)
    shape = (4 * cut.tokens * cut.pieces, cut.groups * cut.width // DIM, DIM)
    want = [torch.full(shape, 7.0, dtype=dtype) for _ in "kv"]
    got = [plane.to(device) for plane in want]
    want = [plane.clone() for plane in want]
    codec.decode_reference(encoded, want, items)
    codec.decode_launch(encoded.to(device), got, items.to(device)).run()
    for plane, expected in zip(got, want, strict=True):
        same = bits_of(plane.cpu()) == bits_of(expected)
        if not codec.lossless:  # no encoder writes what comes back as NaN or infinity
            same |= ~expected.isfinite()
        assert same.all()


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_units(kind: str) -> None:
    for n, count in ((64, 20), (BLOCK_VALUES + 16, 2)):
        same_as_reference(
            make_codec("exp4", n, torch.bfloat16), hostile_units(kind, count, n, seed=5)
        )


@pytest.mark.parametrize("n", [64, BLOCK_VALUES + 16])
def test_damaged_units_are_decoded_from_their_own_bytes(n: int, device: str) -> None:
    """Whatever stands around a unit and whatever its starts say, the values are the same."""
    codec = make_codec("exp4", n, torch.bfloat16)
    encoded, _ = codec.encode(hostile_units("full", 1, n, seed=6))
    tail = encoded.shape[1] - form_of(n).tail
    # A byte of codes, the window, the extra exponent, the start or exceptions.
    flips = torch.arange(8 * (tail - 1), 8 * (tail + 5), 1 if n == 64 else 3)
    damaged = encoded.repeat(len(flips), 1)
    damaged[torch.arange(len(flips)), flips // 8] ^= (1 << flips % 8).to(torch.uint8)
    want = bits_of(decode_units(damaged, n))
    for around in (0, POISON):
        memory = torch.full((len(damaged) + 2, codec.row_bytes), around, dtype=torch.uint8)
        memory[1:-1] = damaged
        decoded = torch.empty((len(damaged), n), dtype=torch.bfloat16, device=device)
        codec.decode_launch(memory.to(device)[1:-1], (decoded,), None).run()
        assert torch.equal(bits_of(decoded.cpu()), want)
