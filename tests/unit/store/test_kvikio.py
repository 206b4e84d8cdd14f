"""The store over KvikIO: the real library, over a stand-in for the GPU driver.

The loader looks for the driver where ``LD_LIBRARY_PATH`` points when a process starts, so whatever
needs it runs in processes of its own.
"""

import ctypes
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from store_testing import config
from typer.testing import CliRunner

from hcache_backend.cli.main import app
from hcache_backend.store import FileOps, best_file_ops
from hcache_backend.store.kvikio_ops import KvikioState, kvikio_state

pytestmark = pytest.mark.slow
DRIVER = Path(sys.prefix) / "driver"
"""Where ``make setup`` puts the stand-in."""

FAULTS = "test_faults.py::test_whatever_operation_fails_reads_are_right_or_misses"
AS_USER = (
    "--ignore=test_given_folders.py",
    "--deselect=test_damaged_index.py::test_what_root_makes_belongs_to_the_owner_of_the_folder",
)
READING = ("with_kvikio.py", "test_format.py", "test_store.py", f"{FAULTS}[short]")
LONG = (pytest.mark.long, pytest.mark.timeout(7200))


def run(folder: Path, *command: object, **variables: str) -> str:
    """What a Python process says that has ``folder`` for its driver's, KvikIO without cuFile."""
    libraries = os.pathsep.join((str(folder), os.environ.get("LD_LIBRARY_PATH", "")))
    known = {**os.environ, "LD_LIBRARY_PATH": libraries, "KVIKIO_COMPAT_MODE": "ON"}
    found = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=Path(__file__).parent,
        env=known | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    return found.stdout


@pytest.mark.parametrize(
    ("tests", "marks"),
    [
        pytest.param(READING, "not long", id="reading"),
        pytest.param(
            # Folders are tried by forked users, who would lack KvikIO's threads and wait for them.
            ("with_kvikio.py", ".", f"--ignore={Path(__file__).name}", *AS_USER),
            "long or not long",
            id="all",
            marks=LONG,
        ),
    ],
)
def test_the_store_keeps_its_promises(tests: tuple[str, ...], marks: str) -> None:
    assert (DRIVER / "libcuda.so.1").exists(), "make setup compiles the stand-in"
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks)
    said = run(DRIVER, *options, *tests, HCACHE_TEST_READER="kvikio")
    assert " passed" in said


def test_without_kvikio_or_a_driver_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    mode, why = kvikio_state()
    assert mode == "nothing" and "no GPU driver" in why
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert kvikio_state() == ("nothing", "it is not installed")


def test_a_driver_that_kvikio_cannot_use_is_found_by_a_read(tmp_path: Path) -> None:
    library = importlib.import_module("xxhash._xxhash").__file__
    assert library is not None
    shutil.copy(library, tmp_path / "libcuda.so.1")
    code = "from hcache_backend.store.kvikio_ops import kvikio_state; print(*kvikio_state())"
    said = run(tmp_path, "-c", code)
    assert said.startswith("nothing it fails: ") and "undefined symbol" in said


@pytest.mark.parametrize(
    ("mode", "reader", "verdict", "said"),
    [
        ("nothing", "posix", "skip", "a reason; not needed (reader: posix)"),
        ("nothing", "kvikio", "fair", "a reason; pages are read by posix"),
        ("compat", "kvikio", "good", "compat: a reason; reads pages into host memory"),
        ("GDS", "kvikio", "good", "GDS: a reason; reads pages into host memory, without GDS"),
    ],
)
def test_store_and_doctor_say_what_kvikio_does(
    mode: Any,
    reader: str,
    verdict: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = KvikioState(mode, "a reason")
    for module in ("cli.doctor", "store.kvikio_ops"):
        monkeypatch.setattr(f"hcache_backend.{module}.kvikio_state", lambda: state)
    if mode == "nothing":
        assert type(best_file_ops(config(tmp_path, reader=reader))) is FileOps
        warned = [line.endswith("'reader' is 'kvikio': a reason") for line in caplog.messages]
        assert warned == [True] * (reader == "kvikio")
    options = {"dirs": [str(tmp_path / "store")], "reader": reader}
    monkeypatch.setenv("HCACHE_CONFIG", json.dumps(options))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    checks = {check["subject"]: check for check in json.loads(result.output)["checks"]}
    assert checks["KvikIO"]["verdict"] == verdict
    assert checks["KvikIO"]["detail"].startswith(said)
