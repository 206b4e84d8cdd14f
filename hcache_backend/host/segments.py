"""K and V, or latents, of layers between SGLang's KV pool and segments of our pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch

from hcache_backend.format.page import (
    PageLayout,
    StoredLayer,
    kv_layer,
    latent_layer,
    with_index_keys,
)
from hcache_backend.format.units import SHARD_COUNTS, WHOLE, Shard, units_per_group
from hcache_backend.host.index_keys import IndexKeys
from hcache_backend.projection.paged_pool import holds_latents, index_keys_of, planes_of
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.restore.ring import Ring
from hcache_backend.streams import current_stream
from hcache_kernels.codecs import KV, LATENT, Cut, UnsupportedRows, make_segment_codec
from hcache_kernels.pages import gather_pages, gather_planes, scatter_pages
from hcache_kernels.pages.kernel import LayerTable, gather_launch, gather_planes_launch

_Found = TypeVar("_Found")

_ENCODED_BYTES = 64 << 20  # of the device's memory, for backups and for loads each


class KVSegments:
    """Copies K and V of some layers between SGLang's pool (MHATokenToKVPool) and pages, or latents
    (MLATokenToKVPool), which K and V stand for below, too. Raises UnsupportedRows if ``codec`` does
    not take them.

    - A page has K of one group of this rank's heads after the other, each of all tokens, then V.
      With one group, and unencoded, that is the content of the pool's slots.
    - A page has latents of the tokens of its shard: all ranks have the same, so each keeps a part,
      and a restore brings the parts of all (:attr:`shares_tokens`). They have no groups of heads.
    - Layers are numbered as by ``kvcache``. Behind its last one follow those of ``drafts``: pools
      of one layer each, with K and V of the same slots.
    - The slots of a page follow each other, from a multiple of the page size on.
    - ``shard`` is this rank's part of a page; ``groups`` are those of all ranks.
    """

    by_header = False  # pages are copied by their headers, and are to be named on the CPU

    def __init__(
        self,
        kvcache: Any,
        layers: Sequence[int],
        page_size: int,
        shard: Shard,
        groups: int,
        codec: str = "none",
        drafts: Sequence[Any] = (),
    ) -> None:
        self._kvcache, self.drafts = kvcache, tuple(drafts)
        self.page_size = page_size
        self.latent = holds_latents(kvcache)
        self.shares_tokens = self.latent and shard.of > 1
        # Tokens of a page that this rank keeps, and the first of them.
        self._tokens = page_size // shard.of if self.latent else page_size
        self._first = shard.number * self._tokens if self.latent else 0
        self._ranks, self._whole_groups = shard.of, groups  # groups of heads, of all ranks
        self._groups = 1 if self.latent else groups // shard.of  # of this rank
        first = int(kvcache.layer_num) if drafts else 0  # number of the first draft layer
        self.layers = (*layers, *range(first, first + len(self.drafts)))
        kind = LATENT if self.latent else KV
        self._encoder = None
        if codec != "none":
            self._encoder = make_segment_codec(codec, *self._cut(codec), kind)
            codec = self._encoder.name
        self.codec = codec
        pools = {layer: self._of_layer(index_keys_of, layer) for layer in self.layers}
        key_pools = {layer: pool for layer, pool in pools.items() if pool is not None}
        self.keys = IndexKeys(key_pools, page_size, shard.of)
        self._tables: dict[tuple[int, ...], LayerTable] = {}  # addresses for kernels
        self._rings: dict[str, Ring] = {}  # memory for encoded pages, to "save" and to "load"

    def layout(self, layers: Sequence[StoredLayer], shard: Shard) -> PageLayout:
        """The layout of pages with ``layers``; those of K and V are from :meth:`stored_layer`."""
        return PageLayout(self.page_size, tuple(layers), shard)

    def stored_layer(self, layer: int) -> StoredLayer:
        """Segments of one layer in whole pages, with the parts of all ranks, and their codec."""
        planes, encoder = self.planes(layer), self._encoder
        itemsize = planes[0].dtype.itemsize
        if self.latent:
            latent = partial(latent_layer, self.page_size, planes[0][0].numel(), itemsize)
            stored = latent() if encoder is None else latent(encoder.code, *encoder.unit_bytes)
            keys = self.keys.bytes_of(layer) * self._ranks
            return with_index_keys(stored, self.page_size, keys) if keys else stored
        k, v = (buffer[0].numel() * self._ranks for buffer in planes)
        if encoder is None:
            return kv_layer(self.page_size, k, v, itemsize, self._whole_groups)
        code, (k_unit, v_unit) = encoder.code, encoder.unit_bytes
        return kv_layer(self.page_size, k, v, itemsize, self._whole_groups, code, (k_unit, v_unit))

    def save(
        self, layout: PageLayout, memory: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor | None:
        """Copy K and V of whole pages from the pool to ``memory`` (uint8 ``[all pages,
        page_bytes]``), on the current stream. ``pages`` (physical, int64 ``[p]``; see
        :attr:`by_header`) and ``slots`` (int64 ``[p * page_size]``) are on the device. Returns,
        with a codec, a mask of the layers that fit, bool ``[layers, p]`` on the device."""
        offsets = [layout.segment_offsets[layer] for layer in self.layers]
        slots, encoder = self.kept(slots), self._encoder
        self._copy_keys(self.layers, memory, pages, offsets, slots, save=True)
        if not slots.is_cuda:
            held, each = self.pages_of(slots), zip(self.layers, offsets, strict=True)
            masks = [self._save_layer(layer, held, memory, pages, offset) for layer, offset in each]
            return torch.stack(masks) if encoder is not None else None
        # By one launch over layers, planes and units.
        table = self._table(self.layers, offsets)
        if encoder is None:
            pool = [self._by_group(plane) for plane in table.planes]
            gather_planes_launch(memory, pages, 0, pool, slots, table, save=True).run()
            return None
        masks = []
        for staged, page_part, slot_part in self._staged_parts("save", len(table), pages, slots):
            flags = (*staged.shape[:2], encoder.flags)
            masks.append(torch.empty(flags, dtype=torch.bool, device=slots.device))
            encoder.encode_launch(table.planes, slot_part, staged, None, 0, masks[-1], table).run()
            gather_launch(memory, page_part, 0, staged, layers=table, save=True).run()
        return torch.cat(masks, dim=1).all(2)

    def _copy_keys(
        self,
        layers: Sequence[int],
        memory: torch.Tensor,
        pages: torch.Tensor,
        offsets: Sequence[int],
        slots: torch.Tensor,
        *,
        save: bool = False,
    ) -> None:
        """Copy index keys of ``layers``, if any, from ``pages`` of ``memory`` to ``slots`` of the
        pool; ``save``: the other way. They follow the latents, which are at ``offsets``."""
        if self.keys.layers_with_keys(layers):
            behind = [offset + self._latent_bytes for offset in offsets]
            self.keys.copy(layers, memory, pages, behind, self.pages_of(slots), save=save)

    @property
    def _latent_bytes(self) -> int:
        """Bytes of the latents of a layer in this rank's part of a page."""
        if self._encoder is not None:
            return self._encoder.segment_bytes
        return self._tokens * self.planes(self.layers[0])[0][0].nbytes

    def _save_layer(
        self, layer: int, held: torch.Tensor, memory: torch.Tensor, pages: torch.Tensor, offset: int
    ) -> torch.Tensor:
        """Save ``held``, pages of a pool on the CPU; returns a mask: which the codec can hold."""
        if self._encoder is not None:
            return self._encoder.encode_pages(self.planes(layer), held, memory, pages, offset)
        for plane in self._plain_planes(layer, held):
            scatter_pages(plane, memory, pages, offset)
            offset += plane.shape[1]
        return torch.ones(len(held), dtype=torch.bool, device=held.device)

    def restored_layer(self, layer: int) -> RestoredLayer:
        """How ``layer`` gets to the pool: by a copy; of shared tokens by a gather, and a fill."""
        if self.shares_tokens:
            return RestoredLayer("kv", self._fill, self._gather)
        launches = 1 if self._encoder is None else 2  # of kernels: copy, decode
        return RestoredLayer("kv", copy=self.load, launches=launches, by_header=self.by_header)

    def _gather(
        self,
        layers: Sequence[int],
        memory: torch.Tensor,
        pages: torch.Tensor,
        offsets: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        """Copy this rank's share of latents, then of index keys, from ``offsets`` (by layer) in
        ``pages`` of ``memory`` to ``out``: uint8, flat, ``[layer, page, byte]`` of each."""
        size = self._latent_bytes * len(layers) * len(pages)
        rows = out[:size].view(len(layers), len(pages), -1)
        if self.keys.layers_with_keys(layers):
            behind = [offset + self._latent_bytes for offset in offsets]
            self.keys.gather(layers, memory, pages, behind, out[size:])
        if out.is_cuda:
            table = self._table(layers, offsets)
            gather_launch(memory, pages, 0, rows, layers=table).run()
            return
        for offset, row in zip(offsets, rows, strict=True):
            gather_pages(memory, pages, offset, row.shape[1], out=row)

    def _fill(
        self, layers: Sequence[int], segments: torch.Tensor, _: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write ``segments``, what :meth:`_gather` gave on each rank, one rank after the other, to
        ``slots`` of the pool (int64 ``[p * page_size]``). Encoded latents are decoded."""
        pages = len(slots) // self.page_size
        by_rank = segments.view(self._ranks, -1)
        size = self._latent_bytes * len(layers) * pages
        if self.keys.layers_with_keys(layers):
            self.keys.fill(layers, by_rank[:, size:], self.pages_of(slots))
        shares = by_rank[:, :size].contiguous().view(self._ranks, len(layers), pages, -1)
        if not slots.is_cuda:
            by_layer, pool_pages = shares.transpose(0, 1).flatten(1, 2), self.pages_of(slots)
            if self._encoder is not None:
                self._decode(layers, by_layer.__getitem__, pool_pages)
                return
            for layer, share in zip(layers, by_layer, strict=True):
                # By words: torch copies bytes one by one.
                words = self._by_page(self.planes(layer)[0]).view(torch.int64)
                words.index_copy_(0, pool_pages, share.view(torch.int64))
            return
        # The tokens of a share follow those of the share before it: each is a layer for kernels.
        rows, first_slots = shares.flatten(0, 1), slots[: pages * self._tokens]
        table = self._table(layers, [rows.shape[-1]] * len(layers), self._ranks)
        if self._encoder is not None:
            self._encoder.decode_launch(rows, table.planes, first_slots, table).run()
            return
        page_ids, layer_ids = (torch.arange(n, device=slots.device) for n in (pages, len(rows)))
        planes, addresses, _, aligned = table
        packed = LayerTable(planes, addresses, layer_ids * rows[0].numel(), aligned)
        pool = [self._by_group(plane) for plane in planes]
        gather_planes_launch(rows.flatten(0, 1), page_ids, 0, pool, first_slots, packed).run()

    def _decode(
        self, layers: Sequence[int], segments: Callable[[slice], torch.Tensor], held: torch.Tensor
    ) -> None:
        """Decode ``layers`` to ``held``, pages of the pool on the CPU. ``segments(part)`` gives the
        bytes of that part of ``layers``, uint8 ``[layers, p, segment_bytes]``, to save memory."""
        assert self._encoder is not None
        at_once = max(1, self._encoder.at_once // max(1, len(held)))
        for start in range(0, len(layers), at_once):
            part = slice(start, start + at_once)
            planes = [self.planes(layer) for layer in layers[part]]
            self._encoder.decode_layers(segments(part), planes, held)

    def load(
        self,
        layers: Sequence[int],
        memory: torch.Tensor,
        pages: torch.Tensor,
        offsets: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        """Copy K and V of ``layers`` from ``offsets`` (by layer) in ``pages`` of ``memory`` to
        ``slots`` of the pool, decoded if a codec is used. On a GPU: one or two launches for all."""
        encoder = self._encoder
        self._copy_keys(layers, memory, pages, offsets, slots)
        if not slots.is_cuda:
            self._load_layers(layers, self.pages_of(slots), memory, pages, offsets)
            return
        table = self._table(layers, offsets)
        if encoder is None:
            pool = [self._by_group(plane) for plane in table.planes]
            gather_planes_launch(memory, pages, 0, pool, slots, table).run()
            return
        for staged, page_part, slot_part in self._staged_parts("load", len(table), pages, slots):
            gather_launch(memory, page_part, 0, staged, layers=table).run()
            encoder.decode_launch(staged, table.planes, slot_part, table).run()

    def _staged_parts(
        self, way: str, layers: int, pages: torch.Tensor, slots: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields memory on the device for some encoded pages (uint8 ``[layers, p,
        segment_bytes]``), and these parts of ``pages`` and ``slots``, until all had a turn. Each
        ``way`` ("save", "load") has a ring of memory, made at its first use. Encoders write single
        bytes, which would be slow across a bus."""
        assert self._encoder is not None
        size, stream = self._encoder.segment_bytes, current_stream(slots.device)
        row = layers * size
        if way not in self._rings:
            room = max(_ENCODED_BYTES, 2 * len(self.layers) * size)
            self._rings[way] = Ring(torch.empty(room, dtype=torch.uint8, device=slots.device))
        ring = self._rings[way]
        ring.begin(ring.bytes)
        # An even number keeps the alignment of the ids of each part.
        at_once = ring.bytes // row // 2 * 2
        slots_per_page = len(slots) // max(1, len(pages))
        slot_parts = slots.split(at_once * slots_per_page)
        for page_part, slot_part in zip(pages.split(at_once), slot_parts, strict=True):
            part = ring.next(stream)[: len(page_part) * row]
            yield part.view(layers, len(page_part), size), page_part, slot_part
            ring.mark_used(stream.record())

    def _load_layers(
        self,
        layers: Sequence[int],
        pool_pages: torch.Tensor,
        memory: torch.Tensor,
        pages: torch.Tensor,
        offsets: Sequence[int],
    ) -> None:
        """On the CPU: copy, or decode, ``layers`` from ``offsets`` in ``pages`` to the pool."""
        encoder = self._encoder
        if encoder is None:
            for layer, offset in zip(layers, offsets, strict=True):
                pool = [self._by_group(plane) for plane in self.planes(layer)]
                gather_planes(memory, pages, offset, pool, pool_pages)
            return

        def segments(part: slice) -> torch.Tensor:
            size = encoder.segment_bytes
            return torch.stack([gather_pages(memory, pages, at, size) for at in offsets[part]])

        self._decode(layers, segments, pool_pages)

    def _table(self, layers: Sequence[int], offsets: Sequence[int], shares: int = 1) -> LayerTable:
        """Addresses of the pool of ``layers``, and their ``offsets`` in pages, for kernels: once
        for each of ``shares`` equal parts of a page's tokens. Made at the first use."""
        key = (layers[0], len(layers), offsets[0], shares)
        if key not in self._tables:
            starts = range(0, shares * self._tokens, self._tokens)
            shares_and_layers = product(starts, map(self.planes, layers))
            planes = [tuple(plane[start:] for plane in kv) for start, kv in shares_and_layers]
            self._tables[key] = LayerTable.of(planes, [*offsets] * shares)
        return self._tables[key]

    def read_plain(self, layers: Sequence[int], slots: torch.Tensor) -> torch.Tensor:
        """K and V of ``layers`` in the pool as in plain pages: layer after layer, uint8, on the
        device. ``slots``: of the tokens of a page, int64 ``[page_size]``, on the device."""
        pages = self.pages_of(self.kept(slots))
        planes = (
            plane
            for layer in layers
            for plane in (*self._plain_planes(layer, pages), *self.keys.read_parts(layer, pages))
        )
        return torch.cat([plane[0] for plane in planes])

    @property
    def parts(self) -> int:
        """Parts of a layer for :meth:`holds`: encoded layers are compared by unit."""
        return 1 if self._encoder is None else self._encoder.cut.units

    def holds(
        self, segments: torch.Tensor, plain: torch.Tensor, part: int, layout: PageLayout, layer: int
    ) -> bool:
        """True if ``part`` of a layer's bytes in a page (``segments``) stands for its values in the
        pool (``plain``, of :meth:`read_plain`), by the codec's reference: to the bit, or within the
        promise of a lossy codec. Both uint8, on the CPU. ``layout``: of the page."""
        if self._encoder is None:
            return torch.equal(segments, plain)
        keys = self.keys.bytes_of(layer)  # at the end of both
        if part == 0 and keys and not torch.equal(segments[-keys:], plain[-keys:]):
            return False
        encoded, plain = segments[: len(segments) - keys], plain[: len(plain) - keys]
        return self._encoder.holds(encoded, plain, part)

    def through_codec(
        self, layout: PageLayout, planes: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[Sequence[torch.Tensor]], torch.Tensor]:
        """K and V of :meth:`kept` slots (``planes``, by layer ``[n, heads, dim]`` each) after the
        codec's reference on the CPU; and a mask of pages that the codec holds (``[layers, p]``)."""
        pages = torch.arange(len(planes[0][0]) // self._tokens)
        fits, decoded = torch.ones((len(planes), len(pages)), dtype=torch.bool), [*planes]
        encoder = self._encoder
        for layer, kv in enumerate(planes):
            if encoder is not None:
                on_cpu = [plane.cpu() for plane in kv]
                encoded, fits[layer] = encoder.encode_reference(on_cpu, pages)
                decoded[layer] = [torch.empty_like(plane) for plane in on_cpu]
                encoder.decode_pages(encoded, decoded[layer], pages)
        return decoded, fits

    def code_of(self, layout: PageLayout, layer: int) -> str:
        return self.codec

    @property
    def lossless(self) -> bool:
        """True if K and V that fit come back to the bit."""
        return self._encoder is None or self._encoder.lossless

    def planes(self, layer: int) -> tuple[torch.Tensor, ...]:
        """K and V of a layer in the pool, or its latents, ``[slots, heads, dim]`` each."""
        return self._of_layer(planes_of, layer)

    def _of_layer(self, find: Callable[[Any, int], _Found], layer: int) -> _Found:
        if self.drafts and layer >= self._kvcache.layer_num:
            return find(self.drafts[layer - self._kvcache.layer_num], 0)
        return find(self._kvcache, layer)

    def kept(self, slots: torch.Tensor) -> torch.Tensor:
        """Those of the ``slots`` of pages (int64 ``[p * page_size]``) that this rank keeps."""
        if not self.shares_tokens:
            return slots
        kept = slice(self._first, self._first + self._tokens)
        return slots.view(-1, self.page_size)[:, kept].reshape(-1)

    def pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Pages of the pool, int64 ``[p]``, whose slots are ``slots`` (``[p * page_size]``). Pages
        are as short as a share if ranks share the tokens."""
        return slots[:: self._tokens] // self._tokens

    def bytes_of(self, layer: int) -> int:
        """Bytes of K and V of a layer of a page in the pool, as far as this rank keeps them."""
        planes = self._tokens * sum(buffer[0].nbytes for buffer in self.planes(layer))
        return planes + self.keys.bytes_of(layer)

    def _cut(self, codec: str) -> tuple[Cut, int, torch.dtype]:
        """For ``codec``: cut of rows into units, values of a head, dtype; or UnsupportedRows."""
        planes = [plane for layer in self.layers for plane in self.planes(layer)]
        shapes = sorted({tuple(plane.shape[1:]) for plane in planes})
        if len(shapes) > 1:
            names = ", ".join(map(str, shapes))
            raise UnsupportedRows(f"codec {codec!r} takes K and V of one shape, not {names}")
        [(heads, dim)] = shapes
        width = heads * dim // self._groups
        if self.latent:
            [whole] = latent_layer(self.page_size, width, 1).segments
            pieces = whole.pieces * max(1, whole.groups // self._ranks)
        else:
            pieces = units_per_group(self.page_size, width)
        cut = Cut(width, self._tokens // pieces, self._groups, pieces)
        return cut, dim, planes[0].dtype

    def _plain_planes(self, layer: int, pool_pages: torch.Tensor) -> Iterator[torch.Tensor]:
        """K, then V of pages of the pool, as plain pages hold them: uint8 ``[p, bytes]`` each."""
        for buffer in self.planes(layer):
            rows = self._by_page(buffer)[pool_pages].unflatten(1, (self._tokens, self._groups, -1))
            yield rows.transpose(1, 2).flatten(1).view(torch.uint8)

    def _by_group(self, plane: torch.Tensor) -> torch.Tensor:
        return self._by_page(plane).view(torch.uint8).unflatten(1, (self._tokens, self._groups, -1))

    def _by_page(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(len(buffer) // self._tokens, -1)


def shard_of_heads(rank: int, ranks: int) -> Shard:
    """A rank's shard of pages of K and V: its own heads. If the number of ranks does not divide
    eight, every rank has whole pages of its own."""
    return Shard(rank, ranks) if ranks in SHARD_COUNTS else WHOLE


def head_groups(tp_lcm_size: int | None, shard: Shard, ranks: int) -> int:
    """Groups of heads that K and V of a page divide into, over all ranks; by default one per rank.
    With SGLang's ``tp_lcm_size``, servers with up to that many ranks can share pages."""
    return tp_lcm_size or ranks if shard.of == ranks else shard.of
