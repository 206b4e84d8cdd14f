"""``hcache bench multiturn``: from its options to files and a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import typer

from hcache_backend.benchmark import results
from hcache_backend.benchmark.client import BenchError, RequestError
from hcache_backend.benchmark.driver import Pace
from hcache_backend.cli.bench_run import Measured, Plan, Target, measure, own_server
from hcache_backend.cli.bench_server import METHODS
from hcache_backend.cli.bench_workloads import WorkloadOptions, choose
from hcache_backend.cli.common import (
    errors,
    explained,
    fail,
    human_bytes,
    print_json,
    progress_bar,
    screen,
    table,
)
from hcache_backend.cli.machine import MachineError
from hcache_backend.cli.serving import ServerError
from hcache_backend.workload.base import Workload, WorkloadError
from hcache_backend.workload.sharegpt import Tokenizer

PARALLEL = 128
FAILED = 1


class Where(NamedTuple):
    """Against which server: that at ``url``, or one that is started."""

    url: str | None
    key: str | None
    model: str | None
    method: str
    server_args: Sequence[str]
    server_dir: Path | None


class Sending(NamedTuple):
    """When requests are sent; see :class:`Pace`."""

    rates: Sequence[float]
    distribution: Literal["poisson", "uniform"]
    policy: Literal["random", "fifo"]
    max_parallel: int | None
    barrier: bool
    flush_rounds: bool
    flush: bool
    vocabulary: int

    def plan(self, workload: Workload, seed: int) -> Plan:
        pace = Pace(
            distribution=self.distribution,
            policy=self.policy,
            max_parallel=self.max_parallel or workload.max_parallel or PARALLEL,
            barrier=self.barrier,
            flush=self.flush_rounds,
            seed=seed,
        )
        return Plan(workload, self.rates, pace, self.vocabulary, self.flush)


class Output(NamedTuple):
    """Where results go."""

    log_file: Path
    requests_file: Path | None
    tag: str
    as_json: bool


def report_multiturn(
    where: Where, pool_tokens: int, options: WorkloadOptions, sending: Sending, output: Output
) -> None:
    """Run, write the files, print, and end with the exit status."""
    with failing():
        options = dataclasses.replace(options, tokenizer=lambda: load_tokenizer(where.model))
        plan = sending.plan(choose(options), options.seed)
        with progress_bar(hidden=False) as bar, target(where, pool_tokens) as found:
            measured = measure(found, plan, bar)
    lines = [results.line(output.tag, run.parts) for run in measured]
    with explained():
        results.append(output.log_file, lines)
        if output.requests_file is not None:
            for number, run in enumerate(measured):
                results.append(output.requests_file, results.requests(number, run.records))
    if output.as_json:
        print_json(lines)
    else:
        show(measured)
        screen.print(f"Results: {output.log_file}", highlight=False, soft_wrap=True)
    if any(run.parts["summary"]["failed_requests"] for run in measured):
        raise typer.Exit(FAILED)


@contextmanager
def failing() -> Iterator[None]:
    """End the command with a line, and not with a traceback, where a benchmark cannot run."""
    try:
        yield
    except RequestError as error:
        fail(f"a document could not be prefilled: {error}")
    except (BenchError, MachineError, ServerError, WorkloadError) as error:
        fail(str(error))


@contextmanager
def target(where: Where, pool_tokens: int) -> Iterator[Target]:
    """The server to ask, for the length of the block."""
    if where.url is not None:
        if not where.url.startswith(("http://", "https://")):
            raise BenchError(f"--url {where.url}: must be http://HOST:PORT")
        yield Target(where.url, where.key)
        return
    errors.print(
        f"starting SGLang with {where.model or 'a tiny random Llama'}: "
        f"{METHODS[where.method].title}",
        highlight=False,
        soft_wrap=True,
    )
    with own_server(
        METHODS[where.method], where.model, pool_tokens, where.server_args, where.server_dir
    ) as server:
        yield Target(server.url, server.admin_key)


def load_tokenizer(model: str | None) -> Tokenizer:
    """The tokenizer of a model, by transformers.

    Raises:
        WorkloadError: There is none.
    """
    if model is None:
        raise WorkloadError("--sharegpt: needs --model-path, whose tokenizer reads the texts")
    try:
        from transformers import AutoTokenizer

        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model)
    except ImportError:
        raise WorkloadError("--sharegpt: needs transformers: pip install transformers") from None
    except (OSError, ValueError, KeyError) as error:
        said = str(error).splitlines()[0]
        raise WorkloadError(f"--model-path {model}: has no tokenizer: {said}") from None
    return tokenizer


def show(measured: Sequence[Measured]) -> None:
    """Runs as a table, one column each, and what there is to say about them."""
    shown = table("", "", *(f"{_rate(run)} a second#" for run in measured))
    for title, keys, form in _ROWS:
        values = [[run.parts["summary"].get(key) for key in keys] for run in measured]
        shown.add_row(title, *(form(found) for found in values))
    for title, key in _MOVED:
        moved = [run.parts["l3"].get(key) for run in measured]
        if any(count is not None for count in moved):
            shown.add_row(title, *("-" if n is None else human_bytes(n) for n in moved))
    screen.print(shown)
    for line in notes(measured):
        screen.print(f"- {line}", style="yellow", highlight=False, soft_wrap=True, markup=False)


def notes(measured: Sequence[Measured]) -> list[str]:
    """What a reader has to know about the numbers, each once."""
    found: dict[str, None] = {}
    for run in measured:
        for said, count in run.parts["errors"].items():
            found[f"{count} requests failed: {said}"] = None
        if run.parts["l3"].get("missing"):
            found[f"no bytes of L3: {run.parts['l3']['missing']}"] = None
        if run.parts["l3"].get("pages_dropped"):
            found[f"L3 dropped {run.parts['l3']['pages_dropped']:,} pages"] = None
        if run.parts["summary"]["storage_hit_rate"] is None:
            found[
                "the server does not say where hits were: start it with --enable-cache-report"
            ] = None
    return list(found)


def _rate(run: Measured) -> str:
    rate = run.parts["summary"]["request_rate"]
    return rate if isinstance(rate, str) else f"{rate:g}"


def _ms(values: Sequence[Any]) -> str:
    return " / ".join(f"{1e3 * value:,.1f}" for value in values)


def _counts(values: Sequence[Any]) -> str:
    return " / ".join(f"{value:,.0f}" for value in values)


def _rates(values: Sequence[Any]) -> str:
    return " / ".join(f"{value:,.1f}" for value in values)


def _shares(values: Sequence[Any]) -> str:
    return " / ".join("?" if value is None else f"{100 * value:.1f}" for value in values)


def _quartet(name: str) -> tuple[str, ...]:
    return tuple(f"{kind}_{name}" for kind in ("average", "median", "p90", "p99"))


_ROWS = (
    ("requests (failed)", ("total_requests", "failed_requests"), _counts),
    ("prompt / reply, tokens", ("average_prompt_len", "average_output_len"), _counts),
    ("TTFT, ms: avg / p50 / p90 / p99", _quartet("ttft"), _ms),
    ("between tokens, ms", _quartet("itl"), _ms),
    ("latency, ms", _quartet("latency"), _ms),
    ("requests a second", ("throughput",), _rates),
    (
        "tokens a second: prompts / replies",
        ("input_token_throughput", "output_token_throughput"),
        _counts,
    ),
    ("prompt tokens from a cache, %", ("cache_hit_rate",), _shares),
    (
        "  device / host / storage",
        ("device_hit_rate", "host_hit_rate", "storage_hit_rate"),
        _shares,
    ),
)
_MOVED = (
    ("L3 reads", "bytes_read"),
    ("L3 writes", "bytes_written"),
    ("restored to the device", "bytes_restored"),
)
