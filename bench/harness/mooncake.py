"""A Mooncake cluster on this machine: a master and a node that lends memory, over TCP."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import requests

NODE_BYTES = 256 << 20
BUFFER_BYTES = 16 << 20
READY_S = 20.0
NODE = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup(
    "127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), int(sys.argv[3]), "tcp", "", sys.argv[1], None
)
print("ready", flush=True)
time.sleep(1e6)
"""
DAMAGE = f"""
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup(
    "127.0.0.1", "P2PHANDSHAKE", 0, {BUFFER_BYTES}, "tcp", "", sys.argv[1], None
)
value = bytearray(store.get(sys.argv[2]))
value[len(value) // 2] ^= 1
assert not store.remove(sys.argv[2], True)
assert not store.put(sys.argv[2], bytes(value))
store.close()
"""


class Cluster(NamedTuple):
    """Where the master answers: its clients, and people."""

    address: str
    metrics_port: int


def missing() -> str | None:
    """Why Mooncake cannot be used here, or None."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"{error}; see requirements/mooncake.txt"
    return None


@contextmanager
def cluster(folder: Path, node_bytes: int = NODE_BYTES) -> Iterator[Cluster]:
    """Servers come and go, the node keeps what they stored, up to ``node_bytes``."""
    import mooncake

    program = Path(mooncake.__path__[0]) / "mooncake_master"
    port, metrics_port = _free_ports(2)
    address = f"127.0.0.1:{port}"
    processes: list[subprocess.Popen[Any]] = []
    with (folder / "mooncake.log").open("w") as log:
        try:
            master = [str(program), "-rpc_address", "127.0.0.1", "-rpc_port", str(port)]
            master += ["-metrics_port", str(metrics_port)]
            processes.append(subprocess.Popen(master, stdout=log, stderr=log))
            _wait_for(port)
            node = subprocess.Popen(
                [sys.executable, "-c", NODE, address, str(node_bytes), str(BUFFER_BYTES)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            processes.append(node)
            assert node.stdout is not None
            assert node.stdout.readline() == "ready\n"
            yield Cluster(address, metrics_port)
        finally:
            for process in processes:
                process.kill()
                process.wait()


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
    """What is stored of pages: `..._k` and `..._v` of each, which are its two halves."""
    answer = requests.get(f"http://127.0.0.1:{cluster.metrics_port}/get_all_keys", timeout=10)
    answer.raise_for_status()
    return [key for key in answer.text.split() if key.endswith(("_k", "_v"))]


def damage(cluster: Cluster, key: str) -> None:
    """Flip a bit in the middle of a value."""
    program = [sys.executable, "-c", DAMAGE, cluster.address, key]
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


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
