"""Shared by the commands: options, folders, models and servers; tables and failures."""

from __future__ import annotations

import http.client
import json
import sqlite3
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ByteSize
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hcache_backend.config import ConfigError, HCacheConfig, config_from_environment, parse_config
from hcache_backend.plan.model_config import ModelConfigError, read_dtype, read_model
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.store import is_store_folder

Folders = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Folders of the page store (the server's `dirs`). Default: those of HCACHE_CONFIG, "
        "otherwise a server's default folder.",
        show_default=False,
    ),
]
Dirs = Annotated[
    list[Path] | None,
    typer.Option("--dir", "-d", help="A folder of the page store; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
SERVER = "http://127.0.0.1:30000"
MODEL_HELP = "A config.json, or its folder."
Model = Annotated[Path, typer.Option("--model", "-m", help=MODEL_HELP)]
Ranks = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")]

screen = Console()
errors = Console(stderr=True)


class RequestError(RuntimeError):
    """A server refused a request, or did not finish it; ``status`` is its answer's, or 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def fail(message: str) -> NoReturn:
    """Print why the command cannot do its work, and end it with status 2."""
    errors.print(f"[red]hcache:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def settings(*dirs: Sequence[Path] | None, **options: object) -> HCacheConfig:
    """The options of the environment, and over them those of the command; wrong ones end it."""
    try:
        if any(dirs):
            options["dirs"] = [path.absolute() for paths in dirs for path in paths or ()]
        given = {name: value for name, value in options.items() if value is not None}
        return parse_config(given, "hcache", config_from_environment())
    except ConfigError as error:
        fail(str(error))


def existing_store(*dirs: Sequence[Path] | None, **options: object) -> HCacheConfig:
    """As :func:`settings`, if all folders are stores; otherwise the command ends."""
    config = settings(*dirs, **options)
    with explained():
        for path in config.dirs:
            if not is_store_folder(path):
                fail(
                    f"{path} is not a page store. Name the folders of the server's `dirs`, or set "
                    "HCACHE_CONFIG"
                )
    return config


@contextmanager
def explained(*also: type[Exception]) -> Iterator[None]:
    """End the command with one line instead of a traceback, for errors of a folder and ``also``."""
    failures: tuple[type[Exception], ...] = (OSError, sqlite3.Error, *also)
    try:
        yield
    except failures as error:
        fail(str(error))


def served_model(path: Path, tp: int = 1) -> tuple[ModelShape, str]:
    """A model and its dtype; the command ends if ``tp`` ranks cannot divide its heads."""
    with explained(ModelConfigError):
        shape, dtype = read_model(path), read_dtype(path)
    if shape.heads % tp:
        fail(f"--tp {tp}: must divide the model's {shape.heads} attention heads")
    if not shape.latent and shape.kv_heads % tp and tp % shape.kv_heads:
        fail(f"--tp {tp}: must divide the model's {shape.kv_heads} KV heads, or be a multiple")
    return shape, dtype


def ask(server: str, path: str, seconds: float, *, body: Any = None, key: str | None = None) -> str:
    """The answer of the server at ``HOST:PORT``, or ``http://HOST:PORT``.

    Args:
        seconds: The longest pause within the answer.
        body: Posted as JSON, if it is not None.
        key: The server's API key.

    Raises:
        RequestError: The server does not answer, or refuses.
    """
    whole = server if "://" in server else f"http://{server}"
    if not whole.startswith(("http://", "https://")):
        raise RequestError(f"{server!r} is no address of a server; it must be http://HOST:PORT")
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(f"{whole.rstrip('/')}/{path}", data, headers)
        try:
            answer = urllib.request.urlopen(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            text: str = answer.read().decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        raise RequestError(f"the server does not answer: {why}") from None
    if answer.status >= 400:
        said = "give its --api-key" if answer.status in (401, 403) else error_text(text)
        raise RequestError(f"{answer.status}: {said}", answer.status)
    return text


def error_text(text: str) -> str:
    """The message in an error of SGLang."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, LookupError, TypeError):
        return text.strip()
    return str(error.get("message", error) if isinstance(error, Mapping) else error).strip()


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def say(text: object, console: Console = screen, **options: Any) -> None:
    """Print ``text`` as it is, in lines as long as it has."""
    console.print(text, highlight=False, soft_wrap=True, **options)


def table(title: str, *columns: str, rows: Iterable[Sequence[str]] = ()) -> Table:
    """A table; columns whose name ends in ``#`` hold numbers."""
    result = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 1)
    )
    for column in columns:
        # The longest texts are in the last column, which may take several lines.
        result.add_column(
            column.rstrip("#"),
            justify="right" if column.endswith("#") else "left",
            no_wrap=column is not columns[-1],
            overflow="fold",
        )
    for row in rows:
        result.add_row(*row)
    return result


def human_bytes(count: float) -> str:
    """A number of bytes as people read it."""
    return ByteSize(count).human_readable(separator=" ")


def when(stamp: float) -> str:
    """A time in seconds since 1970 as people read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))


def progress_bar(*, hidden: bool) -> Progress:
    """A progress bar on standard error, so that output stays clean."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=hidden,
    )
