"""A page proves itself, or it is refused."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hcache_backend.format.page import (
    RECOMPUTED,
    PageLayout,
    StoredLayer,
    hidden_layer,
    kv_layer,
    latent_layer,
)
from hcache_backend.format.units import SHARD_COUNTS, UNIT_VALUES, WHOLE, Shard, Unit, units_of

HIDDEN, KV = hidden_layer(16, 16, 8), kv_layer(16, 16, 16, 2, 1)
LAYOUT = PageLayout(16, (RECOMPUTED, HIDDEN, HIDDEN, KV))
LATENTS = PageLayout(16, (latent_layer(16, 8, 2),) * 2, Shard(1, 2))
BOTH = pytest.mark.parametrize("layout", [LAYOUT, LATENTS], ids=["K and V", "latents"])
NAMESPACE, KEY, WRITER = bytes(range(16)), bytes(range(32)), b"writer00"
TOKENS = np.arange(100, 116, dtype=np.int32)


def sealed_page(layout: PageLayout = LAYOUT) -> np.ndarray:
    page = np.random.default_rng(0).integers(0, 256, layout.page_bytes, dtype=np.uint8)
    layout.positions(page)[:] = np.arange(32, 32 + layout.page_size)
    layout.token_ids(page)[:] = TOKENS[0] + np.arange(layout.page_size)
    layout.seal(page, NAMESPACE, KEY, WRITER)
    return page


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_layers_follow_an_aligned_header_without_gaps(page_size: int) -> None:
    layers = (hidden_layer(page_size, 64, 32), RECOMPUTED, kv_layer(page_size, 32, 16, 2, 1))
    layout = PageLayout(page_size, layers)
    assert layout.header_bytes % 4096 == 0
    ends = [layout.header_bytes + page_size * size for size in (0, 64, 64, 160)]
    assert [layout.segment(n) for n in range(3)] == [*map(slice, ends[:-1], ends[1:])]
    assert layout.page_bytes == ends[-1]


def test_the_header_says_of_every_layer_what_is_stored_of_it_and_how_it_divides() -> None:
    """Byte for byte as the module's documentation has it: other programs read pages by that."""
    layers = (RECOMPUTED, hidden_layer(16, 12, 8, "exp4"), kv_layer(16, 64, 32, 2, 4))
    layout = PageLayout(16, layers, Shard(1, 2))
    page = sealed_page(layout)
    header = page.tobytes()[: layout.header_bytes]
    assert struct.unpack_from("<4sHHHHI", header) == (b"HCPG", 4, 3, 3, 1, 16)
    assert header[32:90] == NAMESPACE + KEY + WRITER + bytes([1, 2])
    at = 96 + 2 * 4 * 16
    assert list(struct.iter_unpack("<BBH8s", header[at : at + 36])) == [
        (0, 0, 65535, b"none\0\0\0\0"),
        (1, 0, 0, b"exp4\0\0\0\0"),
        (2, 0, 1, b"none\0\0\0\0"),
    ]
    at += 36
    assert list(struct.iter_unpack("<IHH", header[at : at + 24])) == [
        (16 * 12, 8, 1),
        (16 * 128, 4, 1),
        (16 * 64, 4, 1),
    ]
    at += 24
    # Half of each: four eighths of the tokens, two groups of heads of K and two of V.
    lengths = [24] * 4 + [512] * 2 + [256] * 2
    start = layout.header_bytes
    for digest, length in zip(struct.unpack_from("<8Q", header, at), lengths, strict=True):
        assert digest == xxhash.xxh3_64_intdigest(page[start : start + length].tobytes())
        start += length
    assert start == layout.page_bytes
    assert not any(header[at + 64 :])
    assert header[16:32] == xxhash.xxh3_128_digest(header[32:])


