"""Checking everything in a store folder, beside live servers."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from hcache_backend.store.folder import Folder
from hcache_backend.store.format import DamagedFileError, file_name
from hcache_backend.store.index import Entry
from hcache_backend.store.page_files import check_names, read_header
from hcache_backend.store.page_io import PageIO
from hcache_backend.store.rebuild import find_unknown_files

_LOCK_SECONDS = 30.0


@dataclass
class Findings:
    """What :func:`verify_folder` found.

    Attributes:
        pages: Page files that are right.
        bytes: Their bytes.
        damaged: Page files that are not: path and reason.
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
        """How many things were wrong."""
        return len(self.damaged) + len(self.missing) + len(self.unknown) + len(self.index)


def verify_folder(
    folder: Folder,
    io: PageIO,
    *,
    repair: bool = False,
    progress: Callable[[int, int], None] = lambda done, pages: None,
) -> Findings:
    """Read and verify every page file of a folder.

    Args:
        repair: Delete damaged files and entries without file. Files that the index does not know
            are entered by a rebuild, or deleted here when they are damaged.
        progress: Told how many pages are done, and how many there are.

    Raises:
        OSError, lmdb.Error: The folder or its index cannot be used.
    """
    findings = Findings(index=folder.index.check())
    total = folder.index.totals().pages
    # Taken out at once, so that no reader of the index lives for minutes.
    entries = list(folder.index.entries())
    for done, entry in enumerate(entries, start=1):
        _verify_entry(folder, io, entry, findings, repair)
        if done % 16 == 0 or done == total:
            progress(done, max(total, done))
    for shard, name, reason in find_unknown_files(folder, io):
        findings.unknown.append((f"{shard}/{name}", reason))
        if repair and reason != "a page file":
            with folder.lock.held(_LOCK_SECONDS), folder.shard(shard) as shard_fd:
                folder.ops.unlink(name, shard_fd)
            findings.repaired += 1
    return findings


def _verify_entry(
    folder: Folder, io: PageIO, entry: Entry, findings: Findings, repair: bool
) -> None:
    shard, name = file_name(entry.namespace, entry.key, entry.record.share)
    path = f"{shard}/{name}"
    try:
        _verify_file(folder, io, entry)
    except FileNotFoundError:
        if _is_current(folder, entry):
            findings.missing.append(path)
            findings.repaired += repair and _remove(folder, entry)
    except (DamagedFileError, OSError) as error:
        if _is_current(folder, entry):
            findings.damaged.append((path, str(error)))
            findings.repaired += repair and _remove(folder, entry)
    else:
        findings.pages += 1
        findings.bytes += entry.record.file_bytes


def _verify_file(folder: Folder, io: PageIO, entry: Entry) -> None:
    shard, name = file_name(entry.namespace, entry.key, entry.record.share)
    with folder.shard(shard) as shard_fd:
        fd = folder.ops.open(name, os.O_RDONLY | folder.alignment.flags, shard_fd)
    try:
        size = os.fstat(fd).st_size
        if size != entry.record.file_bytes:
            raise DamagedFileError(f"it has {size} bytes, not {entry.record.file_bytes}")
        header = read_header(folder, io, fd)
        check_names(header, entry)
        layout = header.layout
        payload = memoryview(mmap.mmap(-1, max(layout.payload_bytes, 1)))[: layout.payload_bytes]
        filled, _ = io.read(fd, layout.header_bytes, [payload], folder.alignment)
        if not filled:
            raise DamagedFileError("it is shorter than its header says")
    finally:
        folder.ops.close(fd)
    for block, digest in zip(layout.blocks, header.digests, strict=True):
        stretch = payload[block.payload_offset : block.payload_offset + block.length]
        if xxhash.xxh3_64_intdigest(stretch) != digest:
            raise DamagedFileError(f"checksum of segment {block.segment}")


def _is_current(folder: Folder, entry: Entry) -> bool:
    """Whether the entry still stands: a live server may have evicted the page meanwhile."""
    [records] = folder.index.lookup(entry.namespace, [entry.key])
    return any(record.share == entry.record.share for record in records)


def _remove(folder: Folder, entry: Entry) -> bool:
    shard, name = file_name(entry.namespace, entry.key, entry.record.share)
    with folder.lock.held(_LOCK_SECONDS):
        try:
            with folder.shard(shard) as shard_fd:
                folder.ops.unlink(name, shard_fd)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        folder.index.remove([(entry.namespace, entry.key, entry.record.share)])
    return True
