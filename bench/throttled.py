"""Restores of encoded K and V from a slow L3, beside those of K and V as they are.

SGLang serves a random bfloat16 Llama with grouped-query attention on the CPU. Two servers, alike
but for option ``codec``, take turns in changing order, the other one stopped meanwhile. In a turn a
server brings the same history back from L3 once, with reads of L3 limited to a rate. A time is from
the start of the prefetch to the last layer in the pool, and is compared with the other server's of
the same round. The table has medians, the median of the ratios, and an interval that holds the true
one with 95%.

Where L3 is slow, its bytes are what a restore takes. On a CPU decoding is in plain torch, many
times slower than by a GPU: with faster L3s, this program measures that.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.machine import Machine, MachineError, find_machine
from bench.harness.methods import PAGE_SIZE, Method, server_options
from bench.harness.models import TinyLlama
from bench.harness.program import at_least, failing, parser, stamp
from bench.harness.report import OUT, markdown, write_json
from bench.harness.restorer import l3_bytes, restorer
from bench.pages import LEAST_ROUNDS, median_interval

SHAPE = TinyLlama(layers=8, hidden=1024, heads=8, kv_heads=4, intermediate=1024)
DTYPE = "bfloat16"
"""Of the servers."""
CODECS = ("none", "exp4")
RATES = (5, 10, 20)
"""Of L3, in MB/s."""


def measure(
    machine: Machine, tokens: int, rounds: int
) -> tuple[dict[str, int], dict[int, dict[str, list[float]]]]:
    """Bytes of the history in L3 by codec; milliseconds of its restores by rate and codec.

    Args:
        tokens: Of the history; whole pages.

    Raises:
        ServerError: A server did not start, or the history did not come back.
    """
    history = [random.Random(0).randrange(SHAPE.vocabulary) for _ in range(tokens)]
    sizes: dict[str, int] = {}
    found: dict[int, dict[str, list[float]]] = {rate: {c: [] for c in CODECS} for rate in RATES}
    with tempfile.TemporaryDirectory(prefix="hcache-bench-") as scratch, ExitStack() as stack:
        model = SHAPE.build(Path(scratch))
        servers = {}
        for codec in CODECS:
            # All of every hit is read: what that saves is not the question.
            hcache = {"mode": "kv", "codec": codec, "min_gain": 0, "recompute": "never"}
            options = server_options(
                Method(codec, storage="dynamic", hcache=hcache),
                machine,
                model,
                model.parent / codec,
                pool_tokens=tokens + tokens // 2,
                dtype=DTYPE,
                extra_args=("--mem-fraction-static", "0.5"),  # the other's weights count as used
            )
            server = stack.enter_context(restorer(options, model.parent / codec / "l3"))
            with server.turn():
                server.store(history)
                server.restore(history)  # the first does more
            sizes[codec], servers[codec] = l3_bytes(server.l3), server
        for number in range(rounds):
            for rate, times in found.items():
                for codec in random.Random(number).sample(CODECS, len(CODECS)):
                    with servers[codec].turn():
                        servers[codec].slow_down(l3=1e6 * rate)
                        times[codec].append(servers[codec].restore(history).ms)
            print(f"{number + 1} of {rounds} rounds", flush=True)
    return sizes, found


def compared(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians of each codec, and the ratio of the times of a round."""
    ratios = [coded / plain for plain, coded in zip(*(times[c] for c in CODECS), strict=True)]
    return {
        **{f"{codec}_ms": median(times[codec]) for codec in CODECS},
        "ratio": median(ratios),
        "interval": median_interval(ratios),
    }


def table_lines(results: Mapping[str, Any]) -> str:
    """A row for each rate of L3."""
    share = results["bytes"]["exp4"] / results["bytes"]["none"]
    heads = ("L3", "`none`, ms", "`exp4`, ms", "`exp4` / `none`", "95%", "bytes in L3")
    rows = [
        (
            f"{rate} MB/s",
            *(f"{row[f'{codec}_ms']:.0f}" for codec in CODECS),
            *(row["ratio"], tuple(row["interval"]), f"{share:.3f}"),
        )
        for rate, row in results["compared"].items()
    ]
    return markdown(heads, rows)


def main() -> None:
    parsed = parser("bench.throttled", __doc__)
    parsed.add_argument(
        "--rounds", type=at_least(LEAST_ROUNDS), default=8, help="restores of each server and rate"
    )
    parsed.add_argument(
        "--tokens", type=at_least(PAGE_SIZE), default=1024, help="of a history; whole pages of 64"
    )
    parsed.add_argument("--out", type=Path, default=OUT, help="folder for throttled.json")
    options = parsed.parse_args()
    with failing():
        machine = find_machine()
        if machine.device != "cpu":
            raise MachineError("only the CPU engine slows L3 down; see bench/gpu/ for GPUs")
        tokens = options.tokens // PAGE_SIZE * PAGE_SIZE
        sizes, times = measure(machine, tokens, options.rounds)
    results = {
        **stamp(machine),
        "cores": os.cpu_count(),
        "model": {**SHAPE.describe(), "dtype": DTYPE},
        "tokens": tokens,
        "bytes": sizes,
        "times_ms": {str(rate): of for rate, of in times.items()},
        "compared": {str(rate): compared(of) for rate, of in times.items()},
    }
    print(table_lines(results))
    write_json(options.out / "throttled.json", results)


if __name__ == "__main__":
    main()
