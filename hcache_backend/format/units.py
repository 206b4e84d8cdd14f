"""How a page divides, in host memory and in page files alike: segments, groups, units, shards.

- A page is *segments*: its header, then of each layer the hidden states, or K and then V.
- A segment is *groups* of equal length: hidden states divide into eighths of the tokens, K and V
  into groups of heads. Inside a group rows follow each other token by token. Tensor-parallel ranks
  hold whole groups: the eighths that stand for a group say which ranks have it.
- A group is *units*: equal runs of tokens, of at most 65,536 values. A unit is the smallest part of
  a page that is verified, encoded and read alone. Its digest is an xxh3-64: a page has hundreds of
  units, none of which needs another, so a GPU can compute their digests side by side.
"""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple, Self

import xxhash

EIGHTHS, ALL_EIGHTHS = 8, 0b11111111
SHARD_COUNTS = (1, 2, 4, 8)
"""Numbers of shards that a page may have, and of groups that a segment may have."""
UNIT_VALUES = 65536  # most values of a unit, unless a single row has more
PACKED_SEGMENT = struct.Struct("<IHH")
"""A :class:`Segment` in the headers of pages and of page files."""

Eighths = int  # a part of a page: bit ``e`` stands for its eighth ``e``. Every shard is such a part
Parts = Sequence[memoryview]
"""The memory of one page: one or more writable byte views that follow each other in the page."""


class Shard(NamedTuple):
    """Shard ``number`` of ``of`` shards of a page (tensor-parallel rank of size). ``of`` divides 8.
    Shard (1, 4) holds the eighths 2 and 3: the second quarter of the tokens of hidden states, and
    the second quarter of the heads of K and V."""

    number: int
    of: int

    @property
    def eighths(self) -> Eighths:
        width = EIGHTHS // self.of
        return ((1 << width) - 1) << (width * self.number)


WHOLE = Shard(0, 1)


class Segment(NamedTuple):
    """One stretch of a page: its header, or hidden states, K or V of one layer.

    Group ``g`` stands in every shard that has one of the eighths from ``8 * g / groups`` up to
    ``8 * (g + 1) / groups``. So a single group stands in every shard.
    """

    length: int  # bytes in the whole page
    groups: int = 1  # one after the other: 1, 2, 4 or 8
    pieces: int = 1  # units per group

    def length_in(self, shard: Shard) -> int:
        """Bytes of the groups that stand in ``shard``."""
        return self.length // self.groups * max(1, self.groups // shard.of)


@dataclass(frozen=True)
class SegmentTable:
    """How a page divides into segments; raises ValueError if one does not divide as it says."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        for number, (length, groups, pieces) in enumerate(self.segments):
            if groups not in SHARD_COUNTS:
                raise ValueError(f"segment {number} has {groups} groups; there are 1, 2, 4 or 8")
            if length <= 0 or pieces < 1 or length % (groups * pieces):
                raise ValueError(
                    f"segment {number} has {length} bytes in {groups} groups of {pieces} units; "
                    f"it must be a positive multiple of {groups * max(pieces, 1)}"
                )

    @classmethod
    def of_parts(cls, parts: Parts) -> Self:
        """One undivided segment for every part."""
        return cls(tuple(Segment(part.nbytes) for part in parts if part.nbytes))

    @property
    def page_bytes(self) -> int:
        return sum(segment.length for segment in self.segments)

    @cached_property
    def packed(self) -> bytes:
        return b"".join(PACKED_SEGMENT.pack(*segment) for segment in self.segments)

    def __hash__(self) -> int:
        return self._hash  # tables are looked up for every page

    @cached_property
    def _hash(self) -> int:
        return hash(self.segments)


class Unit(NamedTuple):
    """One unit of a page, and of the payload of a shard: the shard's units in the order of the
    page, with nothing between them, which is the page that a rank holds."""

    segment: int  # its number
    eighths: Eighths  # that stand for its group
    page_offset: int  # in the whole page
    payload_offset: int  # in the payload
    length: int  # bytes


@lru_cache(maxsize=256)
def units_of(table: SegmentTable, shard: Shard = WHOLE) -> tuple[Unit, ...]:
    """The units in ``shard`` of a page, in its order: of the groups of which it has an eighth."""
    units = []
    page_offset = payload_offset = 0
    for number, (length, groups, pieces) in enumerate(table.segments):
        size = length // (groups * pieces)  # bytes of a unit
        for group in range(groups):
            eighths = Shard(group, groups).eighths  # that stand for the group
            for _ in range(pieces):
                if eighths & shard.eighths:
                    units.append(Unit(number, eighths, page_offset, payload_offset, size))
                    payload_offset += size
                page_offset += size
    return tuple(units)


def units_per_group(tokens: int, values: int) -> int:
    """Number of units of a group of ``tokens`` rows of ``values`` values."""
    fits = (n for n in range(1, tokens) if tokens % n == 0 and tokens // n * values <= UNIT_VALUES)
    return next(fits, tokens)


def digest(pieces: Parts) -> int:
    """The xxh3-64 of a unit whose bytes are ``pieces``, in order."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return hasher.intdigest()


class PageMemory:
    """The memory of a shard of one page, addressed by offsets in the payload of the shard.
    ``digests``: those of all units of the shard; None if they have to be computed."""

    def __init__(
        self, parts: Parts, shard: Shard = WHOLE, digests: Sequence[int] | None = None
    ) -> None:
        self.shard, self.digests = shard, digests
        self.parts = [part for part in parts if part.nbytes]
        self.length = sum([part.nbytes for part in self.parts])

    def pieces(self, start: int, length: int) -> list[memoryview]:
        """Views of ``length`` bytes of the payload from ``start`` on, one of each part involved."""
        if len(self.parts) == 1:
            return [self.parts[0][start : start + length]]
        pieces, end = [], start + length
        number = bisect_right(self._ends, start)  # of the part that has byte ``start``
        while start < end:
            part = self.parts[number]
            begin = start - (self._ends[number] - part.nbytes)
            pieces.append(part[begin : begin + end - start])
            start, number = start + pieces[-1].nbytes, number + 1
        return pieces

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(part.nbytes for part in self.parts))

    def digests_of(self, units: Sequence[Unit]) -> tuple[int, ...]:
        """The digests of ``units`` (of this shard), computed from the memory as it is now."""
        if len(self.parts) == 1:
            [part] = self.parts
            return tuple(digest([part[start : start + size]]) for _, _, _, start, size in units)
        return tuple(digest(self.pieces(unit.payload_offset, unit.length)) for unit in units)
