"""One launch for several layers does what one for each does."""

import pytest
import torch

from hcache_kernels.codecs import KV, LATENT, Cut, make_segment_codec
from hcache_kernels.pages import gather_pages, gather_planes
from hcache_kernels.pages.kernel import LayerTable, gather_launch, gather_planes_launch
from tests.kernels.codec_rows import bits_of
from tests.kernels.operations.conftest import by, finish, host
from tests.kernels.operations.test_segments import CUTS, DIM, EXP3_CUTS, POISON, planes_of

PAGES = torch.tensor([0, 4, 2])
ITEMS = torch.tensor([3, 1, 0])


def slots_of(items: torch.Tensor, size: int) -> torch.Tensor:
    return (items[:, None] * size + torch.arange(size)).flatten()


LAYERED = [
    *(("int8", KV, cut) for cut in CUTS.values()),
    *(("exp4", KV, CUTS[what]) for what in ("one group", "groups and pieces")),
    ("exp4", LATENT, CUTS["three groups"]),
    ("exp3", KV, EXP3_CUTS["one group"]),
]


@pytest.mark.parametrize(("name", "planes", "cut"), LAYERED)
def test_layers_are_encoded_and_decoded(name: str, planes: str, cut: Cut, device: str) -> None:
    codec = make_segment_codec(name, cut, DIM, torch.bfloat16, planes)
    layers = [planes_of(codec, 4, seed)[: len(planes)] for seed in (0, 4, 8)]
    length, size = codec.segment_bytes, cut.tokens * cut.pieces
    offsets = [8 + 2 * (length + 8), 8, 8 + length + 8]  # in no order
    here = [tuple(plane.to(device) for plane in held) for held in layers]
    table, slots = LayerTable.of(here, offsets), slots_of(ITEMS, size).to(device)
    memory = host(5, 3 * (length + 8) + 8, value=POISON)
    flags = torch.full((3, 3, codec.flags), POISON, dtype=torch.uint8, device=device)
    fits = flags.view(torch.bool)
    pages = PAGES.to(device)
    codec.encode_launch(here[0], slots, memory, pages, 0, fits, table).run()
    finish()
    want, encoded = torch.full_like(memory, POISON), []
    for held, offset, flag in zip(layers, offsets, flags.cpu().view(torch.bool), strict=True):
        rows, wanted = codec.encode_reference(held, ITEMS)
        assert torch.equal(flag.all(1), wanted)
        if name == "exp3":  # the bytes of what does not fit mean nothing
            rows[~wanted] = memory[PAGES, offset : offset + length][~wanted]
        want[PAGES, offset : offset + length] = rows
        encoded.append(rows)
    assert torch.equal(memory, want)

    # The way of a backup: first in memory of the device, then in wide accesses over the bus.
    staged = torch.full((3, 3, length), POISON, dtype=torch.uint8, device=device)
    again, saved = torch.full_like(flags, POISON), host(5, 3 * (length + 8) + 8, value=POISON)
    rows = staged, None, 0, again.view(torch.bool)
    codec.encode_launch(here[0], slots, *rows, table).run()
    gather_launch(saved, pages, 0, staged, layers=table, save=True).run()
    finish()
    assert torch.equal(saved, want)
    assert torch.equal(again, flags)

    gathered = torch.full((3, 3, length), POISON, dtype=torch.uint8, device=device)
    gather_launch(memory, pages, 0, gathered, layers=table).run()
    assert torch.equal(gathered.cpu(), torch.stack(encoded))
    back = [tuple(torch.full_like(plane, 7.0) for plane in held) for held in here]
    there = LayerTable.of(back, offsets)
    codec.decode_launch(gathered, back[0], slots, there).run()
    for rows, got in zip(encoded, back, strict=True):
        expected = [torch.full(plane.shape, 7.0, dtype=plane.dtype) for plane in got]
        codec.decode_pages(rows, expected, ITEMS)
        for plane, wanted in zip(got, expected, strict=True):
            assert torch.equal(bits_of(plane.cpu()), bits_of(wanted))


@pytest.mark.parametrize(("groups", "programs"), [(1, 1), (1, 1000), (4, 3)])
@pytest.mark.parametrize("rows", [(256, 256), (8, 24), (1152,)], ids=str)
def test_layers_are_copied(rows: tuple[int, ...], groups: int, programs: int, device: str) -> None:
    tokens = 8
    layers = [
        [torch.randint(0, 256, (6, tokens, groups, row), dtype=torch.uint8) for row in rows]
        for _ in range(3)
    ]
    here = [tuple(plane.to(device) for plane in planes) for planes in layers]
    length = tokens * groups * sum(rows)
    offsets = [16 + 2 * length, 16, 16 + length]
    table, slots = LayerTable.of(here, offsets), slots_of(ITEMS, tokens).to(device)
    memory, pages = host(5, 3 * length + 24, value=POISON), PAGES.to(device)
    arguments = memory, pages, 0
    saved = gather_planes_launch(*arguments, here[0], slots, table, save=True)
    by(programs, saved).run()
    finish()
    back = [tuple(torch.full_like(plane, POISON) for plane in planes) for planes in here]
    there = LayerTable.of(back, offsets)
    by(programs, gather_planes_launch(*arguments, back[0], slots, there)).run()
    want = torch.full_like(memory, POISON)
    for planes, offset, got in zip(layers, offsets, back, strict=True):
        one = [torch.full_like(plane, POISON) for plane in planes]
        gather_planes(memory, PAGES, offset, one, ITEMS)
        for plane, wanted, exact in zip(got, one, planes, strict=True):
            assert torch.equal(plane.cpu(), wanted)
            assert torch.equal(wanted[ITEMS], exact[ITEMS])
            assert (wanted[[2, 4, 5]] == POISON).all()
        want[PAGES, offset : offset + length] = gather_pages(memory, PAGES, offset, length)
    assert torch.equal(memory, want)
