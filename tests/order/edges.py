"""Every place of the product that puts streams in an order, so that each can be left out."""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "hcache_backend"
PARTS = ("capture", "restore", "host", "prefetch", "checks", "krul", "sglang", "tiers", "start")
ORDERING = ("wait", "keep", "wait_for_layer", "after_forwards", "give_up_step")
OF_THREADS = ("ended.wait(_PROGRESS_SECONDS)", "collective.wait()")
"""Calls with such names that put threads of the host in an order, and no streams."""


class Edge(NamedTuple):
    """A call that orders streams, or keeps memory."""

    file: str  # below the package
    function: str  # the innermost one that the call stands in
    what: str  # the call as it stands there
    lines: tuple[int, int]  # first and last

    def __str__(self) -> str:
        return f"{self.file}:{self.function} {self.what}"


@cache
def all_edges() -> tuple[Edge, ...]:
    files = (path for part in PARTS for path in sorted((PACKAGE / part).rglob("*.py")))
    return tuple(edge for path in files for edge in _Edges(path).found)


class _Edges(ast.NodeVisitor):
    """The edges in one file."""

    def __init__(self, path: Path) -> None:
        self.found: list[Edge] = []
        self._file, self._text = str(path.relative_to(PACKAGE)), path.read_text()
        self._function = ""
        self.visit(ast.parse(self._text))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = outer

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in ORDERING:
            what = " ".join(str(ast.get_source_segment(self._text, node)).split())
            lines = (node.lineno, node.end_lineno or node.lineno)
            if what not in OF_THREADS:
                self.found.append(Edge(self._file, self._function, what, lines))
        self.generic_visit(node)


_left_out: Edge | None = None


@contextmanager
def without(name: str | None) -> Iterator[None]:
    """Within the block the checked streams pass over the edge whose ``str`` is ``name``."""
    leave_out(name)
    try:
        yield
    finally:
        leave_out(None)


def leave_out(name: str | None) -> None:
    """From now on pass over the edge whose ``str`` is ``name``, in this process."""
    global _left_out  # noqa: PLW0603
    _left_out = None if name is None else {str(edge): edge for edge in all_edges()}[name]


def is_left_out() -> bool:
    """Whether the caller runs for the edge that is left out: in that call, or within it."""
    if _left_out is None:
        return False
    file, (first, last) = str(PACKAGE / _left_out.file), _left_out.lines
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file and first <= frame.f_lineno <= last:
            return True
        frame = frame.f_back
    return False
