"""``hcache hint``: tell a server that a prompt comes back soon, or not for a long time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from hcache_backend.cli import common
from hcache_backend.cli.common import Failure, ask, say

Action = Literal["retain", "prefetch", "demote"]


def hint(
    action: Annotated[Action, Argument(help="Keep the prompt, read L3 for it, or let it go.")],
    tokens: Annotated[Path | None, Argument(help="Its token ids, a list in a JSON file.")] = None,
    session: Annotated[str | None, Option(help="Instead: a session of the server.")] = None,
    seconds: Annotated[float, Option(help="Until then host memory keeps it.")] = 300.0,
    url: Annotated[str, Option(help="The server.")] = common.SERVER,
    api_key: Annotated[str | None, Option(help="The server's admin API key.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Tell a server about a prompt: an agent's history comes back soon, or its session is over."""
    body: dict[str, Any] = {"action": action, "seconds": seconds}
    if tokens is not None:
        try:
            body["input_ids"] = json.loads(tokens.read_text(encoding="utf-8"))
        except ValueError as error:
            raise Failure(f"{tokens}: no list of token ids in JSON: {error}") from None
    if session is not None:
        body["session"] = session
    answers = json.loads(ask(url, "hcache/hint", 60.0, body=body, key=api_key))
    common.output(answers, as_json, show)


def show(answers: list[dict[str, Any]]) -> None:
    for told in answers:
        if "ended" in told:
            found = f"{told['ended']} hints have ended"
        else:
            found = f"{told['in_memory']:,} on the device or in host memory"
            found += f", {told['kept']:,} of them are kept"
        say(f"{told['tokens']:,} tokens: {found}")
