"""The ``hcache`` command: a list of its commands, each in a module of this package."""

from __future__ import annotations

from typing import Annotated

import typer

from hcache_backend import __version__
from hcache_backend.cli import store
from hcache_backend.cli.doctor import doctor
from hcache_backend.cli.ingest import ingest
from hcache_backend.cli.plan import plan
from hcache_backend.cli.profile import profile
from hcache_backend.cli.top import top

app = typer.Typer(
    name="hcache",
    help="HCache for SGLang: look after the page store, plan, profile and watch servers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hcache-backend {__version__}")
        raise typer.Exit


@app.callback()
def main(
    _asked: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Look after the page store, plan, profile and watch servers."""


app.command("stats")(store.stats)
app.command("ls")(store.list_pages)
app.command("verify")(store.verify)
app.command("gc")(store.collect)
app.command("clear")(store.clear)
app.command("doctor")(doctor)
app.command("plan")(plan)
app.command("profile")(profile)
app.command("top")(top)
app.command("ingest")(ingest)


if __name__ == "__main__":
    app()
