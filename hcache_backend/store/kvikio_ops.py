"""Reads of pages by KvikIO, if option ``reader`` asks for it and it works here."""

import ctypes
import errno
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hcache_backend.config import HCacheConfig
from hcache_backend.store.file_ops import FileOps
from hcache_backend.store.stats import logger

MODULES = Path("/proc/modules")
GDS_DRIVER = Path("/proc/driver/nvidia-fs/devcount")
UDEV = Path("/run/udev")


class KvikioState(NamedTuple):
    """``GDS`` reads past host memory, ``compat`` through it, ``nothing`` does not read at all."""

    mode: Literal["GDS", "compat", "nothing"]
    why: str


def kvikio_state() -> KvikioState:
    """How KvikIO reads files on this machine, found by a read with it, and why so."""
    if find_spec("kvikio") is None:
        return KvikioState("nothing", "it is not installed")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        why = "there is no GPU driver (libcuda), which KvikIO asks about every address it reads to"
        return KvikioState("nothing", why)
    try:
        import kvikio
        import kvikio.defaults as options

        compat = options.is_compat_mode_preferred()
        if not compat and not MODULES.exists():
            # cuFile looks for its driver in that file. If it cannot open it, libcufile.so.0 (1.20)
            # calls getline for ever, and opening the first file does not return.
            why = f"cuFile would hang: there is no {MODULES} here; set KVIKIO_COMPAT_MODE=ON"
            return KvikioState("nothing", why)
        # cuFile would write a log to the working directory.
        by_kvikio_alone = options.set({"compat_mode": kvikio.CompatMode.ON})
        with by_kvikio_alone, kvikio.CuFile(__file__, "r") as file:
            file.read(bytearray(1))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return KvikioState("nothing", f"it fails: {error}")
    if not compat and GDS_DRIVER.exists():
        return KvikioState("GDS", "where cuFile and its driver nvidia-fs support the file system")
    if not compat:
        return KvikioState("compat", "cuFile's driver nvidia-fs is not loaded")
    if options.get("compat_mode") == kvikio.CompatMode.ON:
        return KvikioState("compat", "compatibility mode is on (KVIKIO_COMPAT_MODE)")
    if not UDEV.is_dir():
        return KvikioState("compat", f"cuFile needs {UDEV}; containers must mount it")
    return KvikioState("compat", "cuFile (libcufile.so.0) does not load, or this is WSL")


class KvikioFileOps(FileOps):
    """Reads through at least ``threads`` threads of KvikIO into host memory, so not by GPUDirect
    Storage (GDS). These threads start when KvikIO is imported and do not survive a fork."""

    def __init__(self, threads: int = 1) -> None:
        import kvikio
        import kvikio.defaults as options

        self._open: Any = kvikio.CuFile
        options.set("compat_mode", kvikio.CompatMode.ON)
        # Otherwise KvikIO reads through the page cache, for 1.5 to 4 times the CPU time.
        options.set("auto_direct_io_read", True)
        if options.get("num_threads") < threads:
            options.set("num_threads", threads)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill all of ``buffers``; returns their bytes. A file that ends before is an OSError."""
        position = offset
        try:
            # KvikIO takes paths: this one leads to the open file, whatever its name is now. Opening
            # it takes 10 us, for a page once or twice.
            with self._open(f"/proc/self/fd/{fd}", "r") as file, ExitStack() as reads:
                for buffer in buffers:
                    # One task for each buffer: before 26.10 KvikIO raises for the first task that
                    # fails, while others still write. ``reads`` waits for the tasks of all buffers.
                    size = task_size = buffer.nbytes
                    reads.callback(file.pread(buffer, size, position, task_size).get)
                    position += size
        except RuntimeError as error:
            raise OSError(errno.EIO, f"kvikio: {error}") from None
        return position - offset


def best_file_ops(config: HCacheConfig) -> FileOps:
    """The file operations for option ``reader``; those of ``posix`` if KvikIO does not work."""
    if config.reader == "kvikio":
        mode, why = kvikio_state()
        if mode != "nothing":
            return KvikioFileOps(config.io_threads * len(config.dirs))
        logger.warning("hcache: posix reads pages, although 'reader' is 'kvikio': %s", why)
    return FileOps()
