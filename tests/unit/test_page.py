"""A page proves itself, or it is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hcache_backend.page import PageLayout

LAYOUT = PageLayout(page_size=16, segment_bytes=(256, 256, 512))
NAMESPACE, KEY, WRITER = bytes(range(16)), bytes(range(32)), b"writer00"
TOKENS = np.arange(100, 116, dtype=np.int32)


def sealed_page(layout: PageLayout = LAYOUT) -> np.ndarray:
    page = np.random.default_rng(0).integers(0, 256, layout.page_bytes, dtype=np.uint8)
    layout.begin(page, NAMESPACE, WRITER)
    layout.positions(page)[:] = np.arange(32, 32 + layout.page_size)
    layout.token_ids(page)[:] = TOKENS[0] + np.arange(layout.page_size)
    layout.seal(page, KEY)
    return page


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_segments_follow_an_aligned_header_without_gaps(page_size: int) -> None:
    layout = PageLayout(page_size, (1024, 2048, 1024))
    assert layout.header_bytes % 4096 == 0
    assert layout.header_bytes >= 88 + 8 * page_size + 3 * 16
    assert layout.segment(0).start == layout.header_bytes
    assert layout.segment(1) == slice(layout.segment(0).stop, layout.segment(0).stop + 2048)
    assert layout.segment(2).stop == layout.page_bytes


def test_a_sealed_page_is_believed() -> None:
    page = sealed_page()
    assert LAYOUT.problem(page, NAMESPACE, KEY) is None
    assert LAYOUT.problem(page, NAMESPACE, KEY, TOKENS) is None
    assert LAYOUT.positions(page).tolist() == list(range(32, 48))


def test_a_page_that_was_not_sealed_is_not_believed() -> None:
    page = np.zeros(LAYOUT.page_bytes, np.uint8)
    assert LAYOUT.problem(page, NAMESPACE, KEY) == "format"
    LAYOUT.begin(page, NAMESPACE, WRITER)
    assert LAYOUT.problem(page, NAMESPACE, KEY) == "key"
    assert LAYOUT.problem(page, NAMESPACE, bytes(32)) == "checksum"


def test_a_page_of_something_else_is_refused_with_the_reason() -> None:
    page = sealed_page()
    assert LAYOUT.problem(page, bytes(16), KEY) == "namespace"
    assert LAYOUT.problem(page, NAMESPACE, bytes(32)) == "key"
    assert LAYOUT.problem(page, NAMESPACE, KEY, TOKENS + 1) == "token ids"
    other = PageLayout(page_size=16, segment_bytes=(256, 256, 256, 256))
    assert other.page_bytes == LAYOUT.page_bytes
    assert other.problem(page, NAMESPACE, KEY) == "format"


@settings(max_examples=500)
@given(st.integers(0, LAYOUT.page_bytes * 8 - 1))
def test_no_flipped_bit_goes_unnoticed(bit: int) -> None:
    page = sealed_page()
    page[bit // 8] ^= 1 << bit % 8
    assert LAYOUT.problem(page, NAMESPACE, KEY, TOKENS) is not None


def test_every_byte_of_the_header_counts() -> None:
    for offset in range(LAYOUT.header_bytes):
        page = sealed_page()
        page[offset] ^= 0xFF
        assert LAYOUT.problem(page, NAMESPACE, KEY, TOKENS) is not None, offset


def test_only_the_header_counts_where_the_storage_verifies_segments() -> None:
    page = sealed_page()
    page[LAYOUT.header_bytes :] ^= 0xFF
    assert LAYOUT.problem(page, NAMESPACE, KEY, TOKENS, segments=False) is None
    assert LAYOUT.problem(page, NAMESPACE, KEY, TOKENS) == "checksum"
    for offset in range(LAYOUT.header_bytes):
        page = sealed_page()
        page[offset] ^= 0xFF
        assert LAYOUT.problem(page, NAMESPACE, KEY, TOKENS, segments=False) is not None, offset


def test_a_share_is_not_taken_for_another() -> None:
    first, second = (PageLayout(16, LAYOUT.segment_bytes, share, 2) for share in range(2))
    assert [*first.kept, *second.kept] == [*range(16)]
    assert first.page_bytes == LAYOUT.page_bytes
    page = sealed_page(first)
    assert first.problem(page, NAMESPACE, KEY, TOKENS) is None
    assert second.problem(page, NAMESPACE, KEY, TOKENS) == "share"
    assert LAYOUT.problem(page, NAMESPACE, KEY, TOKENS) == "share"
    # The store verifies by itself, and may take the header from any share.
    assert second.problem(page, NAMESPACE, KEY, TOKENS, segments=False) is None
    second.seal(page, KEY)
    assert second.problem(page, NAMESPACE, KEY, TOKENS) is None


def test_layers_of_which_nothing_is_stored_take_no_bytes() -> None:
    layout = PageLayout(16, (0, 0, 512))
    assert layout.page_bytes == layout.header_bytes + 512
    assert layout.problem(sealed_page(layout), NAMESPACE, KEY, TOKENS) is None
