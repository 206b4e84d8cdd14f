"""Shares of pages, and the segments that pages divide into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Parts = Sequence[memoryview]
"""The memory of one page: one or more writable byte views that follow each other in the page."""

EIGHTHS = 8
"""Pages divide into eighths of their tokens; shares are made of whole eighths."""

ALL_EIGHTHS = (1 << EIGHTHS) - 1


class Share(NamedTuple):
    """Share ``number`` of ``of`` shares of the tokens of a page (tensor-parallel rank of size).

    ``of`` divides 8. Share (1, 4) holds the second quarter of the tokens, that is the eighths
    2 and 3.
    """

    number: int
    of: int

    @property
    def eighths(self) -> int:
        """Bit mask of the eighths in this share."""
        width = EIGHTHS // self.of
        return ((1 << width) - 1) << (width * self.number)


WHOLE = Share(0, 1)


class Segment(NamedTuple):
    """One stretch of a page, usually a layer segment.

    Attributes:
        length: Bytes.
        planes: How many token-major runs it consists of: 1 for hidden states ``[tokens, hidden]``,
            2 for K and V ``[2, tokens, heads, dim]``, 0 when it does not divide by tokens (a page
            header); then every share repeats it.
    """

    length: int
    planes: int


@dataclass(frozen=True)
class SegmentTable:
    """How a page divides into segments; every segment is verified on its own.

    Raises:
        ValueError: A divided segment whose length is no multiple of 8 * planes bytes.
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        for number, (length, planes) in enumerate(self.segments):
            if length <= 0 or planes < 0 or (planes and length % (EIGHTHS * planes)):
                raise ValueError(
                    f"segment {number} has {length} bytes in {planes} planes; it must be a "
                    f"positive multiple of {EIGHTHS * max(planes, 1)}"
                )

    @classmethod
    def of_parts(cls, parts: Parts) -> SegmentTable:
        """One undivided segment for every part."""
        return cls(tuple(Segment(part.nbytes, 0) for part in parts if part.nbytes))

    @property
    def page_bytes(self) -> int:
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True)
class Subset:
    """The part of a page that a caller wants.

    Attributes:
        segments: Numbers of the wanted segments; None means all.
        eighths: Bit mask of the wanted eighths of the tokens.
        undivided: Whether segments that do not divide by tokens are wanted, too.
    """

    segments: frozenset[int] | None = None
    eighths: int = ALL_EIGHTHS
    undivided: bool = True
