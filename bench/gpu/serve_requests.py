"""A server by one method: prompts, a decode batch, and both once more when only L3 has them.

    python -m bench.gpu.serve_requests hcache-hidden MODEL_FOLDER

One step of bench/gpu/serve.sh, whose ``--help`` says what is asked.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from bench.gpu import program
from bench.gpu.program import Results, Row
from bench.harness.client import Reply, StreamingClient
from bench.harness.machine import Machine, find_machine
from bench.harness.methods import METHODS, PAGE_SIZE, SERVED, Method, server_options
from bench.harness.options import ADMIN_KEY
from bench.harness.report import markdown
from bench.harness.restorer import Restorer, forget_files, recomputed, restored_from_l3, restorer
from hcache_backend.server_report import read_report

METHODS_SERVED = tuple(
    name for name in SERVED if METHODS[name].storage or METHODS[name].cache == "none"
)
"""Methods whose histories come from L3, or are computed again."""
VOCABULARY = 1000
"""Random tokens are below it: every model has more."""


@dataclass(frozen=True)
class Load:
    """Requests that are sent at once, and later once more as far as they were answered.

    Attributes:
        name: Of its rows.
        requests: How many.
        prompt: Tokens of each.
        reply: Tokens that each generates, and that are part of its history later.
        after: Tokens that follow the history: the same ones, generated twice.
        rounds: How often; the first includes what is done once only.
    """

    name: str
    requests: int
    prompt: int
    reply: int
    after: int
    rounds: int

    @property
    def history(self) -> int:
        """Tokens of each that come back from L3: whole pages."""
        return self.prompt + self.reply - 1  # the last token's K and V are not computed yet

    @property
    def room(self) -> int:
        """Tokens that all of them need of the KV pool, in whole pages."""
        pages = -(-(self.history + self.after) // PAGE_SIZE) + 1
        return self.requests * pages * PAGE_SIZE

    def prompts(self, number: int) -> list[list[int]]:
        """Random tokens, others in each round."""
        source = random.Random(f"{self.name} {number}")
        return [
            [source.randrange(VOCABULARY) for _ in range(self.prompt)] for _ in range(self.requests)
        ]


LOADS = (Load("prefill", 2, 4096, 1, 32, 3), Load("decode", 64, 64, 129, 32, 3))
DRY_LOADS = (Load("prefill", 2, 256, 1, 8, 1), Load("decode", 4, 64, 65, 8, 1))


def main() -> int:
    parser = program.parser(__doc__)
    parser.add_argument("method", choices=METHODS_SERVED)
    parser.add_argument("model", help="folder of the model")
    options = parser.parse_args()
    machine = find_machine()
    results = Results(f"serve-{options.method}", machine.name, options)
    loads = DRY_LOADS if options.dry_run else LOADS
    with tempfile.TemporaryDirectory(prefix="server-") as folder:
        measure(machine, options.method, options.model, loads, Path(folder), results)
    print(table(results.of()))
    return results.finish()


def measure(
    machine: Machine,
    name: str,
    model: str,
    loads: tuple[Load, ...],
    folder: Path,
    results: Results,
) -> None:
    """One row for the server, and one per load and round, computed and restored.

    Raises:
        ServerError: The server did not start, or died.
        RequestError: It refused a request.
    """
    method, exact = METHODS[name], machine.device == "cpu"
    options = server_options(
        method,
        machine,
        model,
        folder,
        pool_tokens=sum(load.room for load in loads),
        overlap=True,  # as on a GPU
    )
    with restorer(options, folder / "l3") as server:
        forced = method.hcache.get("mode") == "hidden"
        said = server.said()
        right = not forced or said.startswith("hidden mode")
        start = {"step": "start", "said": said, "right": right}
        if (report := read_report(server.l3)) is not None:
            start["exactness"] = report.model_dump(
                mode="json", include={"projection", "recomputation"}
            )
        results.add(start, f"{name}, start")
        for load in loads:
            for number in range(load.rounds):
                for row in restored_later(server, method, load, number, exact=exact):
                    said = f"{name}, {row['step']}, round {number + 1}"
                    results.add({"round": number + 1, **row}, said)


def restored_later(
    server: Restorer, method: Method, load: Load, number: int, *, exact: bool
) -> Iterator[Row]:
    """Have a load computed, then its histories brought back.

    Args:
        exact: Whether all tokens after a restore must be those without one.
    """
    prompts, told = load.prompts(number), load.reply + load.after
    computed = ask(server, prompts, told)
    yield {
        "step": load.name,
        **times(computed),
        "right": all(reply.cached.total == 0 for reply in computed),
    }
    histories = [
        [*prompt, *reply.output_ids[: load.reply]]
        for prompt, reply in zip(prompts, computed, strict=True)
    ]
    server.server.flush_cache(300)
    forget_files(server.l3)
    server.skip_trace()
    again = ask(server, histories, load.after)
    events = server.events()
    took = restored_from_l3(events) or recomputed(events)
    pairs = [
        (before, after)
        for computed_one, restored_one in zip(computed, again, strict=True)
        for before, after in zip(
            computed_one.output_ids[load.reply :], restored_one.output_ids, strict=True
        )
    ]
    same = sum(before == after for before, after in pairs)
    expected = load.history if method.storage else 0
    whole = all((reply.cached.storage or reply.cached.total) == expected for reply in again)
    yield {
        "step": f"{load.name}, restored",
        **times(again),
        "restore_ms": took and took.ms,
        "l3_ms": took and took.l3_ms,
        "load_ms": took and took.load_ms,
        "from_l3": sum(reply.cached.storage for reply in again),
        "same_tokens": same,
        "of_tokens": len(pairs),
        "right": whole and (same == len(pairs) or not exact),
    }
    server.server.flush_cache(300)


def ask(server: Restorer, prompts: list[list[int]], tokens: int) -> list[Reply]:
    """All prompts at once, each for so many tokens."""

    async def asked() -> list[Reply]:
        async with StreamingClient(server.server.url, ADMIN_KEY) as client:
            return await asyncio.gather(*(client.generate(prompt, tokens) for prompt in prompts))

    return asyncio.run(asked())


def times(replies: list[Reply]) -> Row:
    """Milliseconds to the first token, and between tokens."""
    gaps = [1e3 * gap for reply in replies for gap in reply.gaps_s]
    return {
        "requests": len(replies),
        "tokens": replies[0].prompt_tokens,
        "ttft_ms": 1e3 * median(reply.ttft_s for reply in replies),
        "last_ttft_ms": 1e3 * max(reply.ttft_s for reply in replies),
        "gap_ms": median(gaps),
        "gap_p99_ms": quantiles(gaps, n=100, method="inclusive")[98],
    }


def table(rows: list[Row]) -> str:
    """One line per load and round; what the server said stands above."""
    start, *others = rows
    heads = ("asked", "requests", "tokens", "TTFT, ms", "of the last", "between tokens", "99%")
    parts = ("step", "requests", "tokens", "ttft_ms", "last_ttft_ms", "gap_ms", "gap_p99_ms")
    more = ("restore, ms", "reading L3", "loading", "from L3", "same tokens", "right")
    rest = ("restore_ms", "l3_ms", "load_ms", "from_l3")
    lines = (
        (
            *(row.get(part) for part in (*parts, *rest)),
            f"{row['same_tokens']} of {row['of_tokens']}" if "same_tokens" in row else None,
            row["right"],
        )
        for row in others
    )
    return f"{start['said'] or 'as SGLang is'}\n\n{markdown((*heads, *more), lines)}"


if __name__ == "__main__":
    sys.exit(main())
