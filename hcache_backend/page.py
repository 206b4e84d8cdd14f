"""The page: the unit of the host pool (L2) and of storage (L3).

A page holds ``page_size`` consecutive tokens of one sequence, all layers:

- bytes are little-endian; a page is a header, then one layer segment after the other;
- the header is padded to a multiple of 4096 bytes: direct I/O reads straight into a page, and
  segments keep the alignment of the page;
- where tensor-parallel ranks share the tokens of a page (paper section 5), each rank's page has the
  hidden states of its own tokens only; all that the header says of tokens it says of all of them;
- the header holds a checksum of every segment, and one of itself;
- a reader believes a page only if magic, version, namespace, key and checksums all agree, whatever
  storage backend brought it. A backend that verifies what it reads by itself may put a page
  together from the shares of others: then the header tells nothing of the segments.

====== ===== ====================================================================
offset bytes field
====== ===== ====================================================================
0      4     magic ``HCPG``
4      2     format version
6      2     layers
8      4     header bytes
12     4     page size in tokens
16     16    xxh3-128 of bytes 32 to the end of the header
32     16    namespace (weights, dtypes, page size, format, partition, stage)
48     32    key: SGLang's chained sha256 over the whole prefix
80     8     writer: the server run that made the page
88     1     number of the share
89     1     number of shares
90     6     0
96     4*p   positions of the tokens, int32
96+4*p 4*p   token ids, int32
96+8*p 16*l  xxh3-128 of every segment
====== ===== ====================================================================
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

_MAGIC = b"HCPG"
FORMAT_VERSION = 3
NAMESPACE_BYTES = 16
KEY_BYTES = 32
WRITER_BYTES = 8
HEADER_ALIGNMENT = 4096
NO_NAMESPACE = bytes(NAMESPACE_BYTES)
"""The namespace of a page whose rows are not all there."""

_SHA256_HEX = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_PREFIX = struct.Struct("<4sHHII")
_CHECKSUM = slice(16, 32)
_COVERED = 32
_NAMESPACE = slice(32, 48)
_KEY = slice(48, 80)
_WRITER = slice(80, 88)
_SHARE = slice(88, 90)
_TOKENS = 96
_DIGEST_BYTES = 16

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PageLayout:
    """Where things stand in a page.

    Attributes:
        page_size: Tokens per page.
        segment_bytes: Bytes of every layer segment, first layer first; 0 for a layer of which
            nothing is stored. With several shares, of what this share holds.
        share: Number of the share of the tokens whose hidden states the page holds.
        shares: How many there are; divides ``page_size``.
    """

    page_size: int
    segment_bytes: tuple[int, ...]
    share: int = 0
    shares: int = 1

    @property
    def kept(self) -> range:
        """The tokens of a page whose hidden states it holds."""
        rows = self.page_size // self.shares
        return range(self.share * rows, (self.share + 1) * rows)

    @cached_property
    def header_bytes(self) -> int:
        used = _TOKENS + 8 * self.page_size + _DIGEST_BYTES * len(self.segment_bytes)
        return -(-used // HEADER_ALIGNMENT) * HEADER_ALIGNMENT

    @cached_property
    def segment_offsets(self) -> tuple[int, ...]:
        ends = np.cumsum((self.header_bytes, *self.segment_bytes)).tolist()
        return tuple(ends[:-1])

    @cached_property
    def page_bytes(self) -> int:
        return self.header_bytes + sum(self.segment_bytes)

    @cached_property
    def _prefix(self) -> bytes:
        return _PREFIX.pack(
            _MAGIC, FORMAT_VERSION, len(self.segment_bytes), self.header_bytes, self.page_size
        )

    def segment(self, layer: int) -> slice:
        """The bytes of one layer segment inside a page."""
        start = self.segment_offsets[layer]
        return slice(start, start + self.segment_bytes[layer])

    def positions(self, pages: Bytes) -> Ints:
        """View of the positions of ``pages`` (``[..., page_bytes]``): int32, ``[..., p]``."""
        return pages[..., _TOKENS : _TOKENS + 4 * self.page_size].view(np.int32)

    def token_ids(self, pages: Bytes) -> Ints:
        """View of the token ids of ``pages`` (``[..., page_bytes]``): int32, ``[..., p]``."""
        start = _TOKENS + 4 * self.page_size
        return pages[..., start : start + 4 * self.page_size].view(np.int32)

    def _digests(self, page: Bytes) -> Bytes:
        """View of the checksums of the segments: uint8 ``[layers, 16]``."""
        start = _TOKENS + 8 * self.page_size
        table = page[start : start + _DIGEST_BYTES * len(self.segment_bytes)]
        return table.reshape(-1, _DIGEST_BYTES)

    def begin(self, page: Bytes, namespace: bytes, writer: bytes) -> None:
        """Write the header of a fresh page; positions, ids and segments are the caller's.

        The page is not valid until :meth:`seal`.
        """
        page[: self.header_bytes] = 0
        page[: _PREFIX.size] = np.frombuffer(self._prefix, np.uint8)
        page[_SHARE] = self.share, self.shares
        self.stamp(page, namespace, writer)

    def stamp(self, page: Bytes, namespace: bytes, writer: bytes) -> None:
        """Say whose page it is, when that was left open at :meth:`begin`."""
        page[_NAMESPACE] = np.frombuffer(namespace, np.uint8)
        page[_WRITER] = np.frombuffer(writer, np.uint8)

    def seal(self, page: Bytes, key: bytes) -> None:
        """Stamp key and checksums: from here on the page proves itself."""
        page[_SHARE] = self.share, self.shares  # the header may have come with another share
        page[_KEY] = np.frombuffer(key, np.uint8)
        for layer, digest in enumerate(self._digests(page)):
            digest[:] = np.frombuffer(_digest(page[self.segment(layer)]), np.uint8)
        page[_CHECKSUM] = np.frombuffer(_digest(page[_COVERED : self.header_bytes]), np.uint8)

    def problem(
        self,
        page: Bytes,
        namespace: bytes,
        key: bytes,
        token_ids: Ints | None = None,
        *,
        segments: bool = True,
    ) -> str | None:
        """Why ``page`` (uint8 ``[page_bytes]``) is not the wanted one, or None when it is.

        Args:
            namespace: 16 bytes the page must belong to.
            key: 32 bytes of the page's key.
            token_ids: The page's tokens as the radix tree knows them, when the caller has them.
            segments: Look at share and segments too; not where the storage verified what it read.
        """
        if page[: _PREFIX.size].tobytes() != self._prefix:
            return "format"
        if page[_NAMESPACE].tobytes() != namespace:
            return "namespace"
        if page[_KEY].tobytes() != key:
            return "key"
        if page[_CHECKSUM].tobytes() != _digest(page[_COVERED : self.header_bytes]):
            return "checksum"
        if segments and page[_SHARE].tolist() != [self.share, self.shares]:
            return "share"
        if segments and any(
            digest.tobytes() != _digest(page[self.segment(layer)])
            for layer, digest in enumerate(self._digests(page))
        ):
            return "checksum"
        if token_ids is not None and not np.array_equal(self.token_ids(page), token_ids):
            return "token ids"
        return None

    def namespace_of(self, page: Bytes) -> bytes:
        """The namespace in the header of ``page``."""
        return page[_NAMESPACE].tobytes()

    def is_stamped(self, page: Bytes) -> bool:
        """Whether ``page`` was stamped: no row of it was lost, or is still on its way."""
        return self.namespace_of(page) != NO_NAMESPACE


def key_bytes(key: str) -> bytes:
    """32 bytes for a key: SGLang's sha256 itself, or the sha256 of any other text.

    Whatever the text is, no path can be built from it.
    """
    if _SHA256_HEX.fullmatch(key):
        return bytes.fromhex(key)
    return hashlib.sha256(b"text:" + key.encode()).digest()


def _digest(part: Bytes) -> bytes:
    return xxhash.xxh3_128_digest(part.data)
