"""Restores by several methods, over a bus or from an L3 of a given rate, timed in the server.

SGLang serves a model; every method has a server of its own with the same history in its L3 and
nowhere else. On the CPU engine the servers take turns in changing order, the others stopped
meanwhile, and the bus or L3 is slowed down. A restore counts from the start of the prefetch (the
files are not in the page cache) to the last layer in the pool. Studies:

- methods: SGLang's file L3, NIXL, Mooncake, recomputation and ours; L3 as it is, over a bus on
  which the load takes as long as it took to restore (balanced), and from an L3 of a third of that
- codec: encoded K and V in bfloat16 beside those as they are, from a slow L3
- pages: own pages of K and V beside SGLang's plain pages, also a backup of two histories to host
  memory and a load of one from there
- ranks: latents of two tensor-parallel ranks, each of which reads its part or all of them, from an
  L3 that gives each rank that rate

The table has medians, and medians of the ratios of the same round with the interval that holds the
true one with 95%.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch

from bench.harness import mooncake
from bench.harness.machine import Machine, MachineError
from bench.harness.methods import (
    EVERY_HIT,
    HYBRID,
    METHODS,
    MOONCAKE,
    NIXL,
    PAGE_SIZE,
    Method,
    server_options,
)
from bench.harness.models import TinyLatent, TinyLlama
from bench.harness.plans import has_shape, measure_profile, naive_hybrid, with_bus, with_l3
from bench.harness.program import MODEL, Program, Run, Setting, at_least, scratch, several
from bench.harness.report import Column, Columns, Picture, Results, Row, Series, Table
from bench.harness.restorer import Restorer, l3_bytes, restorer
from bench.harness.rounds import median_interval
from bench.harness.turns import history
from hcache_backend.plan.profile import Profile

MHA = TinyLlama(layers=8, hidden=1024, heads=8, kv_heads=8, intermediate=2816)


class Limit(NamedTuple):
    """The limit of a row of results.

    Attributes:
        mb_per_s: To this rate; 0: it is as it is.
        of_balanced: Or to this share of the balanced rate, which is measured: at it the bytes
            of the history take as long as their load took.
        parts: Of the restore that are shown.
    """

    slowed: Literal["bus", "L3"]
    mb_per_s: float = 0.0
    of_balanced: float = 0.0
    parts: Sequence[str] = ("restore",)


@dataclass(frozen=True, kw_only=True)
class Study:
    """One comparison.

    Attributes:
        methods: The servers. The first one decides which rate is the balanced one.
        limits: Rows of results.
        ratios: Pairs of methods that are compared round by round.
        planned: Methods that go by a profile of this machine with the limit: each limit has its
            own server of them.
        pool: Tokens of the device's pool, in histories.
        staged: Also backups and loads are timed.
        options: Further ones of the servers.
    """

    methods: Mapping[str, Method]
    limits: Sequence[Limit]
    ratios: Sequence[tuple[str, str]] = ()
    planned: Sequence[str] = ()
    shape: TinyLlama | TinyLatent = MHA
    tokens: int = 1024
    rounds: int = 6
    pool: float = 2.0
    staged: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def _ours(title: str, **hcache: Any) -> Method:
    return Method(title, storage="dynamic", hcache=hcache)


def _at(slowed: Literal["bus", "L3"], *rates: float, part: str = "restore") -> list[Limit]:
    return [Limit(slowed, rate, parts=(part,)) for rate in rates]


_PAGES = (("plain", "plain"), ("own", "kv"))
_GQA = TinyLlama(layers=8, hidden=1024, heads=8, kv_heads=4, intermediate=1024)
"""In float32 K and V of a page have as many bytes as those of Llama-3-8B in bfloat16."""
_COMPARED = (
    *("hcache-hidden", "hcache-hidden-eager", "hcache-kv", "file", NIXL, MOONCAKE),
    *("hcache", "hcache-eager", HYBRID, "recompute"),
)
STUDIES = {
    "methods": Study(
        methods={name: METHODS[name] for name in _COMPARED},
        limits=(
            Limit("L3", parts=("restore", "reading L3", "load", "first token")),
            Limit("bus", of_balanced=1.0, parts=("load",)),
            Limit("L3", of_balanced=1 / 3),
        ),
        planned=("hcache", "hcache-eager", HYBRID),
        tokens=4096,
        rounds=3,
    ),
    "codec": Study(
        methods={
            codec: _ours(f"`{codec}`", mode="kv", codec=codec, recompute="never")
            for codec in ("none", "exp4", "exp3")
        },
        limits=_at("L3", 10, 20, 60),
        ratios=(("exp4", "none"), ("exp3", "none"), ("exp3", "exp4")),
        shape=_GQA,
        rounds=8,
        pool=1.5,
        options={"dtype": "bfloat16"},
    ),
    "pages": Study(
        methods={kind: _ours(f"{kind} pages", mode=mode) for kind, mode in _PAGES},
        limits=(Limit("L3", parts=("backup", "load", "restore")),),
        ratios=(("own", "plain"),),
        shape=_GQA,
        rounds=15,
        pool=1.5,  # one history, not two
        staged=True,
        options={"hicache_ratio": 3.0},
    ),
    "ranks": Study(
        methods={
            "own": _ours("each rank reads its part", mode="kv", recompute="never"),
            "plain": _ours("each rank reads all", mode="plain"),
            "file": METHODS["file"],
        },
        limits=_at("L3", 10, 25, 100, 0),
        ratios=(("own", "plain"), ("own", "file")),
        shape=TinyLatent(layers=8, hidden=512, intermediate=1408),
        tokens=4096,
        rounds=9,
        pool=1.5,
        options={"tp": 2},
    ),
}


class Servers:
    """The servers of a study, and the times of their restores.

    Attributes:
        ms: Milliseconds of each round, by limit and part, then by method.
        stored: Bytes per token of each server, and its own words about them.
        balanced: The balanced rate in MB/s; 0: it is not measured.
    """

    def __init__(self, machine: Machine, study: Study, model: str, folder: Path) -> None:
        self.balanced = 0.0
        self.ms: dict[tuple[Limit, str], dict[str, list[float]]] = {}
        self.stored: list[Row] = []
        self._machine, self._study, self._model = machine, study, model
        self._folder, self._said = folder, partial(print, flush=True)
        self._histories = [history(study.tokens, n) for n in range(3 + 2 * study.rounds)]
        self._profile: Profile | None = None
        if set(study.methods) & set(study.planned) and has_shape(model):
            self._profile = measure_profile(machine, model, folder / "profile")

    def measure(self) -> None:
        """Go through all limits: methods in turn, and one alone that cannot wait for others."""
        alone = list(filter(self._alone, self._study.methods))
        together = [name for name in self._study.methods if name not in alone]
        for chosen in filter(None, (together, *([name] for name in alone))):
            self._measure(chosen)

    def limit(self, limit: Limit) -> float:
        """The rate in MB/s; 0: nothing is slowed down."""
        return limit.mb_per_s or round(limit.of_balanced * self.balanced, 1)

    def _measure(self, chosen: Sequence[str]) -> None:
        study = self._study
        with ExitStack() as stack:
            servers = {
                name: stack.enter_context(self._started(name))
                for name in chosen
                if name not in study.planned
            }
            stored = [name for name in servers if study.methods[name].storage is not None]
            slows = self._machine.device == "cpu"
            wanted = any(limit.of_balanced for limit in study.limits)
            if slows and wanted and stored and not self.balanced:
                self.balanced = self._find_balanced(stored[0], servers[stored[0]])
            for limit in study.limits:
                if (limit.mb_per_s and not slows) or (limit.of_balanced and not self.balanced):
                    continue
                with ExitStack() as once:
                    planned = [name for name in chosen if name in study.planned]
                    started = {n: once.enter_context(self._started(n, limit)) for n in planned}
                    self._rounds(limit, servers | started)

    def _rounds(self, limit: Limit, servers: Mapping[str, Restorer]) -> None:
        for server in servers.values():
            server.slow_down(**{limit.slowed.lower(): 1e6 * self.limit(limit)})
        for number in range(self._study.rounds):
            self._said(f"{label(limit, self.limit(limit))}, round {number + 1}")
            for name in random.Random(number).sample(list(servers), len(servers)):
                with self._turn(name, servers[name]):
                    for part, ms in self._times(servers[name], name, number).items():
                        self.ms.setdefault((limit, part), {}).setdefault(name, []).append(ms)

    def _turn(self, name: str, server: Restorer) -> AbstractContextManager[None]:
        """The server runs in the block; on the CPU engine it is stopped behind it."""
        return nullcontext() if self._alone(name) else server.turn()

    def _alone(self, name: str) -> bool:
        """Whether a server has the machine for itself: others cannot wait for it."""
        return self._machine.device != "cpu" or self._study.methods[name].storage == MOONCAKE

    def _times(self, server: Restorer, name: str, number: int) -> Mapping[str, float]:
        """Milliseconds of one restore, by part."""
        if self._study.methods[name].storage is None:
            computed = server.recompute(self._histories[0])
            return {"restore": computed.ms, "first token": computed.ttft_ms}
        if self._study.staged:
            return staged(server, *self._histories[1 + 2 * number : 3 + 2 * number])
        found = server.restore(self._histories[0])
        parts = {"restore": found.ms, "reading L3": found.l3_ms, "load": found.load_ms}
        return {**parts, "first token": found.ttft_ms}

    def _find_balanced(self, name: str, server: Restorer) -> float:
        """MB/s at which the stored bytes take as long as their load takes here."""
        server.slow_down()
        with self._turn(name, server):
            loads = [server.restore(self._histories[0]).load_ms for _ in range(3)]
        return l3_bytes(server.l3) / median(loads) / 1e3

    @contextmanager
    def _started(self, name: str, limit: Limit | None = None) -> Iterator[Restorer]:
        """A server that has the history in its L3 and, on the CPU, is stopped between its turns;
        its plan is for ``limit``."""
        study, method = self._study, self._study.methods[name]
        self._said(f"{method.title}: starting")
        place = name if limit is None else f"{name}-{study.limits.index(limit)}"
        folder = self._folder / place
        folder.mkdir(parents=True)
        with ExitStack() as stack:
            options = server_options(
                *(method, self._machine, self._model, folder),
                pool_tokens=int(study.pool * study.tokens),
                hcache={**EVERY_HIT, **(self._planned(name, folder, limit) if limit else {})},
                # The others' weights count as used.
                **{"extra_args": ("--mem-fraction-static", "0.5"), **study.options},
            )
            if method.storage == MOONCAKE:
                free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
                cluster = stack.enter_context(mooncake.cluster(folder, free // 4))
                options = replace(options, extra_config=mooncake.store_config(cluster))
            server = stack.enter_context(restorer(options, folder / "l3"))
            with self._turn(name, server):
                server.store(self._histories[0])
                size = l3_bytes(server.l3)
                self._times(server, name, study.rounds)  # the first does more
            row: dict[str, Any] = {"method": method.title, "bytes_per_token": size / study.tokens}
            row |= {"limit": limit and label(limit, self.limit(limit)), "said": server.said()}
            self.stored.append(row)
            yield server

    def _planned(self, name: str, folder: Path, limit: Limit) -> Mapping[str, Any]:
        """Options of a method that goes by the machine's profile with the limit."""
        if self._profile is None:
            return {}
        profile, rate = self._profile, 1e6 * self.limit(limit)
        if rate:
            profile = (with_bus if limit.slowed == "bus" else with_l3)(profile, rate)
        if name == HYBRID:
            hybrid = naive_hybrid(profile, self._machine, self._model, self._study.tokens)
            return {"partition": asdict(hybrid)}
        profile.save(folder / "profile.json")
        return {"profile": str(folder / "profile.json")}


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


