"""Records results: into ``bench/results`` and into the tables of the documentation.

    python -m bench.record NAME... [--out out]    what a program wrote becomes the recorded result
    python -m bench.record --tables               tables anew from the recorded results
    python -m bench.record --pictures             pictures anew from the recorded results

``bench/results/archive`` has results of programs that left the tree: nothing makes them anew.

A table of the documentation stands between ``<!-- results: NAME -->`` and ``<!-- end -->``; the
program of that name makes it from its results (``table_lines``). ``NAME CHOICE`` is a choice of its
rows (``CHOICE_lines``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.harness.report import OUT, measured, write_picture

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PROGRAMS = {
    "demo": "bench.demo.report",
    "compare": "bench.compare.report",
    "peers": "bench.compare.report",
    "saving": "bench.compare.report",
    "load": "bench.compare.report",
    "paper": "bench.paper",
    "beside": "bench.beside",
    "partition": "bench.sweep.report",
    "eager": "bench.sweep.report",
    "eager_kv": "bench.sweep.report",
    "codecs": "bench.codecs",
    "codecs_smollm2-mha": "bench.codecs",
    "throttled": "bench.throttled",
    "accuracy_gqa": "bench.accuracy.report",
    "accuracy_paired": "bench.accuracy.report",
    "accuracy_smollm2": "bench.accuracy.report",
    "accuracy_smollm2-mha": "bench.accuracy.report",
    "store": "bench.store.__main__",
    "eviction": "bench.eviction",
    "pages": "bench.pages",
    "hits": "bench.hits.report",
    "hits_flags": "bench.hits.report",
    "hits_load": "bench.hits.load",
}
"""Name of the results -> the module that makes their table."""
_BLOCK = re.compile(r"(<!-- results: ([\w-]+(?: \w+)?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *PROGRAMS], metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT, help="folder with what programs wrote")
    parser.add_argument("--tables", action="store_true", help="only write tables anew")
    parser.add_argument("--pictures", action="store_true", help="draw pictures anew, and tables")
    options = parser.parse_args()
    if bool(options.names) == (options.tables or options.pictures):
        parser.error(f"give names ({', '.join(PROGRAMS)}), --tables or --pictures")
    for name in options.names:
        record(name, options.out)
    for name in drawn() if options.pictures else ():
        write_picture(RESULTS / f"{name}.png", results_of(name), program_of(name).draw)
    for page in PAGES:
        page.write_text(refreshed(page.read_text()))


def record(name: str, out: Path) -> None:
    """Copy the results ``NAME.json`` and pictures from ``out``; ends the program without them."""
    path = out / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run the program first")
    for file in (path, *out.glob(f"{name}*.png")):
        shutil.copyfile(file, RESULTS / file.name)


def refreshed(text: str) -> str:
    """A page with all of its marked tables made from the recorded results."""

    def anew(block: re.Match[str]) -> str:
        return f"{block[1]}{table(block[2])}\n{block[4]}"

    return _BLOCK.sub(anew, text)


def marked(text: str) -> Iterator[tuple[str, str]]:
    """Name and content of every marked table of a page."""
    for block in _BLOCK.finditer(text):
        yield block[2], block[3].rstrip("\n")


def table(name: str) -> str:
    """The table of the recorded results of a program, and when and where they were measured.

    ``NAME CHOICE`` has fewer rows.
    """
    name, _, choice = name.partition(" ")
    results = results_of(name)
    text: str = getattr(program_of(name), f"{choice or 'table'}_lines")(results).rstrip("\n")
    return f"{text}\n\n{measured(results)}" if "sglang_version" in results else text


def drawn() -> list[str]:
    """Names of the recorded results that have a picture."""
    return [name for name in recorded() if hasattr(program_of(name), "draw")]


def recorded() -> list[str]:
    """Names of the results of programs that stand in ``bench/results``."""
    return [name for name in PROGRAMS if (RESULTS / f"{name}.json").exists()]


def results_of(name: str) -> Any:
    """What a program measured."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def program_of(name: str) -> ModuleType:
    """The module that makes tables and the picture of results."""
    return importlib.import_module(PROGRAMS[name])


if __name__ == "__main__":
    main()
