"""The size of each folder: lines, files, classes, functions, branches, what is of type ``Any``; and
verbs that many classes define.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MOST_CLASSES = 4  # define a verb: otherwise nobody finds its calls
STRUCTURE = ROOT / "docs" / "structure.md"
_BRANCHES = (ast.If, ast.IfExp, ast.While, ast.For, ast.Try, ast.BoolOp, ast.comprehension)
PACKAGE = ("hcache_backend/", "kernels/")
_PYTHONS = ("close",)  # contextlib.closing calls it
_ROW = re.compile(r"^\| `([\w/]+)/` \| .* \| ([\d,]+) \|$", re.M)


class Size(NamedTuple):
    lines: int = 0
    files: int = 0
    classes: int = 0
    functions: int = 0
    branches: int = 0
    any: int = 0  # parameters and attributes whose type is Any

    def plus(self, other: Size) -> Size:
        return Size(*(mine + its for mine, its in zip(self, other, strict=True)))


def size_of(text: str) -> Size:
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    classes = sum(isinstance(node, ast.ClassDef) for node in nodes)
    branches = sum(isinstance(node, _BRANCHES) for node in nodes)
    lines = len(text.splitlines())
    return Size(lines, 1, classes, functions, branches, len(list(names_of_any(tree))))


def names_of_any(tree: ast.AST) -> Iterator[str]:
    """Parameters and attributes of a module whose type is ``Any``, without splats."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            typed = [
                (a.arg, a.annotation) for a in (*node.posonlyargs, *node.args, *node.kwonlyargs)
            ]
        elif isinstance(node, ast.AnnAssign):
            typed = [(ast.unparse(node.target).removeprefix("self."), node.annotation)]
        else:
            continue
        yield from (name for name, of in typed if isinstance(of, ast.Name) and of.id == "Any")


class _Class(NamedTuple):
    bases: Sequence[str]
    verbs: set[str]  # methods that are no properties; without private ones


def _classes(trees: Iterable[ast.AST]) -> dict[str, _Class]:
    found = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            methods = [of for of in node.body if isinstance(of, ast.FunctionDef)]
            verbs = {of.name for of in methods if not of.name.startswith("_")}
            verbs -= {
                of.name for of in methods if "property" in map(ast.unparse, of.decorator_list)
            }
            bases = [ast.unparse(base).split("[")[0] for base in node.bases]
            found[node.name] = _Class(bases, verbs)
    return found


def verbs(files: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """The classes of the package that define each method. Methods of one protocol, or of one base
    class, count once. A class has a protocol if it has all of its methods, and these are several.
    """
    classes = _classes(ast.parse(text) for path, text in files if path.startswith(PACKAGE))

    def lineage(name: str) -> list[str]:
        """A class and its bases of ours."""
        bases = classes[name].bases if name in classes else ()
        return [name, *(base for of in bases for base in lineage(of) if base in classes)]

    def methods(name: str) -> set[str]:
        return set().union(*(classes[of].verbs for of in lineage(name)))

    protocols = {name: methods(name) for name, of in classes.items() if "Protocol" in of.bases}
    found: dict[str, set[str]] = {}
    for name, of in classes.items():
        for verb in of.verbs:
            first = [base for base in lineage(name) if verb in classes[base].verbs][-1]
            has = (
                p
                for p, its in protocols.items()
                if verb in its and its <= methods(name) and its != {verb}
            )
            found.setdefault(verb, set()).add(next(has, first))
    return found


def sizes(files: Iterable[tuple[str, str]], folders: Iterable[str]) -> dict[str, Size]:
    """The size of each of ``folders``; a file (path, text) counts in the longest one it is in."""
    found = dict.fromkeys(sorted(folders, key=len, reverse=True), Size())
    for path, text in files:
        folder = next((folder for folder in found if path.startswith(f"{folder}/")), None)
        if folder is not None and path.endswith(".py"):
            found[folder] = found[folder].plus(size_of(text))
    return found


def common_verbs(files: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Those that more than :data:`MOST_CLASSES` define, but for Python's own words."""
    found = verbs(files).items()
    return {verb: of for verb, of in found if len(of) > MOST_CLASSES and verb not in _PYTHONS}


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
    shown = ["| folder | " + " | ".join(Size._fields) + " |", "|---" * 7 + "|"]
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
        nodes = ast.walk(ast.parse(text)) if path.startswith(PACKAGE) else ()
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
    for verb, classes in sorted(common_verbs(tree()).items()):
        print(f"{verb}: {', '.join(sorted(classes))}")


if __name__ == "__main__":
    main()
