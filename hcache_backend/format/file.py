"""Page files, format version 2: header and payload of one shard of one page.

- The header begins as every form of a page does (:mod:`.envelope`). It says how the page divides,
  and has the xxh3-64 of every unit, so that each can be read and verified alone. Its checksum is
  over all of it but the checksum.
- The payload is the shard's units in the order of the page, with nothing between them. That of
  shard 0 of 1 is the page, that of another shard the page of the rank that wrote it. Zeros follow
  it up to a multiple of 4096 bytes.
- A reader believes a file only if length, magic, version, shard, namespace, key and digests agree.
- Paths are ``pages/<first two digits of the key>/<namespace>.<key>.<shard>of<shards>.page``, in
  hexadecimal digits.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import xxhash

from hcache_backend.format import units as page_units
from hcache_backend.format.envelope import BLOCK, CHECKSUM, PageName, check_shard, round_up
from hcache_backend.format.units import Eighths, PageMemory, Segment, SegmentTable, Shard, Unit

MAGIC = b"HCPF"
VERSION = 2
MAX_HEADER_BYTES = 1 << 20

# The header: prefix, checksum, fields, every segment (bytes in the whole page, groups, units per
# group), and the xxh3-64 of every unit (8 bytes each) in the order of the file.
_PREFIX = struct.Struct("<4sHBBII")
"""Magic, version, shard number, shard count, header bytes, number of segments."""
_FIELDS = struct.Struct("<16s32s8sQQII")
"""Namespace, key, writer, payload bytes of this shard, bytes of the page, number of units, 0."""
_SEGMENTS_AT = CHECKSUM.stop + _FIELDS.size


class DamagedFileError(Exception):
    """A file is not the page file that it should be; the message says what is wrong. ``status``:
    that of the file, if one was opened."""

    status: os.stat_result | None = None


@dataclass(frozen=True)
class FileLayout:
    """The layout of the file of a shard of a page that divides by ``table``."""

    table: SegmentTable
    header_bytes: int
    payload_bytes: int
    units: tuple[Unit, ...]

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + round_up(self.payload_bytes)

    def check(self, memory: PageMemory) -> None:
        """Raise ValueError unless ``memory`` has the payload's bytes, and no digests or all."""
        digests = len(self.units) if memory.digests is None else len(memory.digests)
        if (self.payload_bytes, len(self.units)) != (memory.length, digests):
            shard = f"shard {memory.shard.number} of {memory.shard.of}"
            raise ValueError(
                f"memory of {memory.length} bytes and {digests} digests for {shard} of a page; by "
                f"its table it has {self.payload_bytes} and {len(self.units)}"
            )


class Header(NamedTuple):
    name: PageName
    writer: bytes
    layout: FileLayout
    digests: tuple[int, ...]


@lru_cache(maxsize=256)
def file_layout(table: SegmentTable, shard: Shard) -> FileLayout:
    """The layout of the file of ``shard`` of a page; a ValueError if there is no such shard."""
    check_shard(shard)
    units = page_units.units_of(table, shard)
    used = _SEGMENTS_AT + page_units.PACKED_SEGMENT.size * len(table.segments) + 8 * len(units)
    payload_bytes = sum(segment.length_in(shard) for segment in table.segments)
    return FileLayout(table, round_up(used), payload_bytes, units)


def pack_header(
    target: memoryview, name: PageName, writer: bytes, layout: FileLayout, digests: Sequence[int]
) -> None:
    """Write a header into ``target`` (``header_bytes``); ``digests``: the xxh3-64 of all units."""
    namespace, key, shard = name
    table = layout.table
    sizes = (layout.payload_bytes, table.page_bytes)
    prefix = _PREFIX.pack(MAGIC, VERSION, *shard, layout.header_bytes, len(table.segments))
    fields = _FIELDS.pack(namespace, key, writer, *sizes, len(digests), 0)
    units = struct.pack(f"<{len(digests)}Q", *digests)
    body = (fields + table.packed + units).ljust(layout.header_bytes - CHECKSUM.stop, b"\0")
    target[:] = prefix + xxhash.xxh3_128_digest(prefix + body) + body


