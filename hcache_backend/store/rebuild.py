"""Telling the index of page files that it does not know.

Needed when an index was lost, and after the machine went down, because the last commit of the index
may then be undone. It runs beside live stores: they see pages appear.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hcache_backend.store.folder import Folder
from hcache_backend.store.format import DamagedFileError, file_name, parse_name
from hcache_backend.store.index import Entry, Record
from hcache_backend.store.page_files import read_header
from hcache_backend.store.page_io import PageIO

_LOCK_SECONDS = 30.0
_FILES_AT_A_TIME = 128


@dataclass
class Adopted:
    """What :func:`adopt_unknown_files` found.

    Attributes:
        pages: Page files that the index now knows.
        damaged: Files that are no page files, or damaged ones: shard folder, name, reason.
    """

    pages: int
    damaged: list[tuple[str, str, str]]


def adopt_unknown_files(
    folder: Folder,
    io: PageIO,
    *,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, shards: None,
) -> Adopted:
    """Enter every page file that the index does not know, with its time of writing as last use.

    Headers are verified here, payloads when they are read.

    Args:
        stop: Asked now and then whether to end early.
        progress: Told how many shard folders are done, and how many there are.

    Raises:
        OSError, lmdb.Error: The folder or its index cannot be used.
    """
    result = Adopted(0, [])
    shards = folder.shards()
    for done, shard in enumerate(shards, start=1):
        if stop():
            break
        with folder.shard(shard) as shard_fd:
            unknown = _unknown(folder, shard, folder.ops.list(shard_fd), result)
            for start in range(0, len(unknown), _FILES_AT_A_TIME):
                # Under the lock nobody evicts or replaces the file between look and entry.
                with folder.lock.held(_LOCK_SECONDS):
                    chunk = unknown[start : start + _FILES_AT_A_TIME]
                    found = _entries(folder, io, shard, shard_fd, chunk, result)
                    folder.index.insert(found)
                result.pages += len(found)
        progress(done, len(shards))
    return result


def find_unknown_files(folder: Folder, io: PageIO) -> list[tuple[str, str, str]]:
    """Files that the index does not know: shard folder, name, and what they are.

    What they are is ``"a page file"``, or why they are none.

    Raises:
        OSError, lmdb.Error: The folder or its index cannot be used.
    """
    result = Adopted(0, [])
    for shard in folder.shards():
        with folder.shard(shard) as shard_fd, folder.lock.held(_LOCK_SECONDS):
            unknown = _unknown(folder, shard, folder.ops.list(shard_fd), result)
            sound = _entries(folder, io, shard, shard_fd, unknown, result)
        for entry in sound:
            name = file_name(entry.namespace, entry.key, entry.record.share)[1]
            result.damaged.append((shard, name, "a page file"))
    return result.damaged


def _unknown(folder: Folder, shard: str, names: Sequence[str], result: Adopted) -> list[str]:
    unknown = []
    for name in names:
        parsed = parse_name(name)
        if parsed is None:
            result.damaged.append((shard, name, "its name is no page file's"))
            continue
        namespace, key, share = parsed
        [records] = folder.index.lookup(namespace, [key])
        if not any(record.share == share for record in records):
            unknown.append(name)
    return unknown


def _entries(
    folder: Folder, io: PageIO, shard: str, shard_fd: int, names: Sequence[str], result: Adopted
) -> list[Entry]:
    entries = []
    for name in _unknown(folder, shard, names, result):
        try:
            entries.append(_entry(folder, io, shard, shard_fd, name))
        except FileNotFoundError:
            continue
        except OSError as error:
            result.damaged.append((shard, name, str(error)))
        except DamagedFileError as error:
            result.damaged.append((shard, name, str(error)))
    return entries


def _entry(folder: Folder, io: PageIO, shard: str, shard_fd: int, name: str) -> Entry:
    fd = folder.ops.open(name, os.O_RDONLY | folder.alignment.flags, shard_fd)
    try:
        status = os.fstat(fd)
        header = read_header(folder, io, fd)
    finally:
        folder.ops.close(fd)
    if parse_name(name) != (header.namespace, header.key, header.share):
        raise DamagedFileError("its name is not the one in its header")
    if shard != name[33:35]:
        raise DamagedFileError("it stands in the wrong folder")
    layout = header.layout
    if status.st_size != layout.file_bytes:
        raise DamagedFileError(f"it has {status.st_size} bytes, not {layout.file_bytes}")
    record = Record(
        header.share, layout.header_bytes, layout.payload_bytes, header.writer, status.st_mtime_ns
    )
    return Entry(header.namespace, header.key, record)
