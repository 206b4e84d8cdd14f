"""What the programs have in common: options, and the files of a device's results.

As a program it prints the folder for the GPU's results; exit status 1: there is no GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.harness.report import OUT, write, write_json

Row = dict[str, Any]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options of every program."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    made.add_argument("--out", type=Path, help="folder of results; default: out/DEVICE")
    return made


def require_device(parsed: argparse.ArgumentParser, *, dry_run: bool) -> None:
    """End a program that has no GPU, but for a dry run."""
    if not dry_run and not torch.cuda.is_available():
        parsed.error("no CUDA device; --dry-run does without")


class Results:
    """Rows of a program, in its file from the moment that they are measured.

    A dry run only writes where it is told.

    Args:
        name: The file's, without its ending.
        device: The device's name.
        options: ``dry_run`` and ``out``.
    """

    def __init__(self, name: str, device: str, options: argparse.Namespace) -> None:
        self._name = name
        self._folder = options.out or (None if options.dry_run else folder_of(device))
        self._head = {"device": device, "torch": torch.__version__, "dry_run": options.dry_run}
        self._rows: dict[str, list[Row]] = {}

    def add(self, row: Row, said: str, kind: str = "rows") -> None:
        """Keep a row of a ``kind``; tell what was measured."""
        self._rows.setdefault(kind, []).append(row)
        if self._folder is not None:
            write_json(self._folder / f"{self._name}.json", {**self._head, **self._rows})
        print(f"{said}: measured", flush=True)

    def of(self, kind: str = "rows") -> list[Row]:
        """The rows of a kind."""
        return self._rows.get(kind, [])

    def finish(self, draw: Callable[[Row], Any] | None = None) -> int:
        """Draw the picture of the file's content; None: there is none.

        Returns:
            Exit status: 1 if a result was wrong.
        """
        if self._folder is not None and draw is not None:
            write(self._folder, self._name, {**self._head, **self._rows}, draw)
        every = (row for rows in self._rows.values() for row in rows)
        return int(not all(row["right"] for row in every if not row.get("skipped")))


def folder_of(device: str) -> Path:
    """Where results of the device of this name are written."""
    return OUT / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit(1)
    print(folder_of(torch.cuda.get_device_name()))
