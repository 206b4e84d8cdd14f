"""A server in a process group of its own, and the few requests that the commands make.

Nothing here knows what is served: a command line, its environment and a log file come from the
caller. See :mod:`hcache_backend.cli.machine` for what SGLang needs on this machine.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

POLL_S = 0.05
LOG_TAIL_LINES = 40
_running: set[ServerProcess] = set()


class ServerError(RuntimeError):
    """The server died, or did not do what was asked of it; carries the end of its log."""


class Answer(NamedTuple):
    """A server's answer, whatever its status."""

    status: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True)
class Reply:
    """One answer of ``/generate``."""

    output_ids: list[int]
    meta_info: dict[str, Any]

    @property
    def storage_tokens(self) -> int:
        """Prompt tokens that came from L3 (needs ``--enable-cache-report``)."""
        details = self.meta_info.get("cached_tokens_details") or {}
        return int(details.get("storage", 0))


class ServerProcess:
    """``with ServerProcess(...) as server:`` is ready to answer when the block is entered.

    The processes of the server form one group, which is killed at the end of the block and when
    this interpreter ends. There is nothing to lose in a kill: L3 must survive one by design.

    Args:
        command: Command line without ``--host``, ``--port`` and ``--admin-api-key``.
        environment: Variables to add to this process's own.
        log: File for the server's output; overwritten.
        ready_timeout_s: Seconds a start may take.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        ready_timeout_s: float = 600.0,
    ) -> None:
        self.log = log
        self.port = 0
        self._command = list(command)
        self._environment = dict(environment)
        self._ready_timeout_s = ready_timeout_s
        self._admin_key = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers, once it was started."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_key(self) -> str:
        """What its administrative requests need as bearer token."""
        return self._admin_key

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start, and wait until requests are answered.

        Raises:
            ServerError: It ended, or was not ready in time.
        """
        self.launch()
        try:
            self._wait_ready()
        except BaseException:
            self.kill()
            raise

    def launch(self) -> None:
        """Start without waiting."""
        self.port = free_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, *address, "--admin-api-key", self._admin_key],
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _running.add(self)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL to the whole group; returns when its processes are gone."""
        _running.discard(self)
        process, self._process = self._process, None
        if process is None:
            return
        kill_group(process.pid)
        process.wait()
        wait_group_gone(process.pid)

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, timeout_s: float = 600.0
    ) -> Reply:
        """One greedy request that never stops at a token.

        Raises:
            ServerError: It was refused or failed.
        """
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
            },
        }
        answer = self._accepted("POST", "/generate", body, timeout_s)
        reply = answer.json()
        return Reply(reply["output_ids"], reply["meta_info"])

    def flush_cache(self, timeout_s: float = 60.0) -> None:
        """Empty device and host caches once the server is idle; L3 is not touched.

        SGLang counts write-through and L3 backups in flight as work, so everything that was to be
        backed up is in L3 when this returns.

        Raises:
            ServerError: The server was not idle within ``timeout_s``.
        """
        self._accepted("POST", f"/flush_cache?timeout={timeout_s}", None, timeout_s + 30)

    def request(
        self, method: str, path: str, body: object = None, timeout_s: float = 60.0
    ) -> Answer:
        """One HTTP request with the admin key; ``body`` is sent as JSON.

        Raises:
            ServerError: There was no answer at all.
        """
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                "Authorization": f"Bearer {self._admin_key}",
            },
            method=method,
        )
        try:
            with _opener.open(request, timeout=timeout_s) as answer:
                return Answer(answer.status, answer.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read().decode(errors="replace"))
        except OSError as error:
            raise self.error(f"{method} {path}: {error}") from error

    def log_text(self) -> str:
        """Everything the server has printed so far."""
        return self.log.read_text(errors="replace")

    def error(self, message: str) -> ServerError:
        """A ServerError with the end of the log."""
        tail = "\n".join(self.log_text().splitlines()[-LOG_TAIL_LINES:])
        return ServerError(f"SGLang server: {message}\n--- end of {self.log}\n{tail}")

    def _accepted(self, method: str, path: str, body: object, timeout_s: float) -> Answer:
        answer = self.request(method, path, body, timeout_s)
        if answer.status != 200:
            raise self.error(f"{path} answered {answer.status}: {answer.text}")
        return answer

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._ready_timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self.error(f"exited with {self._process.returncode} while starting")
            with contextlib.suppress(ServerError):
                if self.request("GET", "/health", timeout_s=5).status == 200:
                    return
            time.sleep(POLL_S)
        raise self.error(f"not ready after {self._ready_timeout_s:.0f} s")


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks 127.0.0.1 directly, whatever proxy the environment names."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kill_group(group: int) -> None:
    """SIGKILL to a process group, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def wait_group_gone(group: int, timeout_s: float = 10.0) -> None:
    """Wait until no process of the group is left, so that its files and ports are free again."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(POLL_S)


@atexit.register
def _kill_running() -> None:
    for server in list(_running):
        server.kill()
