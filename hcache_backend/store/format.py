"""Page files, format version 1: header and payload of one share of one page.

- Integers are little-endian; header and file are padded with zeros to multiples of 4096 bytes.
- A segment with 0 planes is one block and stands in every share; one with p planes divides into
  8 * p equal blocks, block ``plane * 8 + eighth``. The payload is the blocks of the share's eighths
  in the order of the page, with nothing between them: that of share 0 of 1 is the page.
- Every block has its xxh3-64 in the header, so that any (segment, eighth) can be read and verified
  alone; the header has an xxh3-128 over all of itself but that digest.
- A reader believes a file only if length, magic, version, share, namespace, key and digests agree.
- Paths are ``pages/<first two digits of the key>/<namespace>.<key>.<index>of<count>.page``, in
  hexadecimal digits: nothing in them comes from text that a caller chose.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import xxhash

from hcache_backend.page import KEY_BYTES, NAMESPACE_BYTES, WRITER_BYTES
from hcache_backend.store.shares import ALL_EIGHTHS, EIGHTHS, Segment, SegmentTable, Share

MAGIC = b"HCPF"
VERSION = 1
BLOCK = 4096
MAX_HEADER_BYTES = 1 << 20
SHARE_COUNTS = (1, 2, 4, 8)

# The header: prefix, digest, fields, every segment, and the xxh3-64 of every block (8 bytes each)
# in the order of the file.
_PREFIX = struct.Struct("<4sHBBII")
"""Magic, version, share number, share count, header bytes, number of segments."""
_DIGEST = slice(16, 32)
"""xxh3-128 of the header but these bytes."""
_FIELDS = struct.Struct("<16s32s8sQQII")
"""Namespace, key, writer, payload bytes of this share, bytes of the page, number of blocks, 0."""
_SEGMENTS = 32 + _FIELDS.size
"""Where the segments begin."""
_SEGMENT = struct.Struct("<IHH")
"""Length, planes, 0."""
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


class Block(NamedTuple):
    """One verifiable stretch of a page file.

    Attributes:
        eighths: Bit mask of the eighths it belongs to.
        page_offset: Where it stands in the page.
        payload_offset: Where it stands in the payload of the file.
    """

    segment: int
    eighths: int
    page_offset: int
    payload_offset: int
    length: int


@dataclass(frozen=True)
class FileLayout:
    """Where things stand in the file of a share."""

    header_bytes: int
    payload_bytes: int
    blocks: tuple[Block, ...]

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + round_up(self.payload_bytes)

    @cached_property
    def payload_offsets(self) -> dict[int, int]:
        """Where in the payload every block begins, by its offset in the page."""
        return {block.page_offset: block.payload_offset for block in self.blocks}


class Header(NamedTuple):
    """The verified header of a page file."""

    name: PageName
    writer: bytes
    table: SegmentTable
    layout: FileLayout
    digests: tuple[int, ...]


def round_up(length: int, unit: int = BLOCK) -> int:
    """``length`` as the next multiple of ``unit``."""
    return -(-length // unit) * unit


@lru_cache(maxsize=256)
def file_layout(table: SegmentTable, share: Share) -> FileLayout:
    """The layout of ``share`` of a page; a ValueError if there is no such share."""
    check_share(share)
    blocks = []
    page_offset = payload_offset = 0
    for number, (length, planes) in enumerate(table.segments):
        size = length // (planes * EIGHTHS) if planes else length
        for position in range(length // size):
            eighths = 1 << (position % EIGHTHS) if planes else ALL_EIGHTHS
            if eighths & share.eighths:
                blocks.append(
                    Block(number, eighths, page_offset + position * size, payload_offset, size)
                )
                payload_offset += size
        page_offset += length
    used = _SEGMENTS + _SEGMENT.size * len(table.segments) + 8 * len(blocks)
    return FileLayout(round_up(used), payload_offset, tuple(blocks))


def check_share(share: Share) -> None:
    """Refuse, by a ValueError, what is no share."""
    if share.of not in SHARE_COUNTS or not 0 <= share.number < share.of:
        raise ValueError(f"share {share.number} of {share.of}: there are 1, 2, 4 or 8")


def pack_header(
    target: memoryview,
    name: PageName,
    writer: bytes,
    table: SegmentTable,
    digest_of: Callable[[Block], int],
) -> None:
    """Write a header into ``target`` (``header_bytes``); ``digest_of`` is a block's xxh3-64."""
    namespace, key, share = name
    layout = file_layout(table, share)
    blocks, sizes = layout.blocks, (layout.payload_bytes, table.page_bytes)
    parts = (
        _PREFIX.pack(MAGIC, VERSION, *share, layout.header_bytes, len(table.segments)),
        bytes(16),
        _FIELDS.pack(namespace, key, writer, *sizes, len(blocks), 0),
        *(_SEGMENT.pack(length, planes, 0) for length, planes in table.segments),
        struct.pack(f"<{len(blocks)}Q", *map(digest_of, blocks)),
    )
    header = b"".join(parts)
    target[: len(header)] = header
    target[len(header) :] = bytes(layout.header_bytes - len(header))
    target[_DIGEST] = _header_digest(target)


def parse_header(data: memoryview) -> Header:
    """The header at the beginning of ``data``; a DamagedFileError unless it verifies."""
    header = data[: header_length(data)]
    _, version, index, count, _, segment_count = _PREFIX.unpack_from(header)
    if version != VERSION:
        raise DamagedFileError(f"format version {version}; this is version {VERSION}")
    if _header_digest(header) != bytes(header[_DIGEST]):
        raise DamagedFileError("header checksum")
    # From here on the bytes are what a writer meant.
    namespace, key, writer, _, _, block_count, _ = _FIELDS.unpack_from(header, 32)
    segments = header[_SEGMENTS : _SEGMENTS + _SEGMENT.size * segment_count]
    table = _table(bytes(segments))
    share = Share(index, count)
    layout = file_layout(table, share)
    digests = struct.unpack_from(f"<{block_count}Q", header, _SEGMENTS + len(segments))
    return Header(PageName(namespace, key, share), writer, table, layout, digests)


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
    return SegmentTable(
        tuple(Segment(length, planes) for length, planes, _ in _SEGMENT.iter_unpack(packed))
    )


def _header_digest(header: memoryview) -> bytes:
    hasher = xxhash.xxh3_128(header[: _DIGEST.start])
    hasher.update(header[_DIGEST.stop :])
    return hasher.digest()
