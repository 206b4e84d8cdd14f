"""The ``hcache`` command: a list of its commands, which are functions of this package."""

from __future__ import annotations

import sqlite3
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from hcache_backend import __version__
from hcache_backend.cli import common, doctor, metrics_page, plan, store
from hcache_backend.config import ConfigError


class _Commands(TyperGroup):
    """Ends a command that cannot do its work with one line instead of a traceback, and status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # as in `hcache ls | head`; click ends quietly
        except (common.Failure, OSError, sqlite3.Error, ConfigError, UnicodeError) as error:
            why = str(error).removeprefix("hcache: ")  # some begin with it, as in a server's log
        message = Text.assemble(("hcache:", "red"), f" {common.printable(why)}")
        common.say(message, console=common.errors)
        raise typer.Exit(2)


app = typer.Typer(
    name="hcache",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_MACHINE = (doctor.doctor, doctor.config, plan.size, plan.plan, plan.profile)
_STORE = (store.stats, store.ls, store.verify, store.gc, store.clear)
for _command in (*_MACHINE, metrics_page.top, *_STORE):
    app.command()(_command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hcache-backend {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """HCache for SGLang: check a set-up, look after the page store, plan and watch servers."""


if __name__ == "__main__":
    app()
