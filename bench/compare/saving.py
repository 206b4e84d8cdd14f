"""What saving hidden states costs requests that are running: the time between their tokens.

Decode steps of more and more sequences, each with a history of 512 tokens, as in the paper's figure
14: without saving, and with ours (two stages, section 4.2.2). The figure's DirectIO, which writes
within the step, is a variant of ``bench.gpu.capture``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

from bench.harness.client import StreamingClient
from bench.harness.machine import Machine
from bench.harness.methods import METHODS, PAGE_SIZE, server_options
from bench.harness.options import ADMIN_KEY
from bench.harness.server import Server

HISTORY = 512
BATCHES = (1, 4, 16)
_TOKENS = 48
_UNEVEN = 8
"""Tokens at either end of a reply between which all requests of a batch are surely running."""


class _Way(NamedTuple):
    title: str
    method: str


WAYS = {
    "none": _Way("nothing is saved", "ideal"),
    "staged": _Way("HCache: two stages", "hcache-hidden"),
}


@dataclass(frozen=True)
class SavingPlan:
    """What is asked.

    Attributes:
        model: A folder, or a name that SGLang knows.
        rounds: Replies of every sequence that are timed.
        batches: Numbers of sequences that run together.
        history: Tokens of each before its reply.
        vocabulary: Random tokens are below it.
        server_args: More arguments of SGLang.
        folder: For L3 and logs; a folder below it for each way of saving.
    """

    machine: Machine
    model: str
    rounds: int
    vocabulary: int
    server_args: Sequence[str]
    folder: Path
    batches: Sequence[int] = BATCHES
    history: int = HISTORY
    seed: int = 1

    def histories(self) -> list[list[int]]:
        """Random tokens for each sequence of the largest batch."""
        source = random.Random(self.seed)
        return [
            [source.randrange(self.vocabulary) for _ in range(self.history)]
            for _ in range(max(self.batches))
        ]


def steps(plan: SavingPlan) -> int:
    """How often :func:`save_all` calls ``advance``."""
    return len(WAYS) * (2 + len(plan.batches) * plan.rounds)


def save_all(plan: SavingPlan, advance: Callable[[str], None]) -> dict[str, Any]:
    """The time between tokens with each way of saving; what ``compare.json`` says of it.

    Args:
        advance: Called :func:`steps` times, with what comes next.

    Raises:
        ServerError: A server did not start.
        RequestError: A server refused a request.
    """
    return {
        "history": plan.history,
        "batches": list(plan.batches),
        "ways": {name: _save(plan, name, advance) for name in WAYS},
    }


def _save(plan: SavingPlan, name: str, advance: Callable[[str], None]) -> dict[str, Any]:
    way = WAYS[name]
    options = server_options(
        METHODS[way.method],
        plan.machine,
        plan.model,
        plan.folder / name,
        pool_tokens=max(plan.batches) * (plan.history + _TOKENS + 2 * PAGE_SIZE),
        extra_args=plan.server_args,
    )
    advance(f"{way.title}: starting")
    with Server(options) as server:
        gaps = asyncio.run(_gaps(plan, way, server, advance))
    return {"title": way.title, "gaps_ms": {str(batch): gaps[batch] for batch in plan.batches}}


async def _gaps(
    plan: SavingPlan, way: _Way, server: Server, advance: Callable[[str], None]
) -> dict[int, dict[str, float]]:
    histories = plan.histories()
    found: dict[int, list[float]] = {batch: [] for batch in plan.batches}
    async with StreamingClient(server.url, ADMIN_KEY) as client:
        advance(f"{way.title}: prefilling")
        for history in histories:
            await client.generate(history, 1)
        for number in range(plan.rounds):
            for batch in plan.batches:
                advance(f"{way.title}: {batch} sequences")
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
