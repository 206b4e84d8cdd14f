"""Server processes, started by this interpreter's nursery and ended no later than it.

The nursery (see `hcache_cpu_engine/nursery.py`) is started with the first server and lives as long
as this process: nothing imported by it outlives a test run.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ORDER_BUFFER_BYTES = 1 << 20


class ServerProcess:
    """As `subprocess.Popen` for a child, for a process whose parent is the nursery."""

    def __init__(self, status: int):
        self._status = status
        self._pending = b""
        self._gone = False  # whether no process of the server's group is left
        self.pid = 0
        self.returncode: int | None = None  # as in `subprocess`: negative is a signal
        while not self.pid and self.returncode is None:
            self._read(None)

    def poll(self) -> int | None:
        self._read(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit status; raises TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._read(left)
        return self.returncode

    def kill_group(self) -> None:
        """SIGKILL to the server and all its workers; returns when they are gone."""
        if not self.pid:
            return
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        while not self._gone:
            self._read(None)

    def _read(self, timeout: float | None) -> None:
        """Take the lines of the nursery in, waiting up to `timeout` seconds for one."""
        if self._gone or not select.select([self._status], [], [], timeout)[0]:
            return
        received = os.read(self._status, 4096)
        *lines, self._pending = (self._pending + received).split(b"\n")
        for line in lines:
            what, number = line.split()
            if what == b"pid":
                self.pid = int(number)
            else:
                self.returncode = int(number)
        if not received:  # early only when the nursery was killed, and its servers with it
            self._gone = True
            os.close(self._status)
            if self.returncode is None:
                self.returncode = -signal.SIGKILL


class NurseryClient:
    def __init__(self, env: Mapping[str, str]):
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ORDER_BUFFER_BYTES)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the nursery
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hcache_cpu_engine.nursery", str(theirs.fileno())],
                env=dict(env),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def launch(
        self, module: str, args: Sequence[str], env: Mapping[str, str], log: Path, *, fresh: bool
    ) -> ServerProcess:
        """Start `python -m module args`, forked off the nursery or `fresh`, writing to `log`.

        It runs in the log's folder: a working directory is a place to import from, and the
        repository's has a folder `kernels`, which is also the name of a package of SGLang's.
        """
        order = {
            "module": module,
            "args": list(args),
            "env": dict(env),
            "cwd": str(log.parent.absolute()),
            "fresh": fresh,
        }
        ours, theirs = os.pipe()
        with log.open("wb") as output:
            try:
                message = json.dumps(order).encode()
                socket.send_fds(self.control, [message], [output.fileno(), theirs])
            finally:
                os.close(theirs)
        process = ServerProcess(ours)
        if not process.pid:
            self.close()
            self.log.seek(0)
            text = self.log.read().decode(errors="replace")
            raise RuntimeError(f"the nursery ended instead of starting a server:\n{text}")
        return process

    def close(self) -> None:
        """End the nursery and every server that it started."""
        self.control.close()
        self.process.wait()


_nurseries: list[NurseryClient] = []


def nursery(env: Mapping[str, str]) -> NurseryClient:
    """The nursery of this process; its imports see `env` when it has to be started."""
    if not _nurseries or _nurseries[-1].process.poll() is not None:
        _nurseries.append(NurseryClient(env))
        atexit.register(_nurseries[-1].close)
    return _nurseries[-1]
