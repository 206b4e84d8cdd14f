"""Pages in which some layers share a slot, two by two (codec ``krul``); each page says which ones.
All pages of a form have as many pairs and one table of segments: slots of the pairs by their first
layers, then those of the other layers. So one load may mix pages with different pairs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from hcache_backend.arena import Ids
from hcache_backend.format.page import LAYER_ENTRY, Bytes, PageLayout, StoredLayer
from hcache_backend.format.units import WHOLE, Segment, Shard
from hcache_backend.host.segments import KVSegments
from hcache_backend.krul.pair_forms import PAIR_FORMS, MergedPair, PairSlot, changes_of_merges
from hcache_backend.krul.pairs import CodedPair, check_pairs, unpaired
from hcache_backend.streams import to_device
from hcache_kernels.codecs import Int8, UnsupportedRows, make_segment_codec
from hcache_kernels.pages import gather_pages, scatter_pages

_KV = 2  # segments of a slot
_KNOWN = 1024  # parsed tables of pages that are kept
_AT_ONCE_BYTES = 4 << 20  # K and V of a layer to merge at once: it takes 30 times the memory


class Slot(NamedTuple):
    """Place of K and V of some layers in a page."""

    layers: tuple[int, ...]  # one, or the two that share it
    code: str
    offset: int  # in a rank's page


@dataclass(frozen=True)
class PairedLayout(PageLayout):
    """Layout of a page with pairs. ``layers``: storage of an unpaired layer, the same for all.
    Pages belong to one rank; shards are never combined, because two could be of two strategies.
    Raises ValueError if a layer is in two pairs, or a pair has an unknown code."""

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
        """Layouts with the same pairs: for each code one in which all pairs have that code."""
        return [self.with_pairs([(*pair[:2], code) for pair in self.pairs]) for code in self.codes]

    @cached_property
    def form(self) -> str:
        codes = " ".join((*self.codes, *(layer.codec for layer in self.layers)))
        return xxhash.xxh3_64_hexdigest(self._prefix + self._packed + codes.encode())

    def of_page(self, page: Bytes) -> PairedLayout | None:
        return self._parse_entries(page[self._entries_at].tobytes())

    def sharing(self, layer: int) -> tuple[int, ...]:
        return self.slots[layer].layers

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The slot of every layer; both layers of a pair have the same one."""
        slot_of: dict[int, Slot] = {}
        offset = self.header_bytes
        for layers, code in self._in_order:
            slot_of |= dict.fromkeys(layers, Slot(layers, code, offset))
            offset += sum(segment.length for segment in self._segments_of(layers))
        return tuple(slot_of[layer] for layer in range(len(self.layers)))

    @cached_property
    def segment_bytes(self) -> tuple[int, ...]:
        """Stored bytes by layer: of a pair its first layer has all, its second one 0."""
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
        """The different slots that ``layer`` has in ``pages`` (at least one) of ``memory`` (uint8
        ``[..., page_bytes]``), each with indices into ``pages``. A page whose table of layers is
        not of this layout is left out: HiCache has freed it, and it is being read into again."""
        entries = memory[:, self._entries_at][pages]
        alike, places = (entries == entries[:1]).all(), defaultdict(list)
        for place, page in enumerate(entries[:1] if alike else entries):
            if (layout := self._parse_entries(page.tobytes())) is not None:
                places[layout.slots[layer]].append(place)
        every = np.arange(len(pages))
        return [(slot, every if alike else every[found]) for slot, found in places.items()]

    @cached_property
    def _parse_entries(self) -> Callable[[bytes], PairedLayout | None]:
        """Parser of a page's table of layers: those with one first segment and code are a pair.
        It returns None for a table that this layout would not have written."""

        @lru_cache(_KNOWN)
        def parsed(entries: bytes) -> PairedLayout | None:
            """The layout with the pairs of a page's table, or None."""
            layers_by_slot = defaultdict(list)
            for layer, (_, first_segment, code) in enumerate(LAYER_ENTRY.iter_unpack(entries)):
                name = code.rstrip(b"\0").decode(errors="replace")
                layers_by_slot[first_segment, name].append(layer)
            slots = layers_by_slot.items()
            pairs = [(*layers, code) for (_, code), layers in slots if len(layers) > 1]
            try:
                layout = self.with_pairs(pairs)
            except ValueError:  # other numbers of pairs or layers, other codes
                return None
            return layout if layout._entries == entries else None

        return parsed

    @cached_property
    def _in_order(self) -> list[tuple[tuple[int, ...], str]]:
        """The layers in each slot of a page, and the slot's code."""
        shared: list[tuple[tuple[int, ...], str]] = [(pair[:2], pair[2]) for pair in self.pairs]
        others = unpaired(len(self.layers), self.pairs)
        return shared + [((layer,), self.layers[layer].codec) for layer in others]

    def _segments_of(self, layers: tuple[int, ...]) -> tuple[Segment, ...]:
        return self.slot if len(layers) > 1 else self.layers[0].segments

    @cached_property
    def _segments(self) -> tuple[Segment, ...]:
        return tuple(part for layers, _ in self._in_order for part in self._segments_of(layers))

    @cached_property
    def _entries(self) -> bytes:
        """A page's table of layers: of each one its segments, the first of them, and its code."""
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


