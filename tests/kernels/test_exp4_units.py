"""``exp4`` in plain torch: whatever the units are, they come back to the bit or do not fit."""

from __future__ import annotations

import hashlib
from itertools import product

import numpy as np
import pytest
import torch

from hcache_backend.page import PageLayout, StoredLayer
from hcache_backend.units import Segment, units_of, units_per_group
from hcache_kernels.codecs import UnsupportedRows
from hcache_kernels.codecs.exp4 import Cut
from hcache_kernels.codecs.exp4_code import (
    BLOCK_VALUES,
    decode_units,
    encode_units,
    most_exceptions,
    tail_bytes,
    unit_bytes,
)
from hcache_kernels.codecs.segments import decode_segments, encode_segments, segment_bytes
from tests.kernels.codec_rows import bits_of, exceptions_of
from tests.kernels.hostile_units import HOSTILE, hostile_units

CHUNK = 10_000
BY_HAND = 50
"""Units of a chunk whose exceptions are counted by trying every window."""


def exact_or_unfit(units: torch.Tensor) -> torch.Tensor:
    """Which of the units fit, bool ``[count]``; those come back to the bit."""
    n = units.shape[1]
    encoded, fits = encode_units(units)
    assert encoded.shape == (len(units), unit_bytes(n))
    same = (bits_of(decode_units(encoded, n)) == bits_of(units)).all(1)
    assert (same | ~fits).all()
    return fits


def check_small_units(kind: str, chunks: range) -> None:
    """Chunks of units of 64 values; they fit whenever they can."""
    n = 64
    for seed in chunks:
        units = hostile_units(kind, CHUNK, n, seed)
        fits = exact_or_unfit(units)
        exponents = (bits_of(units[:BY_HAND]).numpy() >> 7 & 0xFF).astype(np.int64)
        needed = [exceptions_of(unit) for unit in exponents]
        assert fits[:BY_HAND].tolist() == [most <= most_exceptions(n) for most in needed]


@pytest.mark.parametrize("kind", HOSTILE)
def test_100_000_hostile_units_come_back_to_the_bit_or_do_not_fit(kind: str) -> None:
    check_small_units(kind, range(1))


@pytest.mark.long
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_million_hostile_units_come_back_to_the_bit_or_do_not_fit(kind: str) -> None:
    check_small_units(kind, range(1, 11))


