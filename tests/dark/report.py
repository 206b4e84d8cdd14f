"""Which statements of the package no test ran, and the list that says why."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.dark.python import hcache_dark
from tests.dark.python.hcache_dark import ROOT, Source

LISTED = Path(__file__).with_name("dark.toml")
MOST = 0.01
"""Of the package's statements may stay dark."""

Key = tuple[str, str, str]
"""File, function, first line of a statement."""


def sources() -> Iterator[Source]:
    for folder in hcache_dark.FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield hcache_dark.read(path)


def statements() -> Counter[Key]:
    """Every statement of the package; the same text can stand in a function several times."""
    return Counter((s.name, one.owner, one.text) for s in sources() for one in s.statements)


@dataclass(frozen=True)
class Listed:
    """``dark.toml``: statements that no test has to run."""

    reasons: dict[Key, str]
    counts: Counter[Key]  # how often each is dark in its function
    sometimes: set[Key]  # run by chance: it is no error that they did

    @classmethod
    def read(cls, path: Path = LISTED) -> Listed:
        """Raises ValueError if a statement is listed under two reasons."""
        reasons, counts, sometimes = dict[Key, str](), Counter[Key](), set[Key]()
        for group in tomllib.loads(path.read_text())["because"]:
            for place, lines in group["lines"].items():
                file, _, owner = place.partition(":")
                for key in ((file, owner, line) for line in lines):
                    if reasons.setdefault(key, group["reason"]) != group["reason"]:
                        raise ValueError(f"{key} is listed under two reasons")
                    counts[key] += 1
                    if group.get("sometimes"):
                        sometimes.add(key)
        return cls(reasons, counts, sometimes)

    def problems(self, dark: Counter[Key]) -> list[str]:
        """Where the list and what was found dark differ."""
        found = [("dark, and not listed", *key) for key in (dark - self.counts).elements()]
        lit = (key for key in (self.counts - dark).elements() if key not in self.sometimes)
        found += [("listed, and not dark", *key) for key in lit]
        return [f"{how}: {file}:{owner}: {text}" for how, file, owner, text in found]


@dataclass
class Dark:
    """What the marks of a run say."""

    total: int
    places: list[tuple[str, int, Key]]  # file, line and statement of each that did not run

    @classmethod
    def read(cls, folder: Path) -> Dark:
        total, places = 0, list[tuple[str, int, Key]]()
        for source in sources():
            total += len(source.statements)
            with source.marks(folder) as marks:
                for seen, one in zip(marks[:], source.statements, strict=bool(source.statements)):
                    if seen == 0:
                        key = (source.name, one.owner, one.text)
                        places.append((source.name, one.line, key))
        return cls(total, places)

    @property
    def counts(self) -> Counter[Key]:
        return Counter(key for _, _, key in self.places)

    def text(self) -> str:
        """Every dark statement, by file and function, and their number."""
        rows, before = list[str](), ("", "")
        for file, line, (_, owner, text) in self.places:
            if (file, owner) != before:
                rows.append(f"{file}: {owner}")
                before = (file, owner)
            rows.append(f"  {line:4} {text}")
        share = len(self.places) / self.total
        rows.append(f"{len(self.places)} of {self.total} statements are dark ({share:.1%})")
        return "\n".join(rows)
