"""The ``hcache`` command: a list of its commands, each in a module of this package."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hcache_backend import __version__
from hcache_backend.cli import store
from hcache_backend.cli.check_config import check_config
from hcache_backend.cli.common import fail
from hcache_backend.cli.doctor import doctor
from hcache_backend.cli.ingest import ingest
from hcache_backend.cli.plan import plan
from hcache_backend.cli.profile import profile
from hcache_backend.cli.size import size
from hcache_backend.cli.top import top

_EXTRAS = {
    "matplotlib": "'hcache-backend[plot]'",
    "torch": "torch (not needed by `hcache plan --codec none`)",
}
"""What installs a package that only some commands need; SGLang brings the others."""


class _Commands(TyperGroup):
    """Says in one line which package a command lacks: most do without torch, which is large."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            name = error.name or ""
            fail(f"this command needs {name}: pip install {_EXTRAS.get(name, name)}")


app = typer.Typer(
    name="hcache",
    help="HCache for SGLang: check a set-up, look after the page store, plan and watch servers.",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor)
app.command("config")(check_config)
app.command("size")(size)
app.command("plan")(plan)
app.command("profile")(profile)
app.command("top")(top)
app.command("stats")(store.stats)
app.command("ls")(store.list_pages)
app.command("verify")(store.verify)
app.command("gc")(store.collect)
app.command("clear")(store.clear)
app.command("ingest")(ingest)


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
    """Options of the command itself; its help is that of ``app``."""


if __name__ == "__main__":
    app()
