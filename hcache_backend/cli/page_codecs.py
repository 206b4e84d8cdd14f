"""What encodes the pages of a store, as their headers say."""

from __future__ import annotations

from pathlib import Path

from hcache_backend.format.envelope import BLOCK
from hcache_backend.format.file import DamagedFileError, header_length, parse_header
from hcache_backend.format.page import FORMAT_VERSION, LAYER_ENTRY, MAGIC, PREFIX, TOKENS


def codecs_of(file: Path) -> str | None:
    """Names of what encodes the layers of the page in a page file, with commas between them.

    Returns:
        None where the file cannot be read, or holds no page of our own form. Only headers are read.
    """
    try:
        with file.open("rb") as opened:
            first = opened.read(BLOCK)
            rest = opened.read(header_length(memoryview(first)) - BLOCK)
            header = parse_header(memoryview(first + rest))
            page = opened.read(header.layout.table.segments[0].length)
    except (OSError, DamagedFileError):
        return None
    if len(page) < PREFIX.size:
        return None
    magic, version, layers, _, _, page_size = PREFIX.unpack_from(page)
    start = TOKENS + 8 * page_size
    table = page[start : start + layers * LAYER_ENTRY.size]
    if (magic, version) != (MAGIC, FORMAT_VERSION) or len(table) < layers * LAYER_ENTRY.size:
        return None
    stored = [code for method, _, code in LAYER_ENTRY.iter_unpack(table) if method]
    return ", ".join(
        code.rstrip(b"\0").decode("ascii", "replace") for code in dict.fromkeys(stored)
    )
