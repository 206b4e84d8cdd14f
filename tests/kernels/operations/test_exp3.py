"""The kernels of ``exp3`` give the reference's bytes and values, and touch nothing else."""

from __future__ import annotations

import pytest
import torch

from hcache_kernels.codecs import Cut, make_segment_codec
from hcache_kernels.codecs.exp3.reference import decode_units, encode_units, form_of
from hcache_kernels.pages.kernel import LayerTable
from tests.kernels.codec_rows import bits_of
from tests.kernels.hostile_units import HOSTILE, hostile_units
from tests.kernels.operations.conftest import finish, host
from tests.kernels.operations.test_segments import DIM, OFFSET, POISON, planes_of

CUTS = {
    "one group": Cut(64, 32),
    "three groups": Cut(48, 32, groups=3),
    "two pieces": Cut(32, 32, groups=2, pieces=2),
    "several blocks": Cut(160, 64),
    "counted in part": Cut(16, 136),
}


def pool(cut: Cut, pages: int, seed: int) -> list[torch.Tensor]:
    return planes_of(cut, pages, seed, torch.bfloat16, window=7)


@pytest.mark.parametrize("seed", [0, 4, 8])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_units_are_encoded(cut: Cut, seed: int, device: str) -> None:
    codec, planes = make_segment_codec("exp3", cut, DIM, torch.bfloat16), pool(cut, 4, seed)
    items, pages, length = torch.tensor([3, 1]), torch.tensor([0, 2]), codec.segment_bytes
    memory = host(4, OFFSET + length + 8, value=POISON)
    fits = host(4, codec.flags, value=POISON)
    arguments = ([p.to(device) for p in planes], items.to(device), memory, pages.to(device))
    codec.encode_launch(*arguments, OFFSET, fits[1:3].view(torch.bool)).run()
    finish()
    want, want_fits = codec.encode_reference(planes, items)
    assert want_fits[0]
    assert torch.equal(fits[1:3].view(torch.bool).all(1), want_fits)
    assert torch.equal(memory[pages, OFFSET : OFFSET + length][want_fits], want[want_fits])
    memory[pages, OFFSET : OFFSET + length] = POISON
    fits[1:3] = POISON
    assert (memory == POISON).all()
    assert (fits == POISON).all()


