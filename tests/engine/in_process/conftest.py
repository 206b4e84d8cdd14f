"""These tests import SGLang, so they run in an interpreter of their own, started by
tests/engine/test_in_process.py: its stand-ins for a plain CPU must not reach other tests."""

import os
from typing import Any

import pytest

collect_ignore_glob = [] if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" else ["*.py"]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process whose model is loaded and that nobody configured."""
    from hcache_backend.engine import runtime as runtime_module
    from tests.engine.in_process.storage_config import unconfigured_runtime

    state = unconfigured_runtime()
    monkeypatch.setattr(runtime_module, "_runtime", state)
    return state
