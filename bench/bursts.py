"""What requests that come at once use of L3, beside what they use one by one.

Histories of 1,344 tokens are in L3 and nowhere else, as after a restart. Half of host memory holds
four of them. A question behind each is asked, one request after the other and all at once, with
this backend and with SGLang's `file`.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.client import Reply, StreamingClient
from bench.harness.methods import METHODS, PAGE_SIZE, server_options
from bench.harness.models import SMALL
from bench.harness.options import ADMIN_KEY
from bench.harness.program import Program, Run, Setting, at_least, scratch, several
from bench.harness.report import Picture, Results, Row, Series, Table
from bench.harness.server import Server
from bench.harness.turns import history

TOKENS, POOL, GOAL = 21 * PAGE_SIZE, 5952, 0.95
QUESTION = 8  # tokens
WAYS = {"ours": "hcache-eager", "file": "file"}
"""Name in tables -> the server's method."""


async def _answers(url: str, prompts: Sequence[Sequence[int]], *, at_once: bool) -> list[Reply]:
    async with StreamingClient(url, ADMIN_KEY) as client:
        asked = (client.generate(prompt, 1) for prompt in prompts)
        return await asyncio.gather(*asked) if at_once else [await one for one in asked]


def _served(server: Server, sizes: Sequence[int], rounds: int) -> list[Row]:
    """For each size the share of the histories that is used, and seconds until all are answered."""
    for number in range(max(sizes)):
        server.generate(history(TOKENS, number), 1)
        server.flush_cache()
    rows = list[Row]()
    for size in sizes:
        used: dict[str, list[float]] = {"alone": [], "at_once": []}
        seconds: dict[str, list[float]] = {"alone": [], "at_once": []}
        for turn in range(rounds):
            for how, shares in used.items():
                asked = [
                    history(TOKENS, n) + history(QUESTION, 1000 * turn + n) for n in range(size)
                ]
                begin = time.perf_counter()
                replies = asyncio.run(_answers(server.url, asked, at_once=how == "at_once"))
                seconds[how].append(time.perf_counter() - begin)
                cached = sum(reply.cached.total for reply in replies)
                shares.append(cached / (size * TOKENS))
                server.flush_cache()
        row: dict[str, Any] = {"size": size}
        row |= {f"used_{how}": median(found) for how, found in used.items()}
        row |= {f"seconds_{how}": median(found) for how, found in seconds.items()}
        ratios = [at / one for at, one in zip(seconds["at_once"], seconds["alone"], strict=True)]
        rows.append(row | {"of_alone": median(ratios)})
    return rows


def measure(run: Run) -> Results:
    given, rows = run.given, list[Row]()
    with scratch() as folder:
        model = SMALL.build(Path(folder))
        for way, method in WAYS.items():
            print(f"{way}: starting", flush=True)
            options = server_options(
                *(METHODS[method], run.machine, model, Path(folder) / way),
                pool_tokens=POOL,
                hicache_ratio=2.0,
            )
            with Server(options) as server:
                rows += [{"way": way, **row} for row in _served(server, given.sizes, given.rounds)]
    return {"tokens": TOKENS, "rounds": given.rounds, "rows": rows}


def of(results: Results, way: str) -> list[Row]:
    return [row for row in results["rows"] if row["way"] == way]


def finding(results: Results) -> str:
    ours, others = (of(results, way)[-1] for way in ("ours", "file"))
    return (
        f"{ours['size']} conversations that come back at once are answered after "
        f"{ours['seconds_at_once']:.1f} s, with SGLang's file backend after "
        f"{others['seconds_at_once']:.1f} s"
    )


PROGRAM = Program(
    name="bursts",
    doc=__doc__,
    measure=measure,
    settings=(
        several("--sizes", at_least(1), [4, 8, 12, 16], "of bursts"),
        Setting("--rounds", at_least(1), 3, "of each size"),
    ),
    tables=Table(
        "rows",
        "L3 = way | at once = size | used, one by one = used_alone :.2f"
        " | used, at once = used_at_once :.2f | s, one by one = seconds_alone :.1f"
        " | s, at once = seconds_at_once :.1f | at once / one by one = of_alone :.2f",
    ),
    draw=Picture(
        title=finding,
        panels=lambda results: {
            f"{TOKENS:,} tokens each, {way}": of(results, way) for way in ("ours", "file")
        },
        x="size",
        x_label="requests at once",
        y_label="seconds until all are answered",
        series=(
            Series("one by one", "seconds_alone", "computed"),
            Series("at once", "seconds_at_once", "ours"),
        ),
        bars="%.1f",
    ),
    wrong=lambda results: [
        f"{row['size']} at once use {row['used_at_once']:.2f}, one by one {row['used_alone']:.2f}"
        for row in of(results, "ours")
        if row["used_at_once"] < GOAL * row["used_alone"]
    ],
)

if __name__ == "__main__":
    PROGRAM.run()
