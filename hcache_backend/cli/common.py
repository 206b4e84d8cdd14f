"""Shared by the commands: options, folders, models and servers; tables and failures."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ByteSize, Field, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from typer import Argument, BadParameter, Exit, Option, echo

from hcache_backend.config import Bytes, HCacheConfig, options_from_environment, parse_config
from hcache_backend.plan import model_config
from hcache_backend.plan.model_shape import DSAType, PlannedCodec, dsa_rows
from hcache_backend.server_report import ServerReport
from hcache_backend.store import is_store_folder

_Result = TypeVar("_Result")

SERVER = "http://127.0.0.1:30000"
FOLDERS_HELP = "Folders of the store. Default: `dirs` of HCACHE_CONFIG, otherwise a server's."
MODEL_HELP = "A config.json, or its folder."
Folders = Annotated[list[Path] | None, Argument(help=FOLDERS_HELP)]
Dirs = Annotated[list[Path] | None, Option("--dir", "-d", help="Another folder of the store.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of tables.")]
Model = Annotated[Path, Option("--model", "-m", help=MODEL_HELP)]
Codec = Annotated[PlannedCodec, Option(help="Option `codec` of the server.")]
KVType = Annotated[DSAType, Option("--kv-cache-dtype", help="Option of a server of DSA models.")]
Ranks = Annotated[int, Option("--tp", min=1, help="Tensor-parallel ranks.")]

_COUNT: TypeAdapter[int] = TypeAdapter(Annotated[Bytes, Field(ge=1)])
_DIGITS = {"namespace": 8, "key": 12, "writer": 8}  # that tables show


class _Console(Console):
    """Prints texts as they are: names of models and folders are others', and no markup."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)
        if not self.is_terminal:
            self.width = 10_000  # a program that reads a table wants a row in one line

    def render_str(self, text: str, *args: Any, **options: Any) -> Text:
        return super().render_str(printable(text), *args, **options)


def printable(text: str) -> str:
    """``text`` with escapes for what would move the cursor, or is no character."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text
    )


screen = _Console()
errors = _Console(stderr=True)


class Failure(Exception):
    """Why a command cannot do its work, in one line. The command prints it and ends with 2."""


def settings(*dirs: Sequence[Path] | None, **options: object) -> HCacheConfig:
    """The options of the environment, and over them those of a command. Raises ConfigError."""
    values = {name: value for name, value in options.items() if value is not None}
    if folders := [path.absolute() for paths in dirs for path in paths or ()]:
        values["dirs"] = folders
    return parse_config(values, "hcache", options_from_environment())


def existing_store(*dirs: Sequence[Path] | None, **options: object) -> HCacheConfig:
    """The environment's options, and over them a command's; Failure if a folder is no store."""
    config = settings(*dirs, **options)
    for path in config.dirs:
        if not is_store_folder(path):
            raise Failure(f"{path} is not a page store. Name one, or set HCACHE_CONFIG")
    return config


def quantity(help: str) -> Any:
    """An option whose value is a number of things."""
    return Option(parser=_count, metavar="COUNT", help=help)


def _count(text: object) -> int:
    """A number of things from text such as "60K", with the units of sizes but without bytes."""
    with contextlib.suppress(ValidationError):
        if not str(text).lower().endswith(("b", "bytes")):
            return _COUNT.validate_python(text)
    raise BadParameter(f"{text!r} must be a whole number from 1, such as 60000, 60K or 1.5M")


def served_model(path: Path, tp: int = 1, kv: DSAType = "auto", on: str = "") -> model_config.Model:
    """The model at ``path``. ``kv``: --kv-cache-dtype of DSA models, which on "auto" depends on the
    device ``on``. Raises a Failure if ``tp`` cannot divide the heads, or ``kv`` is wrong."""
    model = model_config.read_model(path)
    shape = model.shape
    if shape.heads % tp:
        raise Failure(f"--tp {tp}: must divide the model's {shape.heads} attention heads")
    if not shape.latent and shape.kv_heads % tp and tp % shape.kv_heads:
        raise Failure(f"--tp {tp}: must divide the {shape.kv_heads} KV heads, or be a multiple")
    if kv != "auto" and not shape.index_bytes:
        raise Failure(f"--kv-cache-dtype {kv}: only DSA models are planned with another than auto")
    return model._replace(shape=dsa_rows(shape, kv, on))


def output(
    result: _Result, as_json: bool, show: Callable[[_Result], object], failed: bool = False
) -> None:
    """Print a command's result as JSON, or let ``show`` print it; status 1 if it ``failed``."""
    if as_json:
        echo(json.dumps(result, indent=2))
    else:
        show(result)
    if failed:
        raise Exit(1)


def say(*texts: object, console: Console = screen) -> None:
    """Print texts or tables as they are, in lines as long as they have."""
    console.print(*texts, sep="\n", soft_wrap=True)


def table(title: str, *columns: str) -> Table:
    """A table; columns whose name ends in ``#`` hold numbers."""
    result = Table(title=title or None, box=None, pad_edge=False, title_justify="left")
    for column in columns:
        # The longest texts are in the last column, which may take several lines.
        result.add_column(column.rstrip("#"), no_wrap=column is not columns[-1], overflow="fold")
        if column.endswith("#"):
            result.columns[-1].justify = "right"
    return result


def listing(title: str, keys: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """A table of ``rows``. ``keys``: those shown, between spaces; a key with ``#`` has numbers."""
    result = table(title, *(key.replace("_", " ") for key in keys.split()))
    for row in rows:
        result.add_row(*(cell(key, row[key]) for key in keys.replace("#", "").split()))
    return result


def cell(key: str, value: Any) -> str:
    """``value`` of JSON as people read it; its ``key`` says if it is a time, bytes or a number."""
    if isinstance(value, str):
        return value[: _DIGITS.get(key, len(value))]
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if key == "last_used":
        return when(value)
    return human_bytes(value) if "bytes" in key else f"{value:,.0f}"


def human_bytes(count: float) -> str:
    return ByteSize(count).human_readable(separator=" ")


def when(stamp: float) -> str:
    """A time in seconds since 1970 as people read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))


def describe_server(report: ServerReport) -> str:
    """The report of a server in one line."""
    started = when(report.time).rpartition(":")[0]
    parts = [f"{report.model}, started {started}: {report.mode} mode, {report.pages} pages"]
    parts += filter(None, [report.reason, report.codec and f"codec {report.codec}"])
    for group in report.projection:
        how = "by spec" if group.method == "spec" else "by their attention modules"
        numbers = ", ".join(map(str, group.layers))
        parts.append(f"layers {numbers} {how}: {group.detail} ({group.exactness})")
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in report.tokens_per_second.items())
    unused = ", ".join(f"{what} ({why})" for what, why in report.unused.items())
    fields = {"recomputed layers": report.recomputation, "stored": report.partition}
    fields |= {"shared L3": report.shared, "not used": unused, "tokens per second": rates}
    return "; ".join(parts + [f"{name}: {value}" for name, value in fields.items() if value])


def progress_bar(*, hidden: bool) -> Progress:
    """A progress bar on standard error, so that output stays clean."""
    _, *others = Progress.get_default_columns()
    columns = (TextColumn("{task.description}", markup=False), *others, MofNCompleteColumn())
    return Progress(*columns, console=errors, transient=True, disable=hidden)
