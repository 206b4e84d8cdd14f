"""The ``hcache`` command. One module for each group of commands; this one only lists them."""

from __future__ import annotations

import typer

from hcache_backend.cli import doctor, inspect, maintain
from hcache_backend.cli.bench import bench
from hcache_backend.cli.demo import demo
from hcache_backend.cli.ingest import ingest
from hcache_backend.cli.plan import plan
from hcache_backend.cli.profile import profile
from hcache_backend.cli.top import top

app = typer.Typer(
    name="hcache",
    help="HCache for SGLang: hidden states in L3 instead of KV.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo)
app.add_typer(bench, name="bench")
app.command("ingest")(ingest)
app.command("plan")(plan)
app.command("profile")(profile)
app.command("stats")(inspect.stats)
app.command("ls")(inspect.list_pages)
app.command("top")(top)
app.command("verify")(maintain.verify)
app.command("gc")(maintain.collect)
app.command("clear")(maintain.clear)
app.command("doctor")(doctor.doctor)


if __name__ == "__main__":
    app()
