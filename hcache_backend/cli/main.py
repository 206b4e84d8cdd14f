"""The ``hcache`` command: a list of its commands, which are functions of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hcache_backend import __version__
from hcache_backend.cli import common, doctor, ingest, plan, profile, size, store, top

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
            common.fail(f"this command needs {name}: pip install {_EXTRAS.get(name, name)}")


app = typer.Typer(
    name="hcache",
    help="HCache for SGLang: check a set-up, look after the page store, plan and watch servers.",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_FUNCTIONS: dict[str, Callable[..., None]] = {
    "doctor": doctor.doctor,
    "config": doctor.check_config,
    "size": size.size,
    "plan": plan.plan,
    "profile": profile.profile,
    "top": top.top,
    "stats": store.stats,
    "ls": store.list_pages,
    "verify": store.verify,
    "gc": store.collect,
    "clear": store.clear,
    "ingest": ingest.ingest,
}
for _name, _command in _FUNCTIONS.items():
    app.command(_name)(_command)


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
