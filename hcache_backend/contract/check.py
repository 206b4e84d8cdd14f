"""Are all places of SGLang's that we meet there, as we use them? Sources are read and nothing is
imported, so any version can be asked, in seconds. ``seams.json`` has the places; it is written from
our sources by ``python -m tests.contract``. A changed meaning behind an old name is not seen."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hcache_backend.contract.source import Parameters, Source


class ContractResult(NamedTuple):
    """How many seams were looked up, and a sentence for each that is not as we need it."""

    seams: int
    problems: tuple[str, ...]

    def describe(self) -> str:
        """The problems, for a log line; without any, that all seams are there."""
        if not self.problems:
            return f"all {self.seams} seams are there"
        missing = "; ".join(self.problems)
        return f"of {self.seams} seams {len(self.problems)} are missing: {missing}"


@cache
def check_installed() -> ContractResult:
    """The contract with the SGLang of this Python environment. Raises ModuleNotFoundError."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("SGLang is not installed")
    return Contract(Source(Path(spec.origin).parents[1])).check()


class Contract:
    """What is needed of a ``source``: as ``seams.json`` has it, or ``needs`` of the same form."""

    def __init__(self, source: Source, needs: Mapping[str, Any] | None = None) -> None:
        self._source = source
        self._needs = needs or json.loads(files(__package__).joinpath("seams.json").read_text())
        self._one_of = {_short(name) for names in self._needs["one of"] for name in names}

    def check(self) -> ContractResult:
        checks = self._names, self._members, self._calls, self._overrides, self._attributes
        facts = [fact for check in (*checks, self._alternatives, self._results) for fact in check()]
        problems = dict.fromkeys(fact for fact in facts if fact is not None)  # each once
        return ContractResult(len(facts), tuple(problems))

    def _names(self) -> Iterator[str | None]:
        """For each name that we import or hook: None if SGLang has it, otherwise a problem."""
        for name in self._needs["names"]:
            exists = self._source.find(name) is not None or _short(name) in self._one_of
            yield None if exists else f"there is no {name}"

    def _members(self) -> Iterator[str | None]:
        """For each member that we use of a class: None if it exists, otherwise a problem."""
        for owner, name in self._needs["members"]:
            yield None if self._class_has(owner, name) else f"{_short(owner)} has no {name}"

    def _calls(self) -> Iterator[str | None]:
        """For each call of ours: None if SGLang takes its arguments, otherwise a problem."""
        for name, positional, keywords in self._needs["calls"]:
            target, owner = self._source.find(name), self._source.find(name.rpartition(".")[0])
            if target is None or not isinstance(target.node, ast.ClassDef | ast.FunctionDef):
                continue  # another check names it
            bound = owner is not None and not isinstance(owner.node, ast.Module)
            parameters = self._source.parameters(target, bound=bound)
            problem = parameters.problem_of_call(positional, keywords)
            yield problem and f"{_short(name)} {problem}"

    def _overrides(self) -> Iterator[str | None]:
        """For each method that our subclasses override: None if SGLang has it (otherwise ours is
        never called) with these arguments. Problems for missing attributes and abstract methods."""
        for ours, needs in self._needs["overrides"].items():
            base = self._source.find(needs["base"])
            if base is None or not isinstance(base.node, ast.ClassDef):
                continue
            for name, takes in needs["methods"].items():
                original = self._source.method(base, name)
                if original is None:
                    yield f"{_short(needs['base'])} has no {name}, which {ours} overrides"
                    continue
                mine, theirs = Parameters(**takes), Parameters.of_function(original, bound=True)
                problem = mine.problem_as_override(theirs)
                yield problem and f"{ours}.{name}: {problem}"
            for name in sorted(set(needs["uses"]) - self._source.attributes(base)):
                yield f"{ours} uses {name}, and {_short(needs['base'])} has none"
            for name in sorted(self._source.abstract_methods(base) - set(needs["defines"])):
                yield f"{_short(needs['base'])} wants a method {name}, which {ours} has not"

    def _attributes(self) -> Iterator[str | None]:
        """For each attribute that we read of a variable, ``owner``: None if one of the ``classes``
        that it may be of has it, or if SGLang's versions differ in it; otherwise a problem."""
        for owner, (classes, names) in self._needs["attributes"].items():
            known = set().union(*map(self.attributes_of, classes))
            for name in names:
                full_names = {f"{cls.rpartition('.')[2]}.{name}" for cls in classes}
                exists = name in known or full_names & self._one_of
                yield None if exists else f"{owner}.{name} is not there"

    def _alternatives(self) -> Iterator[str | None]:
        """For each set of alternative members: None if one exists, otherwise a problem."""
        for members in self._needs["one of"]:
            split = (member.rpartition(".") for member in members)
            exists = any(self._class_has(owner, name) for owner, _, name in split)
            yield None if exists else f"there is none of {', '.join(map(_short, members))}"

    def _results(self) -> Iterator[str | None]:
        """For each function: None if its result has one of the ``known`` types, or a problem."""
        for name, known in self._needs["results"].items():
            node = getattr(self._source.find(name), "node", None)
            if isinstance(node, ast.FunctionDef):
                returns = ast.unparse(node.returns) if node.returns else "what it does not say"
                other = f"{_short(name)} returns {returns}, and not {' or '.join(known)}"
                yield None if returns in known else other

    def attributes_of(self, dotted: str) -> set[str]:
        """Attributes of a class's instances, or of all classes of a module; empty if not found."""
        definition = self._source.find(dotted)
        if definition is None:
            return set()
        if isinstance(definition.node, ast.Module):
            return self._source.attributes_in(definition)
        return self._source.attributes(definition)

    def _class_has(self, dotted: str, name: str) -> bool:
        """True if instances of the class ``dotted`` have ``name``, or if ``dotted`` is no class."""
        definition = self._source.find(dotted)
        if definition is None:
            return False
        if not isinstance(definition.node, ast.ClassDef):
            return True  # a variable or a module: whatever it holds is looked up as a name
        return name in self._source.attributes(definition)


def _short(dotted: str) -> str:
    """`Class.name` of a dotted name."""
    return ".".join(dotted.split(".")[-2:])
