"""Records results: into ``bench/results`` and into the tables of the documentation.

    python -m bench.record NAME... [--out out]    results of a program become the recorded ones
    python -m bench.record --tables               tables anew from the recorded results
    python -m bench.record --pictures             pictures anew from the recorded results

``bench/results/archive`` has results of programs that left the tree: nothing makes them anew.

A table of the documentation stands between ``<!-- results: NAME -->`` and ``<!-- end -->``; the
program of that name makes it from its results. ``NAME CHOICE`` is another of its tables. Numbers in
prose are marked, too (:mod:`bench.claims`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from bench import claims
from bench.harness.program import Program
from bench.harness.report import OUT, Results, measured, write_picture

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
PROGRAMS = {
    "demo": "bench.demo",
    "real": "bench.real",
    "restores": "bench.restores",
    "clients": "bench.clients",
    "paper": "bench.paper",
    "codecs": "bench.codecs",
    "accuracy": "bench.accuracy.__main__",
    "store": "bench.store.__main__",
    "eviction": "bench.eviction",
    "replies": "bench.replies",
    "returns": "bench.returns",
    "bursts": "bench.bursts",
    "hits": "bench.hits.__main__",
    "hits_load": "bench.hits.load",
}
"""How names of results begin -> the module of the program that makes them."""
OTHERS = {"long"}  # results that no program makes a table of
_BLOCK = re.compile(r"(<!-- results: ([\w-]+(?: \w+)?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="of results, as codecs_smollm2-mha"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder with what programs wrote")
    parser.add_argument("--tables", action="store_true", help="only write tables anew")
    parser.add_argument("--pictures", action="store_true", help="draw pictures anew, and tables")
    options = parser.parse_args()
    if bool(options.names) == (options.tables or options.pictures):
        parser.error("give names of results, --tables or --pictures")
    for name in options.names:
        record(name, options.out)
    for name in drawn() if options.pictures else ():
        draw(name)
    for page in PAGES:
        page.write_text(refreshed(page.read_text()))


def draw(name: str) -> None:
    picture = program_of(name).draw
    assert picture is not None
    write_picture(RESULTS / f"{name}.png", results_of(name), picture)


def record(name: str, out: Path) -> None:
    """Copy the results ``NAME.json`` and pictures from ``out``; ends the program without them."""
    path = out / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run the program first")
    for file in (path, *out.glob(f"{name}*.png")):
        shutil.copyfile(file, RESULTS / file.name)


def refreshed(text: str) -> str:
    """A page with all of its marked tables and numbers made from the recorded results."""

    def anew(block: re.Match[str]) -> str:
        return f"{block[1]}{table(block[2])}\n{block[4]}"

    return claims.refreshed(_BLOCK.sub(anew, text), results_of)


def marked(text: str) -> Iterator[tuple[str, str]]:
    """Name and content of every marked table of a page."""
    for block in _BLOCK.finditer(text):
        yield block[2], block[3].rstrip("\n")


def table(name: str) -> str:
    """The table of recorded results, and when and where they were measured. ``NAME CHOICE`` has
    fewer rows."""
    name, _, choice = name.partition(" ")
    results = results_of(name)
    text = program_of(name).table(results, choice or "table")
    return f"{text}\n\n{measured(results)}" if "sglang_version" in results else text


def drawn() -> list[str]:
    return [name for name in recorded() if program_of(name).draw is not None]


def recorded() -> list[str]:
    return sorted(path.stem for path in RESULTS.glob("*.json") if path.stem not in OTHERS)


def results_of(name: str) -> Results:
    return json.loads((RESULTS / f"{name}.json").read_text())


def program_of(name: str) -> Program:
    """The program that makes results of this name."""
    begin = max((begin for begin in PROGRAMS if name.startswith(begin)), key=len)
    program: Program = importlib.import_module(PROGRAMS[begin]).PROGRAM
    return program


if __name__ == "__main__":
    main()