def label(limit: Limit, rate: float) -> str:
    balanced = ", balanced" if limit.of_balanced == 1 else ""
    return f"{limit.slowed} at {rate:g} MB/s{balanced}" if rate else "as it is"


def missing(method: Method, model: str) -> str | None:
    """Why a method cannot be tried here; None: it can."""
    if method is STUDIES["methods"].methods[HYBRID] and not has_shape(model):
        return "--model-path must be a folder with a config.json that plans know"
    if method.storage == NIXL and find_spec("nixl") is None:
        return "it is not installed; see requirements/peers.txt"
    return mooncake.missing() if method.storage == MOONCAKE else None


def chosen(given: Any) -> Study:
    """The study of these options.

    Raises:
        MachineError: It has no such method.
    """
    study = STUDIES[given.study]
    methods = given.methods or list(study.methods)
    if unknown := set(methods) - set(study.methods):
        known = ", ".join(study.methods)
        raise MachineError(f"--methods: {given.study} has {known}, not {unknown}")
    changed: dict[str, Any] = {
        "methods": {name: how for name, how in study.methods.items() if name in methods},
        "ratios": [pair for pair in study.ratios if set(pair) <= set(methods)],
        "rounds": given.rounds or study.rounds,
        "tokens": (given.tokens or study.tokens) // PAGE_SIZE * PAGE_SIZE,
    }
    if given.rates is not None:
        first = study.limits[0]
        changed["limits"] = _at(first.slowed, *given.rates, part=first.parts[0])
    if given.server_args:
        changed["options"] = {**study.options, "extra_args": given.server_args}
    return replace(study, **changed)


