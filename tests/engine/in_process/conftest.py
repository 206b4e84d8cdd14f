"""These tests import SGLang, so they run in an interpreter of their own, started by
tests/engine/test_in_process.py: its stand-ins for a plain CPU must not reach other tests."""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

collect_ignore_glob = [] if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" else ["*.py"]


@pytest.fixture
def runtime(monkeypatch: MonkeyPatch) -> Any:
    """A process whose model is loaded and that nobody configured."""
    from hcache_backend.sglang import runtime as runtime_module
    from tests.engine.in_process.storage_config import unconfigured_runtime

    state = unconfigured_runtime()
    monkeypatch.setattr(runtime_module, "_runtime", state)
    return state


@pytest.fixture(autouse=True)
def checks_never_rest(monkeypatch: MonkeyPatch) -> None:
    """However busy the machine is."""
    from hcache_backend.checks import service as service_check

    monkeypatch.setattr(service_check, "_BURST_SECONDS", math.inf)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """The folder that all machines see; a busy machine has the time that it needs to look up."""
    from hcache_backend.tiers import tier as store
    from tests.engine.in_process.shared.machines import SECONDS

    monkeypatch.setattr(store, "LOOK_UP_SECONDS", SECONDS)
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "shared"))
    return tmp_path / "shared"


@pytest.fixture
def machine(tmp_path: Path, shared: Path, runtime: Any) -> Iterator[Any]:
    """Makes the machine of a name, with a pool of its own unless one is given."""
    from tests.engine.in_process.shared.machines import Machine
    from tests.engine.in_process.storage_config import HostPool

    with ExitStack() as open_machines:

        def made(name: str, pool: Any = None, **options: Any) -> Machine:
            found = Machine(tmp_path / name, pool or HostPool(32), **options)
            open_machines.callback(found.storage.close)
            return found

        yield made


@pytest.fixture
def first(machine: Any) -> Any:
    return machine("first")


@pytest.fixture
def second(machine: Any) -> Any:
    return machine("second")
