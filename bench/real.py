"""Conversations that come back from L3 after a restart: a real model, default options, no throttle.

SmolLM2-135M-Instruct, as published and in its form with multi-head attention, has read a part of
Python's standard library. Each server has stored that history, and is started anew. It computes
(HiCache without an L3), or brings the history back by SGLang's `file` or `nixl` backend, from a
Mooncake store in the memory of this machine (TCP), or by this backend with its default options.
Then the servers take turns at new questions behind the history, the others stopped meanwhile. After
each question a server forgets the history. Every question is asked twice: with the files of L3 out
of the page cache (cold) and with them in it as far as a server leaves them there (warm).
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import torch

from bench.fixtures.models import real_model
from bench.fixtures.smollm2 import FORMS, TITLE
from bench.fixtures.text import library_tokens
from bench.harness import mooncake
from bench.harness.client import RequestError
from bench.harness.machine import Machine, MachineError
from bench.harness.methods import METHODS, MOONCAKE, NIXL, PAGE_SIZE, Method, server_options
from bench.harness.program import (
    Advance,
    Program,
    Run,
    Setting,
    at_least,
    names,
    scratch,
    several,
    stamp,
    steps,
)
from bench.harness.report import Column, Columns, Picture, Results, Row, Series, Table, write_json
from bench.harness.restorer import Restorer, l3_bytes, resting, restorer
from bench.harness.rounds import median_interval
from bench.harness.server import ServerError
from bench.harness.turns import NO_L3, QUESTION
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

FILE, OURS, NEVER = "file", "ours", "never"
COMPARED = {
    NO_L3: replace(METHODS["host"], title="computed"),
    FILE: replace(METHODS["file"], title="`file`"),
    NIXL: replace(METHODS[NIXL], title="NIXL"),
    MOONCAKE: replace(METHODS[MOONCAKE], title="Mooncake"),
    OURS: Method("ours", storage="dynamic"),
    NEVER: Method("ours, all read", storage="dynamic", hcache={"recompute": "never"}),
}
DEFAULT = [name for name in COMPARED if name != NEVER]
DTYPES = ["bfloat16", "float32"]
_COMPUTED = 1  # rounds of the server that computes: its times are long and vary little
_ROOM = 1024  # tokens of a pool beside the history
_NODE = 2  # times the bytes of a history that Mooncake has room for
Case = tuple[str, str, int]  # form, type and length of a history


class Ask(NamedTuple):
    """One question: milliseconds to the first token, the server's CPU seconds, the history's share
    from L3, and the reply."""

    ms: float
    cpu_s: float
    share: float
    reply: tuple[int, ...]


class Text:
    """The standard library in the model's tokens."""

    def __init__(self, model: Path, tokens: int) -> None:
        stub_torchvision()
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        ids = [*islice(library_tokens(tokenizer), tokens + 64 * QUESTION)]
        self.history, self._rest = ids[:tokens], ids[tokens:]

    def prompt(self, number: int) -> list[int]:
        """The history and a question that nobody has asked."""
        start = number * QUESTION
        return [*self.history, *self._rest[start : start + QUESTION]]


@contextmanager
def restarted(
    name: str, machine: Machine, model: Path, text: Text, dtype: str, folder: Path
) -> Iterator[Restorer]:
    """A server, stopped, that was started after another one had stored the history.

    Raises:
        ServerError: A server did not start.
    """
    tokens, place = len(text.history), folder / name
    place.mkdir()
    options = server_options(
        *(COMPARED[name], machine, model, place),
        pool_tokens=tokens + _ROOM,
        dtype=dtype,
        hicache_ratio=1.2,  # all servers are there at once
        # The others' weights and pools count as used.
        extra_args=("--mem-fraction-static", "0.5"),
    )
    with ExitStack() as stack:
        if name == MOONCAKE:
            node = _NODE * tokens * kv_bytes(model, dtype)
            cluster = stack.enter_context(mooncake.cluster(place, node))
            options = replace(options, extra_config=mooncake.store_config(cluster))
        if name != NO_L3:
            with restorer(options, place / "l3") as before:
                before.store(text.history)
        yield stack.enter_context(resting(options, place / "l3"))


