"""Which page files together have the eighths of pages that are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hcache_backend.store.index import Record
from hcache_backend.store.volume import Name, Volume


class Piece(NamedTuple):
    """A page file, and what it is good for.

    Attributes:
        place: Which of the folders it stands in.
        record: What the index says of it.
        eighths: Bit mask of the eighths that no other piece of the page is there for.
    """

    place: int
    record: Record
    eighths: int


def cover(
    volumes: Sequence[Volume],
    namespace: bytes,
    keys: Sequence[bytes],
    eighths: int,
    counts: Callable[[Volume, Name], bool] = lambda volume, name: True,
) -> list[list[Piece]]:
    """For every page the files that together have ``eighths``; none where some are missing.

    Files of large shares are taken before those of small ones, so that few files are read.

    Args:
        eighths: Bit mask of the wanted eighths.
        counts: Asked about a file before it is taken.
    """
    missing = [eighths] * len(keys)
    found: list[list[Piece]] = [[] for _ in keys]
    for place, volume in enumerate(volumes):
        numbers = [number for number, mask in enumerate(missing) if mask]
        if not numbers:
            break
        listed = volume.lookup(namespace, [keys[number] for number in numbers])
        for number, records in zip(numbers, listed, strict=True):
            for record in sorted(records, key=lambda record: record.share.of):
                useful = record.share.eighths & missing[number]
                if useful and counts(volume, (namespace, keys[number], record.share)):
                    found[number].append(Piece(place, record, useful))
                    missing[number] &= ~useful
    return [[] if mask else pieces for mask, pieces in zip(missing, found, strict=True)]
