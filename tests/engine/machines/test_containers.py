"""Two servers in containers of their own share a folder: their processes have equal numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness.options import base_environment
from bench.harness.server import MODULE, Server
from tests.engine.harness.conversations import converse, make_conversations, turns_of
from tests.engine.harness.ours import assert_no_cache_output, our_server

pytestmark = [pytest.mark.engine, pytest.mark.long]

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
CONVERSATIONS = 200
ROUNDS = 4
"""The second server is killed behind each of them but the last."""


class Contained:
    """A process with a PID namespace, as far as :class:`Server` looks at it."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        with log.open("a") as output:
            self._process = subprocess.Popen(
                [*CONTAINER, *command],
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def kill_group(self) -> None:
        """SIGKILL; the namespace's other processes go with its first one."""
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class ContainedServer(Server):
    """A server whose processes are counted from 1 on."""

    def launch(self, port: int | None = None) -> None:
        self.port = port or 31000 + os.getpid() % 1000 + int(self.options.log.stem[-1])
        command = [sys.executable, "-m", MODULE, *self.options.arguments(self.port)]
        env = base_environment("cpu") | self.options.environment()
        self.process = Contained(command, env, self.options.log)  # type: ignore[assignment]


def test_two_containers_share_a_folder(model: Path, tmp_path: Path) -> None:
    if subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespaces here")
    first, second = (
        ContainedServer(our_server(model, tmp_path, log=tmp_path / f"server-{number}.log"))
        for number in (1, 2)
    )
    conversations = make_conversations(CONVERSATIONS, turns=2, tokens=130)
    step = CONVERSATIONS // ROUNDS
    of_the_other = []
    with first, second:
        for number in range(ROUNDS):
            some = conversations[number * step : (number + 1) * step]
            halves = some[: step // 2], some[step // 2 :]
            for server, half in zip((first, second), halves, strict=True):
                converse(server, half, turns=1)
            for server, half in zip((second, first), halves, strict=True):  # the other one
                converse(server, half)
                of_the_other += [turn.cached.storage for c in half for turn in c.turns[1:]]
            if number < ROUNDS - 1:
                second.kill()
                second.start()
    assert_no_cache_output(model, conversations)
    wrong = [tokens for tokens in of_the_other if tokens < 128]
    print(f"{len(turns_of(conversations))} replies, 0 wrong; {len(of_the_other)} second turns on")
    print(f"the other server, {len(of_the_other) - len(wrong)} of which found their history in L3")
    assert not wrong
    for server in (first, second):
        assert "cannot be used" not in server.log_text()
