"""The ``hcache`` command: where its commands are registered, and nothing else."""

from __future__ import annotations

import typer

from hcache_backend.cli.demo import demo

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)


@app.callback()
def hcache() -> None:
    """HCache for SGLang: hidden states in L3 instead of KV."""
