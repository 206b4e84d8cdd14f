"""Which page files to read: those that together have the wanted eighths of a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hcache_backend.store.format import PageName
from hcache_backend.store.index import Entry
from hcache_backend.store.page_files import Wanted
from hcache_backend.store.page_io import PageMemory
from hcache_backend.store.shares import Parts, Share, Subset
from hcache_backend.store.volume import Volume


class Piece(NamedTuple):
    """A page file, and what it is good for.

    Attributes:
        volume: The folder it stands in.
        entry: What the index says of it.
        eighths: Bit mask of the eighths that no other piece of the page is there for.
    """

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

    Files of large shares are taken before those of small ones, so that few files are read.

    Args:
        eighths: Bit mask of the wanted eighths.
        counts: Asked about a file before it is taken.
    """
    missing = [eighths] * len(keys)
    found: list[list[Piece]] = [[] for _ in keys]
    for volume in volumes:
        numbers = [number for number, mask in enumerate(missing) if mask]
        if not numbers:
            break
        listed = volume.lookup(namespace, [keys[number] for number in numbers])
        for number, records in zip(numbers, listed, strict=True):
            for record in sorted(records, key=lambda record: record.share.of):
                useful = record.share.eighths & missing[number]
                entry = Entry(namespace, keys[number], record)
                if useful and counts(volume, entry.name):
                    found[number].append(Piece(volume, entry, useful))
                    missing[number] &= ~useful
    return [[] if mask else pieces for mask, pieces in zip(missing, found, strict=True)]


class Read(NamedTuple):
    """A page file on its way to memory.

    Attributes:
        number: Place of the page in the caller's lists.
        volume: The folder it stands in.
        entry: What the index says of it.
        memory: Where it goes.
        wanted: What is wanted of it.
    """

    number: int
    volume: Volume
    entry: Entry
    memory: PageMemory
    wanted: Wanted


def plan_reads(
    volumes: Sequence[Volume],
    namespace: bytes,
    keys: Sequence[bytes],
    pages: Sequence[Parts],
    subset: Subset,
    share: Share,
) -> list[Read]:
    """Which page files to read for a share of pages; pages that are not there are left out."""
    reads = []
    covers = cover(volumes, namespace, keys, subset.eighths & share.eighths)
    for number, pieces in enumerate(covers):
        memory = PageMemory(pages[number], share)
        for order, (volume, entry, eighths) in enumerate(pieces):
            # What every share repeats comes from one file: two would race for its memory.
            wanted = Wanted(subset.segments, eighths, undivided=order == 0)
            reads.append(Read(number, volume, entry, memory, wanted))
    return reads
