"""What saving hidden states costs requests that are running: the time between their tokens.

Decode steps of more and more sequences, each with a history of 512 tokens, as in the paper's figure
14: without saving, and with ours (two stages, section 4.2.2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, quantiles

from bench.harness.client import StreamingClient
from bench.harness.methods import METHODS, PAGE_SIZE, server_options
from bench.harness.models import TinyLlama
from bench.harness.options import ADMIN_KEY
from bench.harness.program import MODEL, Program, Run, Setting, at_least, scratch, steps
from bench.harness.report import Column, Picture, Results, Row, Series, Table
from bench.harness.server import Server
from bench.harness.turns import history

HISTORY, BATCHES, _TOKENS = 512, (1, 4, 16), 48
_UNEVEN = 8
"""Tokens at either end of a reply between which all requests of a batch are surely running."""
SHAPE = TinyLlama(layers=8, hidden=1024, heads=8, kv_heads=8, intermediate=2816)
WAYS = {"none": ("nothing is saved", "ideal"), "staged": ("hcache: two stages", "hcache-hidden")}
"""Ways to save: their titles, and the methods whose servers do so."""


def measure(run: Run) -> Results:
    """The time between tokens with each way of saving.

    Raises:
        ServerError: A server did not start.
        RequestError: A server refused a request.
    """
    given, found = run.given, {}
    pool = max(BATCHES) * (HISTORY + _TOKENS + 2 * PAGE_SIZE)
    with steps(len(WAYS) * (2 + len(BATCHES) * given.rounds)) as advance, scratch() as folder:
        model = given.model_path or SHAPE.build(Path(folder))
        for name, (title, method) in WAYS.items():
            advance(f"{title}: starting")
            options = server_options(
                METHODS[method],
                run.machine,
                model,
                Path(folder) / name,
                pool_tokens=pool,
                extra_args=given.server_args,
            )
            with Server(options) as server:
                found[name] = asyncio.run(gaps(server, title, given.rounds, advance))
    rows = [
        {
            "sequences": batch,
            "ms": {name: summary(each[batch]) for name, each in found.items()},
            "staged_of_none": median(found["staged"][batch]) / median(found["none"][batch]),
        }
        for batch in BATCHES
    ]
    return {"model": given.model_path or SHAPE.describe(), "history": HISTORY, "rows": rows}


async def gaps(
    server: Server, title: str, rounds: int, advance: Callable[[str], None]
) -> Mapping[int, Sequence[float]]:
    """Seconds between tokens, by the number of sequences that run together."""
    histories = [history(HISTORY, number) for number in range(max(BATCHES))]
    found: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    async with StreamingClient(server.url, ADMIN_KEY) as client:
        advance(f"{title}: prefilling")
        for tokens in histories:
            await client.generate(tokens, 1)
        for number in range(rounds):
            for batch in BATCHES:
                advance(f"{title}: {batch} sequences")
                asked = (client.generate([*h, number], _TOKENS) for h in histories[:batch])
                for reply in await asyncio.gather(*asked):
                    found[batch] += reply.gaps_s[_UNEVEN:-_UNEVEN]
    return found


def summary(seconds: Sequence[float]) -> Row:
    """Milliseconds."""
    found = {
        "mean": fmean(seconds),
        "median": median(seconds),
        "p99": quantiles(seconds, n=100, method="inclusive")[98],
    }
    return {name: round(1e3 * value, 3) for name, value in found.items()}


PROGRAM = Program(
    name="saving",
    doc=__doc__,
    measure=measure,
    settings=(Setting("--rounds", at_least(1), 3, "replies of every sequence"), *MODEL),
    tables={
        "table": Table(
            "rows",
            (
                Column("sequences", "sequences"),
                *(
                    Column(f"{title}, ms between tokens{more}", f"ms.{name}.{part}")
                    for name, (title, _) in WAYS.items()
                    for part, more in (("median", ""), ("p99", ", 99%"))
                ),
                Column("two stages / nothing", "staged_of_none"),
            ),
        )
    },
    draw=Picture(
        title=lambda results: "Time between tokens while hidden states are saved",
        panels=lambda results: {f"histories of {HISTORY} tokens": results["rows"]},
        x="sequences",
        x_label="sequences that run together",
        y_label="between tokens, ms (median)",
        series=[
            Series(title, f"ms.{name}.median", colour)
            for (name, (title, _)), colour in zip(WAYS.items(), ("computed", "ours"), strict=True)
        ],
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
