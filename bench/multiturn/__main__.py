"""``python -m bench.multiturn``: how fast a server brings histories back.

Multi-turn conversations and long contexts against an SGLang server: time to first token (TTFT),
time between tokens, hits by tier.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from bench.harness.machine import find_machine
from bench.harness.methods import METHODS, SERVED, check_model, server_options
from bench.harness.models import TinyLlama
from bench.harness.options import ADMIN_KEY
from bench.harness.program import VOCABULARY, failing
from bench.harness.report import OUT
from bench.harness.server import Server, unwind_when_terminated
from bench.multiturn.driver import PARALLEL, Pace
from bench.multiturn.report import append, log_lines, request_lines, show
from bench.multiturn.run import Plan, Target, measure
from bench.workload.options import Name, WorkloadOptions, choose
from hcache_backend.cli.client import UnusableServer
from hcache_backend.cli.common import AsJson, errors, fail, print_json, progress_bar, screen

RATES = (16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)
"""Rates of ``--auto-run``, as in SGLang's benchmark."""
DEFAULT_HOST, DEFAULT_PORT = "localhost", 30000
CLIENTS, TINY_CLIENTS = 256, 8
POOL_TOKENS = 16_384
SERVER, SENDING, WORKLOAD = "Server", "When requests are sent", "What is asked"
FAILED = 1
LOG_FILE = OUT / "multiturn.jsonl"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    url: Annotated[
        str | None,
        typer.Option(
            help="A running SGLang server, http://HOST:PORT. Default: one is started.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Host of a running server.", rich_help_panel=SERVER)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of a running server.", rich_help_panel=SERVER),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="(Admin) API key of a running server.", rich_help_panel=SERVER),
    ] = None,
    model_path: Annotated[
        str | None,
        typer.Option(
            help="Model of the server that is started. Default: a tiny random Llama.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help=f"How the server that is started brings back: {', '.join(SERVED)}.",
            rich_help_panel=SERVER,
        ),
    ] = "hcache",
    server_args: Annotated[
        str,
        typer.Option(help="More arguments of the server that is started.", rich_help_panel=SERVER),
    ] = "",
    server_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where its L3 and log stay. Default: they are removed.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    pool_tokens: Annotated[
        int,
        typer.Option(min=256, help="Tokens of its device's KV pool.", rich_help_panel=SERVER),
    ] = POOL_TOKENS,
    workload: Annotated[
        Name,
        typer.Option(
            help="multiturn: as SGLang's benchmark; sharegpt4, leval, zipf: the HCache paper's; "
            "sharegpt: a file's.",
            rich_help_panel=WORKLOAD,
        ),
    ] = "multiturn",
    num_clients: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Sessions. Default: {CLIENTS}; with the tiny model {TINY_CLIENTS}.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    num_rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rounds of a client (multiturn). Default: 5.", rich_help_panel=WORKLOAD
        ),
    ] = None,
    min_rounds: Annotated[
        int | None,
        typer.Option(min=1, help="At least so many (multiturn).", rich_help_panel=WORKLOAD),
    ] = None,
    max_rounds: Annotated[
        int | None,
        typer.Option(min=1, help="At most so many (any workload).", rich_help_panel=WORKLOAD),
    ] = None,
    request_length: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a question (multiturn). Default: 512.", rich_help_panel=WORKLOAD
        ),
    ] = None,
    sub_question_input_length: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of later questions (multiturn). Default: as the first.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    output_length: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a reply (multiturn). Default: 64.", rich_help_panel=WORKLOAD
        ),
    ] = None,
    range_ratio: Annotated[
        float | None,
        typer.Option(
            help="Lengths are between this share of them and all of them (multiturn).",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    leval_task: Annotated[
        str | None,
        typer.Option(help="paper, gsm, quality or mixed (leval).", rich_help_panel=WORKLOAD),
    ] = None,
    zipf_skew: Annotated[
        float | None,
        typer.Option(
            help="0: all documents alike, 2: few favourites (zipf, rag). Default: 1.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    num_documents: Annotated[
        int | None,
        typer.Option(min=1, help="Documents (zipf, rag).", rich_help_panel=WORKLOAD),
    ] = None,
    sharegpt: Annotated[
        Path | None,
        typer.Option(help="JSON file of conversations (sharegpt).", rich_help_panel=WORKLOAD),
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds between rounds of a client. Default: the workload's.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    scale: Annotated[
        float,
        typer.Option(
            help="Multiplies all lengths and intervals, to try a workload on a small machine.",
            rich_help_panel=WORKLOAD,
        ),
    ] = 1.0,
    max_context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a history, its last reply included.", rich_help_panel=WORKLOAD
        ),
    ] = None,
    vocabulary: Annotated[
        int,
        typer.Option(min=2, help="Random token ids are below it.", rich_help_panel=WORKLOAD),
    ] = VOCABULARY,
    seed: Annotated[
        int,
        typer.Option(min=0, help="Seed of lengths, tokens and times.", rich_help_panel=WORKLOAD),
    ] = 1,
    request_rate: Annotated[
        float,
        typer.Option(
            help="Requests per second, or inf; sessions for sharegpt4, agent and sharegpt.",
            rich_help_panel=SENDING,
        ),
    ] = 1.0,
    auto_run: Annotated[
        bool,
        typer.Option(
            "--auto-run/--disable-auto-run",
            help=f"A run for each of {RATES[0]}, {RATES[1]}, ... {RATES[-1]} requests per second.",
            rich_help_panel=SENDING,
        ),
    ] = False,
    distribution: Annotated[
        Literal["poisson", "uniform"],
        typer.Option(help="Distribution of the times between requests.", rich_help_panel=SENDING),
    ] = "poisson",
    max_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Requests in flight at most. Default: {PARALLEL}; leval and zipf: 1.",
            rich_help_panel=SENDING,
        ),
    ] = None,
    ready_queue_policy: Annotated[
        Literal["random", "fifo"],
        typer.Option(help="Which client that is ready goes next.", rich_help_panel=SENDING),
    ] = "random",
    enable_round_barrier: Annotated[
        bool,
        typer.Option(
            "--enable-round-barrier",
            help="A round begins when all clients have finished the one before.",
            rich_help_panel=SENDING,
        ),
    ] = False,
    flush_between_rounds: Annotated[
        bool,
        typer.Option(
            "--flush-between-rounds",
            help="A barrier at which device and host caches are emptied: histories come from L3.",
            rich_help_panel=SENDING,
        ),
    ] = False,
    flush: Annotated[
        bool,
        typer.Option(help="Empty device and host caches before each run.", rich_help_panel=SENDING),
    ] = True,
    log_file: Annotated[Path, typer.Option(help="A JSON line for each run is added to it.")] = OUT
    / "multiturn.jsonl",
    requests_file: Annotated[
        Path | None, typer.Option(help="A JSON line for each request is added to it.")
    ] = None,
    tag: Annotated[str, typer.Option(help="Tag in each line of the log file.")] = "",
    as_json: AsJson = False,
) -> None:
    """Multi-turn conversations and long contexts against an SGLang server.

    Options mean what they mean in SGLang's bench_multiturn.py where it has them; --auto-run has to
    be asked for. Exit status: 0; 1 when requests failed; 2 when it could not run.
    """
    if host is not None or port is not None:
        if url is not None:
            fail(f"--url {url}: give it, or --host and --port, and not both")
        url = f"http://{host or DEFAULT_HOST}:{port or DEFAULT_PORT}"
    if method not in SERVED:
        fail(f"--method {method!r}: must be one of {', '.join(SERVED)}")
    if not request_rate > 0:
        fail(f"--request-rate {request_rate:g}: must be above 0, or inf for all at once")
    check_model(model_path)
    with failing():
        workload_chosen = choose(
            WorkloadOptions(
                workload="sharegpt" if sharegpt and workload == "multiturn" else workload,
                num_clients=num_clients or (CLIENTS if url or model_path else TINY_CLIENTS),
                seed=seed,
                num_rounds=num_rounds,
                min_rounds=min_rounds,
                max_rounds=max_rounds,
                request_length=request_length,
                sub_question_input_length=sub_question_input_length,
                output_length=output_length,
                range_ratio=range_ratio,
                leval_task=leval_task,
                zipf_skew=zipf_skew,
                num_documents=num_documents,
                sharegpt=sharegpt,
                interval=interval,
                scale=scale,
                max_context=max_context,
                model=model_path,
            )
        )
        pace = Pace(
            distribution=distribution,
            policy=ready_queue_policy,
            max_parallel=max_parallel or workload_chosen.max_parallel or PARALLEL,
            barrier=enable_round_barrier or flush_between_rounds,
            flush=flush_between_rounds,
            seed=seed,
        )
        rates = RATES if auto_run else (request_rate,)
        plan = Plan(workload_chosen, rates, pace, vocabulary, flush)
        with (
            (
                running(url, api_key)
                if url is not None
                else started(method, model_path, pool_tokens, shlex.split(server_args), server_dir)
            ) as target,
            progress_bar(hidden=False) as bar,
        ):
            measured = measure(target, plan, bar)
        lines = log_lines(measured, tag)
        append(log_file, lines)
        if requests_file is not None:
            append(requests_file, request_lines(measured))
    if as_json:
        print_json(lines)
    else:
        show(measured)
        screen.print(f"Results: {log_file}", highlight=False, soft_wrap=True)
    if any(run.parts["summary"]["failed_requests"] for run in measured):
        raise typer.Exit(FAILED)


