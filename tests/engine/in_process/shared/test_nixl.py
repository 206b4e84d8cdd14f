"""NIXL as the shared tier: its POSIX plugin in a folder that machines share."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.in_process.shared.machines import Machine, counted, until
from tests.engine.in_process.test_storage import KEYS

pytest.importorskip("nixl", reason="no NIXL: see requirements/peers.txt")

NIXL = {"backend": "nixl", "config": {"plugin": {"posix": {"active": True}}}}


def test_another_machine_finds_what_nixl_has_and_nothing_that_is_damaged(
    machine: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "nixl"
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", str(shared))
    before = counted("written")
    given = machine("first", shared=NIXL).write(0, 1, 2)
    until(lambda: counted("written") == before + 3, "pages to be shared")
    second = machine("second", shared=NIXL)
    assert second.storage.batch_exists(KEYS[:5]) == 3
    for path in shared.rglob("*"):
        if path.is_file() and KEYS[1] in path.name:
            path.write_bytes(path.read_bytes()[::-1])
    assert second.read(0, 1, 2) == [True, False, True]
    assert torch.equal(second.pool.data[:, [0, 2]], given[:, [0, 2]])
    until(lambda: second.stored() == 2, "pages to be kept")
