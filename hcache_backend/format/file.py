"""Page files, format version 2: header and payload of one share of one page.

- Integers are little-endian; header and file are padded with zeros to multiples of 4096 bytes.
- The payload is the share's units in the order of the page, with nothing between them: that of
  share 0 of 1 is the page, and that of any other is the page of the rank that wrote it.
- The header says how the page divides, and has the xxh3-64 of every unit, so that any of them can
  be read and verified alone; it has an xxh3-128 over all of itself but that digest.
- A reader believes a file only if length, magic, version, share, namespace, key and digests agree.
- Paths are ``pages/<first two digits of the key>/<namespace>.<key>.<index>of<count>.page``, in
  hexadecimal digits: nothing in them comes from text that a caller chose.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import xxhash

from hcache_backend.format.page import KEY_BYTES, NAMESPACE_BYTES, WRITER_BYTES
from hcache_backend.format.units import (
    PACKED_SEGMENT,
    SHARE_COUNTS,
    Segment,
    SegmentTable,
    Share,
    Unit,
    units_of,
)

MAGIC = b"HCPF"
VERSION = 2
BLOCK = 4096
MAX_HEADER_BYTES = 1 << 20

# The header: prefix, digest, fields, every segment (bytes in the whole page, groups, units per
# group), and the xxh3-64 of every unit (8 bytes each) in the order of the file.
_PREFIX = struct.Struct("<4sHBBII")
"""Magic, version, share number, share count, header bytes, number of segments."""
_DIGEST = slice(16, 32)
"""xxh3-128 of the header but these bytes."""
_FIELDS = struct.Struct("<16s32s8sQQII")
"""Namespace, key, writer, payload bytes of this share, bytes of the page, number of units, 0."""
_SEGMENTS = 32 + _FIELDS.size
"""Where the segments begin."""
_NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{64})\.([0-7])of([1248])\.page")


class DamagedFileError(Exception):
    """A file is not the page file that it should be; the message says what is wrong.

    Attributes:
        status: The file's, where one was opened.
    """

    status: os.stat_result | None = None


class PageName(NamedTuple):
    """What a page file is called: namespace (16 bytes), key (32 bytes) and share."""

    namespace: bytes
    key: bytes
    share: Share

    @property
    def page(self) -> bytes:
        """Namespace and key: all files of one page have them in common."""
        return self.namespace + self.key

    @property
    def shard(self) -> str:
        """The folder below ``pages`` that the file stands in."""
        return self.key[:1].hex()

    @property
    def file(self) -> str:
        """The name of the file in that folder."""
        share = self.share
        return f"{self.namespace.hex()}.{self.key.hex()}.{share.number}of{share.of}.page"


@dataclass(frozen=True)
class FileLayout:
    """Where things stand in the file of a share of a page that divides by ``table``."""

    table: SegmentTable
    header_bytes: int
    payload_bytes: int
    units: tuple[Unit, ...]

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + round_up(self.payload_bytes)

    @cached_property
    def payload_offsets(self) -> dict[int, int]:
        """Where in the payload every unit begins, by its offset in the page."""
        return {unit.page_offset: unit.payload_offset for unit in self.units}


class Header(NamedTuple):
    """The verified header of a page file."""

    name: PageName
    writer: bytes
    layout: FileLayout
    digests: tuple[int, ...]

    @property
    def table(self) -> SegmentTable:
        return self.layout.table


def round_up(length: int) -> int:
    """``length`` as the next multiple of :data:`BLOCK`."""
    return -(-length // BLOCK) * BLOCK


@lru_cache(maxsize=256)
def file_layout(table: SegmentTable, share: Share) -> FileLayout:
    """The layout of ``share`` of a page; a ValueError if there is no such share."""
    check_share(share)
    units = units_of(table, share)
    used = _SEGMENTS + PACKED_SEGMENT.size * len(table.segments) + 8 * len(units)
    payload_bytes = sum(segment.length_in(share) for segment in table.segments)
    return FileLayout(table, round_up(used), payload_bytes, units)


def check_share(share: Share) -> None:
    """Refuse, by a ValueError, what is no share."""
    if share.of not in SHARE_COUNTS or not 0 <= share.number < share.of:
        raise ValueError(f"share {share.number} of {share.of}: there are 1, 2, 4 or 8")


def pack_header(
    target: memoryview,
    name: PageName,
    writer: bytes,
    layout: FileLayout,
    digests: Sequence[int],
) -> None:
    """Write a header into ``target`` (``header_bytes``); ``digests`` are those of the units."""
    namespace, key, share = name
    table = layout.table
    sizes = (layout.payload_bytes, table.page_bytes)
    prefix = _PREFIX.pack(MAGIC, VERSION, *share, layout.header_bytes, len(table.segments))
    fields = _FIELDS.pack(namespace, key, writer, *sizes, len(digests), 0)
    units = struct.pack(f"<{len(digests)}Q", *digests)
    body = (fields + table.packed + units).ljust(layout.header_bytes - _DIGEST.stop, b"\0")
    target[:] = prefix + xxhash.xxh3_128_digest(prefix + body) + body


def parse_header(data: memoryview) -> Header:
    """The header at the beginning of ``data``; a DamagedFileError unless it verifies."""
    header = bytes(data[: header_length(data)])
    _, version, number, of, _, segment_count = _PREFIX.unpack_from(header)
    if version != VERSION:
        raise DamagedFileError(f"format version {version}; this is version {VERSION}")
    rest = header[: _DIGEST.start] + header[_DIGEST.stop :]
    if xxhash.xxh3_128_digest(rest) != header[_DIGEST]:
        raise DamagedFileError("header checksum")
    # From here on the bytes are what a writer meant.
    namespace, key, writer, _, _, unit_count, _ = _FIELDS.unpack_from(header, 32)
    behind = _SEGMENTS + PACKED_SEGMENT.size * segment_count
    share = Share(number, of)
    layout = file_layout(_table(header[_SEGMENTS:behind]), share)
    digests = struct.unpack_from(f"<{unit_count}Q", header, behind)
    return Header(PageName(namespace, key, share), writer, layout, digests)


def header_length(data: memoryview) -> int:
    """Bytes that the header at the start of ``data`` (a block) claims, or a DamagedFileError."""
    if len(data) < _PREFIX.size or bytes(data[:4]) != MAGIC:
        raise DamagedFileError("no page file (magic)")
    length = int(_PREFIX.unpack_from(data)[4])
    if length % BLOCK or not BLOCK <= length <= MAX_HEADER_BYTES:
        raise DamagedFileError(f"header length {length}")
    return length


def parse_name(file: str) -> PageName | None:
    """The page file that has this file name, or None when it is no page file's."""
    match = _NAME.fullmatch(file)
    if match is None or int(match[3]) >= int(match[4]):
        return None
    share = Share(int(match[3]), int(match[4]))
    return PageName(bytes.fromhex(match[1]), bytes.fromhex(match[2]), share)


def check_names(namespace: bytes, keys: tuple[bytes, ...] | list[bytes]) -> None:
    """Refuse, by a ValueError, what is no namespace (16 bytes) or key (32 bytes)."""
    _check_bytes("namespace", namespace, NAMESPACE_BYTES)
    if {*map(type, keys)} <= {bytes} and {*map(len, keys)} <= {KEY_BYTES}:
        return  # the usual case, for all keys at once
    for key in keys:
        _check_bytes("key", key, KEY_BYTES)


def check_writer(writer: bytes) -> None:
    """Refuse, by a ValueError, what is no writer (8 bytes)."""
    _check_bytes("writer", writer, WRITER_BYTES)


def _check_bytes(what: str, value: bytes, length: int) -> None:
    if not isinstance(value, bytes) or len(value) != length:
        raise ValueError(f"a {what} is {length} bytes, not {value!r}")


@lru_cache(maxsize=256)
def _table(packed: bytes) -> SegmentTable:
    return SegmentTable(tuple(map(Segment._make, PACKED_SEGMENT.iter_unpack(packed))))
