"""Other stores that pages go through: SGLang's HiCacheFile, NIXL's POSIX backend, Mooncake."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import mooncake

_NIXL_BATCH = 32


class Peer(ABC):
    """A store of pages of one size, in the memory that it was made with; its files, if it has any,
    are in ``pages``."""

    pages: Path

    @abstractmethod
    def put(self, keys: Sequence[bytes]) -> None:
        """Store as many pages, from the beginning of the memory on."""

    @abstractmethod
    def get(self, keys: Sequence[bytes]) -> None:
        """Read pages to the beginning of the memory."""

    def clear(self, keys: Sequence[bytes]) -> None:
        """Delete pages."""
        for path in files_in(self.pages):
            path.unlink()

    def close(self) -> None:  # noqa: B027
        """End it, if there is anything to end."""


class HiCacheFilePeer(Peer):
    """SGLang's own file backend; an ImportError if SGLang cannot be imported."""

    def __init__(self, folder: Path, memory: memoryview, page: int, most: int) -> None:
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        self.pages = folder
        ranks = {f"{kind}_rank": 0 for kind in ("tp", "pp", "attn_cp")}
        ranks |= {f"{kind}_size": 1 for kind in ("tp", "pp", "attn_cp")}
        flags = {"is_mla_model": False, "enable_storage_metrics": False}
        flags |= {"is_page_first_layout": True}
        config = HiCacheStorageConfig(**ranks, **flags, model_name="bench")
        self._backend = HiCacheFile(config, file_path=str(folder))
        self._tensors = list(torch.frombuffer(memory, dtype=torch.uint8).split(page))

    def put(self, keys: Sequence[bytes]) -> None:
        tensors = self._tensors[: len(keys)]
        if not self._backend.batch_set([key.hex() for key in keys], tensors):
            raise RuntimeError("HiCacheFile did not store")

    def get(self, keys: Sequence[bytes]) -> None:
        tensors = self._tensors[: len(keys)]
        found = self._backend.batch_get([key.hex() for key in keys], tensors)
        if any(tensor is None for tensor in found):
            raise RuntimeError("HiCacheFile did not read")


class NixlPeer(Peer):
    """NIXL's POSIX backend with Linux AIO, as SGLang's HiCache drives it.

    One file for each page, in 256 folders, opened by NIXL with direct I/O; an ImportError if it is
    not installed.
    """

    def __init__(self, folder: Path, memory: memoryview, page: int, most: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        for number in range(256):
            (folder / f"{number:02x}").mkdir(parents=True)
        self.pages = folder
        self._page = page
        self._agent: Any = nixl_agent("bench", nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", {"use_aio": "true"})
        self._start = _address(memory)
        whole = self._agent.get_reg_descs([(self._start, memory.nbytes, 0, "")], "DRAM")
        self._agent.register_memory(whole)
        self._files = 0

    def put(self, keys: Sequence[bytes]) -> None:
        self._move("WRITE", "rw,create,direct", keys)

    def get(self, keys: Sequence[bytes]) -> None:
        self._move("READ", "ro,direct", keys)

    def _move(self, direction: str, flags: str, keys: Sequence[bytes]) -> None:
        for first in range(0, len(keys), _NIXL_BATCH):
            start = self._start + first * self._page
            self._move_batch(direction, flags, keys[first : first + _NIXL_BATCH], start)

    def _move_batch(self, direction: str, flags: str, keys: Sequence[bytes], start: int) -> None:
        agent, page = self._agent, self._page
        files = [
            (0, page, self._files + number, f"{flags}:{self.pages}/{key[:1].hex()}/{key.hex()}")
            for number, key in enumerate(keys, start=1)
        ]
        self._files += len(files)
        pages = [(start + number * page, page, 0) for number in range(len(keys))]
        registered = agent.register_memory(agent.get_reg_descs(files, "FILE"))
        memory = agent.get_xfer_descs(pages, "DRAM")
        request = agent.initialize_xfer(direction, memory, registered.trim(), "bench")
        state = agent.transfer(request)
        while state not in ("DONE", "ERR"):
            time.sleep(0.0001)  # as SGLang's backend does
            state = agent.check_xfer_state(request)
        agent.release_xfer_handle(request)
        agent.deregister_memory(registered)
        if state == "ERR":
            raise RuntimeError("NIXL did not move the pages")


class MooncakePeer(Peer):
    """Mooncake's store: a node in another process lends its memory, over TCP on this machine.

    A RuntimeError or ImportError if it does not run.
    """

    def __init__(self, folder: Path, memory: memoryview, page: int, most: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        folder.mkdir()
        self.pages = folder / "none"
        self.pages.mkdir()
        self._page, self._start = page, _address(memory)
        # A fifth is left: the master makes room at 95%.
        self._cluster = mooncake.cluster(folder, most + most // 4)
        address = self._cluster.__enter__().address
        self._store: Any = MooncakeDistributedStore()
        options = ("127.0.0.1", "P2PHANDSHAKE", 0, mooncake.BUFFER_BYTES, "tcp", "", address)
        if self._store.setup(*options) or self._store.register_buffer(self._start, memory.nbytes):
            raise RuntimeError("Mooncake's store could not be set up")

    def put(self, keys: Sequence[bytes]) -> None:
        if any(self._store.batch_put_from(*self._places(keys))):
            raise RuntimeError("Mooncake did not store")

    def get(self, keys: Sequence[bytes]) -> None:
        if set(self._store.batch_get_into(*self._places(keys))) != {self._page}:
            raise RuntimeError("Mooncake did not read")

    def clear(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._store.remove(key.hex(), True)

    def close(self) -> None:
        self._store.close()
        self._cluster.__exit__(None, None, None)

    def _places(self, keys: Sequence[bytes]) -> tuple[list[str], list[int], list[int]]:
        starts = [self._start + number * self._page for number in range(len(keys))]
        return [key.hex() for key in keys], starts, [self._page] * len(keys)


PEERS: dict[str, Callable[[Path, memoryview, int, int], Peer]] = {
    "HiCacheFile": HiCacheFilePeer,
    "NIXL POSIX": NixlPeer,
    "Mooncake, memory": MooncakePeer,
}


def found_peers(
    folder: Path, memory: memoryview, page: int, most: int, opened: ExitStack
) -> dict[str, Peer]:
    """Those that run here, by name, until ``opened`` ends; says why others do not. At most ``most``
    bytes of pages are stored at a time."""
    found: dict[str, Peer] = {}
    for name, kind in PEERS.items():
        try:
            found[name] = kind(folder / f"{name.split()[0]}-{page}", memory, page, most)
        except Exception as error:
            print(f"without {name}: {error!r}")
        else:
            opened.callback(found[name].close)
    return found


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
