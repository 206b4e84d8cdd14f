"""A server by one method: prompts, a decode batch, and both once more when only L3 has them.

One step of bench/gpu/serve.sh, whose ``--help`` lists the requests.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from bench.gpu.program import GpuProgram, GpuRun, Row
from bench.harness.client import Reply, StreamingClient
from bench.harness.methods import EVERY_HIT, METHODS, PAGE_SIZE, SERVED, Method, server_options
from bench.harness.options import ADMIN_KEY
from bench.harness.program import Setting, scratch
from bench.harness.report import Column, Table
from bench.harness.restorer import Restorer, forget_files, recomputed, restored_from_l3, restorer
from hcache_backend.cli.metrics_page import fetch
from hcache_backend.server_report import ServerReport, read_report

METHODS_SERVED = {
    name: METHODS[name] for name in SERVED if METHODS[name].storage or METHODS[name].cache == "none"
} | {"hcache-kv-eager": Method("HCache, KV pages, eager", storage="dynamic", hcache={"mode": "kv"})}
"""Methods whose histories come from L3, or are computed again."""
VOCABULARY = 1000  # random tokens are below it: every model has more


class Load(NamedTuple):
    """Requests that are sent at once, and later once more as far as they were answered.

    Attributes:
        prompt: Tokens of each.
        reply: Tokens that each generates, and that are part of its history later.
        after: Tokens that follow the history: the same ones, generated twice.
        rounds: How often; the first round includes work that is done once only.
    """

    name: str
    requests: int
    prompt: int
    reply: int
    after: int
    rounds: int

    @property
    def history(self) -> int:
        """Tokens of each that come back from L3, in whole pages: the last token has no K and V."""
        return self.prompt + self.reply - 1

    @property
    def room(self) -> int:
        """Tokens of the KV pool for all of them, in whole pages."""
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


RECOMPUTATION, REFUSED = "recomputation", "hcache: not used: recomputation ("
"""If a server recomputes no layers: the step of the row with the reason, and the log line."""
DECODING, TOLD, DRY_TOLD = 4, 512, 96  # requests beside a hit, and tokens of each


def measure(run: GpuRun) -> None:
    """One row for the server, and one per load and round, computed and restored; then decoding.

    Raises:
        ServerError: The server did not start, or died.
        RequestError: It refused a request.
    """
    with scratch() as place:
        _serve(run, Path(place))


def _serve(run: GpuRun, folder: Path) -> None:
    machine, name = run.machine, run.given.method
    loads, told = (DRY_LOADS, DRY_TOLD) if run.given.dry_run else (LOADS, TOLD)
    method, exact = METHODS_SERVED[name], machine.device == "cpu"
    pool, given = sum(load.room for load in loads), (method, machine, run.given.model, folder)
    # A CPU overlaps as a GPU does.
    options = server_options(*given, pool_tokens=pool, hcache=EVERY_HIT, overlap=True, metrics=True)
    with restorer(options, folder / "l3") as server:
        forced = method.hcache.get("mode") == "hidden"
        said = server.said()
        right = not forced or said.startswith("hidden mode")
        start = {"step": "start", "said": said, "right": right}
        if (report := read_report(server.l3)) is not None:
            parts = {"mode", "projection", "recomputation"}
            start["exactness"] = report.model_dump(mode="json", include=parts)
        run.add(start, f"{name}, start")
        if method.storage == "dynamic":
            refused = refused_recomputation(method, server.server.log_text(), report)
            row = {"step": RECOMPUTATION, "refused": refused, "right": refused is None}
            run.add(row, f"{name}, {RECOMPUTATION}")
            if refused is not None:
                print(f"{name} fails: layers are not recomputed: {refused}", flush=True)
        for load in loads:
            for number in range(load.rounds):
                for row in restored_later(server, method, load, number, exact=exact):
                    said = f"{name}, {row['step']}, round {number + 1}"
                    run.add({"round": number + 1, **row}, said)
        for row in beside_decoding(server, method, loads[0], told):
            run.add(row, f"{name}, {row['step']}")


def refused_recomputation(method: Method, log: str, report: ServerReport | None) -> str | None:
    """Why a server of ours recomputes no layers, though its method wants it to; None: it does."""
    if REFUSED in log:
        return log.split(REFUSED, 1)[1].splitlines()[0].removesuffix(")")
    if report is None:
        return "the server left no report"
    if (
        report.recomputation is None and "recomputation" not in report.unused
    ):  # layer-wise restores of K and V have nothing to recompute
        layerwise = report.mode == "kv" and method.hcache.get("restore") == "layerwise"
        return None if layerwise else "the server's report does not say that it recomputes"
    return report.unused.get("recomputation")


def restored_later(
    server: Restorer, method: Method, load: Load, number: int, *, exact: bool
) -> Iterator[Row]:
    """Have a load computed, then its histories brought back; ``exact``: all tokens after a restore
    must be those without one."""
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
    before = [token for reply in computed for token in reply.output_ids[load.reply :]]
    after = [token for reply in again for token in reply.output_ids]
    same = sum(one == other for one, other in zip(before, after, strict=True))
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
        "of_tokens": len(after),
        "right": whole and (same == len(after) or not exact),
    }
    server.server.flush_cache(300)


def beside_decoding(server: Restorer, method: Method, load: Load, told: int) -> Iterator[Row]:
    """Others decode, alone and while the history of one prompt comes back, which delays them.

    Times between tokens are those of the others, and the time to the first token is the prompt's.
    """
    prompt, short = load.prompts(-1)[0], Load("short", DECODING, PAGE_SIZE, told, 0, 1)
    ask(server, [prompt], 1)
    for number, hit in enumerate(([], prompt)):
        server.server.flush_cache(300)
        forget_files(server.l3)
        before = recomputed_tokens(server) if method.storage == "dynamic" else 0.0
        others, reply = asyncio.run(_decode(server, short.prompts(number), told, hit))
        row = {**times(others), "step": "decode, few", "right": True}
        if reply is not None:
            row |= {
                "step": "a hit beside them",
                "tokens": reply.prompt_tokens,
                "ttft_ms": 1e3 * reply.ttft_s,
                "last_ttft_ms": 1e3 * reply.ttft_s,
                "from_l3": reply.cached.storage,
                "right": not method.storage or reply.cached.storage > 0,
            }
            if method.storage == "dynamic":
                row["recomputed_tokens"] = recomputed_tokens(server) - before
        yield row
    server.server.flush_cache(300)


async def _decode(
    server: Restorer, prompts: list[list[int]], tokens: int, hit: list[int]
) -> tuple[list[Reply], Reply | None]:
    """Replies to prompts, and to ``hit``, if any, which comes while the others decode."""
    async with StreamingClient(server.server.url, ADMIN_KEY) as client:
        others = [asyncio.create_task(client.generate(prompt, tokens)) for prompt in prompts]
        await client.generate([VOCABULARY], 1)  # behind their prefill
        reply = await client.generate(hit, 1) if hit else None
        return await asyncio.gather(*others), reply


def recomputed_tokens(server: Restorer) -> float:
    """Tokens of hits that were recomputed in slices so far."""
    return fetch(server.server.url).counters["l3_tokens"].get("recomputed", 0.0)


def ask(server: Restorer, prompts: list[list[int]], tokens: int) -> list[Reply]:
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


def same(row: Row) -> str | None:
    return f"{row['same_tokens']} of {row['of_tokens']}" if "same_tokens" in row else None


PROGRAM = GpuProgram(
    name="serve_requests",
    doc=__doc__,
    measure=measure,
    served=True,
    file=lambda given: f"serve-{Path(given['model']).name}-{given['method']}",
    said=lambda results: [results["rows"][0]["said"] or "as SGLang is", ""],
    settings=(
        Setting("method", str, None, "by which it restores", {"choices": METHODS_SERVED}),
        Setting("model", str, None, "folder of the model"),
    ),
    tables=Table(
        lambda results: [r for r in results["rows"][1:] if r["step"] != RECOMPUTATION],
        (
            "asked = step | requests | tokens | TTFT, ms = ttft_ms | "
            "of the last = last_ttft_ms | between tokens = gap_ms | 99% = gap_p99_ms | "
            "restore, ms = restore_ms | reading L3 = l3_ms | loading = load_ms | "
            "from L3 = from_l3 | recomputed = recomputed_tokens",
            *(Column("same tokens", same), Column("right", "right")),
        ),
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
