"""Tests that need KvikIO and a GPU driver; ``test_kvikio.py`` runs them over the stand-in."""

import os
import re
from contextlib import ExitStack
from pathlib import Path

import kvikio
import kvikio.defaults
import pytest
from store_testing import Ops, content, get, key, memory, open_quiet, page_files, put

from hcache_backend.store import kvikio_ops as states
from hcache_backend.store.kvikio_ops import kvikio_state


def test_pages_are_read_by_kvikio_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*ignored: object) -> int:
        raise OSError("not by KvikIO")

    store = open_quiet(tmp_path / "store", io_threads=5)
    assert kvikio.defaults.get("num_threads") >= 5
    with store.disks[0].use() as folder:
        direct = bool(folder.io.alignment.flags)
    put(store, 1)
    monkeypatch.setattr(os, "preadv", refuse)
    [path] = page_files(tmp_path / "store")
    kvikio.drop_file_page_cache(path, 0, 0, True)
    assert get(store, 1) == content(key(1))
    cached, _ = kvikio.get_page_cache_info(path)
    assert cached == 0 or not direct


@pytest.mark.parametrize("refused", [1, None], ids=["not begun", "not finished"])
def test_a_read_that_failed_writes_to_memory_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    """Every part has ended before the error is raised and the file closed."""
    said: list[str] = []

    class Read:
        def __init__(self, number: int) -> None:
            self.number = number

        def get(self) -> int:
            said.append(f"end {self.number}")
            if refused is None and self.number == 0:
                raise RuntimeError("a bad sector")
            return 4096

    class File(ExitStack):
        def __init__(self, path: str, flags: str) -> None:
            super().__init__()
            self.callback(said.append, "close")
            self.begun = 0

        def pread(self, buffer: memoryview, size: int, offset: int, task_size: int) -> Read:
            assert task_size >= size, "KvikIO alone knows of the other tasks of a read"
            if self.begun == refused:
                raise RuntimeError("a strange address")
            self.begun += 1
            return Read(self.begun - 1)

    monkeypatch.setattr(kvikio, "CuFile", File)
    with pytest.raises(OSError, match=r"kvikio: a (bad sector|strange address)"):
        Ops().read(0, [memory(4096) for _ in range(3)], 0)
    assert said[-1] == "close"
    assert sorted(said[:-1]) == [f"end {number}" for number in range(refused or 3)]


@pytest.mark.parametrize(
    ("option", "there", "mode", "why"),
    [
        ("OFF", ["MODULES", "GDS_DRIVER", "UDEV"], "GDS", "where cuFile and its driver"),
        ("OFF", ["MODULES", "UDEV"], "compat", "cuFile's driver nvidia-fs is not loaded"),
        ("OFF", ["UDEV"], "nothing", "would hang.*KVIKIO_COMPAT_MODE=ON"),
        ("ON", ["GDS_DRIVER"], "compat", "compatibility mode is on .KVIKIO_COMPAT_MODE"),
        ("AUTO", ["GDS_DRIVER"], "compat", "containers must mount it"),
        ("AUTO", ["MODULES", "GDS_DRIVER", "UDEV"], "compat", "libcufile.so.0"),
    ],
)
def test_it_is_known_how_bytes_would_come_to_the_device(
    option: str,
    there: list[str],
    mode: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MODULES", "GDS_DRIVER", "UDEV"):
        monkeypatch.setattr(states, name, tmp_path / ("" if name in there else "nowhere"))
    if option == "AUTO":
        monkeypatch.setattr(kvikio.defaults, "is_compat_mode_preferred", lambda: True)
    wanted = getattr(kvikio.CompatMode, option)
    with kvikio.defaults.set({"compat_mode": wanted}):
        found = kvikio_state()
        assert kvikio.defaults.get("compat_mode") == wanted, "as it was found"
    assert found.mode == mode and re.search(why, found.why)