class PairedSegments(KVSegments):
    """Copies K and V between the pool and pages whose headers say which layers share a slot. Layers
    in no pair are stored without loss: by ``exp4`` if it takes their type. Raises UnsupportedRows
    if there are too few layers for ``pairs``, or K and V cannot be merged."""

    by_header = True
    lossless = False

    def __init__(
        self, kvcache: Any, layers: Sequence[int], page_size: int, groups: int, pairs: int
    ) -> None:
        super().__init__(kvcache, layers, page_size, WHOLE, groups)
        if self.latent:
            raise UnsupportedRows("codec 'krul' takes no latents of MLA")
        self.codec = "krul"
        cut = self._cut(self.codec)
        if not 0 < 2 * pairs <= len(self.layers):
            raise UnsupportedRows(f"codec 'krul' cannot make {pairs} pairs of {len(layers)} layers")
        self._pairs = pairs
        self._units = Int8(*cut)
        self._slot, self._merged = PairSlot(*cut), MergedPair(*cut)
        if cut[2] == torch.bfloat16:
            self._encoder = make_segment_codec("exp4", *cut)

    def layout(self, layers: Sequence[StoredLayer], shard: Shard) -> PairedLayout:
        """The layout of pages whose pairs are neighbouring layers, until other pairs are chosen."""
        part = Segment(self._slot.slot_bytes // 2, pieces=self._units.cut.units)
        pairs = tuple((2 * n, 2 * n + 1, Int8.name) for n in range(self._pairs))
        codes, slot = tuple(PAIR_FORMS), (part, part)
        self._layout = PairedLayout(
            self.page_size, tuple(layers), shard, slot=slot, codes=codes, pairs=pairs
        )
        return self._layout

    def save(
        self, layout: PageLayout, memory: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Save all layers as headers of ``pages`` say; what fits, bool ``[layers, pages]``."""
        fits = torch.ones((len(self.layers), len(pages)), dtype=torch.bool, device=slots.device)
        for slot, indices, pool_pages, host_pages in self._slots(self.layers, memory, pages, slots):
            if len(slot.layers) == 1:
                fit = self._save_layer(slot.layers[0], pool_pages, memory, host_pages, slot.offset)
            else:
                fit = self._save_pair(slot, pool_pages, memory, host_pages)
            for layer in slot.layers:
                fits[layer, indices] = fit
        return fits

    def load(
        self,
        layers: Sequence[int],
        memory: torch.Tensor,
        pages: torch.Tensor,
        offsets: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        """Load ``layers``, a pair by its first layer. Headers have the places, not ``offsets``."""
        for slot, _, pool_pages, host_pages in self._slots(layers, memory, pages, slots):
            if len(slot.layers) == 1:
                self._load_layers(slot.layers[:1], pool_pages, memory, host_pages, [slot.offset])
            else:
                self._load_pair(slot, pool_pages, memory, host_pages)

    def _slots(
        self, layers: Sequence[int], memory: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> Iterator[tuple[Slot, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each slot in ``pages`` (int64 ``[p]``, on the CPU) whose first layer is in ``layers``.
        With it the ``n`` pages that have such a slot: indices into ``pages``, page numbers in the
        pool, page numbers in ``memory``; all int64 ``[n]``, on the device."""
        ids, pool_pages = pages.numpy(), self.pages_of(slots)
        for layer in layers:
            for slot, places in self._layout.groups(memory.numpy(), ids, layer):
                if layer == slot.layers[0]:
                    indices = to_device(places, slots.device)
                    yield slot, indices, pool_pages[indices], to_device(ids[places], slots.device)

    def _save_layer(
        self, layer: int, held: torch.Tensor, memory: torch.Tensor, pages: torch.Tensor, offset: int
    ) -> torch.Tensor:
        """Save an unpaired layer of the pool's pages ``held``; which of them fit, bool ``[p]``."""
        encoder, fits = self._encoder, list[torch.Tensor]()
        if encoder is None or not held.is_cuda:
            return super()._save_layer(layer, held, memory, pages, offset)
        for [rows], page_part, pool_part in self._staged_parts("save", 1, pages, held):
            rows_in_order = torch.arange(len(page_part), device=held.device)
            fits.append(encoder.encode_pages(self.planes(layer), pool_part, rows, rows_in_order, 0))
            scatter_pages(rows, memory, page_part, offset)
        return torch.cat(fits)

    def _save_pair(
        self, slot: Slot, pool_pages: torch.Tensor, memory: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        """Save both layers of a slot of ``pool_pages``; returns those that fit, bool ``[p]``."""
        fits = []
        for pool_part, page_part in self._parts(pool_pages, pages):
            units = self._units.read_units(self._planes_of(slot), pool_part)
            rows, fit = self._slot.encode(slot.code, units)
            scatter_pages(rows, memory, page_part, slot.offset)
            fits.append(fit)
        return torch.cat(fits)

    def _load_pair(
        self, slot: Slot, pool_pages: torch.Tensor, memory: torch.Tensor, pages: torch.Tensor
    ) -> None:
        for pool_part, page_part in self._parts(pool_pages, pages):
            rows = gather_pages(memory, page_part, slot.offset, self._slot.slot_bytes)
            units = self._slot.decode(slot.code, rows)
            self._units.write_units(units, self._planes_of(slot), pool_part)

    def _planes_of(self, slot: Slot) -> list[torch.Tensor]:
        return [plane for layer in slot.layers for plane in self.planes(layer)]

    def _parts(self, *ids: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        at_once = max(1, _AT_ONCE_BYTES // self.bytes_of(self.layers[0]))
        return zip(*(some.split(at_once) for some in ids), strict=True)

    def holds(
        self, segments: torch.Tensor, plain: torch.Tensor, part: int, layout: PageLayout, layer: int
    ) -> bool:
        """True if ``segments`` stand for ``plain`` K and V; of a pair ``part`` 0 compares all."""
        slot = paired(layout).slots[layer]
        if len(slot.layers) == 1:
            return super().holds(segments, plain, part, layout, layer)
        if part:
            return True
        cut = self._units.cut
        units = plain.view(self._units.dtype).view(1, 4, cut.units, cut.tokens, cut.width)
        return self._slot.stands_for(slot.code, segments[None], units)

    def merge_changes(self, slots: torch.Tensor) -> torch.Tensor:
        """:func:`changes_of_merges` of pages in ``slots``, int64 ``[p * page_size]`` (device)."""
        pages = torch.arange(len(slots) // self.page_size, device=slots.device)
        planes = [[plane[slots] for plane in self.planes(layer)] for layer in self.layers]
        units = [self._units.read_units(kv, pages) for kv in planes]
        return changes_of_merges(self._merged, units)

    def code_of(self, layout: PageLayout, layer: int) -> str:
        slot = paired(layout).slots[layer]
        return slot.code if len(slot.layers) > 1 else "none"

    def through_codec(
        self, layout: PageLayout, planes: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[Sequence[torch.Tensor]], torch.Tensor]:
        """K and V of each layer, encoded and decoded, and which fit, bool ``[layers, pages]``."""
        decoded, fits = super().through_codec(layout, planes)
        pages = torch.arange(fits.shape[1])
        for first, second, code in paired(layout).pairs:
            pair = [plane.cpu() for layer in (first, second) for plane in planes[layer]]
            rows, fits[first] = self._slot.encode(code, self._units.read_units(pair, pages))
            fits[second] = fits[first]
            planes_back = [torch.empty_like(plane) for plane in pair]
            self._units.write_units(self._slot.decode(code, rows), planes_back, pages)
            decoded[first], decoded[second] = planes_back[:2], planes_back[2:]
        return decoded, fits


def paired(layout: PageLayout) -> PairedLayout:
    """The same layout: all of the plug-in's are."""
    assert isinstance(layout, PairedLayout)
    return layout
