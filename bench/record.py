"""Records results: into ``bench/results`` and into the tables of the documentation.

    python -m bench.record NAME... [--out out]    what a program wrote becomes the recorded result
    python -m bench.record --tables               tables anew from the recorded results

A table of the documentation stands between ``<!-- results: NAME -->`` and ``<!-- end -->``; the
program of that name makes it from its results (``table_lines``). ``NAME short`` is a choice of its
rows (``short_lines``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from bench.harness.report import OUT

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PROGRAMS = {
    "demo": "bench.demo.report",
    "compare": "bench.compare.report",
    "peers": "bench.compare.report",
    "saving": "bench.compare.report",
    "load": "bench.compare.report",
    "paper": "bench.paper",
    "depth": "bench.depth",
    "pyramid": "bench.pyramid",
    "beside": "bench.beside",
    "occupancy": "bench.occupancy",
    "partition": "bench.sweep.report",
    "eager": "bench.sweep.report",
    "eager_kv": "bench.sweep.report",
    "codecs": "bench.codecs",
    "codecs_smollm2-mha": "bench.codecs",
    "segment_codec": "bench.segment_codec",
    "segment_codec_models": "bench.segment_codec",
    "throttled": "bench.throttled",
    "accuracy_gqa": "bench.accuracy.report",
    "accuracy_paired": "bench.accuracy.report",
    "accuracy_smollm2": "bench.accuracy.report",
    "accuracy_smollm2-mha": "bench.accuracy.report",
    "thresholds_gqa": "bench.accuracy.thresholds",
    "thresholds_paired": "bench.accuracy.thresholds",
    "store": "bench.store.__main__",
    "eviction": "bench.eviction",
    "pages": "bench.pages",
    "hits": "bench.hits.report",
    "hits_load": "bench.hits.load",
}
"""Name of the results -> the module that makes their table."""
_BLOCK = re.compile(r"(<!-- results: ([\w-]+(?: short)?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *PROGRAMS], metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT, help="folder with what programs wrote")
    parser.add_argument("--tables", action="store_true", help="only write tables anew")
    options = parser.parse_args()
    if bool(options.names) == options.tables:
        parser.error(f"give names ({', '.join(PROGRAMS)}) or --tables")
    for name in options.names:
        record(name, options.out)
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
    """The table of the recorded results of a program; ``NAME short`` has fewer rows."""
    name, _, short = name.partition(" ")
    results = json.loads((RESULTS / f"{name}.json").read_text())
    program = importlib.import_module(PROGRAMS[name])
    text: str = (program.short_lines if short else program.table_lines)(results)
    return text.rstrip("\n")


if __name__ == "__main__":
    main()
