"""The page in host memory (L2), which is also what storage (L3) keeps.

A page holds ``page_size`` consecutive tokens of one sequence, all layers:

- it is a header, then the stored bytes of one layer after the other: nothing, hidden states, K and
  then V, or latents of MLA, and behind these the keys of an indexer (DSA); :mod:`.units` says how
  they divide, so segments keep the alignment of the page;
- if tensor-parallel ranks share pages (paper section 5), each rank's page has the hidden states or
  latents of its own tokens, as large a part of index keys, and K and V of its own heads. The
  header describes tokens and layers of the whole page;
- the header has the digest of every unit of the rank's page, the same number as the header of a
  page file has;
- a reader believes a page only if magic, version, layers, namespace, key and digests all agree,
  also if another storage backend brought it. A backend that verifies units may put a page together
  from the shards of others: then the header tells nothing of the units.

The header begins as every form of a page does (:mod:`.envelope`). Its checksum is over the bytes
from 32 on.

====== ===== ====================================================================
offset bytes field
====== ===== ====================================================================
0      4     magic ``HCPG``
4      2     format version
6      2     layers
8      2     segments, without the header
10     2     header bytes / 4096
12     4     page size in tokens
16     16    checksum, then namespace, key and writer
88     1     number of the shard
89     1     number of shards
90     6     0
96     4*p   positions of the tokens, int32
...    4*p   token ids, int32
...    12*l  of every layer: method (0 recompute, 1 hidden, 2 kv, 3 latent; uint8), 0 (uint8),
             slot (uint16), codec (8 ASCII characters)
...    8*s   of every segment: bytes in the whole page (uint32), groups (uint16), units
             per group (uint16)
...    8*u   xxh3-64 of every unit of this shard, in the order of the page; 0 behind
             them: there is room for those of the whole page
====== ===== ====================================================================

The slot of a layer is the number of its first segment, 65535 for a layer of which nothing is
stored. The codec names what encodes its units; index keys have none. Layers with one slot share it,
if a subclass of :class:`PageLayout` lets them; otherwise the table is the same in all pages.
"""

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from hcache_backend.format import units as page_units
from hcache_backend.format.envelope import BLOCK, CHECKSUM, KEY, NAMESPACE, WRITER, round_up
from hcache_backend.format.units import WHOLE, Segment, SegmentTable, Shard, Unit, digest

MAGIC = b"HCPG"
FORMAT_VERSION = 4

PREFIX = struct.Struct("<4sHHHHI")
_SHARD = slice(88, 90)
TOKENS = 96
LAYER_ENTRY = struct.Struct("<BxH8s")  # a layer in the table of layers
_LATENT = 3
_NO_SLOT = 65535
_DIGEST = np.dtype("<u8")
_SECTOR = 512  # direct I/O takes memory that begins at a multiple of it, on most disks

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]


class StoredLayer(NamedTuple):
    # none, its hidden states, its K and its V, its latents, or these and keys of its indexer
    segments: tuple[Segment, ...]
    codec: str = "none"  # name of what encodes them; at most 8 ASCII characters
    latent: bool = False  # the segment holds latents

    @property
    def method(self) -> int:
        return _LATENT if self.latent else len(self.segments)


RECOMPUTED = StoredLayer(())  # a layer of which nothing is stored


