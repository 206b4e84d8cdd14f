"""Server processes: how their end is seen, and that none outlives its test run."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.harness.server import Server, ServerError, ServerOptions

pytestmark = pytest.mark.engine


def test_a_crashed_scheduler_ends_the_server_and_leaves_no_process(
    model: Path, tmp_path: Path
) -> None:
    with Server(ServerOptions(model, tmp_path / "server.log")) as server:
        assert server.process is not None
        main = psutil.Process(server.process.pid)
        # A new interpreter's command line begins with its path; a fork has a title instead.
        assert main.cmdline()[0] == "python"
        processes = [main, *main.children(recursive=True)]
        (scheduler,) = [p for p in processes if p.cmdline()[:1] == ["sglang::scheduler"]]
        scheduler.kill()
        with pytest.raises(ServerError, match="died while waiting"):
            server.wait_for_log("never said")
        assert server.wait_exit(1) == -signal.SIGKILL
        assert not any(process.is_running() for process in processes)


def test_no_server_outlives_a_test_run_that_is_killed(model: Path, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from bench.harness.server import Server, ServerOptions\n"
        "server = Server(ServerOptions(Path(sys.argv[1]), Path(sys.argv[2]), fork=False))\n"
        "server.launch()\n"
        "print(server.process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, str(model), str(tmp_path / "server.log")]
    run = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert run.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 240
    while psutil.pid_exists(int(run.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(run.stdout))
