"""Which SGLang this package works with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = (0, 5, 20)
NEWEST = (0, 5, 23)


def sglang_version() -> str:
    """The installed version, or ``unknown`` where SGLang has no metadata."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def unsupported_reason(text: str | None = None) -> str | None:
    """Why the SGLang ``text`` (default: the installed one) is not supported, or None."""
    text = sglang_version() if text is None else text
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is not None and OLDEST <= tuple(map(int, match.groups())) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
    return f"SGLang {text} is not one of the supported versions {oldest} to {newest}"