def measure(run: Run) -> Results:
    given, study = run.given, chosen(run.given)
    torch.set_num_threads(1)  # as the servers compute
    with scratch(given.scratch_dir) as place:
        model = given.model_path or str(study.shape.build(Path(place)))
        left_out = {n: why for n, how in study.methods.items() if (why := missing(how, model))}
        methods = {name: how for name, how in study.methods.items() if name not in left_out}
        study = replace(study, methods=methods)
        servers = Servers(run.machine, study, model, Path(place))
        servers.measure()
    return {
        "study": given.study,
        "model": given.model_path or study.shape.describe(),
        "tokens": study.tokens,
        "titles": {name: method.title for name, method in study.methods.items()},
        "left_out": left_out,
        "rows": rows_of(study, servers),
        "stored": servers.stored,
    }


def rows_of(study: Study, servers: Servers) -> list[Row]:
    return [
        {
            "limit": label(limit, servers.limit(limit)),
            "part": part,
            **compared(servers.ms[limit, part], study.ratios),
            "rounds_ms": servers.ms[limit, part],
        }
        for limit in study.limits
        for part in limit.parts
        if (limit, part) in servers.ms
    ]


def compared(rounds: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]) -> Row:
    """Medians, and of each pair the median of the ratios of a round with its interval."""
    ms = {name: median(times) for name, times in rounds.items()}
    ratios = {}
    for one, other in pairs:
        if one in ms and other in ms:
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
    """The part, the limit or both: whatever differs between rows."""
    parts, limits = ({each[key] for each in results["rows"]} for key in ("part", "limit"))
    if len(parts) == 1:
        return str(row["limit"])
    return str(row["part"]) if len(limits) == 1 else f"{row['limit']}: {row['part']}"


