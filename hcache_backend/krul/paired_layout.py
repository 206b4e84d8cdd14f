"""Pages in which some layers share a slot, two by two; each page says which ones.

All pages of a form have the same number of pairs, one length and one table of segments: slots of
the pairs by their first layers, then those of the other layers. So pages of different strategies
are of one form, and one load may mix them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import xxhash

from hcache_backend.arena import Ids
from hcache_backend.format.page import LAYER_ENTRY, Bytes, PageLayout
from hcache_backend.format.units import PACKED_SEGMENT, Segment
from hcache_backend.krul.selection import Strategy

_KV = 2  # segments of a slot
_KNOWN = 1024  # parsed tables of pages that are kept

CodedPair = tuple[int, int, str]  # layers that share a slot, the lower one first, and their code


class Slot(NamedTuple):
    """Place of K and V of some layers in a page."""

    layers: tuple[int, ...]  # one, or the two that share it
    code: str
    offset: int  # in a rank's page


@dataclass(frozen=True)
class PairedLayout(PageLayout):
    """Layout of a page with pairs. ``layers``: storage of an unpaired layer, the same for all.

    Pages belong to one rank; shares are never combined, because two could be of two strategies.

    Raises:
        ValueError: A layer is in two pairs, or a pair has an unknown code.
    """

    slot: tuple[Segment, ...] = field(kw_only=True)  # storage of a pair
    codes: tuple[str, ...] = field(kw_only=True)  # all that may encode pairs
    pairs: tuple[CodedPair, ...] = field(kw_only=True)  # by first layers

    def __post_init__(self) -> None:
        known = Strategy(len(self.layers), tuple(pair[:2] for pair in self.pairs)).pairs
        unknown = {code for *_, code in self.pairs} - {*self.codes}
        if unknown or tuple(sorted(known)) != known:
            raise ValueError(f"pairs {self.pairs}: must be in order, each by one of {self.codes}")

    def with_pairs(self, pairs: Sequence[CodedPair]) -> PairedLayout:
        """The layout of pages with these pairs, in any order. Raises ValueError if they are no
        pairs of these layers, or not as many."""
        if len(pairs) != len(self.pairs):
            raise ValueError(f"pages have {len(self.pairs)} pairs, not {len(pairs)}")
        return replace(self, pairs=tuple(sorted(pairs)))

    @property
    def variants(self) -> list[PageLayout]:
        """Layouts of pages with the same pairs, all of them encoded in one way."""
        return [self.with_pairs([(*pair[:2], code) for pair in self.pairs]) for code in self.codes]

    @cached_property
    def form(self) -> str:
        codes = " ".join((*self.codes, *(layer.codec for layer in self.layers)))
        return xxhash.xxh3_64_hexdigest(self._prefix + self._packed_segments + codes.encode())

    def of(self, page: Bytes) -> PairedLayout | None:
        return self._of_entries(page[self._entries_at].tobytes())

    def sharing(self, layer: int) -> tuple[int, ...]:
        return self.slots[layer].layers

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        ends = np.cumsum([0, *(segment.length for segment in self._segments)])
        return tuple(
            Slot(layers, code, self.header_bytes + int(ends[_KV * number]))
            for layers, code, number in self._numbered
        )

    @cached_property
    def segment_bytes(self) -> tuple[int, ...]:
        """As of other pages; 0 for the second layer of a pair."""
        return tuple(
            sum(segment.length for segment in (self.slot if len(layers) > 1 else stored.segments))
            * (layers[0] == layer)
            for layer, (stored, (layers, *_)) in enumerate(
                zip(self.layers, self._numbered, strict=True)
            )
        )

    @cached_property
    def segment_offsets(self) -> tuple[int, ...]:
        return tuple(slot.offset for slot in self.slots)

    def segment(self, layer: int) -> slice:
        return super().segment(self.sharing(layer)[0])

    def groups(self, memory: Bytes, pages: Ids, layer: int) -> list[tuple[Slot, Ids]]:
        """The slots of a layer in ``pages`` (at least one) of ``memory`` (uint8 ``[...,
        page_bytes]``), each with the indices of its pages. Pages of no form are left out: HiCache
        has freed them meanwhile, and another read goes there."""
        entries = memory[:, self._entries_at][pages]
        if (entries == entries[:1]).all():
            slot = self._slot(entries[0], layer)
            return [(slot, np.arange(len(pages)))] if slot is not None else []
        places = defaultdict(list)
        for place, page in enumerate(entries):
            places[self._slot(page, layer)].append(place)
        return [(slot, np.array(found)) for slot, found in places.items() if slot is not None]

    def _slot(self, entries: Bytes, layer: int) -> Slot | None:
        layout = self._of_entries(entries.tobytes())
        return layout.slots[layer] if layout is not None else None

    @cached_property
    def _of_entries(self) -> Callable[[bytes], PairedLayout | None]:
        """Parses the tables of layers of pages; None if the form is another one."""

        @lru_cache(_KNOWN)
        def parsed(entries: bytes) -> PairedLayout | None:
            together = defaultdict(list)
            for layer, (_, number, code) in enumerate(LAYER_ENTRY.iter_unpack(entries)):
                together[number, code].append(layer)
            shared = [(slot, layers) for slot, layers in together.items() if len(layers) > 1]
            try:
                layout = self.with_pairs(
                    [(first, second, _name(code)) for (_, code), (first, second) in shared]
                )
            except ValueError:  # other numbers of pairs or layers, other codes
                return None
            return layout if layout._entries == entries else None

        return parsed

    @cached_property
    def _numbered(self) -> tuple[tuple[tuple[int, ...], str, int], ...]:
        """For every layer: the layers in its slot, the slot's code and its number."""
        paired = {layer for pair in self.pairs for layer in pair[:2]}
        alone = [layer for layer in range(len(self.layers)) if layer not in paired]
        slots: list[tuple[tuple[int, ...], str]] = [(pair[:2], pair[2]) for pair in self.pairs]
        slots += [((layer,), self.layers[layer].codec) for layer in alone]
        found = {
            layer: (layers, code, number)
            for number, (layers, code) in enumerate(slots)
            for layer in layers
        }
        return tuple(found[layer] for layer in range(len(self.layers)))

    @cached_property
    def _segments(self) -> tuple[Segment, ...]:
        alone = len(self.layers) - 2 * len(self.pairs)
        return self.slot * len(self.pairs) + self.layers[0].segments * alone

    @cached_property
    def _entries(self) -> bytes:
        return b"".join(
            LAYER_ENTRY.pack(_KV, _KV * number, code.encode()) for _, code, number in self._numbered
        )

    @property
    def _entries_at(self) -> slice:
        start = self.tables_at.start
        return slice(start, start + len(self._entries))

    @cached_property
    def _tables(self) -> bytes:
        return self._entries + self._packed_segments

    @property
    def _packed_segments(self) -> bytes:
        return b"".join(PACKED_SEGMENT.pack(*segment) for segment in self._segments)


def _name(code: bytes) -> str:
    return code.rstrip(b"\0").decode(errors="replace")
