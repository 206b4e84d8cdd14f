"""A simple store: one checksummed file a page.

- A file is a 88-byte header (magic, version, namespace, key, writer, payload length, xxh3-128 of
  all of these and the payload), then the payload.
- It is written under a temporary name and renamed, so a page is whole or absent.
- It lives in ``<dir>/<namespace>/<first two key digits>/<key>.page``; names are made from
  hexadecimal digits only, never from text that a caller chose.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import struct
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import xxhash

from hcache_backend.page import KEY_BYTES, NAMESPACE_BYTES, WRITER_BYTES
from hcache_backend.store.base import PageStore, Parts, StoreStats

logger = logging.getLogger(__name__)

_MAGIC = b"HCST"
_VERSION = 1
_HEADER = struct.Struct("<4sHH16s32s8sQ16s")
_TEMPORARY_PREFIX = ".tmp-"


class FilePageStore(PageStore):
    """Pages as files in one or more folders, chosen by the key.

    Raises:
        OSError: A folder can neither be used nor created.
    """

    def __init__(self, dirs: Sequence[Path], writer: bytes) -> None:
        if len(writer) != WRITER_BYTES:
            raise ValueError(f"writer must be {WRITER_BYTES} bytes, not {writer!r}")
        self.stats = StoreStats()
        self._dirs = tuple(dirs)
        self._writer = writer
        self._lock = threading.Lock()
        self._serial = count()
        for folder in self._dirs:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(f"{folder}: the store needs to read and write here")

    def exists(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        return [self._path(namespace, key).is_file() for key in keys]

    def put(self, namespace: bytes, keys: Sequence[bytes], pages: Sequence[Parts]) -> list[bool]:
        return [
            self._put_one(namespace, key, parts) for key, parts in zip(keys, pages, strict=True)
        ]

    def get(self, namespace: bytes, keys: Sequence[bytes], pages: Sequence[Parts]) -> list[bool]:
        return [
            self._get_one(namespace, key, parts) for key, parts in zip(keys, pages, strict=True)
        ]

    def drop_writer(self, namespace: bytes, writer: bytes) -> int:
        dropped = 0
        for path in self._pages(namespace):
            with contextlib.suppress(OSError, struct.error):
                with path.open("rb") as file:
                    fields = _HEADER.unpack(file.read(_HEADER.size))
                if fields[5] == writer:
                    path.unlink()
                    dropped += 1
        return dropped

    def clear(self, namespace: bytes) -> None:
        for folder in self._dirs:
            shutil.rmtree(folder / namespace.hex(), ignore_errors=True)

    def close(self) -> None:
        """Nothing is held open."""

    def _put_one(self, namespace: bytes, key: bytes, parts: Parts) -> bool:
        path = self._path(namespace, key)
        if path.is_file():
            return True
        temporary = path.parent / f"{_TEMPORARY_PREFIX}{os.getpid()}-{next(self._serial)}"
        length = sum(part.nbytes for part in parts)
        header = self._header(namespace, key, self._writer, length, parts)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with temporary.open("wb", buffering=0) as file:
                for piece in (memoryview(header), *parts):
                    _write_all(file.fileno(), piece)
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._count(write_errors=1)
            logger.warning("hcache: page %s was not stored: %s", key.hex()[:12], error)
            return False
        self._count(pages_written=1, bytes_written=_HEADER.size + length)
        return True

    def _get_one(self, namespace: bytes, key: bytes, parts: Parts) -> bool:
        path = self._path(namespace, key)
        length = sum(part.nbytes for part in parts)
        header = bytearray(_HEADER.size)
        try:
            with path.open("rb", buffering=0) as file:
                whole = os.fstat(file.fileno()).st_size == _HEADER.size + length
                if whole:
                    for piece in (memoryview(header), *parts):
                        _read_all(file.fileno(), piece)
        except FileNotFoundError:
            self._count(misses=1)
            return False
        except OSError as error:
            self._count(read_errors=1)
            logger.warning("hcache: page %s was not read: %s", key.hex()[:12], error)
            return False
        if not whole or not self._proves_itself(header, namespace, key, length, parts):
            self._count(bad_pages=1)
            logger.warning("hcache: page %s is damaged; it is deleted", path)
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        self._count(pages_read=1, bytes_read=_HEADER.size + length)
        return True

    def _proves_itself(
        self, header: bytearray, namespace: bytes, key: bytes, length: int, parts: Parts
    ) -> bool:
        writer = _HEADER.unpack(header)[5]
        return bytes(header) == self._header(namespace, key, writer, length, parts)

    @staticmethod
    def _header(namespace: bytes, key: bytes, writer: bytes, length: int, parts: Parts) -> bytes:
        def pack(digest: bytes) -> bytes:
            return _HEADER.pack(_MAGIC, _VERSION, 0, namespace, key, writer, length, digest)

        hasher = xxhash.xxh3_128(pack(bytes(16)))
        for part in parts:
            hasher.update(part)
        return pack(hasher.digest())

    def _path(self, namespace: bytes, key: bytes) -> Path:
        if len(namespace) != NAMESPACE_BYTES or len(key) != KEY_BYTES:
            raise ValueError(
                f"a namespace has {NAMESPACE_BYTES} bytes and a key {KEY_BYTES}, "
                f"not {len(namespace)} and {len(key)}"
            )
        name = key.hex()
        folder = self._dirs[int.from_bytes(key[-4:], "little") % len(self._dirs)]
        return folder / namespace.hex() / name[:2] / f"{name}.page"

    def _pages(self, namespace: bytes) -> Iterator[Path]:
        for folder in self._dirs:
            yield from (folder / namespace.hex()).glob("??/*.page")

    def _count(self, **increments: int) -> None:
        with self._lock:
            for name, increment in increments.items():
                setattr(self.stats, name, getattr(self.stats, name) + increment)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _read_all(fd: int, target: memoryview) -> None:
    while target:
        read = os.readv(fd, [target])
        if read == 0:
            raise OSError("the file ended early")
        target = target[read:]
