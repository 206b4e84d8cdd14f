"""The harness: SGLang's own caches, which our backend is later held to, and server processes: how
they start, how their end is seen, and that none outlives its test run."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.harness.models import build_model
from bench.harness.server import CachedTokens, Server, ServerError, ServerOptions
from tests.engine.harness.conversations import converse, make_conversations, random_tokens
from tests.engine.harness.ours import assert_no_cache_output, assert_restored_from_l3, file_backend

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma", marks=pytest.mark.long)])
def test_flushed_turns_come_back_from_storage_with_the_reference_tokens(
    name: str, model_cache: Path, tmp_path: Path
) -> None:
    model = build_model(name, model_cache)
    with Server(file_backend(model, tmp_path)) as server:
        conversations = converse(server, make_conversations(1, turns=2))
    assert_no_cache_output(model, conversations)
    assert_restored_from_l3(conversations, server.options.page_size)
    assert conversations[0].turns[0].cached.storage == 0
    # A model that repeats itself would hide wrong KV.
    assert all(len(set(output)) > 5 for output in conversations[0].outputs)


def test_every_full_page_is_in_l3_after_wait_backed_up_and_none_after_clear(
    model: Path, tmp_path: Path
) -> None:
    prompt = random_tokens(600, seed=1)
    with Server(file_backend(model, tmp_path)) as server:
        server.generate(prompt, 40)
        server.wait_backed_up()
        assert len(list((tmp_path / "l3").glob("*.bin"))) == 639 // server.options.page_size
        server.flush_cache()
        assert server.clear_storage().status_code == 200
        assert list((tmp_path / "l3").glob("*.bin")) == []
        assert server.generate(prompt, 4).cached == CachedTokens(0, 0, 0)


@pytest.fixture
def options(model: Path, tmp_path: Path) -> ServerOptions:
    return ServerOptions(model, tmp_path / "server.log")


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


def test_a_server_that_dies_while_starting_is_an_error_with_its_log(options: ServerOptions) -> None:
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


def terminated(server: Server) -> None:
    """Ended as an operator does it; what SGLang leaves behind goes with its process group."""
    assert server.process is not None
    psutil.Process(server.process.pid).terminate()
    server.wait_exit()
    server.kill()


def test_a_server_is_forked_off_the_nursery_and_its_end_leaves_no_process(
    options: ServerOptions,
) -> None:
    for end in (terminated, Server.kill):
        with Server(options) as server:
            assert "nursery: a fresh process" not in server.log_text()
            assert server.process is not None
            main = psutil.Process(server.process.pid)
            # A new interpreter's command line begins with its path; a fork has a title instead.
            assert main.cmdline()[0] == "python"
            processes = [main, *main.children(recursive=True)]
            assert len(processes) >= 3
            end(server)
            assert not any(process.is_running() for process in processes)


# A fork needs a nursery of its own first, which imports SGLang.
@pytest.mark.parametrize("fork", [False, pytest.param(True, marks=pytest.mark.long)])
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
