"""Which page files together have what is wanted of pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hcache_backend.format.envelope import PageName
from hcache_backend.store.index import Entry
from hcache_backend.store.volume import Volume


class Piece(NamedTuple):
    """A page file, and the eighths that no other piece of the page is there for (bit mask)."""

    volume: Volume
    entry: Entry
    eighths: int


def cover(
    volumes: Sequence[Volume],
    namespace: bytes,
    keys: Sequence[bytes],
    eighths: int,
    counts: Callable[[Volume, PageName], bool] = lambda volume, name: True,
) -> list[list[Piece]]:
    """For every page the files that together have ``eighths``; none where some are missing.

    Files of large shares are taken before those of small ones, so that few files are read. A file
    that ``counts`` denies is not taken.
    """
    missing = [eighths] * len(keys)
    found: list[list[Piece]] = [[] for _ in keys]
    for volume in volumes:
        numbers = [number for number, mask in enumerate(missing) if mask]
        if not numbers:
            break
        listed = volume.lookup(namespace, [keys[number] for number in numbers])
        for number, entries in zip(numbers, listed, strict=True):
            if len(entries) > 1:
                entries.sort(key=lambda entry: entry.name.share.of)
            for entry in entries:
                useful = entry.name.share.eighths & missing[number]
                if useful and counts(volume, entry.name):
                    found[number].append(Piece(volume, entry, useful))
                    missing[number] &= ~useful
    return [[] if mask else pieces for mask, pieces in zip(missing, found, strict=True)]
