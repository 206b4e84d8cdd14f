"""How fast a server brings histories back: multi-turn conversations and long contexts.

Against a running SGLang server, or one that is started: time to first token (TTFT), time between
tokens, hits by tier. Options mean what they mean in SGLang's bench_multiturn.py where it has them;
--auto-run has to be asked for. Exit status: 0; 1 when requests failed; 2 when it could not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness.machine import find_machine
from bench.harness.methods import METHODS, SERVED, server_options
from bench.harness.models import TinyLlama
from bench.harness.options import ADMIN_KEY
from bench.harness.program import add_model_options, at_least, failing, parser
from bench.harness.report import OUT
from bench.harness.server import Server
from bench.multiturn.driver import PARALLEL, Pace
from bench.multiturn.report import append, log_lines, request_lines, show
from bench.multiturn.run import Plan, Target, measure
from bench.workload.options import add_workload_options, choose
from hcache_backend.cli.common import errors, print_json, progress_bar, screen
from hcache_backend.cli.ingest import UnusableServer

RATES = (16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)
"""Rates of ``--auto-run``, as in SGLang's benchmark."""
DEFAULT_HOST, DEFAULT_PORT = "localhost", 30000
CLIENTS, TINY_CLIENTS = 256, 8
POOL_TOKENS = 16_384
FAILED = 1


def options() -> argparse.ArgumentParser:
    """The options of the program."""
    made = parser("bench.multiturn", __doc__)
    running = made.add_argument_group("a running server").add_argument
    running("--url", help="http://HOST:PORT; default: a server is started")
    running("--host", help=f"default: {DEFAULT_HOST}, if --port is given")
    running("--port", type=at_least(1), help=f"default: {DEFAULT_PORT}, if --host is given")
    running("--api-key", help="its (admin) API key")
    started = made.add_argument_group("the server that is started")
    add_model_options(started)
    started.add_argument(
        "--method", choices=SERVED, default="hcache-eager", help="how it brings back"
    )
    started.add_argument(
        "--server-dir", type=Path, help="where L3 and log stay; default: they are removed"
    )
    started.add_argument(
        "--pool-tokens",
        type=at_least(256),
        default=POOL_TOKENS,
        help="tokens of its device's KV pool",
    )
    add_workload_options(made, "what is asked", "multiturn")
    sending = made.add_argument_group("when requests are sent").add_argument
    sending(
        "--request-rate",
        type=float,
        default=1.0,
        help="requests per second, or inf; sessions for sharegpt4, agent and sharegpt",
    )
    sending(
        "--auto-run",
        action="store_true",
        help=f"a run for each of {RATES[0]}, {RATES[1]}, ... {RATES[-1]} requests per second",
    )
    sending("--disable-auto-run", dest="auto_run", action="store_false", help="the default")
    sending(
        "--distribution",
        choices=("poisson", "uniform"),
        default="poisson",
        help="distribution of the times between requests",
    )
    sending(
        "--max-parallel",
        type=at_least(1),
        help=f"requests in flight at most; default: {PARALLEL}; leval and zipf: 1",
    )
    sending(
        "--ready-queue-policy",
        choices=("random", "fifo"),
        default="random",
        help="which client that is ready goes next",
    )
    sending(
        "--enable-round-barrier",
        action="store_true",
        help="a round begins when all clients have finished the one before",
    )
    sending(
        "--flush-between-rounds",
        action="store_true",
        help="a barrier at which device and host caches are emptied: histories come from L3",
    )
    sending(
        "--no-flush",
        dest="flush",
        action="store_false",
        help="do not empty device and host caches before each run",
    )
    made.add_argument(
        "--log-file",
        type=Path,
        default=OUT / "multiturn.jsonl",
        help="a JSON line for each run is added to it",
    )
    made.add_argument(
        "--requests-file", type=Path, help="a JSON line for each request is added to it"
    )
    made.add_argument("--tag", default="", help="tag in each line of the log file")
    made.add_argument(
        "--json", dest="as_json", action="store_true", help="print JSON instead of tables"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parsed = options()
    given = parsed.parse_args(arguments)
    if given.host is not None or given.port is not None:
        if given.url is not None:
            parsed.error(f"--url {given.url}: give it, or --host and --port, and not both")
        given.url = f"http://{given.host or DEFAULT_HOST}:{given.port or DEFAULT_PORT}"
    if not given.request_rate > 0:
        parsed.error(
            f"--request-rate {given.request_rate:g}: must be above 0, or inf for all at once"
        )
    if given.num_clients is None:
        given.num_clients = CLIENTS if given.url or given.model_path else TINY_CLIENTS
    with failing():
        workload = choose(given)
        pace = Pace(
            distribution=given.distribution,
            policy=given.ready_queue_policy,
            max_parallel=given.max_parallel or workload.max_parallel or PARALLEL,
            barrier=given.enable_round_barrier or given.flush_between_rounds,
            flush=given.flush_between_rounds,
            seed=given.seed,
        )
        rates = RATES if given.auto_run else (given.request_rate,)
        plan = Plan(workload, rates, pace, given.vocabulary, given.flush)
        with (
            (
                running(given.url, given.api_key)
                if given.url is not None
                else started(
                    given.method,
                    given.model_path,
                    given.pool_tokens,
                    given.server_args,
                    given.server_dir,
                )
            ) as target,
            progress_bar(hidden=False) as bar,
        ):
            measured = measure(target, plan, bar)
        lines = log_lines(measured, given.tag)
        append(given.log_file, lines)
        if given.requests_file is not None:
            append(given.requests_file, request_lines(measured))
    if given.as_json:
        print_json(lines)
    else:
        show(measured)
        screen.print(f"Results: {given.log_file}", highlight=False, soft_wrap=True)
    return FAILED if any(run.parts["summary"]["failed_requests"] for run in measured) else 0


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
    sys.exit(main())
