"""KvikIO on this machine."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

MODULES = Path("/proc/modules")
GDS_DRIVER = Path("/proc/driver/nvidia-fs/devcount")
UDEV = Path("/run/udev")


class KvikioState(NamedTuple):
    """``GDS`` reads past host memory, ``compat`` through it, ``nothing`` does not read at all."""

    mode: Literal["GDS", "compat", "nothing"]
    why: str


def kvikio_state() -> KvikioState:
    """Find the state by a read with KvikIO."""
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