@settings(max_examples=100)
@given(
    tokens=st.sampled_from([1, 4, 8, 16, 24, 64, 128, 256]),
    values=st.sampled_from([64, 96, 1024, 5120, 8192, 16384]),
    groups=st.sampled_from(SHARD_COUNTS),
    kv=st.booleans(),
)
def test_a_unit_is_a_run_of_tokens_of_one_group_and_not_too_large(
    tokens: int, values: int, groups: int, kv: bool
) -> None:
    if kv:
        layer = kv_layer(tokens, values, values // 2, 2, groups)
    else:
        layer, groups = hidden_layer(tokens, 2 * values, values), 1 if tokens % 8 else 8
    layout = PageLayout(tokens, (layer,))
    for number, segment in enumerate(layer.segments, start=1):
        units = [unit for unit in layout.units if unit.segment == number]
        row = 2 * values // (1 + (number == 2)) // (groups if kv else 1)
        assert len({unit.length for unit in units}) == 1
        assert len(units) == segment.groups * segment.pieces
        assert segment.groups == groups
        assert units[0].length % row == 0, "no row is cut"
        assert units[0].length <= max(2 * UNIT_VALUES, row)
        larger = [n for n in range(1, segment.pieces) if tokens // groups % n == 0 or kv]
        assert sum(unit.length for unit in units) == segment.length
        rows = tokens if kv else tokens // groups
        assert all(rows % n or rows // n * row > 2 * UNIT_VALUES for n in larger), "no smaller"


def test_models_that_people_serve_have_one_unit_for_k_and_one_for_v_of_a_layer() -> None:
    """Llama-3-8B: 8 KV heads of 128 values, pages of 64 tokens."""
    layout = PageLayout(64, (kv_layer(64, 1024, 1024, 2, 1),) * 32)
    assert [unit.length for unit in layout.units[1:]] == [131072] * 64
    assert layout.header_bytes == 4096
    assert layout.page_bytes == 64 * 32 * 2 * 1024 * 2 + 4096


OTHERWISE = {
    "order": (RECOMPUTED, HIDDEN, KV, HIDDEN),
    "slots": (HIDDEN, RECOMPUTED, HIDDEN, KV),
    "codec": (RECOMPUTED, HIDDEN, HIDDEN._replace(codec="int8"), KV),
    "groups": (RECOMPUTED, HIDDEN, HIDDEN, kv_layer(16, 16, 16, 2, 2)),
    "widths": (RECOMPUTED, HIDDEN, HIDDEN, kv_layer(16, 24, 8, 2, 1)),
    "method": (RECOMPUTED, HIDDEN, HIDDEN, StoredLayer((KV.segments[0]._replace(length=1024),))),
    "a latent": (RECOMPUTED, HIDDEN, latent_layer(16, 8, 2), KV),
    "latents": (RECOMPUTED, HIDDEN, HIDDEN, latent_layer(16, 32, 2)),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_page_of_as_many_bytes_that_divides_otherwise_is_refused(name: str) -> None:
    other = PageLayout(16, OTHERWISE[name])
    assert other.page_bytes == LAYOUT.page_bytes
    assert other.form != LAYOUT.form, "it has another namespace, too"
    assert other.problem(sealed_page(), NAMESPACE, KEY) == "format"


def test_a_page_of_a_codec_that_is_gone_is_refused() -> None:
    gone, there = (
        PageLayout(16, (HIDDEN._replace(codec=code), KV)) for code in ("fp8.2", "int8.2")
    )
    assert there.form != gone.form, "it has another namespace, too"
    assert there.problem(sealed_page(gone), NAMESPACE, KEY) == "format"


@BOTH
def test_a_page_is_believed_once_it_is_sealed_as_what_it_is(layout: PageLayout) -> None:
    page = np.zeros(layout.page_bytes, np.uint8)
    assert layout.problem(page, NAMESPACE, KEY) == "format"
    page = sealed_page(layout)
    assert layout.problem(page, NAMESPACE, KEY) is None
    assert layout.problem(page, NAMESPACE, KEY, TOKENS) is None
    assert layout.positions(page).tolist() == list(range(32, 48))
    assert layout.problem(page, bytes(16), KEY) == "namespace"
    assert layout.problem(page, NAMESPACE, bytes(32)) == "key"
    assert layout.problem(page, NAMESPACE, KEY, TOKENS + 1) == "token ids"


@BOTH
def test_every_byte_of_a_page_counts(layout: PageLayout) -> None:
    page = sealed_page(layout)
    for offset in range(layout.page_bytes):
        page[offset] ^= 1 << offset % 8
        assert layout.problem(page, NAMESPACE, KEY, TOKENS) is not None, offset
        page[offset] ^= 1 << offset % 8
    assert layout.problem(page, NAMESPACE, KEY, TOKENS) is None


def test_only_the_header_counts_where_the_storage_verifies_units() -> None:
    page = sealed_page()
    page[LAYOUT.header_bytes :] ^= 0xFF
    assert LAYOUT.problem(page, NAMESPACE, KEY, TOKENS, segments=False) is None
    assert LAYOUT.problem(page, NAMESPACE, KEY, TOKENS) == "checksum"
    for offset in range(LAYOUT.header_bytes):
        page = sealed_page()
        page[offset] ^= 0xFF
        assert LAYOUT.problem(page, NAMESPACE, KEY, TOKENS, segments=False) is not None, offset


def test_a_share_is_not_taken_for_another() -> None:
    first, second = (PageLayout(16, (HIDDEN, HIDDEN), Shard(number, 2)) for number in range(2))
    whole = PageLayout(16, (HIDDEN, HIDDEN))
    assert [*first.kept, *second.kept] == [*range(16)]
    assert first.page_bytes == second.page_bytes < whole.page_bytes
    assert first.form == whole.form, "they are shards of the same pages"
    page = sealed_page(first)
    assert first.problem(page, NAMESPACE, KEY, TOKENS) is None
    assert second.problem(page, NAMESPACE, KEY, TOKENS) == "shard"
    # The store verifies by itself, and may take the header from any shard.
    assert second.problem(page, NAMESPACE, KEY, TOKENS, segments=False) is None
    whole_page = sealed_page(whole)[: second.page_bytes].copy()
    assert second.problem(whole_page, NAMESPACE, KEY, TOKENS, segments=False) is None
    second.seal(whole_page, NAMESPACE, KEY, WRITER)
    assert second.problem(whole_page, NAMESPACE, KEY, TOKENS) is None


layers = st.sampled_from(
    [
        RECOMPUTED,
        *(hidden_layer(16, size, values) for size in (8, 24) for values in (4, 65536)),
        *(kv_layer(16, size, 8, 1, groups) for size in (8, 8192) for groups in SHARD_COUNTS),
        *(latent_layer(16, size, 2) for size in (8, 8192)),
    ]
)


def units_by_place(layout: PageLayout) -> dict[int, Unit]:
    return {unit.page_offset: unit for unit in layout.units[1:]}


@settings(max_examples=60)
@given(st.lists(layers, max_size=4).map(tuple), st.sampled_from(SHARD_COUNTS))
def test_shards_have_the_units_of_the_whole_page_with_their_digests(
    layers: tuple[StoredLayer, ...], of: int
) -> None:
    whole = PageLayout(16, layers)
    page = sealed_page(whole)
    digests = dict(zip(whole.units, whole.unit_digests(page), strict=True))
    by_place, seen = units_by_place(whole), set()
    for number in range(of):
        layout = PageLayout(16, layers, Shard(number, of))
        assert layout.header_bytes == whole.header_bytes
        own = np.zeros(layout.page_bytes, np.uint8)
        own[: layout.header_bytes] = page[: layout.header_bytes]
        for place, unit in units_by_place(layout).items():
            own[unit.payload_offset : unit.payload_offset + unit.length] = page[
                place : place + unit.length
            ]
        layout.seal(own, NAMESPACE, KEY, WRITER)
        assert layout.problem(own, NAMESPACE, KEY, TOKENS) is None
        for unit, digest in zip(layout.units[1:], layout.unit_digests(own)[1:], strict=True):
            assert digest == digests[by_place[unit.page_offset]]
            seen.add(unit.page_offset)
    assert seen == by_place.keys(), "together they have all of it"
    assert units_of(whole.table) == units_of(whole.table, WHOLE)