def parse_header(data: memoryview) -> Header:
    """The header at the beginning of ``data``; a DamagedFileError unless it verifies."""
    header = bytes(data[: header_length(data)])
    _, version, number, shards, _, segment_count = _PREFIX.unpack_from(header)
    if version != VERSION:
        raise DamagedFileError(f"format version {version}; this is version {VERSION}")
    rest = header[: CHECKSUM.start] + header[CHECKSUM.stop :]
    if xxhash.xxh3_128_digest(rest) != header[CHECKSUM]:
        raise DamagedFileError("header checksum")
    # From here on the bytes are what a writer meant.
    namespace, key, writer, _, _, unit_count, _ = _FIELDS.unpack_from(header, CHECKSUM.stop)
    end = _SEGMENTS_AT + page_units.PACKED_SEGMENT.size * segment_count
    shard = Shard(number, shards)
    try:
        check_shard(shard)
        table = _table(header[_SEGMENTS_AT:end])
        # Counted before ``file_layout`` lists the units: a sound header may claim billions.
        units = sum(s.pieces * max(1, s.groups // shards) for s in table.segments)
        digests = struct.unpack_from(f"<{unit_count}Q", header, end)
        if units != unit_count:
            raise ValueError(f"{units} units and {unit_count} digests")
        layout = file_layout(table, shard)
    except (ValueError, struct.error) as error:
        raise DamagedFileError(f"impossible header: {error}") from None
    return Header(PageName(namespace, key, shard), writer, layout, digests)


def header_length(data: memoryview) -> int:
    """Bytes of the header, by its start ``data``; a DamagedFileError if no page file begins so."""
    if len(data) < _PREFIX.size or bytes(data[:4]) != MAGIC:
        raise DamagedFileError("no page file (magic)")
    length = int(_PREFIX.unpack_from(data)[4])
    if length % BLOCK or not BLOCK <= length <= MAX_HEADER_BYTES:
        raise DamagedFileError(f"header length {length}")
    return length


@lru_cache(maxsize=256)
def _table(packed: bytes) -> SegmentTable:
    return SegmentTable(tuple(map(Segment._make, page_units.PACKED_SEGMENT.iter_unpack(packed))))


class Run(NamedTuple):
    """Units that follow each other in a file: one reading."""

    offset: int  # in the file
    stretches: list[tuple[int, int]]  # start and length of the memory that they go to, few of them
    numbers: list[int]  # among the file's units
    units: list[Unit]  # with the offsets of the memory


@lru_cache(maxsize=256)
def runs_between(
    table: SegmentTable, shard: Shard, target: Shard, part: Eighths
) -> tuple[int, list[Run]]:
    """Number of bytes, and runs, by which the file of ``shard`` fills ``part`` of the memory of
    ``target``. A group in several files comes from that whose part has its first eighth."""
    layout, wanted = file_layout(table, shard), file_layout(table, target).units
    target_offsets = {unit.page_offset: unit.payload_offset for unit in wanted}  # in the memory
    runs: list[Run] = []
    total = end = 0  # end: of the last unit taken, in the file's payload
    for number, unit in enumerate(layout.units):
        eighths = unit.eighths & target.eighths
        if not eighths & -eighths & part:  # the first of its eighths is in another file's part
            continue
        if not runs or end != unit.payload_offset:
            runs.append(Run(layout.header_bytes + unit.payload_offset, [], [], []))
        _, stretches, numbers, units = runs[-1]
        end = unit.payload_offset + unit.length
        offset = target_offsets[unit.page_offset]
        if stretches and sum(stretches[-1]) == offset:  # the memory goes on, too
            start, length = stretches[-1]
            stretches[-1] = (start, length + unit.length)
        else:
            stretches.append((offset, unit.length))
        numbers.append(number)
        units.append(unit._replace(payload_offset=offset))
        total += unit.length
    return total, runs