@contextmanager
def running(url: str, key: str | None) -> Iterator[Target]:
    """A server that is up already."""
    if not url.startswith(("http://", "https://")):
        raise UnusableServer(f"--url {url}: must be http://HOST:PORT")
    yield Target(url, key)


@contextmanager
def started(
    method: str, model: str | None, pool_tokens: int, extra_args: Sequence[str], folder: Path | None
) -> Iterator[Target]:
    """A server for the length of the block.

    Args:
        model: None: a tiny Llama with random weights.
        extra_args: More arguments of SGLang.
        folder: Where L3 and log stay; None: they go with the server.

    Raises:
        MachineError: SGLang cannot serve here.
        ServerError: The server did not start.
    """
    errors.print(
        f"starting SGLang with {model or 'a tiny random Llama'}: {METHODS[method].title}",
        highlight=False,
        soft_wrap=True,
    )
    unwind_when_terminated()
    machine = find_machine()
    with TemporaryDirectory(prefix="hcache-bench-") as scratch:
        options = server_options(
            METHODS[method],
            machine,
            model or TinyLlama(positions=pool_tokens).build(Path(scratch)),
            folder or Path(scratch) / "server",
            pool_tokens=pool_tokens,
            metrics=True,
            extra_args=extra_args,
        )
        with Server(options) as server:
            yield Target(server.url, ADMIN_KEY)


if __name__ == "__main__":
    app()
