"""The size of each folder: lines, files, classes, functions, branches.

    python -m tests.house [REVISION]
    python -m tests.house draw SEED [NUMBER]

Without a revision it counts the working tree; with one it prints both, side by side. ``draw``
prints functions of the package at random (20), to be read by somebody who does not know it.
"""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
STRUCTURE = ROOT / "docs" / "structure.md"
_BRANCHES = (ast.If, ast.IfExp, ast.While, ast.For, ast.Try, ast.BoolOp, ast.comprehension)
_ROW = re.compile(r"^\| `([\w/]+)/` \| .* \| ([\d,]+) \|$", re.M)


class Size(NamedTuple):
    lines: int = 0
    files: int = 0
    classes: int = 0
    functions: int = 0
    branches: int = 0

    def plus(self, other: Size) -> Size:
        return Size(*(mine + its for mine, its in zip(self, other, strict=True)))


def size_of(text: str) -> Size:
    nodes = list(ast.walk(ast.parse(text)))
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    classes = sum(isinstance(node, ast.ClassDef) for node in nodes)
    branches = sum(isinstance(node, _BRANCHES) for node in nodes)
    return Size(len(text.splitlines()), 1, classes, functions, branches)


def sizes(files: Iterable[tuple[str, str]], folders: Iterable[str]) -> dict[str, Size]:
    """The size of each of ``folders``; a file (path, text) counts in the longest one it is in."""
    found = dict.fromkeys(sorted(folders, key=len, reverse=True), Size())
    for path, text in files:
        folder = next((folder for folder in found if path.startswith(f"{folder}/")), None)
        if folder is not None and path.endswith(".py"):
            found[folder] = found[folder].plus(size_of(text))
    return found


def budgets() -> dict[str, int]:
    rows = _ROW.findall(STRUCTURE.read_text())
    return {folder: int(most.replace(",", "")) for folder, most in rows}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def tree(revision: str | None = None) -> list[tuple[str, str]]:
    """Paths and texts of all files of Python, as they are or as they were at a revision."""
    if revision is None:
        names = _git("ls-files", "*.py").split()
        return [(name, (ROOT / name).read_text()) for name in names if (ROOT / name).exists()]
    names = _git("ls-tree", "-r", "--name-only", revision).split()
    return [(n, _git("show", f"{revision}:{n}")) for n in names if n.endswith(".py")]


def table(now: Mapping[str, Size], before: Mapping[str, Size] | None = None) -> str:
    """A line for each folder; with ``before`` each cell says both numbers."""
    shown = ["| folder | " + " | ".join(Size._fields) + " |", "|---" * 6 + "|"]
    for folder in sorted(now):
        olds = before[folder] if before is not None else now[folder]
        cells = [
            f"{old:,}" if old == new else f"{old:,} -> {new:,}"
            for old, new in zip(olds, now[folder], strict=True)
        ]
        shown.append(f"| {folder} | " + " | ".join(cells) + " |")
    return "\n".join(shown)


def draw(seed: int, number: int = 20) -> Iterable[str]:
    """Some functions of the package with at least five lines in their body, and their places."""
    found = []
    for path, text in tree():
        nodes = (
            ast.walk(ast.parse(text)) if path.startswith(("hcache_backend/", "kernels/")) else ()
        )
        for node in nodes:
            if not isinstance(node, ast.FunctionDef):
                continue
            if (node.end_lineno or 0) - node.body[0].lineno >= 4:
                source = ast.get_source_segment(text, node, padded=True)
                found.append(f"# {path}:{node.lineno}\n{source}\n")
    return random.Random(seed).sample(found, number)


def main() -> None:
    if sys.argv[1:2] == ["draw"]:
        print("\n".join(draw(*map(int, sys.argv[2:]))))
        return
    folders = {*budgets(), "hcache_backend"}
    now = sizes(tree(), folders)
    print(table(now, sizes(tree(sys.argv[1]), folders) if len(sys.argv) > 1 else None))


if __name__ == "__main__":
    main()
