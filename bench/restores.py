"""Restores by servers that differ in one option, from an L3 of a given rate, timed in the server.

SGLang serves a random model; every server has the same history in its L3 and nowhere else. The
servers take turns in changing order, the others stopped meanwhile, and on the CPU engine L3 is
slowed down. A restore counts from the start of the prefetch (the files are not in the page cache)
to the last layer in the pool. Studies:

- codec: encoded K and V in bfloat16 beside those as they are, from a slow L3
- pages: own pages of K and V beside SGLang's plain pages, also a backup of two histories to host
  memory and a load of one from there
- ranks: latents of two tensor-parallel ranks, each of which reads its part or all of them, from an
  L3 that gives each rank that rate

The table has medians, and medians of the ratios of the same round with the interval that holds the
true one with 95%.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.harness.methods import EVERY_HIT, METHODS, PAGE_SIZE, Method, server_options
from bench.harness.models import TinyLatent, TinyLlama
from bench.harness.program import MODEL, Program, Run, Setting, at_least, scratch, several, steps
from bench.harness.report import Column, Columns, Picture, Results, Row, Series, Table
from bench.harness.restorer import Restorer, l3_bytes, resting
from bench.harness.rounds import median_interval
from bench.harness.turns import history


@dataclass(frozen=True, kw_only=True)
class Study:
    """One comparison.

    Attributes:
        methods: The servers.
        rates: Of L3 in MB/s; 0: it is as it is.
        ratios: Pairs of methods that are compared round by round.
        pool: Tokens of the device's pool, in histories.
        staged: Also backups and loads are timed.
        options: Further ones of the servers.
    """

    methods: Mapping[str, Method]
    rates: Sequence[float]
    ratios: Sequence[tuple[str, str]]
    shape: TinyLlama | TinyLatent
    tokens: int = 1024
    rounds: int
    pool: float = 1.5  # one history, not two
    staged: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def _ours(title: str, **hcache: Any) -> Method:
    return Method(title, storage="dynamic", hcache=hcache)


_PAGES = (("plain", "plain"), ("own", "kv"))
_GQA = TinyLlama(layers=8, hidden=1024, heads=8, kv_heads=4, intermediate=1024)
"""In float32 K and V of a page have as many bytes as those of Llama-3-8B in bfloat16."""
STUDIES = {
    "codec": Study(
        methods={
            codec: _ours(f"`{codec}`", mode="kv", codec=codec, recompute="never")
            for codec in ("none", "exp4", "exp3")
        },
        rates=(10, 20, 60),
        ratios=(("exp4", "none"), ("exp3", "none"), ("exp3", "exp4")),
        shape=_GQA,
        rounds=8,
        options={"dtype": "bfloat16"},
    ),
    "pages": Study(
        methods={kind: _ours(f"{kind} pages", mode=mode) for kind, mode in _PAGES},
        rates=(0,),
        ratios=(("own", "plain"),),
        shape=_GQA,
        rounds=15,
        staged=True,
        options={"hicache_ratio": 3.0},
    ),
    "ranks": Study(
        methods={
            "own": _ours("each rank reads its part", mode="kv", recompute="never"),
            "plain": _ours("each rank reads all", mode="plain"),
            "file": METHODS["file"],
        },
        rates=(10, 25, 100, 0),
        ratios=(("own", "plain"), ("own", "file")),
        shape=TinyLatent(layers=8, hidden=512, intermediate=1408),
        tokens=4096,
        rounds=9,
        options={"tp": 2},
    ),
}


def measure(run: Run) -> Results:
    given = run.given
    study = STUDIES[given.study]
    study = replace(
        study,
        rates=study.rates if given.rates is None else given.rates,
        rounds=given.rounds or study.rounds,
        tokens=(given.tokens or study.tokens) // PAGE_SIZE * PAGE_SIZE,
        # The others' weights count as used.
        options={
            "extra_args": ("--mem-fraction-static", "0.5", *given.server_args),
            **study.options,
        },
    )
    torch.set_num_threads(1)  # as the servers compute
    histories = [history(study.tokens, n) for n in range(3 + 2 * study.rounds)]
    servers, stored = dict[str, Restorer](), list[Row]()
    found: dict[tuple[float, str], dict[str, list[float]]] = {}
    total = len(study.methods) + len(study.rates) * study.rounds
    with scratch() as place, ExitStack() as stack, steps(total) as advance:
        model = given.model_path or str(study.shape.build(Path(place)))
        for name, method in study.methods.items():
            advance(f"{method.title}: starting")
            folder = Path(place) / name
            options = server_options(
                *(method, run.machine, model, folder),
                pool_tokens=int(study.pool * study.tokens),
                hcache=EVERY_HIT,
                **study.options,
            )
            server = servers[name] = stack.enter_context(resting(options, folder / "l3"))
            with server.turn():
                server.store(histories[0])
                size = l3_bytes(server.l3) / study.tokens
                times(study, server, histories, study.rounds)  # the first does more
            stored.append({"method": method.title, "bytes_per_token": size, "said": server.said()})
        for rate in study.rates:
            for server in servers.values():
                server.slow_down(l3=1e6 * rate)
            for number in range(study.rounds):
                advance(f"{label(rate)}, round {number + 1}")
                for name in random.Random(number).sample(list(servers), len(servers)):
                    with servers[name].turn():
                        took = times(study, servers[name], histories, number)
                    for part, ms in took.items():
                        found.setdefault((rate, part), {}).setdefault(name, []).append(ms)
    return {
        "study": given.study,
        "model": given.model_path or study.shape.describe(),
        "tokens": study.tokens,
        "titles": {name: method.title for name, method in study.methods.items()},
        "rows": [
            {"limit": label(rate), "part": part, **compared(ms, study.ratios), "rounds_ms": ms}
            for (rate, part), ms in found.items()
        ],
        "stored": stored,
    }


def times(
    study: Study, server: Restorer, histories: Sequence[Sequence[int]], number: int
) -> Mapping[str, float]:
    """Milliseconds of a round's restore, by part."""
    if study.staged:
        return staged(server, *histories[1 + 2 * number : 3 + 2 * number])
    return {"restore": server.restore(histories[0]).ms}


