"""Imports follow docs/structure.md: dependencies point down, and few rooms know SGLang."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hcache_backend"
KERNELS = ROOT / "kernels"
BENCH = ROOT / "bench"

# A part imports only parts of a lower rank (docs/structure.md).
RANKS = {
    "config": 0,
    "format": 0,
    "ranks": 1,
    "streams": 1,
    "arena": 2,
    "fingerprint": 2,
    "store": 2,
    "metrics": 3,
    "server_report": 3,
    "projection": 3,
    "plan": 3,
    "restore": 4,
    "capture": 5,
    "host": 6,
    "krul": 7,
    "prefetch": 7,
    "sglang": 8,
    "checks": 7,
    "tiers": 9,
    "start": 10,
    "cli": 11,
    "": 12,  # hcache_backend/__init__.py offers the storage class to SGLang by name
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


def test_dependencies_point_down() -> None:
    for part, rank in RANKS.items():
        above = [other for other in RANKS if other and RANKS[other] >= rank and other != part]
        files = [path for path in modules() if part_of(path) == part and path != ENTRANCE]
        assert importers(files, *(f"hcache_backend.{other}" for other in above)) == []


PLUGINS = {"krul": PACKAGE / "start" / "page_plan.py"}
"""Rooms that the core does without, and the one file that loads each if an option names it."""


def test_the_core_does_not_import_plugins() -> None:
    for room, loader in PLUGINS.items():
        core = [path for path in modules() if part_of(path) != room and path != loader]
        assert importers(core, f"hcache_backend.{room}") == []


SEAM = ("sglang", "tiers", "start")
"""Rooms that import SGLang."""


def test_few_rooms_import_sglang() -> None:
    assert importers([p for p in modules() if part_of(p) not in SEAM], "sglang") == []


def test_the_product_imports_no_tests_and_no_benchmarks() -> None:
    product = [*modules(), *KERNELS.rglob("*.py")]
    assert importers(product, "tests", "pytest", "hcache_cpu_engine", "bench") == []


def test_of_the_tests_benchmarks_import_the_cpu_engine_only() -> None:
    found = importers(BENCH.rglob("*.py"), "tests", "pytest")
    assert [line for line in found if "tests.cpu_engine." not in line] == []


def test_the_store_and_the_page_format_import_no_torch() -> None:
    light = [path for path in modules() if part_of(path) in ("store", "format", "config")]
    assert importers(light, "torch") == []


def test_kernels_import_nothing_of_the_backend() -> None:
    assert importers(KERNELS.rglob("*.py"), "hcache_backend", "sglang") == []


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


def import_all(names: list[str], absent: set[str]) -> None:
    code = WITHOUT.format(absent=absent, names=names)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_all_other_rooms_import_without_sglang() -> None:
    import_all([dotted(p) for p in modules() if part_of(p) not in SEAM], {"sglang"})


def test_what_needs_no_tensors_imports_without_torch() -> None:
    import_all([dotted(p) for p in modules() if part_of(p) in LIGHT], {"sglang", "torch"})
