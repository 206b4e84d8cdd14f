"""What saving hidden states costs requests that are running: the time between their tokens.

Decode steps of more and more sequences, each with a history of 512 tokens, as in the paper's figure
14: without saving, and with ours (two stages, section 4.2.2). The figure's DirectIO, which writes
within the step, is a variant of ``bench.gpu.capture``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any

from bench.compare.part import Part
from bench.harness import program
from bench.harness.client import StreamingClient
from bench.harness.methods import PAGE_SIZE
from bench.harness.options import ADMIN_KEY
from bench.harness.server import Server

HISTORY = 512
BATCHES = (1, 4, 16)
_TOKENS = 48
_UNEVEN = 8
"""Tokens at either end of a reply between which all requests of a batch are surely running."""


WAYS = {"none": ("nothing is saved", "ideal"), "staged": ("HCache: two stages", "hcache-hidden")}
"""Ways to save: their titles, and the methods whose servers do so."""


@dataclass(frozen=True, kw_only=True)
class SavingPlan(Part):
    """What is asked.

    Attributes:
        rounds: Replies of every sequence that are timed.
        batches: Numbers of sequences that run together.
        history: Tokens of each before its reply.
    """

    rounds: int
    batches: Sequence[int] = BATCHES
    history: int = HISTORY


def steps(plan: SavingPlan) -> int:
    """How many steps of the progress bar :func:`run` takes."""
    return len(WAYS) * (2 + len(plan.batches) * plan.rounds)


def run(plan: SavingPlan) -> dict[str, Any]:
    """The time between tokens with each way of saving; what ``compare.json`` says of it.

    Raises:
        ServerError: A server did not start.
        RequestError: A server refused a request.
    """
    with program.steps(steps(plan)) as (_, advance):
        ways = {name: _save(plan, name, advance) for name in WAYS}
    return {"history": plan.history, "batches": list(plan.batches), "ways": ways}


def _save(plan: SavingPlan, name: str, advance: Callable[[str], None]) -> dict[str, Any]:
    title, method = WAYS[name]
    pool = max(plan.batches) * (plan.history + _TOKENS + 2 * PAGE_SIZE)
    advance(f"{title}: starting")
    with Server(plan.server(method, name, pool)) as server:
        gaps = asyncio.run(_gaps(plan, title, server, advance))
    return {"title": title, "gaps_ms": {str(batch): gaps[batch] for batch in plan.batches}}


async def _gaps(
    plan: SavingPlan, title: str, server: Server, advance: Callable[[str], None]
) -> dict[int, dict[str, float]]:
    histories = plan.histories(max(plan.batches), plan.history)
    found: dict[int, list[float]] = {batch: [] for batch in plan.batches}
    async with StreamingClient(server.url, ADMIN_KEY) as client:
        advance(f"{title}: prefilling")
        for history in histories:
            await client.generate(history, 1)
        for number in range(plan.rounds):
            for batch in plan.batches:
                advance(f"{title}: {batch} sequences")
                asked = (client.generate([*h, number], _TOKENS) for h in histories[:batch])
                for reply in await asyncio.gather(*asked):
                    found[batch] += reply.gaps_s[_UNEVEN:-_UNEVEN]
    return {batch: _summary(gaps) for batch, gaps in found.items()}


def _summary(gaps: Sequence[float]) -> dict[str, float]:
    """Milliseconds, of gaps in seconds."""
    found = {
        "mean": fmean(gaps),
        "median": median(gaps),
        "p99": quantiles(gaps, n=100, method="inclusive")[98],
    }
    return {name: round(1e3 * value, 3) for name, value in found.items()}
