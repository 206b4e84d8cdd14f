"""Reading pages from files: into host memory, or straight into the device's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

THREADS = 8


class Reader(Protocol):
    """Reads pages to memory of its own."""

    def read(self, pages: range) -> None:
        """Read pages; they are there on return.

        Raises:
            OSError: A file cannot be read, or is too short.
        """

    def poison(self) -> None:
        """What is not read shows."""

    def close(self) -> None:
        """Close the files."""


class HostReader:
    """Reads to host memory, with O_DIRECT where the file system has it.

    Args:
        paths: The file of each page.
        memory: uint8 ``[pages, page_bytes]``, which begins at a multiple of 4096.
        header_bytes: Header of each page.
    """

    def __init__(self, paths: Sequence[Path], memory: torch.Tensor, header_bytes: int) -> None:
        self._memory, self._header = memory, header_bytes
        self._files = [_open_direct(path) for path in paths]
        self._threads = ThreadPoolExecutor(THREADS)

    def read(self, pages: range) -> None:
        list(self._threads.map(self._read_page, pages))

    def _read_page(self, page: int) -> None:
        _read_whole(self._files[page], self._memory[page])

    def poison(self) -> None:
        _poison(self._memory, self._header)

    def close(self) -> None:
        self._threads.shutdown()
        for file in self._files:
            os.close(file)


class DeviceReader:
    """Reads to device memory; headers go on to the host, which looks positions up there.

    Args:
        paths: The file of each page.
        host: The pages in host memory, uint8 ``[pages, page_bytes]``; only headers are written.
        header_bytes: Header of each page.
        device: Where the memory is to be.
        open_file: Opens a file, as ``kvikio.CuFile``.

    Attributes:
        memory: uint8 ``[pages, page_bytes]`` on the device.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        host: torch.Tensor,
        header_bytes: int,
        device: str,
        open_file: Callable[[Path], Any],
    ) -> None:
        self.memory = torch.empty(host.shape, dtype=torch.uint8, device=device)
        self._host, self._header = host, header_bytes
        self._files = [open_file(path) for path in paths]

    @torch.inference_mode()
    def read(self, pages: range) -> None:
        size = self.memory.shape[1]
        reads = [self._files[page].pread(self.memory[page], size) for page in pages]
        for page, count in zip(pages, [read.get() for read in reads], strict=True):
            if count != size:
                raise OSError(f"page {page}: {count} of {size} bytes were read")
        batch = slice(pages.start, pages.stop)
        self._host[batch, : self._header] = self.memory[batch, : self._header].cpu()

    def poison(self) -> None:
        _poison(self._host, self._header)
        self.memory.fill_(0xFF)

    def close(self) -> None:
        for file in self._files:
            file.close()


def open_with_kvikio(path: Path) -> Any:
    """A file that KvikIO reads as :class:`HostReader` does: same threads, past the page cache."""
    import kvikio
    import kvikio.defaults

    kvikio.defaults.set("auto_direct_io_read", True)
    if kvikio.defaults.get("num_threads") != THREADS:
        kvikio.defaults.set("num_threads", THREADS)
    return kvikio.CuFile(path, "r")


class StandIn:
    """What a dry run has for ``kvikio.CuFile``: reads to tensors on the CPU."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)

    def pread(self, buffer: torch.Tensor, size: int) -> StandIn:
        """Read to ``buffer``, which has ``size`` bytes."""
        self._size = _read_whole(self._file, buffer[:size])
        return self

    def get(self) -> int:
        """Bytes that the last read brought."""
        return self._size

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _poison(pages: torch.Tensor, header_bytes: int) -> None:
    pages[:, :header_bytes].zero_()  # kernels can look position 0 up, but not what 0xFF is
    pages[:, header_bytes:].fill_(0xFF)


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system without direct I/O
        return os.open(path, os.O_RDONLY)


def _read_whole(file: int, memory: torch.Tensor) -> int:
    row, done = memoryview(memory.numpy()), 0
    while done < len(row):
        count = os.preadv(file, [row[done:]], done)
        if count == 0:
            raise OSError(f"a page of {len(row)} bytes ends after {done}")
        done += count
    return done
