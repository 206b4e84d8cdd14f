"""What sources of ours need of SGLang, found in them: ``seams.json``, and the same of stand-ins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hcache_backend.contract.source import Parameters
from tests.contract import seams
from tests.contract.uses import Subclass, Uses
from tests.contract.versions import ROOT

SEAMS = ROOT / "hcache_backend" / "contract" / "seams.json"
_ROOMS = ("checks", "host", "prefetch", "sglang", "start", "tiers")
_FILES = ("projection/paged_pool", "capture/hooks", "krul/plugin", "krul/segments")
ENGINE = [
    *sorted(path for room in _ROOMS for path in (ROOT / "hcache_backend" / room).rglob("*.py")),
    *(ROOT / "hcache_backend" / f"{name}.py" for name in _FILES),
]
STAND_INS = [
    *sorted((ROOT / "tests" / "cpu_engine" / "hcache_cpu_engine").glob("*.py")),
    ROOT / "tests" / "engine" / "faults" / "hcache_faults.py",
]


def uses_of(files: Iterable[Path]) -> list[Uses]:
    return [Uses(path, ROOT) for path in files]


def subclasses_of(uses: Iterable[Uses]) -> dict[str, Subclass]:
    """Subclasses of SGLang's classes, and those of these."""
    ours: dict[str, Subclass] = {}
    for _ in range(2):
        found = [one for file in uses for one in file.subclasses(ours)]
        ours |= {one.name: one for one in found}
    return ours


def needs_of(files: Iterable[Path]) -> dict[str, Any]:
    """All that ``files`` need, as JSON has it, in one order."""
    uses = uses_of(files)
    ours = subclasses_of(uses)
    made = {name: one for name, one in ours.items() if "__init__" not in one.defined}
    calls = {
        (call.target, call.positional, call.keywords) for file in uses for call in file.calls(made)
    }
    return {
        "names": sorted({name for file in uses for name in file.imports() | file.texts()}),
        "members": sorted({(use.owner, use.name) for file in uses for use in file.members()}),
        "calls": sorted((target, number, sorted(named)) for target, number, named in calls),
        "overrides": {name: _override(one) for name, one in sorted(ours.items())},
        "attributes": _attributes(uses),
        "one of": seams.ONE_OF,
        "results": seams.RESULTS,
    }


def _override(ours: Subclass) -> Mapping[str, Any]:
    takes = {
        name: asdict(Parameters.of_function(ours.methods[name], bound=True))
        for name in sorted(seams.OVERRIDDEN.get(ours.name, ()))
        if name in ours.methods
    }
    return {
        "base": ours.base,
        "methods": {n: t | {"keyword_only": sorted(t["keyword_only"])} for n, t in takes.items()},
        "uses": sorted(ours.inherited),
        "defines": sorted(ours.defined),
    }


def _attributes(uses: Iterable[Uses]) -> dict[str, Any]:
    found: dict[str, set[str]] = {}
    for use in (use for file in uses for use in file.attributes()):
        if use.owner in seams.OBJECTS and (use.owner, use.name) not in seams.OURS:
            found.setdefault(use.owner, set()).add(use.name)
    return {name: (seams.OBJECTS[name], sorted(found[name])) for name in sorted(found)}
