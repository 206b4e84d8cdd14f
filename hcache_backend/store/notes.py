"""Small files that servers leave in a store folder, beside the pages, for people and each other."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_note(folder: Path, name: str, text: str, *, replace: bool = True) -> None:
    """Write a file that only the owner may read; nobody ever sees a part of it.

    Args:
        replace: Whether a file of this ``name`` is replaced; otherwise it stays.

    Raises:
        OSError: It cannot be written.
    """
    temporary = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        temporary.touch(mode=0o600)
        temporary.write_text(text)
        if replace:
            temporary.replace(folder / name)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, folder / name)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