@pytest.mark.parametrize("kind", ["encoded", "any bytes"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_units_are_decoded(cut: Cut, kind: str, device: str) -> None:
    codec, items = make_segment_codec("exp3", cut, DIM, torch.bfloat16), torch.tensor([3, 0])
    encoded, _ = codec.encode_reference(pool(cut, 4, 1), items)
    if kind == "any bytes":
        encoded = torch.randint(0, 256, encoded.shape, dtype=torch.uint8)
    shape = (4 * cut.tokens * cut.pieces, cut.groups * cut.width // DIM, DIM)
    want = [torch.full(shape, 7.0, dtype=torch.bfloat16) for _ in "kv"]
    got = [plane.to(device, copy=True) for plane in want]
    codec.decode_reference(encoded, want, items)
    codec.decode_launch(encoded.to(device), got, items.to(device)).run()
    for plane, expected in zip(got, want, strict=True):
        assert torch.equal(bits_of(plane.cpu()), bits_of(expected))


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_units(kind: str, device: str) -> None:
    tokens, width = 32, 64
    codec = make_segment_codec("exp3", Cut(width, tokens), width, torch.bfloat16)
    rows = hostile_units(kind, 4, tokens * width, seed=5, window=7).view(-1, 1, width)
    planes, items = [rows[: 2 * tokens].to(device), rows[2 * tokens :].to(device)], torch.arange(2)
    memory, fits = host(2, codec.segment_bytes), host(2, 2, value=POISON).view(torch.bool)
    where = items.to(device)
    codec.encode_launch(planes, where, memory, where, 0, fits).run()
    finish()
    want, fit = encode_units(rows.view(4, tokens, width))
    by_item = fit.view(2, 2).T  # of K and V
    assert torch.equal(fits, by_item)
    units = memory.view(2, 2, -1)
    assert torch.equal(units[by_item], want.view(2, 2, -1).transpose(0, 1)[by_item])
    back = [torch.zeros_like(plane) for plane in planes]
    codec.decode_launch(memory.to(device), back, where).run()
    for number, plane in enumerate(back):
        ours = bits_of(plane.cpu()).view(2, -1)[by_item[:, number]]
        exact = bits_of(planes[number].cpu()).view(2, -1)[by_item[:, number]]
        assert torch.equal(ours, exact)


def test_layers_are_encoded_and_decoded_by_one_launch_each(device: str) -> None:
    cut = CUTS["two pieces"]
    codec, size = make_segment_codec("exp3", cut, DIM, torch.bfloat16), cut.tokens * cut.pieces
    items, length = torch.tensor([3, 1]), codec.segment_bytes
    generated = torch.Generator().manual_seed(0)
    shape = (4 * size, cut.groups * cut.width // DIM, DIM)
    layers = [[torch.randn(shape, generator=generated).bfloat16() for _ in "kv"] for _ in range(2)]
    here = [tuple(plane.to(device) for plane in planes) for planes in layers]
    table = LayerTable.of(here, [16 + length, 8])
    slots = (items[:, None] * size + torch.arange(size)).flatten().to(device)
    memory, pages = host(3, 24 + 2 * length, value=POISON), torch.tensor([2, 0]).to(device)
    fits = torch.zeros((2, 2, codec.flags), dtype=torch.bool, device=device)
    codec.encode_launch(here[0], slots, memory, pages, 0, fits, table, size).run()
    finish()
    want = torch.full_like(memory, POISON)
    encoded = [codec.encode_reference(planes, items)[0] for planes in layers]
    for rows, offset in zip(encoded, (16 + length, 8), strict=True):
        want[[2, 0], offset : offset + length] = rows
    assert fits.all()
    assert torch.equal(memory, want)
    back = [tuple(torch.zeros_like(plane) for plane in planes) for planes in here]
    gathered = torch.stack(encoded).to(device)
    codec.decode_launch(gathered, back[0], slots, LayerTable.of(back, [0, 0]), size).run()
    kept = torch.isin(torch.arange(4 * size) // size, items)
    for planes, exact in zip(back, layers, strict=True):
        for plane, wanted in zip(planes, exact, strict=True):
            assert torch.equal(plane.cpu()[kept], wanted[kept])
            assert (plane.cpu()[~kept] == 0).all()


def test_damaged_units_are_decoded_from_their_own_bytes(device: str) -> None:
    """Whatever stands around a unit and whatever its starts say, the values are the same."""
    tokens, width = 64, 72  # two blocks
    codec, form = make_segment_codec("exp3", Cut(width, tokens), 8, torch.bfloat16), form_of(64, 72)
    unit = torch.randn((1, tokens, width), generator=torch.Generator().manual_seed(1)).bfloat16()
    [encoded] = encode_units(unit)[0]
    starts = form.size - form.most - 4
    places = [0, tokens * width + 5, starts - 3, *range(starts, starts + 8), form.size - 1]
    damaged = encoded.repeat(2 * len(places), 1)
    for row, place in enumerate(places):
        damaged[row, place] ^= 0x41
        damaged[len(places) + row, place] = 0xFF
    want = bits_of(decode_units(damaged, tokens, width)).flatten(1)
    pages, items = len(damaged) // 2, torch.arange(len(damaged) // 2).to(device)
    for around in (0, POISON):
        memory = torch.full((pages + 2, 2 * form.size), around, dtype=torch.uint8)
        memory[1:-1] = damaged.view(pages, -1)
        planes = [
            torch.zeros((pages * tokens, width // 8, 8), dtype=torch.bfloat16, device=device)
            for _ in "kv"
        ]
        codec.decode_launch(memory.to(device)[1:-1], planes, items).run()
        got = torch.stack([bits_of(plane.cpu()).view(pages, -1) for plane in planes], dim=1)
        assert torch.equal(got.view(len(damaged), -1), want)
