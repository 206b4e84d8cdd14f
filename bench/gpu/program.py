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

from bench.harness.report import OUT, write

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


def finish(
    name: str,
    device: str,
    options: argparse.Namespace,
    results: dict[str, list[Row]],
    draw: Callable[[Row], Any],
) -> int:
    """Write results; a dry run only writes where it is told.

    Args:
        name: Of the files.
        device: Its name.
        options: ``dry_run`` and ``out``.
        results: Rows, by kind.
        draw: Makes the picture of the file's content.

    Returns:
        Exit status: 1 if a result was wrong.
    """
    folder = options.out or (None if options.dry_run else folder_of(device))
    if folder is not None:
        head = {"device": device, "torch": torch.__version__, "dry_run": options.dry_run}
        write(folder, name, {**head, **results}, draw)
    measured = [row for rows in results.values() for row in rows if not row.get("skipped")]
    return int(not all(row["right"] for row in measured))


def folder_of(device: str) -> Path:
    """Where results of the device of this name are written."""
    return OUT / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit(1)
    print(folder_of(torch.cuda.get_device_name()))
