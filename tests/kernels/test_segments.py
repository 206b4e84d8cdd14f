"""Encoded K and V in plain torch: where units stand in a page, and what comes back of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from hcache_backend.format.page import PageLayout, StoredLayer
from hcache_backend.format.units import Segment
from hcache_kernels.codecs import SEGMENT_CODECS, Codec, Cut, UnsupportedRows, make_segment_codec
from tests.kernels.codec_rows import bits_of

DIM = 16
CUTS = {
    "one group": Cut(128, 16),
    "four groups": Cut(32, 16, groups=4),
    "two pieces": Cut(1024, 64, pieces=2),
    "groups and pieces": Cut(1024, 32, groups=2, pieces=2),
    "a token per unit": Cut(96, 1, groups=2, pieces=8),
}
KINDS = [
    pytest.param(name, cut, id=f"{what}-{name}")
    for name, (what, cut) in product(SEGMENT_CODECS, CUTS.items())
    if name != "exp3" or cut.tokens >= 32
]
HALF_TYPES = (torch.bfloat16, torch.float16)


def pool(
    cut: Cut, pages: int, seed: int, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """K and V of a pool: ``[slots, heads, dim]``. Channels of K, and tokens of V, differ."""
    source = torch.Generator().manual_seed(seed)
    slots, heads = pages * cut.pieces * cut.tokens, cut.groups * cut.width // DIM
    k, v = (torch.randn((slots, heads, DIM), generator=source) for _ in "kv")
    k *= torch.randn((heads, DIM), generator=source).exp()
    v *= (0.3 * torch.randn((slots, 1, 1), generator=source)).exp()
    return [k.to(dtype), v.to(dtype)]


def encoded_pages(codec: Codec, planes: list[torch.Tensor], items: torch.Tensor) -> torch.Tensor:
    memory = torch.zeros((len(items), codec.segment_bytes), dtype=torch.uint8)
    assert codec.encode_pages(planes, items, memory, torch.arange(len(items)), 0).all()
    return memory


def decoded_pool(codec: Codec, encoded: torch.Tensor) -> list[torch.Tensor]:
    cut = codec.cut
    slots = len(encoded) * cut.tokens * cut.pieces
    shape = slots, cut.groups * cut.width // codec.dim, codec.dim
    planes = [torch.empty(shape, dtype=codec.dtype) for _ in "kv"]
    codec.decode_pages(encoded, planes, torch.arange(len(encoded)))
    return planes


def lines_of(cut: Cut, planes: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The largest magnitude of what shares a scale, beside each value of K and then of V."""
    k, v = (plane.double().abs() for plane in planes)
    units = k.view(-1, cut.tokens, *k.shape[1:])
    yield units.amax(1, keepdim=True).expand_as(units).reshape(k.shape)
    yield v.amax(2, keepdim=True).expand_as(v)


@pytest.mark.parametrize(("name", "cut"), KINDS)
def test_segments_are_the_units_of_a_page_in_their_order(cut: Cut, name: str) -> None:
    """Each is what its values are encoded to by themselves."""
    codec, tokens = make_segment_codec(name, cut, DIM, torch.bfloat16), cut.tokens * cut.pieces
    planes, length = pool(cut, 3, seed=0), codec.segment_bytes
    memory = torch.full((4, length + 24), 0xA5, dtype=torch.uint8)
    fits = codec.encode_pages(planes, torch.tensor([2, 0]), memory, torch.tensor([1, 3]), 16)
    assert fits.tolist() == [True, True]
    assert (memory[[0, 2]] == 0xA5).all()
    assert (memory[:, :16] == 0xA5).all()
    assert (memory[:, 16 + length :] == 0xA5).all()

    segments = (Segment(cut.units * size, cut.groups, cut.pieces) for size in codec.unit_bytes)
    layout = PageLayout(tokens, (StoredLayer(tuple(segments), codec.code),))
    units = layout.units[1:]
    assert len(units) == 2 * cut.units
    alone = make_segment_codec(name, Cut(cut.width, cut.tokens), DIM, torch.bfloat16)
    order = product((0, 1), range(cut.groups), range(cut.pieces))
    for unit, (part, group, piece) in zip(units, order, strict=True):
        start = 2 * tokens + piece * cut.tokens
        values = planes[part].view(-1, cut.groups, cut.width)[start : start + cut.tokens, group]
        values = values.reshape(cut.tokens, -1, DIM).contiguous()
        offset = 16 + unit.page_offset - layout.header_bytes
        [both] = encoded_pages(alone, [values, values], torch.tensor([0]))
        wanted = both.split(list(alone.unit_bytes))[part]
        assert torch.equal(memory[1, offset : offset + unit.length], wanted)