def stored_by(row: Row) -> str:
    return ", ".join(filter(None, (row["method"], row["limit"])))


def series(results: Results) -> list[Series]:
    """Times of methods, as multiples of those of the first one."""
    colours = ("ours", "ours, all read", "exp4", "file", "nixl", "int8", "fp8", "pairs", "computed")
    titles = [(name, title.replace("`", "")) for name, title in results["titles"].items()]
    return [
        Series(title, f"of_first.{name}", colour)
        for (name, title), colour in zip(titles[1:] or titles, colours, strict=False)
    ]


def finding(results: Results) -> str:
    """How the second method compares with the first one."""
    (first, one), *others = results["titles"].items()
    second, other = others[0] if others else (first, one)
    times = [row["ms"] for row in results["rows"] if {first, second} <= set(row["ms"])]
    shares = [ms[second] / ms[first] for ms in times]
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
        if first in row["ms"]
    ]
    return {f"{results['tokens']:,} tokens; the line is {title.replace('`', '')}": rows}


PROGRAM = Program(
    name="restores",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("study", str, None, "what is compared", {"choices": STUDIES}),
        Setting("--methods", lambda text: text.split(","), None, "only these, with commas"),
        several("--rates", float, None, "MB/s; 0: no limit"),
        Setting("--rounds", at_least(1), None, "restores by each method and limit"),
        Setting("--tokens", at_least(PAGE_SIZE), None, "of a history; whole pages of 64"),
        Setting("--scratch-dir", Path, None, "disk for the L3 folders; default: that of TMPDIR"),
        *MODEL,
    ),
    tables=(
        Table("rows", columns),
        Table("stored", (Column("stored", stored_by), "bytes per token = bytes_per_token :,.0f")),
    ),
    draw=Picture(
        title=finding,
        panels=panels,
        x="name",
        x_label="what is slowed down, or a part of a restore",
        y_label="time, of the first method's",
        series=series,
        bars="%.2f",
        at=(1.0, "the first method", "limit"),
    ),
    file=lambda results: f"restores_{results['study']}",
)

if __name__ == "__main__":
    PROGRAM.run()
