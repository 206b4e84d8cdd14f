"""Pages in which some layers share a slot, two by two; each page says which ones.

All pages of a form have as many pairs and one table of segments: slots of the pairs by their first
layers, then those of the other layers. So one load may mix pages with different pairs.
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
from hcache_backend.format.units import Segment
from hcache_backend.krul.pairs import CodedPair, alone, check_pairs

_KV = 2  # segments of a slot
_KNOWN = 1024  # parsed tables of pages that are kept


class Slot(NamedTuple):
    """Place of K and V of some layers in a page."""

    layers: tuple[int, ...]  # one, or the two that share it
    code: str
    offset: int  # in a rank's page


@dataclass(frozen=True)
class PairedLayout(PageLayout):
    """Layout of a page with pairs. ``layers``: storage of an unpaired layer, the same for all.

    Pages belong to one rank; shards are never combined, because two could be of two strategies.

    Raises:
        ValueError: A layer is in two pairs, or a pair has an unknown code.
    """

    slot: tuple[Segment, ...] = field(kw_only=True)  # storage of a pair
    codes: tuple[str, ...] = field(kw_only=True)  # all that may encode pairs
    pairs: tuple[CodedPair, ...] = field(kw_only=True)  # by first layers

    def __post_init__(self) -> None:
        check_pairs(len(self.layers), (pair[:2] for pair in self.pairs))
        unknown = {code for *_, code in self.pairs} - {*self.codes}
        if unknown or tuple(sorted(self.pairs)) != self.pairs:
            raise ValueError(f"pairs {self.pairs}: must be in order, each by one of {self.codes}")

    def with_pairs(self, pairs: Sequence[CodedPair]) -> PairedLayout:
        """The layout with these pairs, in any order; ValueError for others, or another number."""
        if len(pairs) != len(self.pairs):
            raise ValueError(f"pages have {len(self.pairs)} pairs, not {len(pairs)}")
        return replace(self, pairs=tuple(sorted(pairs)))

    @property
    def variants(self) -> list[PageLayout]:
        """The same pairs, all of them in one code."""
        return [self.with_pairs([(*pair[:2], code) for pair in self.pairs]) for code in self.codes]

    @cached_property
    def form(self) -> str:
        codes = " ".join((*self.codes, *(layer.codec for layer in self.layers)))
        return xxhash.xxh3_64_hexdigest(self._prefix + self._packed + codes.encode())

    def of(self, page: Bytes) -> PairedLayout | None:
        return self._of_entries(page[self._entries_at].tobytes())

    def sharing(self, layer: int) -> tuple[int, ...]:
        return self.slots[layer].layers

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Of every layer."""
        found: dict[int, Slot] = {}
        offset = self.header_bytes
        for layers, code in self._in_order:
            found |= dict.fromkeys(layers, Slot(layers, code, offset))
            offset += sum(segment.length for segment in self._segments_of(layers))
        return tuple(found[layer] for layer in range(len(self.layers)))

    @cached_property
    def segment_bytes(self) -> tuple[int, ...]:
        """As of other pages; 0 for the second layer of a pair."""
        return tuple(
            sum(segment.length for segment in self._segments_of(slot.layers))
            * (slot.layers[0] == layer)
            for layer, slot in enumerate(self.slots)
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
        alike, places = (entries == entries[:1]).all(), defaultdict(list)
        for place, page in enumerate(entries[:1] if alike else entries):
            layout = self._of_entries(page.tobytes())
            if layout is not None:
                places[layout.slots[layer]].append(place)
        every = np.arange(len(pages))
        return [(slot, every if alike else every[found]) for slot, found in places.items()]

    @cached_property
    def _of_entries(self) -> Callable[[bytes], PairedLayout | None]:
        """Parses the tables of layers of pages; None if the form is another one."""

        @lru_cache(_KNOWN)
        def parsed(entries: bytes) -> PairedLayout | None:
            together = defaultdict(list)
            for layer, (_, number, code) in enumerate(LAYER_ENTRY.iter_unpack(entries)):
                name = code.rstrip(b"\0").decode(errors="replace")
                together[number, name].append(layer)
            shared = [(*found, code) for (_, code), found in together.items() if len(found) > 1]
            try:
                layout = self.with_pairs(shared)
            except ValueError:  # other numbers of pairs or layers, other codes
                return None
            return layout if layout._entries == entries else None

        return parsed

    @cached_property
    def _in_order(self) -> list[tuple[tuple[int, ...], str]]:
        """The layers in each slot of a page, and the slot's code."""
        shared: list[tuple[tuple[int, ...], str]] = [(pair[:2], pair[2]) for pair in self.pairs]
        left = alone(len(self.layers), self.pairs)
        return shared + [((layer,), self.layers[layer].codec) for layer in left]

    def _segments_of(self, layers: tuple[int, ...]) -> tuple[Segment, ...]:
        return self.slot if len(layers) > 1 else self.layers[0].segments

    @cached_property
    def _segments(self) -> tuple[Segment, ...]:
        return tuple(part for layers, _ in self._in_order for part in self._segments_of(layers))

    @cached_property
    def _entries(self) -> bytes:
        packed = {
            layer: LAYER_ENTRY.pack(_KV, _KV * number, code.encode())
            for number, (layers, code) in enumerate(self._in_order)
            for layer in layers
        }
        return b"".join(packed[layer] for layer in range(len(self.layers)))

    @property
    def _entries_at(self) -> slice:
        start = self.tables_at.start
        return slice(start, start + len(self._entries))