def kv_bytes(model: Path, dtype: str) -> int:
    """Bytes of a token's K and V."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, local_files_only=True)
    heads = 2 * config.num_hidden_layers * config.num_key_value_heads
    return int(heads * config.head_dim * getattr(torch, dtype).itemsize)


def asked(restored: Restorer, prompt: Sequence[int], history: int, *, cold: bool) -> Ask:
    with restored.turn():
        before = restored.cpu_seconds()
        ms, reply, _ = restored.ask(prompt, cold=cold)
        spent = restored.cpu_seconds() - before
        restored.server.flush_cache(300)
    return Ask(ms, spent, reply.cached.storage / history, tuple(reply.output_ids))


def at_length(
    servers: Mapping[str, Restorer], text: Text, rounds: int, advance: Advance, case: str
) -> dict[str, Any]:
    """Times of every server, cold and warm; the first round is the first after the restart."""
    found: dict[str, list[tuple[Ask, Ask]]] = {name: [] for name in servers}
    differing = 0
    for number in range(rounds + 1):
        advance(f"{case}round {number}")
        replies = []
        some = [n for n in servers if n != NO_L3 or number <= _COMPUTED]
        for name in random.Random(number).sample(some, len(some)):
            prompt, tokens = text.prompt(number), len(text.history)
            cold = asked(servers[name], prompt, tokens, cold=True)
            warm = cold if name == NO_L3 else asked(servers[name], prompt, tokens, cold=False)
            found[name].append((cold, warm))
            replies += [cold.reply, warm.reply]
        differing += len(set(replies)) > 1
    later = {name: all_[1:] for name, all_ in found.items()}
    rounds_ms = {
        name: [[round(one.ms, 1) for one in two] for two in all_] for name, all_ in found.items()
    }
    return {
        "first_ms": {name: all_[0][0].ms for name, all_ in found.items()},
        "cold_ms": {name: median(cold.ms for cold, _ in all_) for name, all_ in later.items()},
        "warm_ms": {name: median(warm.ms for _, warm in all_) for name, all_ in later.items()},
        "cpu_s": {name: median(two[0].cpu_s for two in all_) for name, all_ in later.items()},
        "share_from_l3": {n: min(two[0].share for two in all_) for n, all_ in found.items()},
        "rounds_ms": rounds_ms,
        "rounds_with_differing_replies": differing,
        **ratios(later),
    }


def ratios(found: Mapping[str, Sequence[tuple[Ask, Ask]]]) -> dict[str, Any]:
    """Ours as a share of all others but computing: medians over the rounds, and intervals."""
    parts: dict[str, Any] = {}
    for other in found.keys() - {NO_L3, OURS}:
        for at, state in enumerate(("cold", "warm")):
            pairs = zip(found[OURS], found[other], strict=True)
            each = [mine[at].ms / its[at].ms for mine, its in pairs]
            parts[f"of_{other}_{state}"] = median(each)
            parts[f"of_{other}_{state}_interval"] = median_interval(each)
    return parts


def measure(run: Run) -> Results:
    """All cases: rows are written after each, and what earlier results have of others stays.

    Raises:
        ServerError: No case could be measured.
    """
    given, failed = run.given, dict[str, str]()
    if not {FILE, OURS} <= {*given.methods}:
        run.parser.error(f"--methods: {FILE} and {OURS} are compared, and must be among them")
    torch.set_num_threads(1)
    lengths = [length // PAGE_SIZE * PAGE_SIZE for length in given.tokens]
    cases = [(f, d, t) for f in given.forms for d in given.dtypes for t in lengths]
    rows = kept_rows(given.keep, run.machine.name) if given.keep else {}
    results: Results = {}
    with steps(len(cases) * (given.rounds + 1 + len(given.methods))) as advance:
        for case in cases:
            called = "{}, {}, {:,} tokens".format(*case)
            try:
                rows[case] = measured(run, case, called, advance)
            except (ServerError, RequestError, OSError) as error:
                failed[called] = str(error).partition("\n")[0]
                continue
            results = {"model": TITLE, "rows": [rows[place] for place in sorted(rows)]}
            write_json(given.out / "real.json", {**stamp(run.machine), **results})
    if not results:
        raise ServerError(*not_measured({"failed": failed}))
    return {**results, "failed": failed} if failed else results


def measured(run: Run, case: Case, called: str, advance: Advance) -> Row:
    """The row of one case. Raises errors of servers and of the disk: there is no room, say."""
    (form, dtype, tokens), given = case, run.given
    model = real_model(form)
    text = Text(model, tokens)
    with scratch() as folder, ExitStack() as stack:
        servers = dict[str, Restorer]()
        for name in given.methods:
            advance(f"{called}: {name} stores the history")
            one = restarted(name, run.machine, model, text, dtype, Path(folder))
            servers[name] = stack.enter_context(one)
        sizes = {name: l3_bytes(one.l3) / tokens for name, one in servers.items()}
        found = at_length(servers, text, given.rounds, advance, f"{called}: ")
        said = servers[OURS].said()
    sizes[MOONCAKE] = kv_bytes(model, dtype)
    return {
        "form": form,
        "kv_heads": FORMS[form],
        "dtype": dtype,
        "tokens": tokens,
        "bytes_per_token": {n: s for n, s in sizes.items() if s and n in servers},
        "stored": said,
        **found,
    }


def not_measured(results: Results) -> list[str]:
    """The cases that failed, each with its reason."""
    return [f"not measured: {case}: {why}" for case, why in results.get("failed", {}).items()]


def kept_rows(path: Path, device: str) -> dict[Case, Row]:
    """Rows of earlier results, by their cases; each has the date of its measurement.

    Raises:
        MachineError: They were measured on another device.
    """
    earlier = json.loads(path.read_text())
    if earlier["device"] != device:
        raise MachineError(f"{path} was measured on {earlier['device']}, this is {device}")
    return {_place(row): {"date": earlier["date"], **row} for row in earlier["rows"]}


def _place(row: Row) -> Case:
    return row["form"], row["dtype"], row["tokens"]


def case(row: Row) -> str:
    heads = "grouped-query" if row["kv_heads"] == FORMS["smollm2"] else "multi-head"
    return f"{heads}, {row['dtype']}"


def ours_of(results: Results, other: str) -> list[float]:
    """Ratios of every row: of a contestant and a state of its files, such as ``file_cold``."""
    return [row[f"of_{other}"] for row in results["rows"]]


def finding(results: Results) -> str:
    cold, warm = (ours_of(results, f"{FILE}_{state}") for state in ("cold", "warm"))
    return (
        f"From cold disks the first token takes {geometric_mean(cold):.2f} of the time of SGLang's "
        f"file backend (geometric mean), at most {max(cold):.2f}; from the page cache "
        f"{geometric_mean(warm):.2f}"
    )


def place(row: Row) -> str:
    return f"{case(row)}, {row['tokens']:,}"


def columns(results: Results) -> Columns:
    cold = results["rows"][0]["cold_ms"]
    warm = (FILE, NIXL, OURS)
    return [
        *(Column("attention, type", case), "history = tokens :,"),
        *(f"{COMPARED[name].title}, ms = cold_ms.{name} :,.0f" for name in cold),
        f"ours / `file` = of_{FILE}_cold | 95% = of_{FILE}_cold_interval",
        *(f"{COMPARED[name].title}, warm = warm_ms.{name} :,.0f" for name in warm if name in cold),
        f"ours / `file`, warm = of_{FILE}_warm",
    ]


def costs(results: Results) -> Columns:
    cold = results["rows"][0]["cold_ms"]
    return [
        *(Column("attention, type", case), "history = tokens :,"),
        *(f"{COMPARED[n].title}, bytes a token = bytes_per_token.{n} :,.0f" for n in (FILE, OURS)),
        *(f"{COMPARED[name].title}, CPU s = cpu_s.{name} :.2f" for name in cold),
        *(f"{COMPARED[name].title}, first ms = first_ms.{name} :,.0f" for name in (FILE, OURS)),
    ]


PROGRAM = Program(
    name="real",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--forms", names(list(FORMS)), list(FORMS), "of the model"),
        Setting("--dtypes", names(DTYPES), DTYPES, "that it is served in"),
        several("--tokens", at_least(PAGE_SIZE), [1500, 4000, 7500], "histories"),
        Setting("--methods", names(list(COMPARED)), DEFAULT, "contestants"),
        Setting("--keep", Path, None, "JSON whose rows stay until their cases are measured anew"),
        Setting("--rounds", at_least(1), 6, "of questions, behind the first after the restart"),
    ),
    tables=(Table("rows", columns), Table("rows", costs)),
    said=lambda results: [finding(results)],
    wrong=not_measured,
    draw=Picture(
        title=finding,
        panels=lambda results: {f"{TITLE}, {results['device']}": results["rows"]},
        x=lambda row: place(row).replace("grouped-query", "GQA").replace("multi-head", "MHA"),
        x_label="attention, type, tokens of the history",
        y_label="ms to the first token, cold",
        series=(
            Series("SGLang file", f"cold_ms.{FILE}", FILE),
            Series("NIXL", f"cold_ms.{NIXL}", "nixl"),
            Series("Mooncake (memory)", f"cold_ms.{MOONCAKE}", "pairs"),
            Series("hcache, default options", f"cold_ms.{OURS}", "ours"),
        ),
        bars="%.0f",
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