def hidden_layer(tokens: int, row_bytes: int, values: int, codec: str = "none") -> StoredLayer:
    """A layer whose hidden states are stored: ``tokens`` rows of ``values`` values, ``row_bytes``
    each as ``codec`` encodes them. 8 groups of tokens; or one if ``tokens`` is no multiple of 8."""
    groups = 1 if tokens % page_units.EIGHTHS else page_units.EIGHTHS
    pieces = page_units.units_per_group(tokens // groups, values)
    return StoredLayer((Segment(tokens * row_bytes, groups, pieces),), codec)


def latent_layer(
    tokens: int, values: int, itemsize: int, codec: str = "none", unit_bytes: int | None = None
) -> StoredLayer:
    """A layer whose latents (MLA) are stored: ``values`` values of ``itemsize`` bytes per token, in
    the groups of :func:`hidden_layer`. ``unit_bytes``: of an encoded unit; None: of its values."""
    [segment] = hidden_layer(tokens, values * itemsize, values).segments
    if unit_bytes is not None:
        segment = segment._replace(length=unit_bytes * segment.groups * segment.pieces)
    return StoredLayer((segment,), codec, latent=True)


def with_index_keys(latents: StoredLayer, tokens: int, size: int) -> StoredLayer:
    """The layer of ``latents`` with a second segment: ``size`` bytes of its indexer's keys, for all
    ``tokens`` together. The keys have the same groups of tokens as hidden states."""
    [keys] = hidden_layer(tokens, size // tokens, size // tokens).segments
    return latents._replace(segments=(*latents.segments, keys))


def kv_layer(
    tokens: int,
    k_values: int,
    v_values: int,
    itemsize: int,
    groups: int,
    codec: str = "none",
    unit_bytes: tuple[int, int] | None = None,
) -> StoredLayer:
    """A layer whose K and V are stored, in ``groups`` groups of heads.

    Args:
        k_values: Values of K per token, in all heads of all ranks; ``v_values`` of V.
        itemsize: Bytes per value.
        unit_bytes: Bytes of a unit of K, and of one of V, that ``codec`` has encoded; None: those
            of their values.
    """
    segments = []
    for values, encoded in zip((k_values, v_values), unit_bytes or (None, None), strict=True):
        pieces = page_units.units_per_group(tokens, values // groups)
        length = tokens * values * itemsize if encoded is None else encoded * groups * pieces
        segments.append(Segment(length, groups, pieces))
    return StoredLayer(tuple(segments), codec)


@dataclass(frozen=True)
class PageLayout:
    """Where things stand in a page."""

    page_size: int  # tokens
    layers: tuple[StoredLayer, ...]  # first layer first
    shard: Shard = WHOLE  # that this rank holds

    @cached_property
    def form(self) -> str:
        """Digest of how the whole page divides, for its namespace."""
        return xxhash.xxh3_64_hexdigest(self._prefix + self._tables)

    @property
    def head_groups(self) -> int | None:
        """Groups of heads that K and V divide into; None: there are no K and V."""
        kv = (layer for layer in self.layers if layer.method == 2)
        groups = (layer.segments[0].groups for layer in kv)
        return next(groups, None)

    @property
    def kept(self) -> range:
        """The tokens of a page whose hidden states or latents it holds."""
        rows = self.page_size // self.shard.of
        return range(self.shard.number * rows, (self.shard.number + 1) * rows)

    @cached_property
    def table(self) -> SegmentTable:
        """How the whole page divides: its header is segment 0."""
        return SegmentTable((Segment(self.header_bytes), *self._segments))

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The units of this rank's page; the header is the first one."""
        return page_units.units_of(self.table, self.shard)

    @cached_property
    def header_bytes(self) -> int:
        units = sum(segment.groups * segment.pieces for segment in self._segments)
        return round_up(self.tables_at.stop + _DIGEST.itemsize * units)

    @cached_property
    def segment_bytes(self) -> tuple[int, ...]:
        """Bytes of every layer in this rank's page; 0 for a layer of which nothing is stored."""
        return tuple(sum(s.length_in(self.shard) for s in layer.segments) for layer in self.layers)

    @cached_property
    def segment_offsets(self) -> tuple[int, ...]:
        return tuple(np.cumsum((self.header_bytes, *self.segment_bytes)).tolist()[:-1])

    @cached_property
    def page_bytes(self) -> int:
        return self.header_bytes + sum(self.segment_bytes)

    @property
    def stride(self) -> int:
        """Bytes from one page of host memory to the next: multiples of :data:`_SECTOR`."""
        return -(-self.page_bytes // _SECTOR) * _SECTOR

    def segment(self, layer: int) -> slice:
        """The bytes of one layer inside a page."""
        start = self.segment_offsets[layer]
        return slice(start, start + self.segment_bytes[layer])

    def positions(self, pages: Bytes) -> Ints:
        """View of the positions of ``pages`` (``[..., page_bytes]``): int32, ``[..., p]``."""
        return pages[..., TOKENS : TOKENS + 4 * self.page_size].view(np.int32)

    def token_ids(self, pages: Bytes) -> Ints:
        """View of the token ids of ``pages`` (``[..., page_bytes]``): int32, ``[..., p]``."""
        start = TOKENS + 4 * self.page_size
        return pages[..., start : start + 4 * self.page_size].view(np.int32)

    @property
    def variants(self) -> "list[PageLayout]":
        """Layouts that differ in every code that a page may have: each is tried at the start."""
        return [self]

    def of_page(self, page: Bytes) -> "PageLayout | None":
        """The layout of ``page`` (uint8 ``[page_bytes]``), whose header may let layers share slots.
        None: it is of another form."""
        return self

    def sharing(self, layer: int) -> tuple[int, ...]:
        """The layers in the slot of ``layer``, in their order."""
        return (layer,)

    def divide(self, pages: Bytes) -> None:
        """Write the slots of layers to the headers of ``pages`` (``[..., page_bytes]``)."""
        pages[..., self.tables_at] = np.frombuffer(self._tables, np.uint8)

    def seal(self, page: Bytes, namespace: bytes, key: bytes, writer: bytes) -> None:
        """Write the header of a page (uint8 ``[page_bytes]``) that has its positions, its token ids
        and its segments: from here on it proves itself."""
        # Tokens stay, and divide() writes what is there already: other threads may read both.
        page[:TOKENS] = 0
        page[self.tables_at.stop : self.header_bytes] = 0
        page[: PREFIX.size] = np.frombuffer(self._prefix, np.uint8)
        self.divide(page)
        page[_SHARD] = self.shard
        for field, value in ((NAMESPACE, namespace), (KEY, key), (WRITER, writer)):
            page[field] = np.frombuffer(value, np.uint8)
        self._digests(page)[:] = self._digests_now(page)
        page[CHECKSUM] = np.frombuffer(self._checksum_now(page), np.uint8)

    def unit_digests(self, page: Bytes) -> list[int]:
        """The digests of all :attr:`units` of a sealed page, as a page file has them."""
        return [digest([page[: self.header_bytes].data]), *self._digests(page).tolist()]

    def problem(
        self,
        page: Bytes,
        namespace: bytes,
        key: bytes,
        token_ids: Ints | None = None,
        *,
        segments: bool = True,
    ) -> str | None:
        """Why ``page`` (uint8 ``[page_bytes]``) is not the wanted one, or None if it is.

        Args:
            namespace: 16 bytes the page must belong to.
            key: 32 bytes of the page's key.
            token_ids: The page's tokens as the radix tree knows them, when the caller has them.
            segments: Check shard number and digests of units, too; False if the storage did that.
        """
        is_ours = page[: PREFIX.size].tobytes() == self._prefix
        layout = self.of_page(page) if is_ours else None
        if layout is None or page[self.tables_at].tobytes() != layout._tables:
            return "format"
        if page[NAMESPACE].tobytes() != namespace:
            return "namespace"
        if page[KEY].tobytes() != key:
            return "key"
        if page[CHECKSUM].tobytes() != self._checksum_now(page):
            return "checksum"
        if segments and page[_SHARD].tolist() != [*self.shard]:
            return "shard"
        if segments and self._digests(page).tolist() != self._digests_now(page):
            return "checksum"
        if token_ids is not None and not np.array_equal(self.token_ids(page), token_ids):
            return "token ids"
        return None

    @cached_property
    def _segments(self) -> tuple[Segment, ...]:
        return tuple(segment for layer in self.layers for segment in layer.segments)

    @cached_property
    def _prefix(self) -> bytes:
        numbers = len(self.layers), len(self._segments), self.header_bytes // BLOCK, self.page_size
        return PREFIX.pack(MAGIC, FORMAT_VERSION, *numbers)

    @cached_property
    def _tables(self) -> bytes:
        return self._entries + self._packed

    @cached_property
    def _entries(self) -> bytes:
        packed, slot = b"", 0
        for layer in self.layers:
            first = slot if layer.segments else _NO_SLOT
            packed += LAYER_ENTRY.pack(layer.method, first, layer.codec.encode())
            slot += len(layer.segments)
        return packed

    @cached_property
    def _packed(self) -> bytes:
        return b"".join(page_units.PACKED_SEGMENT.pack(*segment) for segment in self._segments)

    @cached_property
    def tables_at(self) -> slice:
        """The bytes of the tables of layers and segments in a header."""
        start = TOKENS + 8 * self.page_size
        return slice(start, start + len(self._tables))

    def _digests(self, page: Bytes) -> npt.NDArray[np.uint64]:
        """View of the digests in the header: of all units but the header, which has a checksum."""
        start = self.tables_at.stop
        end = start + _DIGEST.itemsize * (len(self.units) - 1)
        return page[start:end].view(_DIGEST)

    def _digests_now(self, page: Bytes) -> list[int]:
        return [digest([page.data[start : start + size]]) for *_, start, size in self.units[1:]]

    def _checksum_now(self, page: Bytes) -> bytes:
        return xxhash.xxh3_128_digest(page[CHECKSUM.stop : self.header_bytes].data)
