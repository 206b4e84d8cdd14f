"""What our code says about SGLang, found in its sources: imports, calls, overrides, attributes.

Nothing is listed by hand that can be found, so a new use is a use that is checked.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """A call of something that SGLang defines.

    Attributes:
        target: Dotted name of the function or class.
        positional: Arguments by place; those after a ``*`` are not counted.
        keywords: Arguments by name; those after a ``**`` are not known.
    """

    where: str
    target: str
    positional: int
    keywords: tuple[str, ...]


@dataclass(frozen=True)
class Subclass:
    """A class of ours on top of one of SGLang's, or of another one of ours that is.

    Attributes:
        base: Dotted name of SGLang's class.
        methods: What it defines.
        inherited: Attributes of ``self`` and ``super()`` that it uses and we do not define.
        defined: All that it defines, with what it has from ours.
    """

    where: str
    name: str
    base: str
    methods: dict[str, ast.FunctionDef]
    inherited: frozenset[str]
    defined: frozenset[str]


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
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and _is_sglang(node.module or ""):
                for alias in node.names:
                    self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def imports(self) -> set[str]:
        plain = {
            alias.name
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if _is_sglang(alias.name)
        }
        return plain | set(self._names.values())

    def texts(self) -> set[str]:
        """Dotted names in texts, such as the targets of hooks; two texts may be added up."""
        constants: dict[str, str] = {}
        for node in self._tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                        constants[target.id] = node.value.value
        found = set()
        for node in ast.walk(self._tree):
            text = None
            if isinstance(node, ast.Constant):
                text = node.value
            elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name):
                right = node.right.value if isinstance(node.right, ast.Constant) else None
                if isinstance(right, str):
                    text = constants.get(node.left.id, "") + right
            if isinstance(text, str) and _is_sglang(text) and text.count(".") > 2:
                found.add(text)
        prefixes = {text for text in constants.values() if text.endswith(".")}
        return {text for text in found if text not in prefixes and " " not in text}

    def calls(self, ours: Mapping[str, Subclass]) -> Iterator[Call]:
        """Calls of imported names, of their members, of our subclasses, and of ``super()``.

        Args:
            ours: Our subclasses by name, those that are constructed as their base.
        """
        names = self._names | {name: subclass.base for name, subclass in ours.items()}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call):
                first, _, rest = ast.unparse(node.func).partition(".")
                if first in names and "(" not in rest:
                    yield self._call(node, f"{names[first]}.{rest}" if rest else names[first])
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ClassDef):
                bases = [names[ast.unparse(b)] for b in node.bases if ast.unparse(b) in names]
                for call in ast.walk(node) if bases else ():
                    if isinstance(call, ast.Call):
                        owner, _, name = ast.unparse(call.func).rpartition(".")
                        above = {ast.unparse(base) for base in node.bases}
                        if owner == "super()" and not any(
                            name in ours[base].defined for base in above & ours.keys()
                        ):
                            yield self._call(call, f"{bases[0]}.{name}")

    def _call(self, node: ast.Call, target: str) -> Call:
        return Call(
            self._where(node),
            target,
            sum(not isinstance(argument, ast.Starred) for argument in node.args),
            tuple(keyword.arg for keyword in node.keywords if keyword.arg),
        )

    def members(self) -> Iterator[Attribute]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = self._names.get(node.value.id)
                if owner is not None:
                    yield Attribute(self._where(node), owner, node.attr)

    def subclasses(self, ours: Mapping[str, Subclass]) -> Iterator[Subclass]:
        """Those of SGLang's classes, and of those of ``ours`` that are known so far."""
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for name in map(ast.unparse, node.bases):
                above = ours.get(name)
                base = above.base if above else self._names.get(name)
                if base is not None:
                    methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
                    defined = {*methods, *_own_fields(node), *(above.defined if above else ())}
                    yield Subclass(
                        f"{self.path}:{node.lineno}",
                        node.name,
                        base,
                        methods,
                        frozenset(_of_self(node) - defined),
                        frozenset(defined),
                    )

    def attributes(self) -> Iterator[Attribute]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                if isinstance(owner, ast.Call):  # resolved(runner.server_args).page_size
                    owner = owner.func
                name = getattr(owner, "id", None) or getattr(owner, "attr", None)
                if name is not None:
                    yield Attribute(self._where(node), name, node.attr)

    def optional_attributes(self) -> Iterator[Attribute]:
        """Attributes that are asked for with ``getattr`` or ``hasattr``."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "getattr",
                "hasattr",
            ):
                owner, name = node.args[0], node.args[1]
                last = getattr(owner, "id", None) or getattr(owner, "attr", None)
                if last is not None and isinstance(name, ast.Constant):
                    yield Attribute(self._where(node), last, str(name.value))

    def untyped(self) -> Iterator[tuple[str, str]]:
        """Parameters that are annotated ``Any``: where, and their names."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                for argument in (*arguments.args, *arguments.kwonlyargs):
                    if getattr(argument.annotation, "id", None) == "Any":
                        yield self._where(argument), argument.arg

    def _where(self, node: ast.expr | ast.arg) -> str:
        return f"{self.path}:{node.lineno}"


def _is_sglang(dotted: str) -> bool:
    return dotted == "sglang" or dotted.startswith("sglang.")


def _of_self(cls: ast.ClassDef) -> set[str]:
    found = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            value = node.value
            if isinstance(value, ast.Call):
                value = value.func
            if isinstance(value, ast.Name) and value.id in ("self", "super"):
                found.add(node.attr)
    return found


def _own_fields(cls: ast.ClassDef) -> set[str]:
    declared = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return declared | {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
