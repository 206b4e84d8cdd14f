"""Whether names in pages exist: options, configuration, variables, metrics, files, functions."""

import ast
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from bench.harness.tracing import hcache_trace
from hcache_backend import config, metrics
from hcache_backend.cli.main import app
from hcache_backend.config import ConfigError, HCacheConfig, parse_config
from hcache_backend.store import StoreStats
from tests.docs.pages import Finding, Page, Piece, Table

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {config.ENABLE_VARIABLE, config.CONFIG_VARIABLE, config.PROJECTION_VARIABLE}

_SHELL = ("sh", "console", "bash")
_CALL = re.compile(r"(?:^|[\s`(/$])hcache[ \t]+([^|;&<>\n`]+)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_VARIABLE = re.compile(r"\bHCACHE_[A-Z_]+\b")
_METRIC = re.compile(r"\b(hcache_[a-z0-9_]+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r'(\w+)(?:[=!][=~]?"([^"]*)")?')
_MODULES = {"hcache_backend", "hcache_kernels"}
_FILE = re.compile(
    r"(?:bench|dashboards|docs|examples|hcache_backend|kernels|requirements|tests)/[\w./-]*|\.ci/\w+"
)
_DEFINITION = re.compile(r"([\w./-]+\.py):([A-Za-z_][\w.]*)")
_PLACEHOLDER = re.compile(r"[A-Z]{3,}")
_TARGET = re.compile(r"make ([a-z][\w-]*)")
_PROGRAM = re.compile(r"python -m ((?:bench|tests)(?:\.[a-z_]+)+)([^|;&<>\n`]*)")


def name_findings(page: Page) -> Iterator[Finding]:
    for piece in _all_code(page):
        for look in (_commands, _variables, _metrics, _programs):
            for problem in look(piece.text):
                yield Finding(page.path, piece.line, problem)
    for piece in page.codes:
        for look in (_lone_option, _file, _definition, _target):
            for problem in look(piece.text):
                yield Finding(page.path, piece.line, problem)
    for block in page.blocks:
        check = _toml if block.language == "toml" else _configs
        for problem in check(block.text):
            yield Finding(page.path, block.line, problem)
    for table in page.tables:
        if table.header[0] == "option":
            for line, problem in _defaults(table):
                yield Finding(page.path, line, problem)


def unmentioned(pages: Sequence[Page]) -> Iterator[str]:
    text = "\n".join(piece.text for page in pages for piece in _all_code(page))
    commands = [f"hcache {name}" for name in _commands_of(app)]
    yield from (f"no page speaks of {n}" for n in (*commands, *_families()) if n not in text)


def untabled(page: Page) -> Iterator[str]:
    """Options and variables of ours that do not stand once in the page's tables of them."""
    for header, ours in (
        ("option", HCacheConfig.model_fields),
        ("environment variable", VARIABLES),
    ):
        tables = [table for table in page.tables if table.header[0] == header]
        named = Counter(name for table in tables for row in table.rows for name in row.codes[0])
        yield from (f"{name} stands {named[name]} times" for name in ours if named[name] != 1)


def _all_code(page: Page) -> Iterator[Piece]:
    """Inline code, and the logical lines of blocks (a block of another language as a whole)."""
    yield from page.codes
    for block in page.blocks:
        if block.language not in _SHELL:
            yield Piece(block.line, block.text)
            continue
        lines = block.text.splitlines()
        start = 0
        for number, line in enumerate(lines):
            if not line.endswith("\\"):
                yield Piece(block.line + start, "\n".join(lines[start : number + 1]))
                start = number + 1


@cache
def _commands_of(program: typer.Typer) -> dict[str, Any]:
    """The commands of a program by their names; a program that is one command has it as ""."""
    command: Any = typer.main.get_command(program)
    return getattr(command, "commands", {"": command})


def _options_of(command: Any) -> set[str]:
    names = {"--help"}
    for parameter in command.params:
        names |= {*parameter.opts, *parameter.secondary_opts}
    return names


@cache
def _every_option() -> set[str]:
    found = set().union(*map(_options_of, _commands_of(app).values()))
    for file in (ROOT / "bench").glob("**/*"):
        if file.suffix in (".py", ".sh"):
            found |= set(re.findall(r'"(--[a-z][\w-]*)"', file.read_text()))
    return found


@cache
def _sglang_arguments() -> str | None:
    """The text that declares the arguments of SGLang's server; None where there is no SGLang."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).with_name("srt")
    files = [folder / "server_args.py", *sorted((folder / "arg_groups").glob("**/*.py"))]
    return "\n".join(file.read_text() for file in files)


def _is_known_option(option: str) -> bool:
    text = _sglang_arguments()
    if text is None or option in _every_option():
        return True
    field = re.escape(option[2:].replace("-", "_"))
    declared = rf"^    (?:{field}\s*:|\"{field}\",)"
    return f'"{option}"' in text or re.search(declared, text, re.M) is not None


def _commands(text: str) -> Iterator[str]:
    joined = text.replace("\\\n", " ")
    for rest in _CALL.findall(joined):
        words = re.findall(r"[^\s\[\]()'\"]+", rest)
        options = {"--help"}
        name = "hcache"
        if words and not words[0].startswith("-"):
            name, command = f"hcache {words[0]}", _commands_of(app).get(words[0])
            if command is None:
                yield f"`hcache` has no command {words[0]!r}"
                continue
            options = _options_of(command)
        for word in words:
            option = word.split("=")[0].rstrip(".,:")
            if re.fullmatch(r"--?[a-zA-Z][\w-]*", option) and option not in options:
                yield f"`{name}` has no option {option}"
    if "sglang.launch_server" in joined:
        for option in _OPTION.findall(joined):
            if not _is_known_option(option):
                yield f"SGLang's server has no option {option}"


def _lone_option(text: str) -> Iterator[str]:
    match = _OPTION.match(text)
    if match is not None and not _is_known_option(match[0]):
        yield f"neither hcache nor SGLang's server has an option {match[0]}"


def _configs(text: str) -> Iterator[str]:
    """Tables of options of ours inside of JSON, as SGLang or the environment gets them."""
    plain = text.replace('\\"', '"')
    for start in re.finditer(rf"(\"hcache\":\s*|{config.CONFIG_VARIABLE}=')(?=\{{)", plain):
        try:
            options, _ = json.JSONDecoder().raw_decode(plain, start.end())
            parse_config(options, "hcache")
        except (json.JSONDecodeError, ConfigError) as error:
            yield f"configuration: {error}"


def _toml(text: str) -> Iterator[str]:
    """A file for SGLang, with a table of ours, or one for the environment, which is the table."""
    try:
        table = tomllib.loads(text)
        parse_config(table.get("hcache", table), "hcache")
    except (tomllib.TOMLDecodeError, ConfigError) as error:
        yield f"configuration: {error}"


def _defaults(table: Table) -> Iterator[tuple[int, str]]:
    """The options of a table exist, and have the defaults that it says."""
    for row in table.rows:
        names, defaults = row.codes[0], row.codes[1] or (row.cells[1],)
        for name, shown in zip_longest(names, defaults):
            if name not in HCacheConfig.model_fields:
                yield row.line, f"{name!r} is no option"
                continue
            default = _plain(getattr(HCacheConfig(), name))
            if shown != ("none" if default is None else json.dumps(default)):
                yield row.line, f"the default of {name!r} is {json.dumps(default)}, not {shown}"


def _plain(value: Any) -> Any:
    """A default as JSON has it; the home folder as ``~``."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    if isinstance(value, tuple):
        return [str(item).replace(str(Path.home()), "~") for item in value]
    return value


def _variables(text: str) -> Iterator[str]:
    for name in sorted(set(_VARIABLE.findall(text)) - VARIABLES - {hcache_trace.VARIABLE}):
        yield f"{name} is no variable of ours"


def _families() -> list[str]:
    return [family.name for metric in metrics.ALL for family in metric.family.describe()]


@cache
def known_metrics() -> dict[str, set[str]]:
    """Names of samples as a server shows them -> labels."""
    known: dict[str, set[str]] = {}
    for metric in (one.family for one in metrics.ALL):
        for family in metric.describe():
            endings = {"counter": ("_total",), "histogram": ("", "_bucket", "_sum", "_count")}
            for ending in endings.get(family.type, ("",)):
                known[f"{family.name}{ending}"] = {*metric._labelnames, "le"}
    return known


def _metrics(text: str) -> Iterator[str]:
    known = known_metrics()
    for name, braces in _METRIC.findall(text):
        if name in _MODULES or f"{name}/" in text or f"{name}." in text:
            continue
        if name not in known:
            yield f"{name} is no metric"
            continue
        for label, value in _LABEL.findall(braces):
            if label not in known[name] | {"instance"}:
                yield f"{name} has no label {label}"
            elif label == "event" and value and f"pages_{value}" not in StoreStats().snapshot():
                yield f"the store counts no {value}"


def _file(text: str) -> Iterator[str]:
    if _FILE.fullmatch(text) and not _PLACEHOLDER.search(text) and not (ROOT / text).exists():
        yield f"there is no {text}"


def _definition(text: str) -> Iterator[str]:
    """``path.py:name`` or ``path.py:Class.name``, from the root or from the package."""
    match = _DEFINITION.fullmatch(text)
    if match is None:
        return
    paths = [folder / match[1] for folder in (ROOT, ROOT / "hcache_backend")]
    found = next((path for path in paths if path.exists()), None)
    if found is None:
        yield f"there is no {match[1]}"
    elif match[2] not in _definitions(found):
        yield f"{match[1]} defines no {match[2]}"


@cache
def _definitions(path: Path) -> frozenset[str]:
    """Functions, classes and variables of a Python file; those in a class as ``Class.name``."""

    def walk(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield node.name
                yield from walk(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (prefix + one.id for one in targets if isinstance(one, ast.Name))

    return frozenset(walk(ast.parse(path.read_text()).body))


def _programs(text: str) -> Iterator[str]:
    """``python -m bench.NAME``: a module or a package of this repository, and its options."""
    for name, rest in _PROGRAM.findall(text.replace("\\\n", " ")):
        path = ROOT / name.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            yield f"there is no program {name}"
        elif name.startswith("bench."):
            unknown = set(_OPTION.findall(rest)) - _every_option()
            yield from (f"no program in bench has an option {option}" for option in sorted(unknown))


def _target(text: str) -> Iterator[str]:
    match = _TARGET.match(text)
    if match is None or _PLACEHOLDER.search(match[1]):
        return
    rules = re.findall(r"^([\w%-]+):", (ROOT / "Makefile").read_text(), re.M)
    if not any(fnmatch(match[1], rule.replace("%", "*")) for rule in rules):
        yield f"the Makefile has no target {match[1]}"