@pytest.mark.parametrize(("name", "cut"), KINDS)
def test_segments_come_back_to_their_pages_and_nowhere_else(cut: Cut, name: str) -> None:
    codec = make_segment_codec(name, cut, DIM, torch.bfloat16)
    planes, tokens = pool(cut, 4, seed=10), cut.tokens * cut.pieces
    memory = encoded_pages(codec, planes, torch.arange(4))
    exact = planes if codec.lossless else decoded_pool(codec, memory)
    back = [torch.full_like(plane, 7.0) for plane in planes]
    codec.decode_pages(memory[[3, 1]], back, torch.tensor([0, 2]))
    for plane, decoded in zip(exact, back, strict=True):
        want = torch.full_like(plane, 7.0).view(4, tokens, -1)
        want[[0, 2]] = plane.view(4, tokens, -1)[[3, 1]]
        assert torch.equal(bits_of(decoded.view(4, tokens, -1)), bits_of(want))


@pytest.mark.parametrize("name", SEGMENT_CODECS)
def test_a_rank_has_the_bytes_of_its_heads_in_the_whole_page(name: str) -> None:
    whole, own = Cut(64, 32, groups=4), Cut(64, 32, groups=2)
    planes = pool(whole, 1, seed=20)
    halves = (plane.view(32, 4, 64)[:, 2:] for plane in planes)
    of_rank = [half.reshape(32, -1, DIM).contiguous() for half in halves]
    page = torch.zeros(1, dtype=torch.int64)
    for part in (0, 1):
        found = []
        for cut, held in ((whole, planes), (own, of_rank)):
            codec = make_segment_codec(name, cut, DIM, torch.bfloat16)
            [encoded] = encoded_pages(codec, held, page)
            k_and_v = encoded.split([cut.units * size for size in codec.unit_bytes])
            found.append(k_and_v[part].view(cut.groups, -1))
        assert torch.equal(found[0][2:], found[1])


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_int8_keeps_the_error_that_it_states(cut: Cut, dtype: torch.dtype) -> None:
    codec = make_segment_codec("int8", cut, DIM, dtype)
    planes = pool(cut, 2, seed=5, dtype=dtype)
    planes[0][3] = 0
    planes[1][:, 1] = 0
    back = decoded_pool(codec, encoded_pages(codec, planes, torch.arange(2)))
    for plane, got, most in zip(planes, back, lines_of(cut, planes), strict=True):
        exact = plane.double()
        info = torch.finfo(dtype)
        rounding = info.eps * (exact.abs() + info.smallest_normal)
        assert ((got.double() - exact).abs() <= most / 254 * 1.0001 + rounding).all()
        assert (got[exact == 0] == 0).all()
        # What stands highest comes back as it is.
        assert torch.equal(got[exact.abs() == most], plane[exact.abs() == most])


@pytest.mark.parametrize("scale", [2.0**-90, 2.0**-12, 1.0, 2.0**90])
def test_what_was_decoded_in_bfloat16_is_encoded_to_the_same_bytes(scale: float) -> None:
    cut = CUTS["groups and pieces"]
    codec = make_segment_codec("int8", cut, DIM, torch.bfloat16)
    planes = [plane * scale for plane in pool(cut, 2, seed=6)]
    encoded = encoded_pages(codec, planes, torch.arange(2))
    again = encoded_pages(codec, decoded_pool(codec, encoded), torch.arange(2))
    assert torch.equal(again, encoded)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("part", [0, 1])
