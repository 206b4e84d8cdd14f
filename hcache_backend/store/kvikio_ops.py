"""Reads into host memory through KvikIO."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hcache_backend.config import HCacheConfig
from hcache_backend.kvikio_state import kvikio_state
from hcache_backend.store.file_ops import FileOps

logger = logging.getLogger("hcache.store")


class KvikioFileOps(FileOps):
    """Reads through KvikIO's threads into host memory; everything else as usual.

    GPUDirect Storage (GDS) serves reads to the device only, so files are opened in KvikIO's
    compatibility mode. KvikIO's threads start when it is imported and do not survive a fork.

    Args:
        threads: KvikIO has no fewer threads than this.
    """

    def __init__(self, threads: int = 1) -> None:
        import kvikio
        import kvikio.defaults as options

        self._open: Any = kvikio.CuFile
        options.set("compat_mode", kvikio.CompatMode.ON)
        # Else KvikIO reads through the page cache, for 1.5 to 4 times the CPU time.
        options.set("auto_direct_io_read", True)
        if options.get("num_threads") < threads:
            options.set("num_threads", threads)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read all of ``buffers``; a file that ends before is an OSError too."""
        places = list(accumulate((buffer.nbytes for buffer in buffers), initial=offset))
        problems: list[RuntimeError] = []
        try:
            # The path leads to the open file itself, whatever its name by now. To open it takes 10
            # us, and a page is one reading or two: not worth keeping it open.
            with self._open(f"/proc/self/fd/{fd}", "r") as file:
                reads = []
                try:
                    for buffer, place in zip(buffers, places[:-1], strict=True):
                        # One task each: before 26.10 KvikIO reports the first task that fails
                        # while others still write.
                        size = task_size = buffer.nbytes
                        reads.append(file.pread(buffer, size, place, task_size))
                finally:
                    for read in reads:
                        # Until the last one is done, the memory is not the caller's.
                        try:
                            read.get()
                        except RuntimeError as error:
                            problems.append(error)
        except RuntimeError as error:
            problems.append(error)
        if problems:
            raise OSError(errno.EIO, f"kvikio: {problems[0]}")
        return places[-1] - offset


def best_file_ops(config: HCacheConfig) -> FileOps:
    """The file operations for the option ``reader``; logs what was chosen when it differs."""
    if config.reader == "posix":
        return FileOps()
    mode, why = kvikio_state()
    if mode == "nothing":
        logger.warning(
            "hcache: pages are read by 'posix', although option 'reader' is 'kvikio': %s", why
        )
        return FileOps()
    logger.debug("hcache: reading through kvikio")
    return KvikioFileOps(config.io_threads * len(config.dirs))
