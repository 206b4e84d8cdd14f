"""The ``hcache`` command. One module for each group of commands; this one only lists them."""

from __future__ import annotations

import typer

from hcache_backend.cli import doctor, inspect, maintain

app = typer.Typer(
    name="hcache",
    help="Look at, check and tidy the page store of hcache-backend.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command("stats")(inspect.stats)
app.command("ls")(inspect.list_pages)
app.command("verify")(maintain.verify)
app.command("gc")(maintain.collect)
app.command("clear")(maintain.clear)
app.command("doctor")(doctor.doctor)


if __name__ == "__main__":
    app()