def staged(restored: Restorer, first: Sequence[int], second: Sequence[int]) -> Mapping[str, float]:
    """Milliseconds to back two new histories up, to load the first one, which the second drove off
    the device, and to restore it from L3."""
    server = restored.server

    def took(stage: str, tokens: int) -> float:
        events = [event for event in restored.events() if event.stage == stage]
        had = sum(event.tokens for event in events)
        if had != tokens:
            raise server.error(f"{stage} of {had} tokens; it was to be of {tokens}")
        return sum(event.ms for event in events)

    restored.skip_trace()
    for tokens in (first, second):
        server.generate(tokens, 1)
    server.wait_backed_up()
    backup = took("backup", 2 * len(first))
    server.generate([*first, 0], 1)
    load = took("load", len(first))
    server.flush_cache()
    return {"backup": backup, "load": load, "restore": restored.restore(first).ms}


def label(rate: float) -> str:
    return f"L3 at {rate:g} MB/s" if rate else "as it is"


def compared(rounds: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]) -> Row:
    """Medians, and of each pair the median of the ratios of a round with its interval."""
    ms = {name: median(times) for name, times in rounds.items()}
    ratios = {}
    for one, other in pairs:
        found = [a / b for a, b in zip(rounds[one], rounds[other], strict=True)]
        both = {"ratio": median(found), "interval": median_interval(found)}
        ratios[f"{one} / {other}"] = both
    return {"ms": ms, "ratios": ratios}


def columns(results: Results) -> Columns:
    times = (f"{title}, ms = ms.{name} :,.1f" for name, title in results["titles"].items())
    pairs = results["rows"][0]["ratios"]
    ratios = (f"{pair} = ratios.{pair}.ratio | 95% = ratios.{pair}.interval" for pair in pairs)
    return [Column("", partial(name_of, results)), *times, *ratios]


def name_of(results: Results, row: Row) -> str:
    """The part or the limit: whatever differs between rows."""
    parts = {each["part"] for each in results["rows"]}
    return str(row["limit"] if len(parts) == 1 else row["part"])


def series(results: Results) -> list[Series]:
    """Times of methods, as multiples of those of the first one."""
    _, *others = results["titles"].items()
    return [
        Series(title.replace("`", ""), f"of_first.{name}", colour)
        for (name, title), colour in zip(others, ("ours", "file"), strict=False)
    ]


def finding(results: Results) -> str:
    """How the second method compares with the first one."""
    (first, one), (second, other), *_ = results["titles"].items()
    shares = [row["ms"][second] / row["ms"][first] for row in results["rows"]]
    other, one = other.replace("`", ""), one.replace("`", "")
    return f"{other} takes {min(shares):.2f} to {max(shares):.2f} of the time of {one}"


def panels(results: Results) -> Mapping[str, Sequence[Row]]:
    first, title = next(iter(results["titles"].items()))
    rows = [
        {
            "name": name_of(results, row).replace(" MB/s", "\nMB/s"),
            "of_first": {name: ms / row["ms"][first] for name, ms in row["ms"].items()},
        }
        for row in results["rows"]
    ]
    return {f"{results['tokens']:,} tokens; the line is {title.replace('`', '')}": rows}


PROGRAM = Program(
    name="restores",
    doc=__doc__,
    measure=measure,
    slows=True,
    settings=(
        Setting("study", str, None, "what is compared", {"choices": STUDIES}),
        several("--rates", float, None, "of L3 in MB/s; 0: no limit"),
        Setting("--rounds", at_least(1), None, "restores by each server and rate"),
        Setting("--tokens", at_least(PAGE_SIZE), None, "of a history; whole pages of 64"),
        *MODEL,
    ),
    tables=(
        Table("rows", columns),
        Table("stored", "stored = method | bytes per token = bytes_per_token :,.0f"),
    ),
    draw=Picture(
        title=finding,
        panels=panels,
        x="name",
        x_label="rate of L3, or a part of a restore",
        y_label="time, of the first method's",
        series=series,
        bars="%.2f",
        at=(1.0, "the first method", "limit"),
    ),
    file=lambda results: f"restores_{results['study']}",
)

if __name__ == "__main__":
    PROGRAM.run()
