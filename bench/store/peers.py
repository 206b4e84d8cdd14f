"""Other stores that pages go through: SGLang's HiCacheFile and NIXL's POSIX backend."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_NIXL_BATCH = 32


class Peer(ABC):
    """A store of pages of one size, in the memory that it was made with; its files are in
    ``pages``."""

    pages: Path

    @abstractmethod
    def put(self, keys: Sequence[bytes]) -> None:
        """Store as many pages, from the beginning of the memory on."""

    @abstractmethod
    def get(self, keys: Sequence[bytes]) -> None:
        """Read pages to the beginning of the memory."""

    def clear(self) -> None:
        """Delete all pages."""
        for path in files_in(self.pages):
            path.unlink()


class HiCacheFilePeer(Peer):
    """SGLang's own file backend; an ImportError if SGLang cannot be imported."""

    def __init__(self, folder: Path, memory: memoryview, page: int) -> None:
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

    def __init__(self, folder: Path, memory: memoryview, page: int) -> None:
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


PEERS: dict[str, Callable[[Path, memoryview, int], Peer]] = {
    "HiCacheFile": HiCacheFilePeer,
    "NIXL POSIX": NixlPeer,
}


def found_peers(folder: Path, memory: memoryview, page: int) -> dict[str, Peer]:
    """Those that run here, by name; says why others do not."""
    found: dict[str, Peer] = {}
    for name, kind in PEERS.items():
        try:
            found[name] = kind(folder / f"{name.split()[0]}-{page}", memory, page)
        except Exception as error:
            print(f"without {name}: {error!r}")
    return found


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
