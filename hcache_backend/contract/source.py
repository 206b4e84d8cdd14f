"""A tree of SGLang's sources, asked without importing or running any of it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import resolve_name
from pathlib import Path


@dataclass(frozen=True)
class Definition:
    """What a dotted name stands for."""

    module: str  # dotted name of the module that defines it
    node: ast.AST  # a class, function or module; else the statement that assigns the name


class Source:
    """The package ``sglang``, whose folder is in ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, ast.Module | None] = {}  # by dotted name; None: there is no such
        self._names: dict[str, dict[str, ast.stmt]] = {}  # of a module, with their statements
        self._attributes: dict[Definition, set[str]] = {}  # of a class

    def find(self, dotted: str) -> Definition | None:
        """What ``package.module.name`` or ``package.module.Class.name`` is, or None."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            module = ".".join(parts[:end])
            tree = self._module(module)
            if tree is not None:
                definition: Definition | None = Definition(module, tree)
                for name in parts[end:]:
                    definition = definition and self._member(definition, name)
                return definition
        return None

    def classes(self, cls: Definition) -> Iterator[Definition]:
        """A class and those it inherits from, as far as they are SGLang's."""
        yield cls
        assert isinstance(cls.node, ast.ClassDef), cls
        for base in cls.node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            parent = self._lookup(cls.module, name)
            if parent is not None and isinstance(parent.node, ast.ClassDef):
                yield from self.classes(parent)

    def method(self, cls: Definition, name: str) -> ast.FunctionDef | None:
        """The method that instances of a class have, inherited ones included."""
        named = (node for _, node in self._members_of(cls) if getattr(node, "name", "") == name)
        return next((node for node in named if isinstance(node, ast.FunctionDef)), None)

    def attributes(self, cls: Definition) -> set[str]:
        """Names of methods and fields, and of what any method assigns to its first parameter."""
        if cls not in self._attributes:
            names = self._attributes[cls] = set()
            for definition in self.classes(cls):
                for member in _members(definition):
                    names.update(_assigned_names(member))
                for node in ast.walk(definition.node):
                    if isinstance(node, ast.FunctionDef) and node.args.args:
                        names.update(_attributes_set_on(node.args.args[0].arg, node))
        return self._attributes[cls]

    def attributes_in(self, package: Definition) -> set[str]:
        """Attributes of every class in a module, or in the modules of a package."""
        files = self.root.joinpath(*package.module.split(".")).glob("*.py")
        modules = [f"{package.module}.{path.stem}" for path in files] or [package.module]
        return {
            name
            for module in modules
            for node in _statements(getattr(self._module(module), "body", ()))
            if isinstance(node, ast.ClassDef)
            for name in self.attributes(Definition(module, node))
        }

    def parameters(self, called: Definition, *, bound: bool) -> Parameters:
        """What a call of a function or a class takes: of a class the parameters of ``__init__``, or
        the fields of a dataclass. ``bound``: without the first parameter (``self``)."""
        if not isinstance(called.node, ast.ClassDef):
            assert isinstance(called.node, ast.FunctionDef), called
            return Parameters.of_function(called.node, bound=bound)
        init = self.method(called, "__init__")
        if init is not None:
            return Parameters.of_function(init, bound=True)
        fields = [
            node.target.id
            for definition in reversed(list(self.classes(called)))
            for node in _members(definition)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        return Parameters(tuple(dict.fromkeys(fields)), frozenset(), False, False)

    def abstract_methods(self, cls: Definition) -> set[str]:
        names = self.attributes(cls)
        return {name for name in names if _has_decorator(self.method(cls, name), "abstractmethod")}

    def _members_of(self, cls: Definition) -> Iterator[tuple[Definition, ast.stmt]]:
        """Statements of a class and of those it inherits from, with the class of each."""
        for definition in self.classes(cls):
            for node in _members(definition):
                yield definition, node

    def _module(self, dotted: str) -> ast.Module | None:
        """The parsed module or package; None if the tree has no such file or folder."""
        if dotted not in self._modules:
            path = self.root.joinpath(*dotted.split("."))
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            known = file.is_file() or path.is_dir()
            text = file.read_text() if file.is_file() else ""
            self._modules[dotted] = ast.parse(text) if known else None
        return self._modules[dotted]

    def _member(self, owner: Definition, name: str) -> Definition | None:
        """The definition of ``name`` in a module or a class; None: it defines no such name."""
        if isinstance(owner.node, ast.Module):
            return self._lookup(owner.module, name)
        if isinstance(owner.node, ast.ClassDef):
            for definition, node in self._members_of(owner):
                if name in _assigned_names(node):
                    return Definition(definition.module, node)
            return None
        return owner  # a variable: whatever it holds is not looked at

    def _lookup(self, module: str, dotted: str) -> Definition | None:
        """The definition of ``name`` or ``name.member`` in the code of ``module``, or None."""
        name, _, rest = dotted.partition(".")
        statement = self._names_of(module).get(name)
        if statement is None:
            submodule = f"{module}.{name}"
            is_module = self._module(submodule) is not None
            target = self.find(submodule) if is_module else self._starred(module, name)
        elif isinstance(statement, ast.ImportFrom):
            imported = next(a.name for a in statement.names if (a.asname or a.name) == name)
            target = self.find(f"{self._absolute(module, statement)}.{imported}")
        elif isinstance(statement, ast.Import):
            target = self.find(name)
        else:
            target = Definition(module, statement)
        for part in rest.split(".") if rest else []:
            target = target and self._member(target, part)
        return target

    def _starred(self, module: str, name: str) -> Definition | None:
        """The definition of a name that ``module`` has from another one by ``import *``."""
        for node in _statements(getattr(self._module(module), "body", ())):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                definition = self.find(f"{self._absolute(module, node)}.{name}")
                if definition is not None:
                    return definition
        return None

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        """The module that a ``from`` in ``module`` imports from."""
        is_package = self.root.joinpath(*module.split(".")).is_dir()
        package = module if is_package else module.rpartition(".")[0]
        return resolve_name("." * statement.level + (statement.module or ""), package)

    def _names_of(self, module: str) -> dict[str, ast.stmt]:
        """The names that a module defines or imports, with the first statement that does."""
        if module not in self._names:
            names = self._names.setdefault(module, {})
            for node in _statements(getattr(self._module(module), "body", ())):
                for name in _assigned_names(node):
                    names.setdefault(name, node)
        return self._names[module]


@dataclass(frozen=True)
class Parameters:
    """How something may be called."""

    positional: Sequence[str]  # names in their order
    keyword_only: Collection[str]
    more_positional: bool
    more_keywords: bool

    @classmethod
    def of_function(cls, function: ast.FunctionDef, *, bound: bool) -> Parameters:
        args = function.args  # without the first one, ``self``, if ``bound``
        names = [argument.arg for argument in (*args.posonlyargs, *args.args)]
        return cls(
            tuple(names[1:] if bound and not _has_decorator(function, "staticmethod") else names),
            frozenset(argument.arg for argument in args.kwonlyargs),
            args.vararg is not None,
            args.kwarg is not None,
        )

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset([*self.positional, *self.keyword_only])

    def problem_of_call(self, positional: int, keywords: Iterable[str]) -> str | None:
        """Why a call with so many arguments by place, and these by name, fails; or None."""
        if positional > len(self.positional) and not self.more_positional:
            return f"takes {len(self.positional)} arguments by place and gets {positional}"
        unknown = [name for name in keywords if name not in self.names]
        if unknown and not self.more_keywords:
            return f"takes no argument {', '.join(unknown)}"
        return None

    def problem_as_override(self, original: Parameters) -> str | None:
        """Why a method with these parameters cannot override one with ``original``, or None."""
        for place, name in enumerate(original.positional):
            if place < len(self.positional):
                if self.positional[place] != name:
                    return f"argument {place} is {name!r} there, {self.positional[place]!r} here"
            elif not self.more_positional:
                return f"does not take {name!r}"
        missing = set(original.keyword_only) - self.names
        if missing and not self.more_keywords:
            return f"does not take {', '.join(sorted(missing))}"
        return None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of a body, with those inside ``if`` and ``try``."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            handlers = [handler.body for handler in getattr(node, "handlers", ())]
            for branch in (node.body, node.orelse, *handlers, getattr(node, "finalbody", ())):
                yield from _statements(branch)


def _members(definition: Definition) -> Iterator[ast.stmt]:
    assert isinstance(definition.node, ast.ClassDef)
    return _statements(definition.node.body)


def _assigned_names(node: ast.AST) -> list[str]:
    """Names that one statement defines, imports or assigns, without those of inner statements."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign):
        targets = [t for target in node.targets for t in ast.walk(target)]
        return [t.id for t in targets if isinstance(t, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _attributes_set_on(owner: str, function: ast.FunctionDef) -> Iterator[str]:
    """Names of the attributes of variable ``owner`` that a function assigns."""
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr, ctx=ast.Store()) if (
                name == owner
            ):
                yield attr


def _has_decorator(function: ast.FunctionDef | None, decorator: str) -> bool:
    return function is not None and any(
        isinstance(d, ast.Name) and d.id == decorator for d in function.decorator_list
    )