def test_a_page_with_a_value_that_is_not_finite_or_out_of_range_does_not_fit(
    part: int, dtype: torch.dtype
) -> None:
    cut = CUTS["groups and pieces"]
    codec = make_segment_codec("int8", cut, DIM, dtype)
    wrong = [float("nan"), float("inf"), float("-inf")]
    if dtype == torch.bfloat16:
        wrong += [2.0**101, -(2.0**101)]
    planes = pool(cut, len(wrong) + 1, seed=7, dtype=dtype)
    tokens = cut.tokens * cut.pieces
    for page, value in enumerate(wrong):
        planes[part][page * tokens + 3 * page + 40, 5, page] = value
    _, fits = codec.encode_reference(planes, torch.arange(len(wrong) + 1))
    assert fits.tolist() == [False] * len(wrong) + [True]
    tiny = [torch.zeros_like(plane[:tokens]) for plane in planes]
    tiny[part][2, 3, 4] = torch.finfo(dtype).smallest_normal
    _, fits = codec.encode_reference(tiny, torch.tensor([0]))
    assert fits.item() == (dtype == torch.float16)  # all of float16 is in range


def holds(codec: Codec, page: torch.Tensor, plain: torch.Tensor) -> bool:
    return all(codec.holds(page, plain, unit) for unit in range(codec.cut.units))


@pytest.mark.parametrize("name", SEGMENT_CODECS)
def test_a_page_stands_for_what_it_was_encoded_from_and_for_nothing_else(name: str) -> None:
    cut = Cut(32, 32, groups=4)
    codec = make_segment_codec(name, cut, DIM, torch.bfloat16)

    def plain(planes: list[torch.Tensor]) -> torch.Tensor:
        """A page that is not encoded: each group after the other."""
        groups = [plane.view(-1, cut.groups, cut.width).transpose(0, 1) for plane in planes]
        return torch.stack(groups).contiguous().view(torch.uint8).flatten()

    planes = pool(cut, 1, seed=8)
    [page] = encoded_pages(codec, planes, torch.tensor([0]))
    assert holds(codec, page, plain(planes))
    back = [plane.contiguous() for plane in decoded_pool(codec, page[None])]
    assert holds(codec, page, plain(back))
    for number in (0, 1):
        others = [plane.clone() for plane in planes]
        others[number][5, 3, 7] += 0.25 * others[number].abs().max()
        assert not holds(codec, page, plain(others))
    for place in range(0, len(page) * (not codec.lossless), 7):  # others may leave bytes unused
        damaged = page.clone()
        damaged[place] ^= 0x40
        assert not holds(codec, damaged, plain(planes))


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_an_encoder_that_loses_more_than_it_says_is_noticed(
    dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the page is what it encodes the values to."""
    cut = CUTS["one group"]
    codec = make_segment_codec("int8", cut, DIM, dtype)
    planes = [plane * scale for plane in pool(cut, 1, seed=9, dtype=dtype)]
    plain = torch.stack(planes).view(torch.uint8).flatten()
    [page] = encoded_pages(codec, planes, torch.tensor([0]))
    assert holds(codec, page, plain)
    encode = type(codec).encode_units

    def coarse(self: Any, units: torch.Tensor) -> Any:
        return encode(self, (units.view(torch.int16) & ~0x7F).view(dtype))

    monkeypatch.setattr(type(codec), "encode_units", coarse)
    [page] = encoded_pages(codec, planes, torch.tensor([0]))
    assert not holds(codec, page, plain)


@pytest.mark.parametrize(
    ("name", "cut", "dim", "dtype", "message"),
    [
        ("exp4", Cut(72), 72, torch.bfloat16, "a multiple of 16 and at most 65536, not 72"),
        ("exp4", Cut(33, 16), 33, torch.bfloat16, "even number of values per token and group"),
        ("exp4", Cut(64, 16), 64, torch.float16, "takes K and V in bfloat16, not"),
        ("int8", Cut(64, 16), 64, torch.float32, "in bfloat16 or float16, not torch.float32"),
        ("int8", Cut(64, 16), 64, torch.float8_e4m3fn, "float16, not torch.float8_e4m3fn"),
        ("int8", Cut(1, 1025), 1, torch.float16, "at most 1024 tokens .* not 1025 and 1"),
        ("int8", Cut(192, 16), 128, torch.float16, "whole heads, not 192 values of heads of 128"),
    ],
)
def test_units_that_a_codec_does_not_take_are_refused(
    name: str, cut: Cut, dim: int, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(UnsupportedRows, match=message):
        make_segment_codec(name, cut, dim, dtype)
