"""K and V of layers in pages where some layers share a slot, two by two (codec ``krul``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hcache_backend.format.page import PageLayout, StoredLayer
from hcache_backend.format.units import WHOLE, Segment, Share
from hcache_backend.host.segments import KVSegments
from hcache_backend.krul.pair_forms import (
    PAIR_FORMS,
    Fp8Pair,
    MergedPair,
    PairSlot,
    changes_of_merges,
)
from hcache_backend.krul.paired_layout import PairedLayout, Slot
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.streams import to_device
from hcache_kernels.codecs import UnsupportedRows, make_segment_codec
from hcache_kernels.pages import gather_pages, scatter_rows

_AT_ONCE_BYTES = 4 << 20
"""K and V of so many bytes of a layer are merged at once: the calculation takes some thirty times
as much device memory."""


class PairedSegments(KVSegments):
    """Copies K and V between the pool and pages whose headers say which layers share a slot.

    Layers that are in no pair are stored without loss: by ``exp4`` where it takes their type.

    Args:
        pairs: How many pairs each page has.
        others: Those of :class:`KVSegments`, whose pages are a rank's own.

    Raises:
        UnsupportedRows: There are not so many layers, or K and V cannot be merged.
    """

    by_header = True
    lossless = False

    def __init__(
        self, kvcache: Any, layers: Sequence[int], page_size: int, groups: int, pairs: int
    ) -> None:
        super().__init__(kvcache, layers, page_size, WHOLE, groups)
        self.codec = "krul"
        cut = self._cut(self.codec)
        if not 0 < 2 * pairs <= len(self.layers):
            raise UnsupportedRows(f"codec 'krul' cannot make {pairs} pairs of {len(layers)} layers")
        self._pairs = pairs
        self._units = make_segment_codec(Fp8Pair.name, *cut)
        self._slot, self._merged = PairSlot(*cut), MergedPair(*cut)
        if cut[2] == torch.bfloat16:
            self._encoder = make_segment_codec("exp4", *cut)

    def layout(self, layers: Sequence[StoredLayer], share: Share) -> PairedLayout:
        """With neighbours in pairs, until others are chosen."""
        part = Segment(self._slot.slot_bytes // 2, pieces=self._units.cut.units)
        pairs = tuple((2 * n, 2 * n + 1, Fp8Pair.name) for n in range(self._pairs))
        self._layout = PairedLayout(
            self.page_size,
            tuple(layers),
            share,
            slot=(part, part),
            codes=tuple(PAIR_FORMS),
            pairs=pairs,
        )
        return self._layout

    def save(
        self, layout: PageLayout, memory: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        held = self.pages_of(slots)
        fits = torch.ones((len(self.layers), len(held)), dtype=torch.bool, device=held.device)
        for layer in self.layers:
            for slot, at, to in self._by_slot(layer, memory, pages, held.device):
                if len(slot.layers) == 1:
                    fits[layer, at] = self._save_layer(layer, held[at], memory, to, slot.offset)
                elif layer == slot.layers[0]:
                    fit = self._save_pair(slot, held[at], memory, to)
                    for each in slot.layers:
                        fits[each, at] = fit
        return fits

    def restored_layer(self, layer: int) -> RestoredLayer:
        return RestoredLayer("kv", copy=self.load, by_header=True)

    def load(
        self,
        layers: Sequence[int],
        memory: torch.Tensor,
        pages: torch.Tensor,
        offsets: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        """The first layer of a pair brings both; nobody reads the second one before its turn."""
        held = self.pages_of(slots)
        for layer in layers:
            for slot, at, where in self._by_slot(layer, memory, pages, held.device):
                if len(slot.layers) == 1:
                    self._load_layer(layer, held[at], memory, where, slot.offset)
                elif layer == slot.layers[0]:
                    self._load_pair(slot, held[at], memory, where)

    def _by_slot(
        self, layer: int, memory: torch.Tensor, pages: torch.Tensor, device: torch.device
    ) -> Iterator[tuple[Slot, torch.Tensor, torch.Tensor]]:
        """The slots of a layer in ``pages`` (int64 ``[p]``, on the CPU), which of them have it
        there, and these pages; both int64 ``[n]``, on the device."""
        ids = pages.numpy()
        for slot, places in self._layout.groups(memory.numpy(), ids, layer):
            yield slot, to_device(places, device), to_device(ids[places], device)

    def _save_pair(
        self, slot: Slot, held: torch.Tensor, memory: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        """Save pages of the pool in both layers of a slot; which ones fit, bool ``[p]``."""
        fits = []
        for some, to in self._parts(held, pages):
            first, second = (
                self._units.read_units(self.planes(each), some) for each in slot.layers
            )
            rows, fit = self._slot.encode(slot.code, first, second)
            scatter_rows(rows, memory, to, torch.zeros_like(to), slot.offset)
            fits.append(fit)
        return torch.cat(fits)

    def _load_pair(
        self, slot: Slot, held: torch.Tensor, memory: torch.Tensor, pages: torch.Tensor
    ) -> None:
        """Bring back both layers of a slot."""
        for some, where in self._parts(held, pages):
            rows = gather_pages(memory, where, slot.offset, self._slot.slot_bytes)
            decoded = self._slot.decode(slot.code, rows)
            for each, units in zip(slot.layers, decoded, strict=True):
                self._units.write_units(units, self.planes(each), some)

    def _parts(self, *ids: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        at_once = max(1, _AT_ONCE_BYTES // self.plain_bytes)
        return zip(*(some.split(at_once) for some in ids), strict=True)

    def holds(
        self, segments: torch.Tensor, held: torch.Tensor, part: int, layout: PageLayout, layer: int
    ) -> bool:
        """Of a pair all of it is compared with the first part."""
        assert isinstance(layout, PairedLayout)
        slot = layout.slots[layer]
        if len(slot.layers) == 1:
            return super().holds(segments, held, part, layout, layer)
        if part:
            return True
        cut = self._units.cut
        units = held.view(self._units.dtype).view(2, 1, 2, cut.units, cut.tokens, cut.width)
        if torch.equal(torch.stack(self._slot.decode(slot.code, segments[None])), units):
            return True
        encoded, fits = self._slot.encode(slot.code, *units)
        return bool(fits.all()) and torch.equal(encoded[0], segments)

    def merge_changes(self, slots: torch.Tensor) -> torch.Tensor:
        """:func:`changes_of_merges` of whole pages in ``slots`` (int64 ``[p * page_size]``, on the
        device)."""
        pages = torch.arange(len(slots) // self.page_size, device=slots.device)
        held = [[plane[slots] for plane in self.planes(layer)] for layer in self.layers]
        units = [self._units.read_units(planes, pages) for planes in held]
        return changes_of_merges(self._merged, units)

    def code_of(self, layout: PageLayout, layer: int) -> str:
        assert isinstance(layout, PairedLayout)
        slot = layout.slots[layer]
        return slot.code if len(slot.layers) > 1 else "none"

    def through_codec(
        self, layout: PageLayout, planes: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[Sequence[torch.Tensor]], torch.Tensor]:
        assert isinstance(layout, PairedLayout)
        back, fits = super().through_codec(layout, planes)
        pages = torch.arange(fits.shape[1])
        for first, second, code in layout.pairs:
            pair = [[plane.cpu() for plane in planes[layer]] for layer in (first, second)]
            rows, fit = self._slot.encode(
                code, *(self._units.read_units(each, pages) for each in pair)
            )
            decoded = self._slot.decode(code, rows)
            for layer, units in zip((first, second), decoded, strict=True):
                back[layer] = [torch.empty_like(plane) for plane in pair[0]]
                self._units.write_units(units, back[layer], pages)
                fits[layer] = fit
        return back, fits


def make_segments(
    kvcache: Any,
    layers: Sequence[int],
    page_size: int,
    share: Share,
    groups: int,
    codec: str,
    pairs: int,
) -> KVSegments:
    """What copies K and V by ``codec``; ``krul`` makes so many ``pairs`` in a rank's own pages."""
    if codec == "krul":
        return PairedSegments(kvcache, layers, page_size, groups, pairs)
    return KVSegments(kvcache, layers, page_size, share, groups, codec)
