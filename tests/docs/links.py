"""Do links lead somewhere? Nothing is fetched."""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.docs.pages import Finding, Page, read_page

_HOST = re.compile(r"[\w-]+(\.[\w-]+)+(:\d+)?")
_LINE = re.compile(r"L(\d+)(-L\d+)?")

cached_page = lru_cache(maxsize=None)(read_page)


def link_findings(page: Page, root: Path) -> Iterator[Finding]:
    """The links of ``page`` that lead nowhere.

    Args:
        root: The repository; what lies outside of it is not there for others.
    """
    for line, target in page.links:
        problem = _problem(page.path, target, root.resolve())
        if problem is not None:
            yield Finding(page.path, line, f"link to {target!r}: {problem}")


def _problem(path: Path, target: str, root: Path) -> str | None:
    parts = urlsplit(target)
    if parts.scheme in ("http", "https"):
        return None if _HOST.fullmatch(parts.netloc) else f"{parts.netloc!r} is no host"
    if parts.scheme or parts.netloc:
        return "neither a file of the repository nor an http(s) address"
    file = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
    if not file.is_relative_to(root):
        return "it leads out of the repository"
    if not file.exists():
        return "no such file"
    return _fragment_problem(file, parts.fragment) if parts.fragment else None


def _fragment_problem(file: Path, fragment: str) -> str | None:
    if file.suffix == ".md":
        found = cached_page(file).anchors
        return None if fragment in found else f"{file.name} has no heading #{fragment}"
    lines = _LINE.fullmatch(fragment)
    if file.is_file() and lines and int(lines[1]) <= len(file.read_text().splitlines()):
        return None
    return f"{file.name} has no #{fragment}"
