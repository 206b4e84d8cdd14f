"""The kernels of K and V give the reference's bytes and values, and touch nothing else."""

import pytest
import torch

from hcache_kernels.codecs import Codec, Cut, make_codec, make_segment_codec
from hcache_kernels.codecs.exp3 import reference as exp3
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
EXP3_CUTS = {
    "one group": Cut(16, 32),
    "groups and pieces": Cut(16, 32, groups=2, pieces=2),
    "several blocks": Cut(160, 64),
    "counted in part": Cut(16, 136),
}
NAMES = [
    *(("exp3", torch.bfloat16), ("exp4", torch.bfloat16)),
    *(("int8", torch.bfloat16), ("int8", torch.float16)),
]
CODECS = [
    pytest.param(make_segment_codec(name, cut, DIM, dtype), seed, id=f"{name}-{dtype}-{what}")
    for name, dtype in NAMES
    for seed, (what, cut) in enumerate((EXP3_CUTS if name == "exp3" else CUTS).items())
]


def planes_of(codec: Codec, pages: int, seed: int) -> list[torch.Tensor]:
    """K and V of a pool of ``pages`` pages, each of another kind; the last one has values of many
    scales, which every codec holds."""
    kinds, cut = list(HOSTILE), codec.cut
    row, window = cut.groups * cut.width, 7 if codec.name == "exp3" else WINDOW
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
        planes.append(torch.cat(units).view(-1, row // DIM, DIM).to(codec.dtype))
    return planes


@pytest.mark.parametrize(("codec", "seed"), CODECS)
def test_encoded_segments(codec: Codec, seed: int, device: str) -> None:
    planes = planes_of(codec, 3, 3 * seed)
    items, pages = torch.tensor([2, 0]), torch.tensor([3, 1])
    length = codec.segment_bytes
    memory = host(5, OFFSET + length + 8, value=POISON)
    fits = host(4, codec.flags, value=POISON)
    arguments = ([p.to(device) for p in planes], items.to(device), memory, pages.to(device))
    codec.encode_launch(*arguments, OFFSET, fits[1:3].view(torch.bool)).run()
    finish()
    want, want_fits = codec.encode_reference(planes, items)
    assert want_fits[0]
    assert torch.equal(fits[1:3].view(torch.bool).all(1), want_fits)
    same = want_fits if codec.name == "exp3" else slice(None)  # others write what does not fit, too
    assert torch.equal(memory[pages, OFFSET : OFFSET + length][same], want[same])
    memory[pages, OFFSET : OFFSET + length] = POISON
    fits[1:3] = POISON
    assert (memory == POISON).all()
    assert (fits == POISON).all()


@pytest.mark.parametrize(("codec", "seed"), CODECS)
def test_decoded_segments(codec: Codec, seed: int, device: str) -> None:
    """Two pages that were encoded, one of any bytes."""
    cut, items = codec.cut, torch.tensor([3, 0, 2])
    encoded, _ = codec.encode_reference(planes_of(codec, 4, seed), items)
    encoded[2] = torch.randint(0, 256, encoded[2].shape, dtype=torch.uint8)
    shape = (4 * cut.tokens * cut.pieces, cut.groups * cut.width // DIM, DIM)
    want = [torch.full(shape, 7.0, dtype=codec.dtype) for _ in "kv"]
    got = [plane.to(device, copy=True) for plane in want]
    codec.decode_pages(encoded, want, items)
    codec.decode_launch(encoded.to(device), got, items.to(device)).run()
    for plane, expected in zip(got, want, strict=True):
        same = bits_of(plane.cpu()) == bits_of(expected)
        if not codec.lossless:  # no encoder writes what comes back as NaN or infinity
            same |= ~expected.isfinite()
        assert same.all()


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_units_of_exp4(kind: str) -> None:
    for n, count in ((64, 20), (BLOCK_VALUES + 16, 2)):
        same_as_reference(
            make_codec("exp4", n, torch.bfloat16), hostile_units(kind, count, n, seed=5)
        )


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_units_of_exp3(kind: str, device: str) -> None:
    tokens, width = 32, 64
    codec = make_segment_codec("exp3", Cut(width, tokens), width, torch.bfloat16)
    units = hostile_units(kind, 2, tokens * width, seed=5, window=7).view(2, tokens, width)
    planes = [unit.view(tokens, 1, width).to(device) for unit in units]  # K and V of a page
    memory, fits = host(1, codec.segment_bytes), host(1, 2, value=POISON).view(torch.bool)
    page = torch.tensor([0], device=device)
    codec.encode_launch(planes, page, memory, page, 0, fits).run()
    finish()
    want, fit = exp3.encode_units(units)
    assert torch.equal(fits[0], fit)
    assert torch.equal(memory.view(2, -1)[fit], want[fit])
    back = [torch.zeros_like(plane) for plane in planes]
    codec.decode_launch(memory.to(device), back, page).run()
    decoded = torch.stack([plane.cpu().view(tokens, width) for plane in back])
    assert torch.equal(bits_of(decoded[fit]), bits_of(units[fit]))


@pytest.mark.parametrize("n", [64, BLOCK_VALUES + 16])
def test_damaged_units_of_exp4_are_decoded_from_their_own_bytes(n: int, device: str) -> None:
    """Whatever stands around a unit and whatever its starts say, the values are the same."""
    codec = make_codec("exp4", n, torch.bfloat16)
    encoded, _ = codec.encode(hostile_units("full", 1, n, seed=6))
    tail = encoded.shape[1] - form_of(n).tail
    # A byte of codes, the window, the extra exponent, the start or exceptions.
    flips = torch.arange(8 * (tail - 1), 8 * (tail + 5), 1 if n == 64 else 5)
    damaged = encoded.repeat(len(flips), 1)
    damaged[torch.arange(len(flips)), flips // 8] ^= (1 << flips % 8).to(torch.uint8)
    want = bits_of(decode_units(damaged, n))
    for around in (0, POISON):
        memory = torch.full((len(damaged) + 2, codec.row_bytes), around, dtype=torch.uint8)
        memory[1:-1] = damaged
        decoded = torch.empty((len(damaged), n), dtype=torch.bfloat16, device=device)
        codec.decode_launch(memory.to(device)[1:-1], (decoded,), None).run()
        assert torch.equal(bits_of(decoded.cpu()), want)


def test_damaged_units_of_exp3_are_decoded_from_their_own_bytes(device: str) -> None:
    tokens, width = 64, 72  # two blocks
    codec = make_segment_codec("exp3", Cut(width, tokens), 8, torch.bfloat16)
    form = exp3.form_of(tokens, width)
    unit = torch.randn((1, tokens, width), generator=torch.Generator().manual_seed(1)).bfloat16()
    [encoded] = exp3.encode_units(unit)[0]
    starts = form.size - form.most - 4
    places = [0, tokens * width + 5, starts - 3, *range(starts, starts + 8, 2), form.size - 1]
    damaged = encoded.repeat(2 * len(places), 1)
    for row, place in enumerate(places):
        damaged[row, place] ^= 0x41
        damaged[len(places) + row, place] = 0xFF
    want = bits_of(exp3.decode_units(damaged, tokens, width)).flatten(1)
    pages = len(damaged) // 2
    shape = (pages * tokens, width // 8, 8)
    for around in (0, POISON):
        memory = torch.full((pages + 2, 2 * form.size), around, dtype=torch.uint8)
        memory[1:-1] = damaged.view(pages, -1)
        planes = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in "kv"]
        codec.decode_launch(memory.to(device)[1:-1], planes, torch.arange(pages).to(device)).run()
        got = torch.stack([bits_of(plane.cpu()).view(pages, -1) for plane in planes], dim=1)
        assert torch.equal(got.view(len(damaged), -1), want)
