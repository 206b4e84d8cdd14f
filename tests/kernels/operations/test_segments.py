"""The kernels of ``exp4`` give the reference's bytes and values, and touch nothing else."""

from __future__ import annotations

import pytest
import torch

from hcache_kernels.codecs.exp4 import Cut, Exp4Codec, decode_launch, encode_launch
from hcache_kernels.codecs.exp4_code import BLOCK_VALUES, decode_units, tail_bytes
from hcache_kernels.codecs.segments import (
    decode_segments_reference,
    encode_segments_reference,
    segment_bytes,
)
from tests.kernels.codec_rows import bits_of
from tests.kernels.hostile_units import HOSTILE, hostile_units
from tests.kernels.operations.conftest import INTERPRETED
from tests.kernels.operations.test_codecs import same_as_reference

POISON = 0xA5
OFFSET = 24
"""Of the segments in a page."""

CUTS = {
    "one group": (Cut(64, 16), 2),
    "three groups, one plane": (Cut(48, 16, groups=3), 1),
    "groups and pieces": (Cut(64, 8, groups=2, pieces=2), 2),
    "several blocks": (Cut(96, 64, groups=2), 2),
}


def planes_of(cut: Cut, count: int, pages: int, seed: int) -> list[torch.Tensor]:
    """Planes of a pool of ``pages`` pages whose units are of another kind page by page."""
    kinds, row = list(HOSTILE), cut.groups * cut.width
    values = cut.tokens * cut.pieces * row
    numbers = range(seed, seed + count * pages)
    units = [hostile_units(kinds[n % len(kinds)], 1, values, n) for n in numbers]
    return [torch.cat(units[n * pages :][:pages]).view(-1, row) for n in range(count)]


def host(*shape: int, value: int = POISON) -> torch.Tensor:
    """Memory that the device can write."""
    memory = torch.full(shape, value, dtype=torch.uint8)
    return memory if INTERPRETED else memory.pin_memory()


@pytest.mark.parametrize("seed", [0, 4, 8])
@pytest.mark.parametrize(("cut", "count"), CUTS.values(), ids=CUTS)
def test_encoded_segments(cut: Cut, count: int, seed: int, device: str) -> None:
    planes = planes_of(cut, count, 4, seed)
    items, pages = torch.tensor([3, 1, 0]), torch.tensor([0, 4, 2])
    length, units = segment_bytes(count, cut), count * cut.units
    memory, fits = host(5, OFFSET + length + 8), host(5, units)
    arguments = ([p.to(device) for p in planes], items.to(device), cut, memory, pages.to(device))
    encode_launch(*arguments, OFFSET, fits[1:4].view(torch.bool)).run()
    if not INTERPRETED:
        torch.cuda.synchronize()
    want, want_fits = encode_segments_reference(planes, items, cut)
    assert torch.equal(fits[1:4].view(torch.bool), want_fits)
    assert torch.equal(memory[pages, OFFSET : OFFSET + length], want)
    memory[pages, OFFSET : OFFSET + length] = POISON
    fits[1:4] = POISON
    assert (memory == POISON).all()
    assert (fits == POISON).all()


@pytest.mark.parametrize("kind", ["encoded", "any bytes"])
@pytest.mark.parametrize(("cut", "count"), CUTS.values(), ids=CUTS)
def test_decoded_segments(cut: Cut, count: int, kind: str, device: str) -> None:
    items = torch.tensor([3, 0])
    if kind == "encoded":
        encoded, _ = encode_segments_reference(planes_of(cut, count, 4, seed=1), items, cut)
    else:
        encoded = torch.randint(0, 256, (2, segment_bytes(count, cut)), dtype=torch.uint8)
    shape = (4 * cut.tokens * cut.pieces, cut.groups * cut.width)
    want = [torch.full(shape, 7.0, dtype=torch.bfloat16) for _ in range(count)]
    got = [plane.to(device) for plane in want]
    want = [plane.clone() for plane in want]
    decode_segments_reference(encoded, want, items, cut)
    decode_launch(encoded.to(device), got, items.to(device), cut).run()
    for plane, expected in zip(got, want, strict=True):
        assert torch.equal(bits_of(plane.cpu()), bits_of(expected))


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_units(kind: str) -> None:
    for n, count in ((64, 20), (BLOCK_VALUES + 16, 2)):
        same_as_reference(Exp4Codec(n, torch.bfloat16), hostile_units(kind, count, n, seed=5))


@pytest.mark.parametrize("n", [64, BLOCK_VALUES + 16])
def test_damaged_units_are_decoded_from_their_own_bytes(n: int, device: str) -> None:
    """Whatever stands around a unit and whatever its starts say, the values are the same."""
    codec = Exp4Codec(n, torch.bfloat16)
    encoded, _ = codec.encode_reference(hostile_units("full", 1, n, seed=6))
    tail = encoded.shape[1] - tail_bytes(n)
    # A byte of codes, the window, the extra exponent, the start or exceptions.
    flips = torch.arange(8 * (tail - 1), 8 * (tail + 5), 1 if n == 64 else 3)
    damaged = encoded.repeat(len(flips), 1)
    damaged[torch.arange(len(flips)), flips // 8] ^= (1 << flips % 8).to(torch.uint8)
    want = bits_of(decode_units(damaged, n))
    for around in (0, POISON):
        memory = torch.full((len(damaged) + 2, codec.row_bytes), around, dtype=torch.uint8)
        memory[1:-1] = damaged
        decoded = torch.empty((len(damaged), n), dtype=torch.bfloat16, device=device)
        codec.decode_launch(memory.to(device)[1:-1], decoded).run()
        assert torch.equal(bits_of(decoded.cpu()), want)
