"""Fixtures of the store's tests."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_testing import OPENED, open_quiet

from hcache_backend.store import PageStore


@pytest.fixture(autouse=True)
def stores_are_closed() -> Iterator[None]:
    before = len(OPENED)
    yield
    for store in OPENED[before:]:
        store.close()
    del OPENED[before:]


@pytest.fixture(autouse=True)
def no_folder_is_on_the_disk_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcache_backend.store.disk.store_folder.device_of_root", lambda: -1)


@pytest.fixture
def store(tmp_path: Path) -> PageStore:
    return open_quiet(tmp_path / "store")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts something on a new folder; the test is skipped if that is not allowed."""
    mounted: list[Path] = []

    def mount(*arguments: str) -> Path:
        folder = tmp_path / f"mount{len(mounted)}"
        folder.mkdir()
        command = ["mount", *arguments, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


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
