"""Pages in which layers share slots: where things stand by what a page's header says."""

from typing import Any

import numpy as np
import pytest

from hcache_backend.format.page import PageLayout, kv_layer
from hcache_backend.format.units import Segment
from hcache_backend.krul.pairs import CodedPair
from hcache_backend.krul.segments import PairedLayout

LAYERS, TOKENS = 6, 16
ALONE = kv_layer(TOKENS, 64, 64, 2, 1, "exp4.2", (1024, 1024))
NAMESPACE, WRITER, KEY = b"n" * 16, b"w" * 8, b"k" * 32
FIRST: tuple[CodedPair, ...] = ((0, 5, "merged"), (2, 3, "int8"))
OTHER: tuple[CodedPair, ...] = ((0, 5, "merged"), (1, 4, "merged"))


def layout(
    pairs: tuple[CodedPair, ...] = FIRST, codes: tuple[str, ...] = ("merged", "int8")
) -> PairedLayout:
    part = Segment(2048)
    return PairedLayout(TOKENS, (ALONE,) * LAYERS, slot=(part, part), codes=codes, pairs=pairs)


def sealed(of: PageLayout) -> np.ndarray:
    page = np.random.default_rng(0).integers(0, 256, of.page_bytes, dtype=np.uint8)
    of.positions(page)[:] = np.arange(TOKENS)
    of.token_ids(page)[:] = np.arange(TOKENS)
    of.seal(page, NAMESPACE, KEY, WRITER)
    return page


def test_slots_do_not_overlap_and_fill_the_page() -> None:
    found = layout()
    assert [slot.layers for slot in found.slots] == [(0, 5), (1,), (2, 3), (2, 3), (4,), (0, 5)]
    taken = sorted({(found.segment(layer).start, found.segment(layer).stop) for layer in range(6)})
    ends = [found.header_bytes, *(stop for _, stop in taken)]
    assert [start for start, _ in taken] == ends[:-1]
    assert ends[-1] == found.page_bytes == found.header_bytes + sum(found.segment_bytes)
    assert found.page_bytes == found.table.page_bytes


def test_pages_of_other_pairs_are_of_one_form_and_say_which_they_have() -> None:
    first, other = layout(), layout(OTHER)
    assert (first.form, first.table) == (other.form, other.table)
    for reader in (first, other):
        for writer in (first, other):
            page = sealed(writer)
            assert reader.problem(page, NAMESPACE, KEY) is None
            assert reader.of_page(page) == writer
            assert reader.unit_digests(page) == writer.unit_digests(page)


def test_other_numbers_of_pairs_and_other_codes_are_other_forms() -> None:
    forms = {layout().form, layout(FIRST[:1]).form, layout(OTHER[:1], ("merged",)).form}
    assert len({*forms, layout(OTHER, ("merged",)).form}) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        layout(((0, 5, "merged"), (1, 4, "int8"), (2, 3, "int8"))),
        layout(((0, 5, "merged"), (2, 3, "fp8")), ("merged", "fp8")),
        PageLayout(TOKENS, (ALONE,) * LAYERS),
    ],
    ids=["more pairs", "a code that is gone", "no pairs"],
)
def test_pages_that_cannot_be_divided_are_of_another_format(wrong: PageLayout) -> None:
    page = np.zeros(max(wrong.page_bytes, layout().page_bytes), np.uint8)
    page[: wrong.page_bytes] = sealed(wrong)
    page = page[: layout().page_bytes]
    assert layout().problem(page, NAMESPACE, KEY) == "format"


def test_a_damaged_slot_table_is_never_taken_for_another_one() -> None:
    reader = layout()
    right = sealed(reader)
    for at in range(reader.tables_at.start, reader.tables_at.stop):
        for bit in (0, 1, 7):
            page = right.copy()
            page[at] ^= 1 << bit
            assert reader.problem(page, NAMESPACE, KEY) in ("format", "checksum")


def test_whoever_reads_a_page_while_it_is_sealed_sees_how_it_divides() -> None:
    """Loads go by the header of pages in host memory, which are on their way to L3 meanwhile."""
    found = layout(OTHER)
    page = np.zeros(found.page_bytes, np.uint8)
    layout().divide(page)
    before = page.copy()
    seen = []

    class Watched(np.ndarray):
        def __setitem__(self, at: Any, value: Any) -> None:
            super().__setitem__(at, value)
            seen.append(layout(OTHER).of_page(page))

    layout().seal(page.view(Watched), NAMESPACE, KEY, WRITER)
    assert len(seen) >= 3
    assert set(seen) == {layout()}
    assert np.array_equal(page[found.tables_at], before[found.tables_at])


def test_pages_are_grouped_by_the_slot_that_a_layer_has() -> None:
    reader = layout()
    memory = np.zeros((5, reader.page_bytes), np.uint8)
    for page, of in zip(memory, (FIRST, OTHER, FIRST, OTHER, FIRST), strict=True):
        layout(of).divide(page)
    pages = np.array([4, 3, 2, 1])

    def places(layer: int) -> dict[tuple[int, ...], list[int]]:
        return {slot.layers: at.tolist() for slot, at in reader.groups(memory, pages, layer)}

    assert places(0) == {(0, 5): [0, 1, 2, 3]}
    assert places(2) == {(2, 3): [0, 2], (2,): [1, 3]}
    assert places(4) == {(4,): [0, 2], (1, 4): [1, 3]}
    memory[3, reader.tables_at] = 0  # freed, and being read again
    assert places(4) == {(4,): [0, 2], (1, 4): [3]}
    memory[:, reader.tables_at] = 0
    assert places(4) == {}


@pytest.mark.parametrize(
    "pairs",
    [
        ((0, 5, "merged"), (1, 5, "int8")),
        ((2, 3, "int8"), (0, 5, "int8")),
        ((0, 6, "int8"),),
        ((1, 1, "int8"),),
        ((2, 1, "int8"),),
    ],
    ids=["twice", "order", "no such layer", "one layer", "order of layers"],
)
def test_layers_that_cannot_be_paired_are_refused(pairs: tuple[CodedPair, ...]) -> None:
    with pytest.raises(ValueError, match="pair"):
        layout(pairs)
