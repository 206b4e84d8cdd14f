"""Every place of the product that puts streams in an order, so that each can be left out."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "hcache_backend"
PARTS = ("capture", "restore", "engine")
ORDERING = ("wait", "keep", "wait_for_layer", "give_up_step")


class Edge(NamedTuple):
    """A call that orders streams, or keeps memory.

    Attributes:
        file: Below the package.
        lines: First and last line of the call.
        what: The call as it stands there.
    """

    file: str
    lines: tuple[int, int]
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.lines[0]} {self.what}"


def all_edges() -> list[Edge]:
    """The edges of the product, by file and line."""
    return [
        edge
        for part in PARTS
        for path in sorted((PACKAGE / part).rglob("*.py"))
        for edge in _in(path)
    ]


def _in(path: Path) -> Iterator[Edge]:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ORDERING
        ):
            what = " ".join(str(ast.get_source_segment(text, node)).split())
            lines = (node.lineno, node.end_lineno or node.lineno)
            yield Edge(str(path.relative_to(PACKAGE)), lines, what)


_left_out: Edge | None = None


@contextmanager
def without(edge: Edge | None) -> Iterator[None]:
    """Within the block the checked streams pass over the calls of ``edge``."""
    global _left_out  # noqa: PLW0603
    _left_out = edge
    try:
        yield
    finally:
        _left_out = None


def leave_out(name: str | None) -> None:
    """From now on pass over the edge whose ``str`` is ``name``, in this process."""
    global _left_out  # noqa: PLW0603
    _left_out = None if name is None else next(e for e in all_edges() if str(e) == name)


def is_left_out(depth: int = 2) -> bool:
    """Whether the caller's caller is in the edge that is left out."""
    if _left_out is None:
        return False
    frame = sys._getframe(depth)
    file = frame.f_code.co_filename
    first, last = _left_out.lines
    return file == str(PACKAGE / _left_out.file) and first <= frame.f_lineno <= last
