"""K and V of layers between SGLang's KV pool and segments of our pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hcache_backend.page import PageLayout, StoredLayer, kv_layer
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.units import Share, units_per_group
from hcache_kernels.codecs import UnsupportedRows, make_codec
from hcache_kernels.codecs.exp4 import Cut
from hcache_kernels.codecs.exp4_code import REFERENCE_VALUES, decode_units
from hcache_kernels.codecs.segments import decode_segments, encode_segments, segment_bytes
from hcache_kernels.pages import gather_pages, gather_plane, scatter_rows

_COPIED_BYTES = 64 << 20
"""A layer of so many bytes is copied, or encoded, at once: device memory that nobody planned."""


class KVSegments:
    """Copies K and V of some layers between the pool and pages.

    A page has K of one group of this rank's heads after the other, each of all tokens, then V. With
    one group, and unencoded, that is what the pool's slots hold. Layers are numbered as by
    ``kvcache``, which is SGLang's ``MHATokenToKVPool``. The slots of a page follow each other
    there, from a multiple of the page size on, so that whole pages are copied.

    Args:
        share: What this rank holds of a page: its heads are as many of those of all ranks.
        groups: Groups of heads in the whole page.
        codec: Encodes their units: ``none`` or ``exp4``.

    Raises:
        UnsupportedRows: The codec does not take K and V of this pool.
    """

    def __init__(
        self,
        kvcache: Any,
        layers: Sequence[int],
        page_size: int,
        share: Share,
        groups: int,
        codec: str = "none",
    ) -> None:
        self._kvcache = kvcache
        self.page_size = page_size
        self._ranks, self._whole_groups = share.of, groups
        self._groups = groups // share.of
        self.layers = tuple(layers)
        self.codec = codec
        self._cut = None if codec == "none" else self._cut_into_units()

    def stored_layer(self, layer: int) -> StoredLayer:
        """What whole pages hold of one layer."""
        k, v = (buffer[0].numel() * self._ranks for buffer in self._planes(layer))
        dtype = self._kvcache.k_buffer[layer].dtype
        encoded: tuple[str, int] | tuple[()] = ()
        if self._cut is not None:
            codec = make_codec(self.codec, self._cut.values, dtype)
            encoded = codec.code, codec.row_bytes
        return kv_layer(self.page_size, k, v, dtype.itemsize, self._whole_groups, *encoded)

    def save(
        self, layout: PageLayout, memory: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor | None:
        """Copy K and V of whole pages out of the pool, on the current stream.

        Args:
            layout: Layout of a page.
            memory: The arena, uint8 ``[all pages, page_bytes]``, which the device can write.
            pages: Physical pages, int64 ``[p]``, on the device.
            slots: Slots of their tokens, int64 ``[p * page_size]``, on the device.

        Returns:
            With a codec, which layers of which pages fit, bool ``[layers, p]`` on the device: what
            the pages hold of others means nothing.
        """
        held, fits = self.pages_of(slots), []
        for layer in self.layers:
            offset, fit = layout.segment_offsets[layer], []
            at_once = max(1, _COPIED_BYTES // self.bytes_of(layer))
            for some, to in zip(held.split(at_once), pages.split(at_once), strict=True):
                if self._cut is None:
                    self.save_plain(layer, some, memory, to, offset)
                    continue
                rows, fitting = self._encoded(layer, some, self._cut)
                scatter_rows(rows, memory, to, torch.zeros_like(to), offset)
                fit.append(fitting)
            fits += [torch.cat(fit)] if fit else []
        return torch.stack(fits) if fits else None

    def save_plain(
        self,
        layer: int,
        held: torch.Tensor,
        memory: torch.Tensor,
        rows: torch.Tensor,
        offset: int = 0,
    ) -> None:
        """Copy K and V of a layer, as they are, to ``offset`` of some rows of ``memory``.

        ``held`` are pages of the pool; both int64 ``[p]``, on the device.
        """
        for plane in self._plain(layer, held):
            scatter_rows(plane, memory, rows, torch.zeros_like(rows), offset)
            offset += plane.shape[1]

    def load_plain(
        self,
        layer: int,
        held: torch.Tensor,
        memory: torch.Tensor,
        rows: torch.Tensor,
        offset: int = 0,
    ) -> None:
        """Copy back what :meth:`save_plain` did."""
        for buffer in self._planes(layer):
            plane = self._by_page(buffer).view(torch.uint8)
            plane = plane.unflatten(1, (self.page_size, self._groups, -1))
            gather_plane(memory, rows, offset, plane, held)
            offset += plane[0].numel()

    def restored_layer(self, layer: int) -> RestoredLayer:
        """How a layer whose K and V are stored comes back."""
        planes, cut = self._planes(layer), self._cut

        def copy(
            memory: torch.Tensor, pages: torch.Tensor, offset: int, slots: torch.Tensor
        ) -> None:
            held = self.pages_of(slots)
            if cut is None:
                self.load_plain(layer, held, memory, pages, offset)
                return
            encoded = gather_pages(memory, pages, offset, segment_bytes(len(planes), cut))
            decode_segments(encoded, planes, held, cut)

        return RestoredLayer("kv", copy=copy)

    def held(self, layers: Sequence[int], slots: torch.Tensor) -> torch.Tensor:
        """K and V of ``layers`` in the pool, as plain pages have them: layer after layer, uint8, on
        the device.

        ``slots`` are those of the tokens of a page, int64 ``[page_size]``, on the device.
        """
        pages = self.pages_of(slots)
        planes = (plane for layer in layers for plane in self._plain(layer, pages))
        return torch.cat([plane[0] for plane in planes])

    def as_held(self, layer: int, segments: torch.Tensor) -> torch.Tensor:
        """K and V of a layer as :meth:`held` has them, from the ``segments`` of a page (uint8).

        Encoded ones are decoded by the reference, whatever encoded them. All is on the CPU.
        """
        if self._cut is None:
            return segments
        units = segments.view(len(self._planes(layer)) * self._cut.units, -1)
        parts = units.split(max(1, REFERENCE_VALUES // self._cut.values))
        decoded = torch.cat([decode_units(some, self._cut.values) for some in parts])
        return decoded.view(torch.uint8).flatten()

    def pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Pages of the pool, int64 ``[p]``, whose slots are ``slots`` (``[p * page_size]``)."""
        return slots[:: self.page_size] // self.page_size

    def bytes_of(self, layer: int) -> int:
        """Bytes of K and V of a layer of a page, as the pool has them."""
        return self.page_size * sum(buffer[0].nbytes for buffer in self._planes(layer))

    @property
    def plain_bytes(self) -> int:
        """The same of each layer; where there is a codec, all are alike."""
        return self.bytes_of(self.layers[0])

    def _cut_into_units(self) -> Cut:
        planes = [plane for layer in self.layers for plane in self._planes(layer)]
        shapes = sorted({tuple(plane.shape[1:]) for plane in planes})
        dtypes = {plane.dtype for plane in planes}
        if len(shapes) > 1 or dtypes - {torch.bfloat16}:
            raise UnsupportedRows(
                f"codec {self.codec!r} takes K and V of one shape in bfloat16, not "
                f"{', '.join(map(str, shapes))} of {', '.join(sorted(map(str, dtypes)))}"
            )
        width = planes[0][0].numel() // self._groups
        pieces = units_per_group(self.page_size, width)
        cut = Cut(width, self.page_size // pieces, self._groups, pieces)
        segment_bytes(2, cut)
        return cut

    def _plain(self, layer: int, held: torch.Tensor) -> Iterator[torch.Tensor]:
        """K, then V of pages of the pool, as plain pages hold them: uint8 ``[p, bytes]`` each."""
        for buffer in self._planes(layer):
            rows = _swapped(self._by_page(buffer)[held], self.page_size, self._groups)
            yield rows.view(torch.uint8)

    def _encoded(
        self, layer: int, held: torch.Tensor, cut: Cut
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoded K and V of pages of the pool, uint8 ``[p, bytes]``, and which of the pages fit,
        bool ``[p]``."""
        planes = self._planes(layer)
        length = segment_bytes(len(planes), cut)
        encoded = torch.empty((len(held), length), dtype=torch.uint8, device=held.device)
        fits = torch.empty(
            (len(held), len(planes) * cut.units), dtype=torch.bool, device=held.device
        )
        encode_segments(
            planes, held, cut, encoded, torch.arange(len(held), device=held.device), 0, fits
        )
        return encoded, fits.all(1)

    def _by_page(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer of the pool, ``[slots, heads, dim]``, as one row for each page."""
        return buffer.view(len(buffer) // self.page_size, -1)

    def _planes(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kvcache.k_buffer[layer], self._kvcache.v_buffer[layer]


def _swapped(rows: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Rows ``[p, outer * inner * n]`` as ``[p, inner * outer * n]``; no copy where one is 1."""
    return rows.view(len(rows), outer, inner, -1).transpose(1, 2).reshape(len(rows), -1)