@pytest.mark.parametrize("n", [16, 784, BLOCK_VALUES, BLOCK_VALUES + 16, 5 * BLOCK_VALUES, 65536])
@pytest.mark.parametrize("kind", HOSTILE)
def test_units_of_many_sizes_come_back_to_the_bit_or_do_not_fit(kind: str, n: int) -> None:
    exact_or_unfit(hostile_units(kind, max(2, 20_000 // n), n, seed=0))


@pytest.mark.parametrize("kind", ["constant", "zeros", "near", "normal", "between windows"])
def test_units_of_one_scale_always_fit(kind: str) -> None:
    for n in (1024, 65536):
        assert exact_or_unfit(hostile_units(kind, 65536 // n, n, seed=1)).all()


def test_encoded_units_are_part_of_the_page_format() -> None:
    """Pages will hold them: what changes here must change ``code`` of the codec."""
    n = 5 * BLOCK_VALUES // 4
    units = (torch.arange(n) - 100).float() * torch.tensor([[1.0], [2.0**-9]])
    units[1, ::100] = 2.0**60
    units[1, ::70] = 2.0**-60
    encoded, fits = encode_units(units.bfloat16())
    assert fits.all()
    assert encoded.shape == (2, n * 49 // 32)
    assert hashlib.sha256(encoded.numpy().tobytes()).hexdigest()[:16] == "0d6a321d967cfb8e"


def test_the_same_values_give_the_same_bytes() -> None:
    units = hostile_units("normal", 20, 1024, seed=2)
    encoded, _ = encode_units(units)
    again, _ = encode_units(units.flip(0).clone())
    assert torch.equal(encoded, again.flip(0))


@pytest.mark.parametrize("n", [64, BLOCK_VALUES + 16])
def test_any_flipped_bit_decodes_to_something(n: int) -> None:
    """All bits of a small unit; of a large one those of the tail and some of the codes."""
    encoded, _ = encode_units(hostile_units("full", 1, n, seed=3))
    first = 0 if n == 64 else encoded.shape[1] - tail_bytes(n) - 64
    damaged = encoded.repeat(8 * (encoded.shape[1] - first), 1)
    flips = torch.arange(len(damaged))
    damaged[flips, first + flips // 8] ^= (1 << flips % 8).to(torch.uint8)
    decoded = decode_units(damaged, n)
    assert decoded.shape == (len(damaged), n)
    assert torch.equal(bits_of(decoded[5:6]), bits_of(decode_units(damaged[5:6], n)))


@pytest.mark.parametrize("n", [16, 1024, 2 * BLOCK_VALUES])
def test_any_bytes_decode_to_something(n: int) -> None:
    rng = np.random.default_rng(n)
    anything = rng.integers(0, 256, (50, unit_bytes(n)), dtype=np.uint8)
    anything[10:20] = 0
    anything[20:30] = 255
    assert decode_units(torch.from_numpy(anything), n).shape == (50, n)


# ---- segments ----

CUTS = {
    "one group": Cut(128, 16),
    "four groups": Cut(32, 16, groups=4),
    "two pieces": Cut(1024, 64, pieces=2),
    "groups and pieces": Cut(1024, 32, groups=2, pieces=2),
    "a token per unit": Cut(96, 1, groups=2, pieces=8),
}


def pool(cut: Cut, pages: int, seed: int) -> list[torch.Tensor]:
    """K and V of a pool: ``[slots, groups, width]``."""
    source = torch.Generator().manual_seed(seed)
    shape = (pages * cut.pieces * cut.tokens, cut.groups, cut.width)
    return [torch.randn(shape, generator=source).bfloat16() for _ in "kv"]


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_segments_are_the_units_of_a_page_in_their_order(cut: Cut) -> None:
    tokens = cut.tokens * cut.pieces
    k, v = pool(cut, 3, seed=0)
    length = segment_bytes(2, cut)
    memory = torch.full((4, length + 24), 0xA5, dtype=torch.uint8)
    fits = torch.zeros((2, 2 * cut.units), dtype=torch.bool)
    encode_segments((k, v), torch.tensor([2, 0]), cut, memory, torch.tensor([1, 3]), 16, fits)
    assert fits.all()
    assert (memory[[0, 2]] == 0xA5).all()
    assert (memory[:, :16] == 0xA5).all()
    assert (memory[:, 16 + length :] == 0xA5).all()

    segments = tuple(Segment(length // 2, cut.groups, cut.pieces) for _ in "kv")
    layout = PageLayout(tokens, (StoredLayer(segments, "exp4"),))
    units = layout.units[1:]
    assert len(units) == 2 * cut.units
    order = product((k, v), range(cut.groups), range(cut.pieces))
    for unit, (plane, group, piece) in zip(units, order, strict=True):
        start = 2 * tokens + piece * cut.tokens
        values = plane[start : start + cut.tokens, group].reshape(1, -1)
        offset = 16 + unit.page_offset - layout.header_bytes
        stored = memory[1, offset : offset + unit.length]
        assert torch.equal(stored, encode_units(values)[0][0])


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_segments_come_back_to_their_pages_and_nowhere_else(cut: Cut) -> None:
    planes = pool(cut, 4, seed=10)
    tokens = cut.tokens * cut.pieces
    memory = torch.zeros((4, segment_bytes(2, cut)), dtype=torch.uint8)
    pages, fits = torch.arange(4), torch.zeros((4, 2 * cut.units), dtype=torch.bool)
    encode_segments(planes, pages, cut, memory, pages, 0, fits)
    back = [torch.full_like(plane, 7.0) for plane in planes]
    decode_segments(memory[[3, 1]], back, torch.tensor([0, 2]), cut)
    for plane, decoded in zip(planes, back, strict=True):
        want = torch.full_like(plane, 7.0).view(4, tokens, -1)
        want[[0, 2]] = plane.view(4, tokens, -1)[[3, 1]]
        assert torch.equal(bits_of(decoded.view(4, tokens, -1)), bits_of(want))


def test_a_rank_has_the_bytes_of_its_heads_in_the_whole_page() -> None:
    whole, own = Cut(64, 32, groups=4), Cut(64, 32, groups=2)
    planes = pool(whole, 1, seed=20)
    of_rank = [plane[:, 2:].contiguous() for plane in planes]
    encoded = []
    for cut, held in ((whole, planes), (own, of_rank)):
        memory = torch.zeros((1, segment_bytes(2, cut)), dtype=torch.uint8)
        fits = torch.zeros((1, 2 * cut.units), dtype=torch.bool)
        page = torch.zeros(1, dtype=torch.int64)
        encode_segments(held, page, cut, memory, page, 0, fits)
        encoded.append(memory.view(2, cut.groups, -1))
    assert torch.equal(encoded[0][:, 2:], encoded[1])


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("width", [64, 128, 1024, 8192])
def test_pages_take_at_most_0_775_of_their_bytes(width: int, tokens: int) -> None:
    pieces = units_per_group(tokens, width)
    cut = Cut(width, tokens // pieces, pieces=pieces)
    assert segment_bytes(2, cut) <= 0.775 * 2 * 2 * tokens * width


def test_any_flipped_bit_of_encoded_segments_makes_the_page_a_miss() -> None:
    cut = Cut(16, 16, groups=2)
    length = segment_bytes(2, cut)
    layout = PageLayout(16, (StoredLayer((Segment(length // 2, 2), Segment(length // 2, 2))),))
    page = torch.zeros((1, layout.page_bytes), dtype=torch.uint8)
    fits = torch.zeros((1, 2 * cut.units), dtype=torch.bool)
    first = torch.zeros(1, dtype=torch.int64)
    encode_segments(pool(cut, 1, 30), first, cut, page, first, layout.header_bytes, fits)
    memory, namespace, key = page[0].numpy(), bytes(16), bytes(range(32))
    layout.begin(memory, namespace, bytes(8))
    layout.seal(memory, key)
    assert layout.problem(memory, namespace, key) is None
    assert len(units_of(layout.table)) == 5
    for place in range(layout.header_bytes, layout.page_bytes):
        for bit in range(8):
            memory[place] ^= 1 << bit
            assert layout.problem(memory, namespace, key) == "checksum"
            memory[place] ^= 1 << bit


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    cut = Cut(128, 16)
    planes, pages = pool(cut, 2, seed=0), torch.arange(2)
    length = segment_bytes(2, cut)
    memory = torch.zeros((2, length), dtype=torch.uint8)
    fits = torch.zeros((2, 2), dtype=torch.bool)
    good = (planes, pages, cut, memory, pages, 0, fits)
    for number, wrong, message in (
        (0, [], "planes are 0: must be K and V, or one of them"),
        (0, [planes[0].float()] * 2, "of torch.float32: all must be contiguous bfloat16"),
        (0, [planes[0][:20]] * 2, "20 slots of 128 values: must be whole pages of 16 slots of 128"),
        (1, torch.tensor([0, 2]), "items go from 0 to 2: must be from 0 to 1"),
        (1, pages.int(), r"items are \[2\] of torch.int32: must be int64 \[2\]"),
        (3, memory.view(torch.int16), "must be contiguous uint8"),
        (4, pages + 1, "pages go from 1 to 2: must be from 0 to 1"),
        (5, 8, f"bytes 8 to {8 + length} of pages of {length} bytes"),
        (6, fits[:1], r"fits is \[1, 2\] of torch.bool: must be contiguous bool \[2, 2\]"),
    ):
        arguments = [*good]
        arguments[number] = wrong
        with pytest.raises(ValueError, match=message):
            encode_segments(*arguments)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedRows, match="a multiple of 16 and at most 65536, not 72"):
        segment_bytes(2, Cut(72))
    with pytest.raises(UnsupportedRows, match="even number of values per token and group, not 33"):
        segment_bytes(2, Cut(33, 16))
    with pytest.raises(ValueError, match=r"encoded is \[1, .*must be contiguous uint8 \[2, "):
        decode_segments(memory[:1], planes, pages, cut)
    assert not memory.any()
