"""Mutants: small faults in one file of the package, each of which the given tests must find.

    python -m tests.mutants FILE [--lines 40-90] [--number 10] [--seed 1] -- PYTEST ARGUMENTS

Each mutant changes one comparison, operator, constant or statement of FILE in the working tree,
runs the tests, and puts FILE back. It prints the mutants that no test found, and ends with their
number. Before tests leave, mutants of the code that they guard are found by the tests that stay.
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_OPPOSITES = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def _mutations(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` with one fault each."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]) if type(operator) in _OPPOSITES:
            changed.ops = [_OPPOSITES[type(operator)]()]
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(changed.op) in _OPPOSITES:
            changed.op = _OPPOSITES[type(changed.op)]()
        case ast.If() | ast.IfExp() | ast.While():
            changed.test = ast.UnaryOp(ast.Not(), changed.test)
        case ast.Constant(value=bool()):
            changed.value = not changed.value
        case ast.Constant(value=int()):
            changed.value += 1
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            changed = ast.Pass()
        case ast.Return(value=ast.expr()):
            changed.value = ast.Constant(None)
        case _:
            return
    yield ast.copy_location(changed, node)


class _Replace(ast.NodeTransformer):
    def __init__(self, number: int, by: ast.AST) -> None:
        self.number, self.by = number, by

    def visit(self, node: ast.AST) -> ast.AST:
        if getattr(node, "mutant", None) == self.number:
            return self.by
        return self.generic_visit(node)


def _is_text(node: ast.AST) -> bool:
    called = (
        node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    )
    return isinstance(called, ast.Attribute) and ast.unparse(called.value) in ("logger", "log")


def mutants_of(text: str, lines: range) -> Iterator[tuple[int, str, str]]:
    """Line, description and text of each mutant of ``text``."""
    tree = ast.parse(text)
    nodes = [of for of in ast.walk(tree) if getattr(of, "lineno", 0) in lines and not _is_text(of)]
    for number, node in enumerate(nodes):
        node.mutant = number  # type: ignore[attr-defined]
    for number, node in enumerate(nodes):
        for by in _mutations(node):
            whole = ast.fix_missing_locations(_Replace(number, by).visit(copy.deepcopy(tree)))
            was, now = (ast.unparse(of).partition("\n")[0] for of in (node, by))
            yield getattr(node, "lineno", 0), f"{was}  ->  {now}", ast.unparse(whole)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--lines", default="1-100000", help="of FILE, as 40-90")
    parser.add_argument("--number", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=120, help="seconds; then it is found, too")
    parser.add_argument("tests", nargs="+", help="arguments of pytest, after --")
    asked = parser.parse_args()
    text = asked.file.read_text()
    first, last = map(int, asked.lines.split("-"))
    every = list(mutants_of(text, range(first, last + 1)))
    chosen = random.Random(asked.seed).sample(every, min(asked.number, len(every)))
    tests = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *asked.tests]
    if subprocess.run(tests, check=False).returncode != 0:
        sys.exit("the tests fail without a mutant")
    left = []
    try:
        for line, change, mutant in sorted(chosen, key=lambda of: of[0]):
            asked.file.write_text(mutant)
            try:
                ran = subprocess.run(tests, capture_output=True, timeout=asked.timeout, check=False)
                found = ran.returncode in (1, 2)  # 2: the module cannot be imported
            except subprocess.TimeoutExpired:
                found = True
            print(f"{'found' if found else 'LEFT '} {asked.file}:{line}: {change}", flush=True)
            left += [] if found else [change]
    finally:
        asked.file.write_text(text)
    print(f"{len(chosen) - len(left)} of {len(chosen)} mutants were found ({len(every)} possible)")
    return len(left)


if __name__ == "__main__":
    sys.exit(main())
