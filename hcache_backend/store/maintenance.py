"""Maintenance of a folder: syncs, its return, and recovery: page files against the index.

The index lacks files if it was lost, and perhaps after the machine went down: its last commit may
then be undone. Recovery goes on beside live stores. It raises OSError or sqlite3.Error.
"""

import mmap
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import PageName, parse_name
from hcache_backend.format.file import DamagedFileError
from hcache_backend.format.units import PageMemory
from hcache_backend.store.disk import Disk
from hcache_backend.store.eviction import Recency
from hcache_backend.store.folder import Folder, PageRead
from hcache_backend.store.index import Entry
from hcache_backend.store.stats import logger

_LOCK_SECONDS = 30.0
_PAUSE_SECONDS = 1.0
_RECENCY_SECONDS = 5.0


def maintain(disk: Disk, recency: Recency, config: HCacheConfig, stopping: threading.Event) -> None:
    """A thread's work until ``stopping``: look after ``disk``, sync it, save the last uses."""
    next_save = time.monotonic()
    while not stopping.wait(_PAUSE_SECONDS):
        try:
            now = time.monotonic()
            disk.look_after()
            if config.durability == "batch" and disk.dirty:
                disk.flush()
            if now >= next_save:
                recency.save()
                disk.report_room()
                next_save = now + _RECENCY_SECONDS
            _recover(disk, stopping)
        except Exception:
            disk.note_problem("maintenance", f"maintenance failed: {traceback.format_exc()}")


def _recover(disk: Disk, stopping: threading.Event) -> None:
    """Enter unknown page files in the index, if it may lack some; an error is tried again later."""
    try:
        with disk.use() as folder:
            if not folder.index_is_partial:
                return
            unknown = find_unknown_files(folder, adopt=True, stop=stopping.is_set)
            if not stopping.is_set():
                folder.mark_index_complete()
            counts = f"{unknown.adopted} pages found, {len(unknown.damaged)} files not usable"
            logger.info(f"hcache: {disk.path}: the index was completed: {counts}")
    except (OSError, sqlite3.Error) as error:
        disk.note_failure("recovery", error)


@dataclass
class Unknown:
    """Files that the index does not know: sound pages, adopted or not, and others (path, reason)"""

    adopted: int = 0
    pages: list[PageName] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Findings:
    """The result of :func:`verify_folder`: sound page files and their bytes, and the problems."""

    pages: int = 0
    bytes: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)  # page files: path and reason
    missing: list[str] = field(default_factory=list)  # entries without file
    unknown: list[tuple[str, str]] = field(default_factory=list)  # files that have no entry
    index: list[str] = field(default_factory=list)  # inconsistencies of the index
    repaired: int = 0  # problems that were mended

    @property
    def problems(self) -> int:
        return len(self.damaged) + len(self.missing) + len(self.unknown) + len(self.index)


def find_unknown_files(
    folder: Folder,
    *,
    adopt: bool,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, buckets: None,
) -> Unknown:
    """Look for files that the index does not know, bucket by bucket, until ``stop()``. ``adopt``:
    enter the sound ones, with their time of writing as last use. Headers are verified here,
    payloads when pages are read. ``progress`` gets the numbers of buckets done, and of all."""
    result = Unknown()
    buckets = folder.bucket_names()
    for done, bucket in enumerate(buckets, start=1):
        if stop():
            break
        parsed = {file: parse_name(file) for file in folder.files_in(bucket)}
        known = folder.index.known_names(name for name in parsed.values() if name is not None)
        names = []
        for file, name in parsed.items():
            if name is None:
                result.damaged.append((f"{bucket}/{file}", "its name is no page file's"))
            elif name not in known and name.bucket != bucket:
                result.damaged.append((f"{bucket}/{file}", "it stands in the wrong folder"))
            elif name not in known:
                names.append(name)
        for batch in folder.lock.batches(names):
            # Under the lock nothing evicts or replaces the file between look and entry.
            with folder.lock.hold(_LOCK_SECONDS, batch=len(batch)):
                entries = _read_entries(folder, batch, result)
                if adopt:
                    folder.index.insert(entries)
                    result.adopted += len(entries)
                else:  # a page may have been stored since the index was read
                    known = folder.index.known_names(entry.name for entry in entries)
                    result.pages += [e.name for e in entries if e.name not in known]
        progress(done, len(buckets))
    return result


def verify_folder(
    folder: Folder,
    *,
    repair: bool = False,
    progress: Callable[[int, int], None] = lambda done, pages: None,
) -> Findings:
    """Read and verify the index and every page file of a folder. ``repair``: delete damaged files,
    known or unknown, and entries without file; the folder must not be open read-only. Unknown sound
    files stay: a rebuild enters them. ``progress`` gets the numbers of pages done, and of all."""
    findings = Findings(index=folder.index.check())
    total = folder.index.totals().files
    for done, entry in enumerate(folder.index.entries(), start=1):
        _verify_entry(folder, entry, findings, repair)
        progress(done, max(total, done))
    unknown = find_unknown_files(folder, adopt=False)
    pages = [(f"{name.bucket}/{name.file}", "a page file") for name in unknown.pages]
    findings.unknown = pages + unknown.damaged
    for path, _ in unknown.damaged if repair else ():
        bucket, _, file = path.partition("/")
        with (
            folder.lock.hold(_LOCK_SECONDS),
            folder.buckets.opened(bucket) as bucket_fd,
            suppress(IsADirectoryError),  # somebody's folder
        ):
            folder.ops.unlink(file, bucket_fd)
            findings.repaired += 1
    return findings


def _verify_entry(folder: Folder, entry: Entry, findings: Findings, repair: bool) -> None:
    """Verify a page file: count it in ``findings``, or its problem; ``repair`` deletes the page."""
    name = entry.name
    path = f"{name.bucket}/{name.file}"
    payload = memoryview(mmap.mmap(-1, max(entry.payload_bytes, 1)))[: entry.payload_bytes]
    memory = PageMemory([payload], name.shard)
    try:
        folder.read_page(PageRead(0, entry, name.shard.eighths, memory))  # 0: any number
    except (DamagedFileError, OSError) as error:
        if name not in folder.index.known_names([name]):
            return  # a live server has evicted the page meanwhile
        if isinstance(error, FileNotFoundError):
            findings.missing.append(path)
        else:
            findings.damaged.append((path, str(error)))
        if repair:
            with folder.lock.hold(_LOCK_SECONDS), suppress(OSError):
                folder.delete_page(name)
                folder.index.remove([name])
                findings.repaired += 1
    else:
        findings.pages += 1
        findings.bytes += entry.file_bytes


def _read_entries(folder: Folder, names: Sequence[PageName], result: Unknown) -> list[Entry]:
    """Entries for page files that the index still does not know; damaged ones go to ``result``."""
    entries = []
    known = folder.index.known_names(names)
    for name in names:
        if name in known:
            continue
        try:
            with suppress(FileNotFoundError):
                entries.append(folder.entry_of(name))
        except (DamagedFileError, OSError) as error:
            result.damaged.append((f"{name.bucket}/{name.file}", str(error)))
    return entries
