"""SGLang's page keys as bytes."""

from __future__ import annotations

import hashlib
import re

from hcache_backend.page import KEY_BYTES

_SHA256_HEX = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")


def key_bytes(key: str) -> bytes:
    """32 bytes for a key: SGLang's sha256 itself, or the sha256 of any other text.

    Whatever the text is, no path can be built from it.
    """
    if _SHA256_HEX.fullmatch(key):
        return bytes.fromhex(key)
    return hashlib.sha256(b"text:" + key.encode()).digest()
