"""A process that has SGLang imported and forks a server off itself for every order it gets.

Nearly all of a CPU server's start-up is imports. `python -m hcache_cpu_engine.nursery FD` does
them once, then reads orders from the Unix socket FD (`bench/harness/processes.py` is its
other end). What makes a forked server the same as a fresh one:

- The nursery has one thread and no ports, and has neither loaded SGLang's plugins nor read server
  arguments: that happens in the forked server. It has imported the package, which does nothing
  until its plugin is loaded, and lives no longer than the process that starts servers.
- A server gets exactly the environment of its order. Which variables the imports read is recorded
  (`EnvironmentReads`); an order that differs in one of them is executed as a fresh interpreter
  instead, as is one that asks for it. PYTHONPATH alone may differ: a fork's `sys.path` is rebuilt.
  (A `sitecustomize.py` in an added folder does not run in a fork.)
- A server leads a session and process group of its own and dies with the nursery
  (PR_SET_PDEATHSIG); the nursery kills its servers and ends when the socket's other end is closed,
  which the kernel does even for a test run that was killed.
- The nursery adopts what a dead server leaves behind (PR_SET_CHILD_SUBREAPER), kills and reaps it,
  so "gone" means that no process of the group exists any more.

Each order brings a status pipe. It carries `pid N` from the server once it leads its group, then
`exit N` (negative: a signal's number) from the nursery when the server has ended, and is closed
when the whole group is gone.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import setproctitle

PRELOAD = (
    *("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler"),
    *("hcache_backend.start.attach", "hcache_backend.start.build"),
    "hcache_backend.tiers.storage",
)
READ_UNSEEN = frozenset(
    (
        "OMP_NUM_THREADS",
        "THP_MEM_ALLOC_ENABLE",
        "HCACHE_CPU_ENGINE_TRITON",
        "SGLANG_USE_CPU_ENGINE",
        "PYTHONHASHSEED",
    )
)
"""Read by C code or before the recording starts."""
MAX_ORDER_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Order:
    """One server to start: JSON on the socket, with the descriptors of its log and status pipe."""

    module: str
    args: list[str]
    env: dict[str, str]
    cwd: str
    fresh: bool

    def run_forked(self) -> None:
        """Be `python -m module args`; a failure is this interpreter's exit status."""
        sys.argv = [self.module, *self.args]
        setproctitle.setproctitle(f"python -m {' '.join(sys.argv)}")
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)

    def execute(self) -> None:
        """Be `python -m module args` in a new interpreter. Does not return."""
        os.execve(sys.executable, [sys.executable, "-m", self.module, *self.args], self.env)


class EnvironmentReads:
    """Which environment variables the imports read, and what they did to the environment."""

    def __init__(self) -> None:
        self.names = set(READ_UNSEEN)
        self.before = dict(os.environ)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        environ: Any = type(os.environ)
        original = environ.__getitem__

        def getitem(this: Any, name: str) -> str:
            if sys._getframe(1).f_code.co_name != "__iter__":  # `items()` would name all of them
                self.names.add(name)
            return original(this, name)

        environ.__getitem__ = getitem
        try:
            yield
        finally:
            environ.__getitem__ = original
        self.names.discard("PYTHONPATH")

    def differing(self, env: dict[str, str]) -> list[str]:
        """Names for which the imports would have seen another value under `env`."""
        return sorted(n for n in self.names if self.before.get(n) != env.get(n))

    def apply(self, env: dict[str, str]) -> None:
        """Make `os.environ` what it would be after the same imports under `env`."""
        written = {n: v for n, v in os.environ.items() if self.before.get(n) != v}
        os.environ.clear()
        os.environ.update(env | written)


def preload() -> EnvironmentReads:
    """Import what every server imports. Frozen, so that forks do not copy it page by page."""
    reads = EnvironmentReads()
    with reads.recording():
        from .recurrent import name_operators

        name_operators()
        for module in PRELOAD:
            importlib.import_module(module)
        from sglang.srt.models.registry import ModelRegistry

        ModelRegistry.get_supported_archs()
    setproctitle.setproctitle("hcache: nursery of CPU servers")
    gc.collect()
    gc.freeze()
    return reads


class Nursery:
    """The serving loop. Servers are awaited through pidfds, so no signal handlers are needed."""

    def __init__(self, control: socket.socket):
        self.control = control
        self.pid = os.getpid()
        self.servers: dict[int, tuple[int, int]] = {}
        """pidfd of a running server -> its process id and its status pipe."""
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.reads: EnvironmentReads | None = None
        _prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> Order | None:
        """Returns in a forked server with what it is to run, in the nursery when it is over."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is not self.control:
                    self.reap(key.fd)
                    continue
                message, descriptors, *_ = socket.recv_fds(self.control, MAX_ORDER_BYTES, 2)
                if not message:
                    self.kill_all()
                    return None
                order = Order(**json.loads(message))
                if self.start(order, *descriptors):
                    return order

    def start(self, order: Order, log: int, status: int) -> bool:
        if not order.fresh and self.reads is None:
            self.reads = preload()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self.become_server(order, log, status)
            return True
        pidfd = os.pidfd_open(pid)
        self.servers[pidfd] = (pid, status)
        self.selector.register(pidfd, selectors.EVENT_READ)
        os.close(log)
        return False

    def become_server(self, order: Order, log: int, status: int) -> None:
        os.setsid()
        _die_with(self.pid)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.write(status, b"pid %d\n" % os.getpid())
        for pidfd, (_, other) in self.servers.items():
            os.close(pidfd)
            os.close(other)
        os.close(log)
        os.close(status)
        self.selector.close()
        self.control.close()
        os.chdir(order.cwd)
        if not order.fresh:
            assert self.reads is not None
            differing = self.reads.differing(order.env)
            if not differing:
                _replace_python_path(self.reads.before, order)
                self.reads.apply(order.env)
                return
            print(f"nursery: a fresh process, since imports read {differing}", flush=True)
        order.execute()

    def reap(self, pidfd: int) -> None:
        """Report a server's end; kill and collect what is left of its group."""
        pid, status = self.servers.pop(pidfd)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        _, wait_status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, b"exit %d\n" % os.waitstatus_to_exitcode(wait_status))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-pid, 0)
        os.close(status)

    def kill_all(self) -> None:
        for pidfd, (pid, _) in list(self.servers.items()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self.reap(pidfd)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _die_with(parent: int) -> None:
    """SIGKILL for this process when `parent`, the process that forked it, ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was already over
        os.kill(os.getpid(), signal.SIGKILL)


def _replace_python_path(before: dict[str, str], order: Order) -> None:
    """`sys.path` and the import system's caches as under the order's PYTHONPATH and folder."""

    def entries(env: dict[str, str]) -> list[str]:
        return [str(Path(p).absolute()) for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]

    old = entries(before)
    sys.path[:] = [order.cwd, *entries(order.env), *(p for p in sys.path[1:] if p not in old)]
    importlib.invalidate_caches()


if __name__ == "__main__":
    ordered = Nursery(socket.socket(fileno=int(sys.argv[1]))).serve()
    if ordered is not None:
        ordered.run_forked()
