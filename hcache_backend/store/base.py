"""What a page store is to the rest of the system.

A store maps ``(namespace, key)`` to the bytes of a page. It knows nothing of torch, of SGLang or of
what the bytes mean. It never returns wrong bytes: what is read back is verified, or it is a miss;
and it never raises for a page that is missing, damaged or unwritable.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

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
    """

    segments: frozenset[int] | None = None
    eighths: int = ALL_EIGHTHS


@dataclass
class StoreStats:
    """Counters since the store was opened (all but ``lock`` are counters)."""

    pages_written: int = 0
    bytes_written: int = 0
    pages_read: int = 0
    bytes_read: int = 0
    misses: int = 0
    bad_pages: int = 0
    write_errors: int = 0
    read_errors: int = 0
    index_errors: int = 0
    sync_errors: int = 0
    evict_errors: int = 0
    pages_already_stored: int = 0
    pages_dropped_full: int = 0
    pages_dropped_late: int = 0
    pages_dropped_offline: int = 0
    pages_evicted: int = 0
    bytes_evicted: int = 0
    bytes_copied: int = 0
    folders_lost: int = 0
    syncs: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **increments: int) -> None:
        """Add to counters by name."""
        with self.lock:
            for name, increment in increments.items():
                setattr(self, name, getattr(self, name) + increment)

    def snapshot(self) -> dict[str, int]:
        """All counters by name."""
        with self.lock:
            return {name: value for name, value in vars(self).items() if isinstance(value, int)}


class PageStore(Protocol):
    """A local L3. All methods may be called from several threads and processes."""

    stats: StoreStats

    def exists(
        self, namespace: bytes, keys: Sequence[bytes], *, share: Share = WHOLE
    ) -> list[bool]:
        """Whether the share of each page is there, in files of whatever shares.

        It may still turn out to be damaged when it is read.
        """
        ...

    def put(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        pages: Sequence[Parts],
        *,
        share: Share = WHOLE,
        table: SegmentTable | None = None,
    ) -> list[bool]:
        """Store a share of pages; False for a page that was not stored (the counters say why).

        When it returns, the memory of ``pages`` may change. What is there already, in files of
        whatever shares, is not written again.

        Args:
            namespace: 16 bytes.
            keys: 32 bytes each, in the order of the sequence: neighbours go to different folders.
            pages: The memory of the payload of the share: segments that do not divide, and of the
                others the blocks of the share's eighths, in the order of the page, with nothing
                between. The payload of the whole page is the page.
            share: The tokens of every page that the caller has.
            table: How the whole page divides; a must for shares and for reading parts of a layer.
                Without it every part is one segment.

        Raises:
            ValueError: Names of a wrong length, no such share, a share without a table, or memory
                of another length than that of the payload.
        """
        ...

    def get(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        pages: Sequence[Parts],
        *,
        subset: Subset | None = None,
        share: Share = WHOLE,
    ) -> list[bool]:
        """Read a share of pages, from files of whatever shares.

        False is a miss; the memory of that page then holds anything. With ``subset`` only the
        memory of the wanted segments and eighths is written. Where neither the share nor the
        subset leaves an eighth, there is nothing to be had: a miss.

        Args:
            namespace: 16 bytes.
            keys: 32 bytes each.
            pages: The memory of the payload of the share (see :meth:`put`), of just that length.
            subset: What is wanted of the share; None means all.
            share: The tokens of every page that the caller has memory for.

        Raises:
            ValueError: Names of a wrong length, or no such share.
        """
        ...

    def drop_writer(self, namespace: bytes, writer: bytes) -> int:
        """Delete the pages that the server run ``writer`` (8 bytes) wrote; returns how many."""
        ...

    def clear(self, namespace: bytes) -> None:
        """Delete all pages of a namespace."""
        ...

    def flush(self) -> bool:
        """Bring everything that was put to the disks; False when a disk refused."""
        ...

    def close(self) -> None:
        """Release what the store holds; calling it again does nothing."""
        ...
