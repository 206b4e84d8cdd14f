"""K and V of layers in pages where some layers share a slot, two by two (codec ``krul``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hcache_backend.format.page import PageLayout, StoredLayer
from hcache_backend.format.units import WHOLE, Segment, Shard
from hcache_backend.host.segments import KVSegments
from hcache_backend.krul.pair_forms import PAIR_FORMS, MergedPair, PairSlot, changes_of_merges
from hcache_backend.krul.paired_layout import PairedLayout, Slot
from hcache_backend.streams import to_device
from hcache_kernels.codecs import Fp8, UnsupportedRows, make_segment_codec
from hcache_kernels.pages import gather_pages, scatter_pages

# of K and V of a layer that are merged at once; that takes thirty times as much device memory
_AT_ONCE_BYTES = 4 << 20


class PairedSegments(KVSegments):
    """Copies K and V between the pool and pages whose headers say which layers share a slot.

    Each page has a number of ``pairs``, and is a rank's own. Layers in no pair are stored without
    loss: by ``exp4`` if it takes their type. Raises UnsupportedRows if there are too few layers, or
    K and V cannot be merged.
    """

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
        self._units = Fp8(*cut)
        self._slot, self._merged = PairSlot(*cut), MergedPair(*cut)
        if cut[2] == torch.bfloat16:
            self._encoder = make_segment_codec("exp4", *cut)

    def layout(self, layers: Sequence[StoredLayer], shard: Shard) -> PairedLayout:
        """With neighbours in pairs, until others are chosen."""
        part = Segment(self._slot.slot_bytes // 2, pieces=self._units.cut.units)
        pairs = tuple((2 * n, 2 * n + 1, Fp8.name) for n in range(self._pairs))
        how = self.page_size, tuple(layers), shard
        codes = tuple(PAIR_FORMS)
        self._layout = PairedLayout(*how, slot=(part, part), codes=codes, pairs=pairs)
        return self._layout

    def save(
        self, layout: PageLayout, memory: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        shape = len(self.layers), len(pages)
        fits = torch.ones(shape, dtype=torch.bool, device=slots.device)
        for slot, at, held, to in self._slots(self.layers, memory, pages, slots):
            if len(slot.layers) == 1:
                fit = self._save_layer(slot.layers[0], held, memory, to, slot.offset)
            else:
                fit = self._save_pair(slot, held, memory, to)
            for layer in slot.layers:
                fits[layer, at] = fit
        return fits

    def load(
        self,
        layers: Sequence[int],
        memory: torch.Tensor,
        pages: torch.Tensor,
        offsets: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        """The first layer of a pair brings both; nobody reads the second one before its turn."""
        for slot, _, held, where in self._slots(layers, memory, pages, slots):
            if len(slot.layers) == 1:
                self._load_layer(slot.layers[0], held, memory, where, slot.offset)
            else:
                self._load_pair(slot, held, memory, where)

    def _slots(
        self, layers: Sequence[int], memory: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> Iterator[tuple[Slot, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each slot with its first layer among ``layers`` in ``pages`` (int64 ``[p]``, on the CPU).
        With it: indices of the pages that have it, these pages in the pool, and in ``memory``; all
        int64 ``[n]``, on the device."""
        ids, every = pages.numpy(), self.pages_of(slots)
        for layer in layers:
            for slot, places in self._layout.groups(memory.numpy(), ids, layer):
                if layer == slot.layers[0]:
                    at = to_device(places, slots.device)
                    yield slot, at, every[at], to_device(ids[places], slots.device)

    def _save_pair(
        self, slot: Slot, held: torch.Tensor, memory: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        """Save both layers of a slot of pages ``held``; returns those that fit, bool ``[p]``."""
        fits = []
        for some, to in self._parts(held, pages):
            units = self._units.read_units(self._planes_of(slot), some)
            rows, fit = self._slot.encode(slot.code, units)
            scatter_pages(rows, memory, to, slot.offset)
            fits.append(fit)
        return torch.cat(fits)

    def _load_pair(
        self, slot: Slot, held: torch.Tensor, memory: torch.Tensor, pages: torch.Tensor
    ) -> None:
        for some, where in self._parts(held, pages):
            rows = gather_pages(memory, where, slot.offset, self._slot.slot_bytes)
            units = self._slot.decode(slot.code, rows)
            self._units.write_units(units, self._planes_of(slot), some)

    def _planes_of(self, slot: Slot) -> list[torch.Tensor]:
        return [plane for layer in slot.layers for plane in self.planes(layer)]

    def _parts(self, *ids: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        at_once = max(1, _AT_ONCE_BYTES // self.plain_bytes)
        return zip(*(some.split(at_once) for some in ids), strict=True)

    def holds(
        self, segments: torch.Tensor, held: torch.Tensor, part: int, layout: Any, layer: int
    ) -> bool:
        """Of a pair all of it is compared with the first part."""
        slot = layout.slots[layer]
        if len(slot.layers) == 1:
            return super().holds(segments, held, part, layout, layer)
        if part:
            return True
        cut = self._units.cut
        units = held.view(self._units.dtype).view(1, 4, cut.units, cut.tokens, cut.width)
        return self._slot.stands_for(slot.code, segments[None], units)

    def merge_changes(self, slots: torch.Tensor) -> torch.Tensor:
        """:func:`changes_of_merges` of whole pages in ``slots`` (int64 ``[p * page_size]``, on the
        device)."""
        pages = torch.arange(len(slots) // self.page_size, device=slots.device)
        held = [[plane[slots] for plane in self.planes(layer)] for layer in self.layers]
        units = [self._units.read_units(planes, pages) for planes in held]
        return changes_of_merges(self._merged, units)

    def code_of(self, layout: Any, layer: int) -> str:
        slot = layout.slots[layer]
        return str(slot.code) if len(slot.layers) > 1 else "none"

    def through_codec(
        self, layout: Any, planes: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[Sequence[torch.Tensor]], torch.Tensor]:
        back, fits = super().through_codec(layout, planes)
        pages = torch.arange(fits.shape[1])
        for first, second, code in layout.pairs:
            pair = [plane.cpu() for layer in (first, second) for plane in planes[layer]]
            rows, fits[first] = self._slot.encode(code, self._units.read_units(pair, pages))
            fits[second] = fits[first]
            both = [torch.empty_like(plane) for plane in pair]
            self._units.write_units(self._slot.decode(code, rows), both, pages)
            back[first], back[second] = both[:2], both[2:]
        return back, fits
