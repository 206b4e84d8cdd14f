"""When pages were last used: the ends of sequences go before what stands before them.

Time is the store's *access epoch*, in nanoseconds: wall time when a store is opened, or later if
pages have later stamps, and from then on as much as the machine runs. It never steps back, also if
the clock does: what is used later has a later stamp, in every process that has the folders open.

A page is worth something only while every page before it in its sequence is there, so a use counts
for a sequence from its first page on. The stamp of page ``i`` of a sequence is its *level* minus
``i``, in nanoseconds. A level is the epoch of a use, and levels never rise along a sequence. So the
least recently used pages of every folder are ends of sequences, and one sequence is gone before the
next one loses a page. Ranks that store their shares of a page at one time give them different
levels; a use makes them one.

A page whose level is young keeps it: less than 1/16 of the age of the oldest page that the folders
hold. That bounds how often a page that is used all the time is written to the index.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from hcache_backend.format.envelope import PageName
from hcache_backend.store.volume import Volume

_YOUNG = 16
_FURTHER = 1_000_000
_PENDING_AT_MOST = 1 << 20
"""Keys of uses that wait to be saved; more in one interval are not noted."""


class _Use(NamedTuple):
    """A sequence was used up to the last of ``keys``, at ``time`` (access epoch)."""

    namespace: bytes
    keys: Sequence[bytes]
    time: int


class Recency:
    """The uses of a store's pages, which its ``volumes`` learn now and then. Any thread."""

    def __init__(self, volumes: Sequence[Volume]) -> None:
        self._volumes = volumes
        self._lock = threading.Lock()
        self._pending: dict[tuple[bytes, bytes], _Use] = {}
        self._pending_keys = 0
        self._saving = threading.Lock()
        self._epoch_behind = 0  # what is to be added to the machine's own time
        self._follow(time.time_ns())
        self._young()

    def note(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """The pages ``keys`` of a sequence, from its first one on, are being used. Never waits.

        Keys but the last are read when the use is saved, by another thread.
        """
        if keys:
            self._note(_Use(namespace, keys, self._now()))

    def note_new(
        self, namespace: bytes, prefix: Sequence[bytes], keys: Sequence[bytes]
    ) -> list[int]:
        """Pages ``keys`` behind those of ``prefix`` are about to be stored; returns their stamps.

        They and those of them that are there are being used.
        """
        with self._saving:
            young = self._young()
            now = self._now()
            level, start, used = now, 0, 0
            if prefix:
                [last] = self._levels(namespace, prefix[-1:], len(prefix) - 1)
                if last and min(last) >= young:  # then so are those before it
                    level, start = min(level, *last), len(prefix)
            stamps = []
            sequence = [*prefix[start:], *keys]
            for place, found in enumerate(self._levels(namespace, sequence, start), start):
                if found and min(found) >= young:
                    level = min(level, *found)
                elif found:
                    used = place + 1
                if place >= len(prefix):
                    stamps.append(level - place)
            if used:
                self._note(_Use(namespace, [*prefix, *keys][:used], now))
            return stamps

    def save(self) -> None:
        """Tell the index of each folder which pages were used."""
        with self._saving:
            with self._lock:
                uses, self._pending, self._pending_keys = self._pending, {}, 0
            young = self._young() if uses else 0
            changes: list[dict[PageName, int]] = [{} for _ in self._volumes]
            for use in uses.values():
                self._apply(use, young, changes)
            for volume, change in zip(self._volumes, changes, strict=True):
                if change:
                    volume.set_stamps(change)

    def _note(self, use: _Use) -> None:
        with self._lock:
            if self._pending_keys < _PENDING_AT_MOST:
                self._pending[use.namespace, use.keys[-1]] = use
                self._pending_keys += len(use.keys)

    def _apply(self, use: _Use, young: int, changes: Sequence[dict[PageName, int]]) -> None:
        """Note in ``changes``, one for each volume, what a use changes."""
        namespace, level = use.namespace, use.time
        [last] = self._levels(namespace, use.keys[-1:], len(use.keys) - 1)
        if len(last) == 1 and min(last) >= young:
            return
        keys = list(use.keys)
        files = [volume.lookup(namespace, keys) for volume in self._volumes]
        for place in range(len(keys)):
            entries = [
                (change, entry)
                for change, found in zip(changes, files, strict=True)
                for entry in found[place]
            ]
            levels = {entry.stamp + place for _, entry in entries}
            if len(levels) == 1 and min(levels) >= young:
                level = min(level, *levels)
                continue
            newest = max(levels, default=0)  # the shares of a page are of use together only
            for change, entry in entries:
                stamp = max(max(level, newest) - place, change.get(entry.name, 0))
                if stamp > entry.stamp:
                    change[entry.name] = stamp

    def _levels(self, namespace: bytes, keys: Sequence[bytes], first: int) -> list[set[int]]:
        """The levels of the files of consecutive pages from page ``first`` on; none: not there."""
        found: list[set[int]] = [set() for _ in keys]
        for volume in self._volumes:
            for i, entries in enumerate(volume.lookup(namespace, keys)):
                found[i].update(entry.stamp + first + i for entry in entries)
        return found

    def _now(self) -> int:
        """The access epoch at present."""
        return time.monotonic_ns() + self._epoch_behind

    def _follow(self, epoch: int) -> None:
        """The access epoch is at least ``epoch``."""
        with self._lock:
            self._epoch_behind = max(self._epoch_behind, epoch - time.monotonic_ns())

    def _young(self) -> int:
        """Levels from this one on are young."""
        ends = [stamps for volume in self._volumes if (stamps := volume.stamps()) is not None]
        # Another process may be ahead. A level is its page's stamp and less than a millisecond.
        self._follow(max((last for _, last in ends), default=0) + _FURTHER)
        now = self._now()
        return now - max(0, now - min((first for first, _ in ends), default=now)) // _YOUNG
