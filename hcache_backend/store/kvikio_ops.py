"""Reading through KvikIO, where it is installed and a GPU driver is there.

KvikIO reads into host memory with its own threads, or with GPUDirect Storage where the system has
it. It needs ``libcuda``: without it even host reads fail, and some modes hang, so it is not even
imported then. It has not been run on hardware by this project's tests; ``posix`` is the default.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

from hcache_backend.store.file_ops import FileOps

logger = logging.getLogger("hcache.store")


def kvikio_state() -> str:
    """Whether KvikIO can be used: ``"usable"``, or why not."""
    if importlib.util.find_spec("kvikio") is None:
        return "not installed"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "installed, but there is no GPU driver (libcuda)"
    return "usable"


def best_file_ops(reader: str) -> FileOps:
    """The file operations for the option ``reader``; logs what was chosen when it differs."""
    if reader == "posix":
        return FileOps()
    state = kvikio_state()
    if state != "usable":
        logger.warning("hcache: option 'reader' is 'kvikio', which is %s; reading as posix", state)
        return FileOps()
    logger.info("hcache: reading through kvikio")
    return KvikioFileOps()


class KvikioFileOps(FileOps):
    """Reads through KvikIO; everything else as usual."""

    def __init__(self) -> None:
        import kvikio

        self._kvikio: Any = kvikio

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = 0
        # The path leads to the open file itself, whatever its name by now.
        with self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r") as file:
            try:
                futures = []
                for buffer in buffers:
                    futures.append(file.pread(buffer, buffer.nbytes, offset + done))
                    done += buffer.nbytes
                return sum(int(future.get()) for future in futures)
            except RuntimeError as error:
                raise OSError(errno.EIO, f"kvikio: {error}") from None
