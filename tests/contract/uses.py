"""What our code says about SGLang, found in its sources: imports, calls, overrides, attributes.

Nothing is listed by hand that can be found, so a new use is a use that is checked.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Call:
    """A call of something that SGLang defines."""

    where: str
    target: str  # dotted name of the function or class
    positional: int  # arguments by place; those after a ``*`` are not counted
    keywords: tuple[str, ...]  # arguments by name; those after a ``**`` are not known


@dataclass(frozen=True)
class Subclass:
    """A class of ours on top of one of SGLang's, or of another one of ours that is."""

    where: str
    name: str
    base: str  # dotted name of SGLang's class
    methods: dict[str, ast.FunctionDef]
    inherited: frozenset[str]  # attributes of self and super() that it uses and we do not define
    defined: frozenset[str]  # all that it defines, with what it has from ours


@dataclass(frozen=True)
class Attribute:
    """``owner.name``, or a chain ``a.owner.name``, with the name of what holds it."""

    where: str
    owner: str
    name: str


class Uses:
    def __init__(self, path: Path, root: Path) -> None:
        self.path = str(path.relative_to(root))
        self._tree = ast.parse(path.read_text(), str(path))
        self._names: dict[str, str] = {}
        """Name in this file -> dotted name in SGLang."""
        for node in self._nodes(ast.ImportFrom):
            if _is_sglang(node.module or ""):
                for alias in node.names:
                    self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _nodes(self, *kinds: type[ast.AST]) -> Iterator[Any]:
        return (node for node in ast.walk(self._tree) if isinstance(node, kinds))

    def imports(self) -> set[str]:
        names = (alias.name for node in self._nodes(ast.Import) for alias in node.names)
        return {*filter(_is_sglang, names), *self._names.values()}

    def texts(self) -> set[str]:
        """Dotted names in texts, such as the targets of hooks; two texts may be added up."""
        constants = {
            ast.unparse(node.targets[0]): ast.literal_eval(node.value)
            for node in self._tree.body
            if isinstance(node, ast.Assign) and _is_text(node.value)
        }
        found = {node.value for node in self._nodes(ast.Constant) if _is_text(node)}
        for node in self._nodes(ast.BinOp):
            if isinstance(node.left, ast.Name) and _is_text(node.right):
                found.add(constants.get(node.left.id, "") + node.right.value)
        names = {t for t in found if _is_sglang(t) and t.count(".") > 2 and " " not in t}
        return {name for name in names if not name.endswith(".")}  # without what others begin with

    def calls(self, ours: Mapping[str, Subclass]) -> Iterator[Call]:
        """Calls of imported names, of their members, of ``super()``, and of subclasses of ``ours``,
        by name, which are constructed as their base."""
        names = self._names | {name: subclass.base for name, subclass in ours.items()}
        for node in self._nodes(ast.Call):
            first, _, rest = ast.unparse(node.func).partition(".")
            if first in names and "(" not in rest:
                yield self._call(node, f"{names[first]}.{rest}" if rest else names[first])
        for node in self._nodes(ast.ClassDef):
            above = [name for name in map(ast.unparse, node.bases) if name in names]
            defined = {m for name in above if name in ours for m in ours[name].defined}
            for call in ast.walk(node) if above else ():
                if isinstance(call, ast.Call):
                    owner, _, name = ast.unparse(call.func).rpartition(".")
                    if owner == "super()" and name not in defined:
                        yield self._call(call, f"{names[above[0]]}.{name}")

    def _call(self, node: ast.Call, target: str) -> Call:
        return Call(
            self._where(node),
            target,
            sum(not isinstance(argument, ast.Starred) for argument in node.args),
            tuple(keyword.arg for keyword in node.keywords if keyword.arg),
        )

    def members(self) -> Iterator[Attribute]:
        for node in self._nodes(ast.Attribute):
            owner = self._names.get(getattr(node.value, "id", ""))
            if owner is not None:
                yield Attribute(self._where(node), owner, node.attr)

    def subclasses(self, ours: Mapping[str, Subclass]) -> Iterator[Subclass]:
        """Those of SGLang's classes, and of those of ``ours`` that are known so far."""
        for node in self._nodes(ast.ClassDef):
            for name in map(ast.unparse, node.bases):
                above = ours.get(name)
                base = above.base if above else self._names.get(name)
                if base is not None:
                    methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
                    defined = {*methods, *_own_fields(node), *(above.defined if above else ())}
                    used = frozenset(_of_self(node) - defined)
                    where = self._where(node)
                    yield Subclass(where, node.name, base, methods, used, frozenset(defined))

    def attributes(self) -> Iterator[Attribute]:
        for node in self._nodes(ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Call):  # resolved(runner.server_args).page_size
                owner = owner.func
            name = _last_name(owner)
            if name is not None and isinstance(node.ctx, ast.Load):
                yield Attribute(self._where(node), name, node.attr)

    def optional_attributes(self) -> Iterator[Attribute]:
        """Attributes that are asked for with ``getattr`` or ``hasattr``."""
        for node in self._nodes(ast.Call):
            if getattr(node.func, "id", "") in ("getattr", "hasattr"):
                owner, name = _last_name(node.args[0]), node.args[1]
                if owner is not None and isinstance(name, ast.Constant):
                    yield Attribute(self._where(node), owner, str(name.value))

    def untyped(self) -> Iterator[tuple[str, str]]:
        """Parameters that are annotated ``Any``: where, and their names."""
        for node in self._nodes(ast.FunctionDef):
            for argument in (*node.args.args, *node.args.kwonlyargs):
                if getattr(argument.annotation, "id", None) == "Any":
                    yield self._where(argument), argument.arg

    def _where(self, node: ast.expr | ast.arg | ast.stmt) -> str:
        return f"{self.path}:{node.lineno}"


def _is_sglang(dotted: str) -> bool:
    return dotted == "sglang" or dotted.startswith("sglang.")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _last_name(node: ast.AST) -> str | None:
    return getattr(node, "id", None) or getattr(node, "attr", None)


def _of_self(cls: ast.ClassDef) -> set[str]:
    """What is read from ``self`` and ``super()``."""
    found = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            value = node.value.func if isinstance(node.value, ast.Call) else node.value
            if getattr(value, "id", "") in ("self", "super"):
                found.add(node.attr)
    return found


def _own_fields(cls: ast.ClassDef) -> set[str]:
    declared = {_last_name(node.target) for node in cls.body if isinstance(node, ast.AnnAssign)}
    written = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "id", "") == "self"
    }
    return declared | written
