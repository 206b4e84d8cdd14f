"""The envelope that every form of a page has: namespace, key, writer, checksum.

A page in host memory (:mod:`.page`) and a page file (:mod:`.file`) begin alike:

====== ===== ====================================================================
offset bytes field
====== ===== ====================================================================
0      4     magic
4      2     format version
16     16    xxh3-128 of the header: :mod:`.page` and :mod:`.file` say of which bytes
32     16    namespace (weights, dtypes, page size, format, partition, stage)
48     32    key: SGLang's chained sha256 over the whole prefix
80     8     writer: the server run that made the page
====== ===== ====================================================================

Integers are little-endian, and headers are padded with zeros to multiples of 4096 bytes: direct I/O
reads straight into them. A value in a shared tier has a trailer behind the page instead
(:func:`trailer`).
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import xxhash

from hcache_backend.format.units import SHARD_COUNTS, WHOLE, Parts, Shard

BLOCK = 4096
NAMESPACE_BYTES = 16
KEY_BYTES = 32
WRITER_BYTES = 8
CHECKSUM = slice(16, 32)
NAMESPACE = slice(32, 48)
KEY = slice(48, 80)
WRITER = slice(80, 88)

_SHA256_HEX = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_FILE = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{64})\.([0-7])of([1248])\.page")
_TRAILER_MAGIC = b"HCBEHIND"
TRAILER_BYTES = len(_TRAILER_MAGIC) + 16


class PageName(NamedTuple):
    """The name of a shard of a page: namespace (16 bytes), key (32 bytes) and shard."""

    namespace: bytes
    key: bytes
    shard: Shard

    @property
    def page(self) -> bytes:
        """Namespace and key, which all shards of a page have in common."""
        return self.namespace + self.key

    @property
    def bucket(self) -> str:
        """The folder below ``pages`` that the page file stands in."""
        return self.key[:1].hex()

    @property
    def file(self) -> str:
        """The name of the page file in that folder: no text of a caller is in it."""
        shard = self.shard
        return f"{self.namespace.hex()}.{self.key.hex()}.{shard.number}of{shard.of}.page"

    @property
    def value(self) -> str:
        """The name of the value in a shared tier."""
        return f"hcache-{self.file.removesuffix('.page').replace('.', '-')}"


def parse_name(file: str) -> PageName | None:
    """The parts of the file name ``file``; None if it is no page file's name."""
    match = _FILE.fullmatch(file)
    if match is None or int(match[3]) >= int(match[4]):
        return None
    shard = Shard(int(match[3]), int(match[4]))
    return PageName(bytes.fromhex(match[1]), bytes.fromhex(match[2]), shard)


def key_bytes(key: str) -> bytes:
    """32 bytes for a key: SGLang's sha256 itself, or the sha256 of any other text."""
    if _SHA256_HEX.fullmatch(key):
        return bytes.fromhex(key)
    return hashlib.sha256(b"text:" + key.encode()).digest()


class PageKeys(Sequence[bytes]):
    """SGLang's keys of pages as those of ours, each converted when it is read: the scheduler's
    thread passes on thousands of them with every request, and reads none."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: Any) -> Any:
        texts = self._texts[index]
        return PageKeys(texts) if isinstance(index, slice) else key_bytes(texts)


def trailer(name: PageName, page: Parts) -> bytes:
    """The bytes behind ``page`` in a shared tier, which a damaged or another page does not have."""
    hasher = xxhash.xxh3_128()
    for part in page:
        hasher.update(part)
    hasher.update(name.page + bytes(name.shard))
    return _TRAILER_MAGIC + hasher.digest()


def round_up(length: int) -> int:
    """``length`` as the next multiple of :data:`BLOCK`."""
    return -(-length // BLOCK) * BLOCK


def check_names(namespace: bytes, keys: Sequence[bytes], shard: Shard = WHOLE) -> None:
    """Refuse, by a ValueError, a wrong namespace (16 bytes), key (32 bytes) or shard."""
    check_bytes("namespace", namespace, NAMESPACE_BYTES)
    if not {*map(type, keys)} <= {bytes} or not {*map(len, keys)} <= {KEY_BYTES}:  # fast
        for key in keys:
            check_bytes("key", key, KEY_BYTES)
    check_shard(shard)


def check_shard(shard: Shard) -> None:
    """Refuse, by a ValueError, a shard that no page has."""
    if shard.of not in SHARD_COUNTS or not 0 <= shard.number < shard.of:
        raise ValueError(f"shard {shard.number} of {shard.of}: there are 1, 2, 4 or 8")


def check_bytes(what: str, value: bytes, length: int) -> None:
    """Refuse, by a ValueError, a ``what`` that has not ``length`` bytes."""
    if not isinstance(value, bytes) or len(value) != length:
        raise ValueError(f"a {what} is {length} bytes, not {value!r}")
