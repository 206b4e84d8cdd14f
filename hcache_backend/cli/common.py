"""Shared by the commands: options and folders, printed tables, failures."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ByteSize
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hcache_backend.config import (
    ConfigError,
    HCacheConfig,
    config_from_environment,
    parse_config,
)
from hcache_backend.partition.model_shape import ModelShape
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
NamespaceDigits = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Only this namespace (first hexadecimal digits)."),
]

screen = Console()
errors = Console(stderr=True)


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


def existing_store(config: HCacheConfig) -> HCacheConfig:
    """``config`` if all of its folders are stores; otherwise the command ends."""
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


def check_ranks(shape: ModelShape, tp: int) -> None:
    """End the command if ``tp`` ranks cannot divide a model's heads."""
    if shape.heads % tp:
        fail(f"--tp {tp}: must divide the model's {shape.heads} attention heads")
    if not shape.latent and shape.kv_heads % tp and tp % shape.kv_heads:
        fail(f"--tp {tp}: must divide the model's {shape.kv_heads} KV heads, or be a multiple")


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def table(title: str, *columns: str) -> Table:
    """An empty table; columns whose name ends in ``#`` hold numbers."""
    result = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 1)
    )
    for column in columns:
        number = column.endswith("#")
        # What is long is the last column; it may take several lines.
        result.add_column(
            column.rstrip("#"),
            justify="right" if number else "left",
            no_wrap=column is not columns[-1],
            overflow="fold",
        )
    return result


def human_bytes(count: int) -> str:
    """A number of bytes as people read it."""
    return ByteSize(count).human_readable(separator=" ")


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
