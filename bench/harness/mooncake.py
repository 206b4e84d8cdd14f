"""A Mooncake cluster on this machine: a master and a node that lends memory, over TCP."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import requests

from bench.harness.server import free_port

NODE_BYTES = 256 << 20
BUFFER_BYTES = 16 << 20
READY_S = 20.0
CLIENT_TTL_S = 120  # the master gives up a node that is silent for longer; the default is 10
_CONNECT = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store, address, lent, buffer = MooncakeDistributedStore(), *sys.argv[1:4]
setup = "127.0.0.1", "P2PHANDSHAKE", int(lent), int(buffer), "tcp", "", address, None
assert not store.setup(*setup)
"""
NODE = f"""{_CONNECT}
print("ready", flush=True)
time.sleep(1e6)
"""
DAMAGE = f"""{_CONNECT}
for key in sys.argv[4:]:
    value = bytearray(store.get(key))
    value[len(value) // 2] ^= 1
    assert not store.remove(key, True)
    assert not store.put(key, bytes(value))
store.close()
"""


class Cluster:
    """A master, which clients find at ``address`` and people at ``metrics_port``, and a node that
    lends memory."""

    def __init__(self, log: IO[str], node_bytes: int) -> None:
        port, self.metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self._log = log
        self._node_bytes = node_bytes
        self._processes: list[subprocess.Popen[Any]] = []

    def start(self) -> None:
        """Returns when the node has lent its memory."""
        import mooncake

        host, port = self.address.split(":")
        master = [str(Path(mooncake.__path__[0]) / "mooncake_master"), "-rpc_address", host]
        master += ["-rpc_port", port, "-metrics_port", str(self.metrics_port)]
        master += ["-client_ttl", str(CLIENT_TTL_S)]
        self._launch(master, self._log)
        _wait_for(int(port))
        sizes = [str(self._node_bytes), str(BUFFER_BYTES)]
        node = self._launch([sys.executable, "-c", NODE, self.address, *sizes], subprocess.PIPE)
        assert node.stdout is not None
        assert node.stdout.readline() == "ready\n"

    def kill(self) -> None:
        """The master and the node end at once; stored pages are gone."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Inside the block the cluster does not answer, and no connection is closed."""
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in self._processes:
                process.send_signal(signal.SIGCONT)

    def _launch(self, command: list[str], stdout: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen(command, stdout=stdout, stderr=self._log, text=True)
        self._processes.append(process)
        return process


def missing() -> str | None:
    """Why Mooncake cannot be used here, or None."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"{error}; see requirements/mooncake.txt"
    return None


@contextmanager
def cluster(folder: Path, node_bytes: int = NODE_BYTES) -> Iterator[Cluster]:
    """Servers come and go, the node keeps their pages, up to ``node_bytes``."""
    with (folder / "mooncake.log").open("w") as log:
        started = Cluster(log, node_bytes)
        try:
            started.start()
            yield started
        finally:
            started.kill()


def store_config(cluster: Cluster) -> dict[str, Any]:
    """Extra config of SGLang's backend `mooncake`; the server lends no memory itself."""
    return {
        "master_server_address": cluster.address,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "device_name": "",
        "local_hostname": "127.0.0.1",
        "global_segment_size": 0,
        "prefetch_threshold": 16,
    }


def keys(cluster: Cluster) -> list[str]:
    """Keys of stored pages: `..._k` and `..._v` of each, which are its two halves."""
    answer = requests.get(f"http://127.0.0.1:{cluster.metrics_port}/get_all_keys", timeout=10)
    answer.raise_for_status()
    return [key for key in answer.text.split() if key.endswith(("_k", "_v"))]


def damage(cluster: Cluster, keys: Iterable[str]) -> None:
    program = [sys.executable, "-c", DAMAGE, cluster.address, "0", str(BUFFER_BYTES), *keys]
    subprocess.run(program, check=True, capture_output=True)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
