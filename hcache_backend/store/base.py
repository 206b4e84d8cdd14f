"""What a page store is to the rest of the system.

A store maps ``(namespace, key)`` to the bytes of a page. It knows nothing of torch, of SGLang or of
what the bytes mean. It never returns wrong bytes: a page is read back whole and verified, or it is
a miss; and it never raises for a page that is missing, damaged or unwritable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Parts = Sequence[memoryview]
"""The memory of one page, as one or more writable byte views that follow each other on disk."""


@dataclass
class StoreStats:
    """Counters since the store was opened."""

    pages_written: int = 0
    bytes_written: int = 0
    pages_read: int = 0
    bytes_read: int = 0
    misses: int = 0
    bad_pages: int = 0
    write_errors: int = 0
    read_errors: int = 0


class PageStore(Protocol):
    """A local L3. All methods may be called from several threads."""

    stats: StoreStats

    def exists(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        """Whether each page is there (it may still turn out to be damaged when read)."""
        ...

    def put(self, namespace: bytes, keys: Sequence[bytes], pages: Sequence[Parts]) -> list[bool]:
        """Store pages; False for a page that could not be written.

        When it returns, the memory of ``pages`` may change.
        """
        ...

    def get(self, namespace: bytes, keys: Sequence[bytes], pages: Sequence[Parts]) -> list[bool]:
        """Read pages into the given memory, whose length must be that of the stored page.

        False is a miss; the memory of that page then holds anything.
        """
        ...

    def drop_writer(self, namespace: bytes, writer: bytes) -> int:
        """Delete the pages that the server run ``writer`` (8 bytes) wrote; returns how many."""
        ...

    def clear(self, namespace: bytes) -> None:
        """Delete all pages of a namespace."""
        ...

    def close(self) -> None:
        """Release what the store holds; calling it again does nothing."""
        ...
