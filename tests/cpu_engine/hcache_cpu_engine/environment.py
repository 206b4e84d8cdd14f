"""The environment of a CPU server process."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ENGINE_DIR = Path(__file__).resolve().parent.parent


def cache_dir() -> Path:
    """This project's folder under the user's cache directory (`XDG_CACHE_HOME` or `~/.cache`)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hcache"


def cpu_engine_env() -> dict[str, str]:
    """Variables to add to `os.environ` for a process that runs SGLang on the CPU.

    `HCACHE_CPU_ENGINE_TRITON=real` in the caller's environment keeps an installed triton visible;
    by default the server sees an import-only stub, whether or not triton is installed.
    """
    path = os.environ.get("PYTHONPATH")
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        # Huge pages: with small ones a process is by chance up to a tenth slower than another.
        "THP_MEM_ALLOC_ENABLE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_EXTENSIONS_DIR": str(cache_dir() / "torch_extensions" / _interpreter_tag()),
        "PYTHONPATH": f"{ENGINE_DIR}{os.pathsep}{path}" if path else str(ENGINE_DIR),
    }


def warm_extensions() -> None:
    """Compile HiCache's page-hash C++ extension, which SGLang otherwise builds in a first request.

    Takes seconds once and is then found in `TORCH_EXTENSIONS_DIR`. A stamp file skips even the
    interpreter start next time. Raises CalledProcessError with the compiler's message when g++,
    ninja or the OpenSSL headers are missing.
    """
    env = cpu_engine_env()
    stamp = Path(env["TORCH_EXTENSIONS_DIR"]) / "page_hash.ready"
    if stamp.exists():
        return
    code = (
        "from sglang.srt.mem_cache.cpp_utils import native_hash as n; n._load_native_hash_module()"
    )
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, check=True, stdout=sys.stderr
    )
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()


def _interpreter_tag() -> str:
    """Environments that shared a folder would compile anew whenever the other one had."""
    from importlib.metadata import version

    place = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    return f"py{python}_torch{version('torch')}_sglang{version('sglang')}_{place}"
