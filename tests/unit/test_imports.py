"""Who may import whom: dependencies point down, and only the engine knows SGLang."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hcache_backend"
KERNELS = ROOT / "kernels"

# A part imports only parts of a lower rank (DESIGN.md, section 4).
RANKS = {
    "config": 0,
    "page": 0,
    "trace": 0,
    "fingerprint": 1,
    "streams": 1,
    "workload": 1,
    "benchmark": 2,
    "store": 1,
    "server_report": 2,
    "projection": 2,
    "partition": 2,
    "capture": 3,
    "restore": 4,
    "engine": 5,
    "cli": 6,
    "": 7,  # hcache_backend/__init__.py offers the storage class to SGLang by name
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The sub-package or top-level module that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level and path.is_relative_to(KERNELS):
                continue  # mypy knows that folder by another name, so it imports from itself so
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tops_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_dependencies_point_down(path: Path) -> None:
    part = part_of(path)
    assert part in RANKS, f"give {part!r} a rank"
    for name in imports_of(path):
        top, _, below = name.partition(".")
        target = below.split(".")[0]
        if top == "hcache_backend" and target in RANKS and target != part:
            assert RANKS[target] < RANKS[part], f"{part} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_only_the_engine_imports_sglang(path: Path) -> None:
    assert part_of(path) == "engine" or "sglang" not in tops_of(path)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_the_product_imports_no_tests(path: Path) -> None:
    assert not tops_of(path) & {"tests", "pytest", "hcache_cpu_engine"}


def test_the_store_and_the_page_format_import_no_torch() -> None:
    for path in modules():
        if part_of(path) in ("store", "page", "config"):
            assert "torch" not in tops_of(path), path


def test_kernels_import_nothing_of_the_backend() -> None:
    for path in KERNELS.rglob("*.py"):
        assert not tops_of(path) & {"hcache_backend", "sglang"}, path


LIGHT = ("", "config", "page", "store", "workload", "benchmark")

WITHOUT = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ImportError(f"{{name}} is made unimportable")

sys.meta_path.insert(0, Absent())
for name in {names!r}:
    importlib.import_module(name)
"""


def import_all(names: list[str], absent: set[str]) -> None:
    """Import modules in a fresh interpreter that cannot import ``absent``."""
    code = WITHOUT.format(absent=absent, names=names)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_everything_but_the_engine_imports_without_sglang() -> None:
    import_all([dotted(p) for p in modules() if part_of(p) != "engine"], {"sglang"})


def test_what_needs_no_tensors_imports_without_torch() -> None:
    import_all([dotted(p) for p in modules() if part_of(p) in LIGHT], {"sglang", "torch"})
