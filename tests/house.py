"""The lines of Python in each folder of docs/structure.md: ``python -m tests.house [REVISION]``.

With a revision it prints both, side by side.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STRUCTURE = ROOT / "docs" / "structure.md"
_ROW = re.compile(r"^\| `([\w/]+)/` \| .* \| ([\d,]+) \|$", re.M)


def lines_of(files: Iterable[tuple[str, str]], folders: Iterable[str]) -> dict[str, int]:
    """Lines in each of ``folders``; a file (path, text) counts in the longest one it is in."""
    found = dict.fromkeys(sorted(folders, key=len, reverse=True), 0)
    for path, text in files:
        folder = next((folder for folder in found if path.startswith(f"{folder}/")), None)
        if folder is not None:
            found[folder] += len(text.splitlines())
    return found


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


def main() -> None:
    folders = {*budgets(), "hcache_backend"}
    counts = [lines_of(tree(revision), folders) for revision in (*sys.argv[1:2], None)]
    for folder in sorted(folders):
        print(folder, *(f"{count[folder]:,}" for count in counts))


if __name__ == "__main__":
    main()
