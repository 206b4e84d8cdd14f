"""Comparing page files with the index, beside live stores, which see adopted pages appear.

The index does not know all files when it was lost, and after the machine went down: its last commit
may then be undone. What raises OSError or sqlite3.Error is a folder or index that cannot be used.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hcache_backend.format.envelope import PageName, parse_name
from hcache_backend.format.file import DamagedFileError
from hcache_backend.format.units import PageMemory
from hcache_backend.store.folder import FolderView
from hcache_backend.store.index import Entry
from hcache_backend.store.page_files import (
    PageRead,
    check_size,
    delete_page,
    open_page,
    read_header,
    read_page,
)

_LOCK_SECONDS = 30.0
_FILES_AT_A_TIME = 128


@dataclass
class Unknown:
    """Files that the index does not know: sound pages, and others (shard folder, name, reason)."""

    pages: list[PageName] = field(default_factory=list)
    damaged: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass
class Findings:
    """What :func:`verify_folder` found: sound page files and their bytes, and the problems.

    Attributes:
        damaged: Page files: path and reason.
        missing: Entries without file.
        unknown: Files that the index does not know: path and reason.
        index: What is wrong inside the index.
        repaired: How many of these problems were mended.
    """

    pages: int = 0
    bytes: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    index: list[str] = field(default_factory=list)
    repaired: int = 0

    @property
    def problems(self) -> int:
        return len(self.damaged) + len(self.missing) + len(self.unknown) + len(self.index)


def find_unknown_files(
    folder: FolderView,
    *,
    adopt: bool,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, shards: None,
) -> Unknown:
    """Look for files that the index does not know.

    Headers are verified here, payloads when they are read.

    Args:
        adopt: Enter the sound ones, with their time of writing as last use; no view allows that.
        stop: Asked now and then whether to end early.
        progress: Told how many shard folders are done, and how many there are.
    """
    result = Unknown()
    shards = folder.shards()
    for done, shard in enumerate(shards, start=1):
        if stop():
            break
        names = []
        with folder.shard(shard) as shard_fd:
            files = folder.ops.list(shard_fd)
        parsed = {file: parse_name(file) for file in files}
        known = folder.index.known(name for name in parsed.values() if name is not None)
        for file, name in parsed.items():
            if name is None:
                result.damaged.append((shard, file, "its name is no page file's"))
            elif name in known:
                continue
            elif name.bucket != shard:
                result.damaged.append((shard, file, "it stands in the wrong folder"))
            else:
                names.append(name)
        for start in range(0, len(names), _FILES_AT_A_TIME):
            # Under the lock nobody evicts or replaces the file between look and entry.
            with folder.lock.held(_LOCK_SECONDS):
                found = _entries(folder, names[start : start + _FILES_AT_A_TIME], result)
                if adopt:
                    folder.index.insert(found)
                else:  # without the lock, a page may have been stored meanwhile
                    known = folder.index.known(entry.name for entry in found)
                    found = [entry for entry in found if entry.name not in known]
            result.pages += [entry.name for entry in found]
        progress(done, len(shards))
    return result


def verify_folder(
    folder: FolderView,
    *,
    repair: bool = False,
    progress: Callable[[int, int], None] = lambda done, pages: None,
) -> Findings:
    """Read and verify every page file of a folder.

    Args:
        repair: Delete damaged files and entries without file. Files that the index does not know
            are entered by a rebuild, or deleted here when they are damaged. No view allows that.
        progress: Told how many pages are done, and how many there are.
    """
    findings = Findings(index=folder.index.check())
    total = folder.index.totals().pages
    # Taken out at once, so that no reader of the index lives for minutes.
    entries = list(folder.index.entries())
    for done, entry in enumerate(entries, start=1):
        _verify_entry(folder, entry, findings, repair)
        if done % 16 == 0 or done == total:
            progress(done, max(total, done))
    unknown = find_unknown_files(folder, adopt=False)
    for name in unknown.pages:
        findings.unknown.append((f"{name.bucket}/{name.file}", "a page file"))
    for shard, file, reason in unknown.damaged:
        findings.unknown.append((f"{shard}/{file}", reason))
        if repair:
            with folder.lock.held(_LOCK_SECONDS), folder.shard(shard) as shard_fd:
                folder.ops.unlink(file, shard_fd)
            findings.repaired += 1
    return findings


def _verify_entry(folder: FolderView, entry: Entry, findings: Findings, repair: bool) -> None:
    name = entry.name
    path = f"{name.bucket}/{name.file}"
    payload = memoryview(mmap.mmap(-1, max(entry.payload_bytes, 1)))[: entry.payload_bytes]
    try:
        memory = PageMemory([payload], name.share)
        read_page(folder, PageRead(0, entry, memory, name.share.eighths))
    except FileNotFoundError:
        if folder.index.find(name) is None:
            return  # a live server has evicted the page meanwhile
        findings.missing.append(path)
    except (DamagedFileError, OSError) as error:
        if folder.index.find(name) is None:
            return
        findings.damaged.append((path, str(error)))
    else:
        findings.pages += 1
        findings.bytes += entry.file_bytes
        return
    findings.repaired += repair and _remove(folder, name)


def _remove(folder: FolderView, name: PageName) -> bool:
    with folder.lock.held(_LOCK_SECONDS):
        try:
            delete_page(folder, name)
        except OSError:
            return False
        folder.index.remove([name])
    return True


def _entries(folder: FolderView, names: Sequence[PageName], result: Unknown) -> list[Entry]:
    """What the index will say of page files that it still does not know."""
    entries = []
    known = folder.index.known(names)
    for name in names:
        if name in known:
            continue
        try:
            fd = open_page(folder, name)
            try:
                header = read_header(folder.io, fd)
                if name != header.name:
                    raise DamagedFileError("its name is not the one in its header")
                layout = header.layout
                check_size(fd, layout.file_bytes)
                written = os.fstat(fd).st_mtime_ns
            finally:
                folder.ops.close(fd)
        except FileNotFoundError:
            continue
        except (DamagedFileError, OSError) as error:
            result.damaged.append((name.bucket, name.file, str(error)))
            continue
        sizes = (layout.header_bytes, layout.payload_bytes)
        entries.append(Entry(name, *sizes, header.writer, written))
    return entries
