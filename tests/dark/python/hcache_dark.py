"""Records which statements of the package run: in every process, until it is killed.

Each statement of `hcache_backend/` and `kernels/` gets a mark in front of it when its module is
imported. A mark is one byte of a file that all processes map (`HCACHE_DARK` names the folder), so
there is nothing to save at an end: servers of tests end by SIGKILL, and forked ones share the map.
This is why coverage.py, which saves at an exit, is not used; its core for `sys.monitoring` needs
Python 3.12, too.

Only the standard library: this is imported before torch, Triton and SGLang.
"""

import ast
import hashlib
import importlib.abc
import importlib.machinery
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("hcache_backend", "kernels")
VARIABLE = "HCACHE_DARK"
_MARKS = "__dark__"


class Statement(NamedTuple):
    """A statement that can run."""

    owner: str  # the function or class that it stands in, dotted; "" for a module's own
    text: str  # its first line
    line: int  # of the file, from 1
    compiled: bool  # part of a Triton kernel: it runs if the interpreter or tests/ptx runs it


@dataclass(frozen=True)
class Source:
    """A file of the package and its statements, in the order of the file."""

    path: Path
    text: str
    tree: ast.Module
    nodes: dict[ast.stmt, int]
    statements: list[Statement]

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    def marks(self, folder: Path) -> mmap.mmap:
        """A byte for each statement, shared by all processes; 1: it has run."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:12]
        path, size = folder / f"{self.name.replace('/', '.')}.{digest}", len(self.statements) or 1
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.truncate(size)
            return mmap.mmap(file.fileno(), size)


def read(path: Path) -> Source:
    """The statements of a file. Docstrings, imports for types only and ``...`` are none."""
    text = path.read_text()
    tree, lines = ast.parse(text), text.splitlines()
    nodes, statements = dict[ast.stmt, int](), list[Statement]()
    for node, owner, compiled in _statements(tree.body, "", False):
        nodes[node] = len(statements)
        statements.append(Statement(owner, lines[node.lineno - 1].strip(), node.lineno, compiled))
    return Source(path, text, tree, nodes, statements)


def _statements(
    body: list[ast.stmt], owner: str, compiled: bool
) -> Iterator[tuple[ast.stmt, str, bool]]:
    for node in body:
        if isinstance(node, (ast.Global, ast.Nonlocal)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        yield node, owner, compiled
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        inner, in_kernel = owner, compiled
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{owner}.{node.name}" if owner else node.name
            in_kernel = compiled or any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
        for block in _blocks(node):
            yield from _statements(block, inner, in_kernel)


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a statement."""
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(node, name, None):
            yield block
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


# ---- marks ----


def install() -> None:
    """Mark what is imported from here on in this process and in its forks."""
    original = importlib.abc.SourceLoader.get_code
    loader: Any = importlib.machinery.SourceFileLoader

    def get_code(self: Any, fullname: str) -> Any:
        path = Path(self.get_filename(fullname))
        if path.as_posix().endswith("triton/runtime/interpreter.py"):
            hook = "\nfrom hcache_dark import mark_kernels\nmark_kernels(FunctionRewriter)\n"
            return compile(path.read_text() + hook, str(path), "exec")
        real = path.resolve()
        if not any(real.is_relative_to(ROOT / folder) for folder in FOLDERS):
            return original(self, fullname)
        return compile(_marked(read(real)), str(real), "exec", dont_inherit=True)

    loader.get_code = get_code


def marks_of(path: str) -> mmap.mmap:
    """Called by a module that was marked."""
    return read(Path(path)).marks(Path(os.environ.get(VARIABLE, _folder)))


_folder = os.environ.get(VARIABLE, "")
"""A forked server gets another environment than the process that it came from."""


def _marked(source: Source) -> ast.Module:
    def numbers(node: ast.stmt) -> int | None:
        at = source.nodes.get(node)
        return None if at is None or source.statements[at].compiled else at

    _mark(source.tree, numbers)
    start = sum(
        isinstance(node, ast.Expr) or getattr(node, "module", "") == "__future__"
        for node in source.tree.body[:3]
        if not isinstance(node, ast.Assign)
    )
    text = (
        f"from hcache_dark import marks_of as {_MARKS}; {_MARKS} = {_MARKS}({str(source.path)!r})"
    )
    source.tree.body[start:start] = ast.parse(text).body
    return ast.fix_missing_locations(source.tree)


def _mark(node: Any, number_of: Any) -> None:
    """Put a mark before each statement in ``node`` that has a number."""
    for block in _blocks(node):
        for statement in list(block):
            _mark(statement, number_of)
            number = number_of(statement)
            if number is not None:
                mark = ast.parse(f"{_MARKS}[{number}] = 1").body[0]
                for part in ast.walk(mark):
                    ast.copy_location(part, statement)
                block.insert(block.index(statement), mark)


def mark_compiled(places: Iterable[tuple[str, int]]) -> None:
    """Mark statements of kernels whose compiled code ran (tests/ptx), by file and line."""
    lines: dict[Path, set[int]] = {}
    for file, line in places:
        lines.setdefault(Path(file).resolve(), set()).add(line)
    for path, seen in lines.items():
        if not any(path.is_relative_to(ROOT / folder) for folder in FOLDERS):
            continue
        source = read(path)
        with source.marks(Path(os.environ[VARIABLE])) as marks:
            for node, number in source.nodes.items():
                # Of a statement with a body the lines before that.
                last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
                if source.statements[number].compiled and any(
                    node.lineno <= line <= max(last, node.lineno) for line in seen
                ):
                    marks[number] = 1


def mark_kernels(rewriter: Any) -> None:
    """Mark what Triton's interpreter makes of a kernel of ours."""
    transform = rewriter._transform_ast

    def transform_and_mark(self: Any, text: str) -> Any:
        tree = transform(self, text)
        if _MARKS in self.fn.__globals__:
            source = read(Path(self.filename).resolve())
            numbers = {s.line: n for n, s in enumerate(source.statements) if s.compiled}
            _mark(tree, lambda node: numbers.get(node.lineno))
            ast.fix_missing_locations(tree)
        return tree

    rewriter._transform_ast = transform_and_mark
