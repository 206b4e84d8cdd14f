"""Server processes: how they start, how their end is seen, and that none outlives its test run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.harness.models import build_model
from bench.harness.server import Server, ServerError, ServerOptions
from tests.engine.harness.reference import greedy

pytestmark = pytest.mark.engine


@pytest.fixture
def options(model_cache: Path, tmp_path: Path) -> ServerOptions:
    return ServerOptions(build_model("llama", model_cache), tmp_path / "server.log")


def test_servers_are_forked_off_the_nursery_and_import_nothing_anew(options: ServerOptions) -> None:
    with Server(options) as server:
        assert "nursery: a fresh process" not in server.log_text()
        assert server.process is not None
        # A new interpreter's command line begins with its path; a fork has a title instead.
        assert psutil.Process(server.process.pid).cmdline()[0] == "python"


def test_a_fresh_server_that_spawns_its_workers_answers_as_well(options: ServerOptions) -> None:
    options.fork = False
    with Server(options) as server:
        assert (
            server.generate([1, 2, 3], 8).output_ids
            == greedy(options.model, [[1, 2, 3]], 8)[0].tokens
        )
        assert server.process is not None
        command = psutil.Process(server.process.pid).cmdline()
        assert command[1:3] == ["-m", "sglang.launch_server"]


def test_a_variable_that_imports_read_gets_a_fresh_interpreter(options: ServerOptions) -> None:
    options.extra_env = {"TORCHINDUCTOR_MAX_AUTOTUNE": "0"}
    server = Server(options)
    server.launch()
    try:
        server.wait_for_log("a fresh process, since imports read .'TORCHINDUCTOR_MAX_AUTOTUNE'")
    finally:
        server.kill()


def test_a_server_that_refuses_its_arguments_exits_with_a_status(options: ServerOptions) -> None:
    options.extra_args = ["--no-such-argument"]
    server = Server(options)
    server.launch()
    assert server.wait_exit() == 2
    assert "unrecognized arguments: --no-such-argument" in server.log_text()


def test_a_server_that_dies_while_starting_is_an_error_with_its_log(
    options: ServerOptions,
) -> None:
    options.extra_args = ["--hicache-size", "100000"]
    with pytest.raises(ServerError, match=r"(?s)while starting.*host memory"), Server(options):
        pass


def test_a_crashed_scheduler_ends_the_server(options: ServerOptions) -> None:
    with Server(options) as server:
        assert server.process is not None
        workers = psutil.Process(server.process.pid).children(recursive=True)
        (scheduler,) = [w for w in workers if w.cmdline()[:1] == ["sglang::scheduler"]]
        scheduler.kill()
        with pytest.raises(ServerError, match="died while waiting"):
            server.wait_for_log("never said")
        assert server.wait_exit(1) == -signal.SIGKILL


def test_stop_is_a_graceful_end_and_kill_leaves_no_process(options: ServerOptions) -> None:
    for end in (Server.stop, Server.kill):
        with Server(options) as server:
            assert server.process is not None
            main = psutil.Process(server.process.pid)
            processes = [main, *main.children(recursive=True)]
            assert len(processes) >= 3
            end(server)
            assert not any(process.is_running() for process in processes)


@pytest.mark.parametrize("fork", [True, False])
def test_no_server_outlives_a_test_run_that_is_killed(options: ServerOptions, fork: bool) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from bench.harness.server import Server, ServerOptions\n"
        "server = Server(ServerOptions(Path(sys.argv[1]), Path(sys.argv[2]), fork=False))\n"
        "server.launch()\n"
        "print(server.process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    ).replace("fork=False", f"fork={fork}")
    command = [sys.executable, "-c", program, str(options.model), str(options.log)]
    run = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert run.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 240
    while psutil.pid_exists(int(run.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(run.stdout))
