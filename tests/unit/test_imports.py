"""Imports follow docs/structure.md: dependencies point down, and few rooms know SGLang."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hcache_backend"
KERNELS = ROOT / "kernels"
BENCH = ROOT / "bench"

# A part imports only parts of a lower rank (docs/structure.md); those of one line have the same.
RANKED = """
    config contract format
    ranks streams
    arena fingerprint store
    metrics server_report projection plan
    restore
    capture
    host
    krul prefetch checks
    sglang
    tiers
    start
    cli
"""
RANKS = {part: rank for rank, line in enumerate(RANKED.split("\n")) for part in line.split()}
RANKS[""] = 100  # hcache_backend/__init__.py offers the storage class to SGLang by name


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


def importers(paths: Iterable[Path], *packages: str) -> list[str]:
    """``file imports name`` for every import of one of ``packages``, or from below it."""
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in imports_of(path)
        if any(f"{name}.".startswith(f"{package}.") for package in packages)
    ]


def test_every_part_has_a_rank() -> None:
    assert {part_of(path) for path in modules()} == RANKS.keys()


# SGLang makes it at an attach, which runs once.
ENTRANCE = PACKAGE / "tiers" / "storage.py"


@pytest.mark.parametrize("part", RANKS)
def test_dependencies_point_down(part: str) -> None:
    above = [o for o in RANKS if o and RANKS[o] >= RANKS[part] and o != part]
    files = [path for path in modules() if part_of(path) == part and path != ENTRANCE]
    assert importers(files, *(f"hcache_backend.{other}" for other in above)) == []


SEAM = ("sglang", "tiers", "start")
"""Rooms that import SGLang."""

PLUGIN = ("krul", PACKAGE / "start" / "page_plan.py")
"""A room that the core does without, and the one file that loads it if an option names it."""

KERNEL_FILES = sorted(KERNELS.rglob("*.py"))


@pytest.mark.parametrize(
    ("files", "packages"),
    [
        ([p for p in modules() if part_of(p) not in SEAM], ["sglang"]),
        (
            [p for p in modules() if part_of(p) != PLUGIN[0] and p != PLUGIN[1]],
            [f"hcache_backend.{PLUGIN[0]}"],
        ),
        ([*modules(), *KERNEL_FILES], ["tests", "pytest", "hcache_cpu_engine", "bench"]),
        ([p for p in modules() if part_of(p) in ("store", "format", "config")], ["torch"]),
        (KERNEL_FILES, ["hcache_backend", "sglang"]),
    ],
    ids=[
        "SGLang in few rooms",
        "no plug-in in the core",
        "no tests and benchmarks in the product",
        "no torch in the store and the page format",
        "nothing of the backend in kernels",
    ],
)
def test_what_is_not_imported(files: list[Path], packages: list[str]) -> None:
    assert importers(files, *packages) == []


def test_of_the_tests_benchmarks_import_the_cpu_engine_only() -> None:
    found = importers(BENCH.rglob("*.py"), "tests", "pytest")
    assert [line for line in found if "tests.cpu_engine." not in line] == []


LIGHT = ("", "config", "format", "store")
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


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize(
    ("rooms", "absent"),
    [(RANKS.keys() - SEAM, {"sglang"}), (LIGHT, {"sglang", "torch"})],
    ids=["all others without SGLang", "what needs no tensors without torch"],
)
def test_rooms_import_without(rooms: Iterable[str], absent: set[str]) -> None:
    names = [dotted(path) for path in modules() if part_of(path) in rooms]
    code = WITHOUT.format(absent=absent, names=names)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_one_file_names_cuda() -> None:
    naming = {path.name for path in modules() if "torch.cuda." in path.read_text()}
    assert naming == {"streams.py"}
