"""Fixtures of the store's tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the system has one: for tests of what happens, not of disks."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="hcache-test-", dir=shared))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
