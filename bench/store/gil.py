"""How long the interpreter lock (GIL) of this process is held while something runs, by py-spy."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

_RATE = 500  # samples per second
_PY_SPY = Path(sys.executable).with_name("py-spy")


def gil_seconds(work: Callable[[], None]) -> float | None:
    """Run ``work``; returns how long threads of this process held the lock, None if unknown.

    py-spy looks at the process now and then without stopping it. It needs to be installed, and
    allowed to read the memory of another process (in a container: the capability SYS_PTRACE).
    """
    with tempfile.TemporaryDirectory(prefix="hcache-gil-") as folder:
        samples = Path(folder) / "samples"
        options = ("--gil", "--nonblocking", "--rate", str(_RATE), "--format", "raw")
        try:
            watcher = subprocess.Popen(
                [_PY_SPY, "record", "--pid", str(os.getpid()), *options, "--output", samples],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            work()
            return None
        assert watcher.stdout is not None
        watcher.stdout.readline()  # it says that it has begun, or ends
        try:
            work()
        finally:
            watcher.send_signal(signal.SIGINT)
            watcher.communicate()
        if not samples.exists():
            return None
        return sum(int(line.rsplit(" ", 1)[1]) for line in samples.open()) / _RATE
