"""The ``hcache`` command, beside an open store as beside a live server."""

import ctypes
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_testing import (
    FILE,
    NAMESPACE,
    OTHER_NAMESPACE,
    assert_sound,
    content,
    damage,
    get,
    hcache_commands,
    key,
    look_after,
    names,
    open_quiet,
    page_files,
    put,
)
from typer.testing import CliRunner

from hcache_backend.cli import doctor
from hcache_backend.cli.main import app
from hcache_backend.store import PageStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> PageStore:
    """A store with six pages, open as in a running server."""
    store = open_quiet(folder)
    put(store, *range(4))
    put(store, 4, 5, namespace=OTHER_NAMESPACE)
    return store


def hcache(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


def hcache_json(*arguments: object, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hcache(*arguments, "--json", status=status))
    return found


def stats(folder: Path) -> dict[str, Any]:
    [found] = hcache_json("stats", "-d", folder)["folders"]
    return found


def verify(folder: Path, *options: str, status: int = 0) -> dict[str, Any]:
    [found] = hcache_json("verify", "-d", folder, *options, status=status)["folders"].values()
    return found


def doctor_checks(folder: Path) -> dict[str, dict[str, str]]:
    """The checks of a folder by what they are about, without the folder's name."""
    checks = hcache_json("doctor", "-d", folder)["checks"]
    return {check["subject"].removeprefix(str(folder)).lstrip(": "): check for check in checks}


def test_stats_and_ls_show_pages(folder: Path, store: PageStore) -> None:
    found = stats(folder)
    assert (found["pages"], found["bytes"]) == (6, 6 * FILE)
    assert found["namespaces"][NAMESPACE.hex()]["pages"] == 4
    assert "120.0 KiB" in hcache("stats", "-d", folder)
    pages = hcache_json("ls", "-d", folder)["pages"]
    assert {page["key"] for page in pages} == {key(number).hex() for number in range(6)}
    for options, number in ((("-n", OTHER_NAMESPACE.hex()[:6]), 2), (("--limit", 3), 3)):
        assert len(hcache_json("ls", "-d", folder, *options)["pages"]) == number
    assert key(0).hex()[:12] in hcache("ls", folder)
    assert "(the first 3; more with --limit)" in hcache("ls", "-d", folder, "--limit", 3)


def test_verify_finds_and_repairs(folder: Path, store: PageStore) -> None:
    assert "6" in hcache("verify", "-d", folder)
    damaged, missing, *_ = page_files(folder)
    damage(damaged)
    missing.unlink()
    (damaged.parent / "notes.txt").write_text("?")
    found = verify(folder, status=1)
    assert found["pages"] == 4
    assert [len(found[kind]) for kind in ("damaged", "missing", "unknown")] == [1, 1, 1]
    assert damaged.exists(), "without --repair nothing is changed"
    assert "checksum" in hcache("verify", "-d", folder, status=1)
    assert verify(folder, "--repair")["repaired"] == 3
    clean = verify(folder)
    assert (clean["pages"], clean["problems"]) == (4, 0)
    assert_sound(store)


def test_verify_rebuilds_the_index_under_a_live_server(folder: Path, store: PageStore) -> None:
    found = verify(folder, "--rebuild")
    assert (found["adopted"], found["pages"], found["problems"]) == (6, 6, 0)
    look_after(store)
    assert put(store, 7) == [True]
    assert all(get(store, number) == content(key(number)) for number in (0, 1, 2, 3, 7))
    assert_sound(store)
    assert stats(folder)["pages"] == 7


def test_verify_only_looks_at_an_index_that_a_reboot_left_open(
    folder: Path, store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    monkeypatch.setattr("hcache_backend.store.folder._boot_id", lambda: b"another boot")
    found = verify(folder)
    assert (found["pages"], found["problems"], found["adopted"]) == (6, 0, 0)
    assert not stats(folder)["index_complete"]
    verify(folder, "--repair")
    assert stats(folder)["index_complete"]


def test_gc_evicts_down_to_the_bounds(folder: Path, store: PageStore) -> None:
    assert hcache_json("gc", folder, "--quota-bytes", "1TB", "--min-free-bytes", "0")["pages"] == 0
    assert (
        hcache_json("gc", folder, "--quota-bytes", "500,000,000,000", "--min-free-bytes", "0")[
            "pages"
        ]
        == 0
    )
    for text in ("much", "1,5TB", "500GB a disk"):
        said = hcache("gc", folder, "--quota-bytes", text, status=2)
        assert 'such as 500000000000 or "500GB"' in said
    assert "2 pages evicted, 40.0 KiB" in hcache("gc", folder, "--quota-bytes", 5 * FILE)
    found = hcache_json("gc", "-d", folder, "--quota-bytes", 3 * FILE)
    assert found["pages"] == 2, "down to the low water mark"
    assert len(page_files(folder)) == 2
    assert_sound(store)


def test_clear_deletes_what_it_was_asked_to(folder: Path, store: PageStore) -> None:
    hcache("clear", "-d", folder, status=1)  # not confirmed
    for digits, number in (("99", 0), ("6", 2)):
        said = hcache("clear", folder, "-y", "-n", digits, status=2)
        assert f"{number} namespaces begin with '{digits}': see hcache stats" in said
    assert len(page_files(folder)) == 6
    found = hcache_json("clear", "-d", folder, "-y", "-n", OTHER_NAMESPACE.hex()[:8])
    assert found["pages"] == 2
    assert get(store, 0) == content(key(0))
    assert "4 pages deleted" in hcache("clear", "-d", folder, "-y")
    assert page_files(folder) == []


def by_permissions(folder: Path) -> list[str]:
    """Take away every right to write; the command runs without root's power to ignore that."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    return []


def by_mount(folder: Path) -> list[str]:
    """The command runs where the folder is mounted read-only, as kernels do after disk errors."""
    mount = f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder} && exec "
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount + '"$@"', "sh"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    return inside


def without_root_power() -> None:
    """From the next exec on, permissions hold for root too; for others nothing changes."""
    drop_from_bounding_set = 24
    for power in (1, 2):  # to ignore the permissions of files, and those to read and search
        ctypes.CDLL(None).prctl(drop_from_bounding_set, power, 0, 0, 0)


@pytest.mark.parametrize("protect", [by_permissions, by_mount])
def test_a_store_that_cannot_be_written_can_be_looked_at(
    protect: Callable[[Path], list[str]], folder: Path, store: PageStore
) -> None:
    store.close()
    before = names(folder)
    commands = ("stats", "ls", "verify", "doctor", "gc")
    _, results = hcache_commands(protect(folder), folder, *commands, preexec=without_root_power)
    assert [status for status, _ in results] == [0, 0, 0, 1, 2], results
    stats, pages, verified, doctor = (json.loads(output) for _, output in results[:4])
    assert stats["folders"][0]["pages"] == 6
    assert len(pages["pages"]) == 6
    [found] = verified["folders"].values()
    assert (found["pages"], found["problems"]) == (6, 0)
    checks = {check["subject"]: check for check in doctor["checks"]}
    assert checks[str(folder)]["verdict"] == "bad"
    assert checks[f"{folder}: writing"]["verdict"] == "bad"
    assert any(reason in results[4][1] for reason in ("Permission denied", "Read-only file"))
    assert names(folder) == before


def test_a_store_that_cannot_be_read_is_named(folder: Path, store: PageStore) -> None:
    store.close()
    folder.parent.chmod(0)
    try:
        commands = ("stats", "ls", "verify", "doctor")
        _, results = hcache_commands([], folder, *commands, preexec=without_root_power)
    finally:
        folder.parent.chmod(0o700)
    assert [status for status, _ in results] == [2, 2, 2, 1]
    for _, output in results:
        assert "Permission denied" in output
        assert str(folder) in output


def test_a_store_whose_index_is_gone_is_to_be_verified_with_a_new_one(
    folder: Path, store: PageStore
) -> None:
    store.close()
    (folder / "index" / "index.sqlite").unlink()
    told = " ".join(hcache("stats", "-d", folder, status=2).split())
    assert "its index cannot be opened" in told
    assert "hcache verify --rebuild makes a new one" in told
    assert verify(folder, "--rebuild")["pages"] == stats(folder)["pages"] == 6


def test_doctor_tells_speed_and_room_of_a_disk(
    folder: Path, store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCACHE_CONFIG", json.dumps({"min_free_bytes": 1 << 60}))
    before = sorted(names(folder))
    checks = doctor_checks(folder)
    assert "writes" in checks["speed"]["detail"]
    assert checks["free"]["verdict"] == "fair"
    assert "no room, option 'min_free_bytes' keeps 1.0 EiB" in checks["free"]["detail"]
    assert sorted(names(folder)) == before
    assert "does not exist yet" in doctor_checks(folder.parent / "new")[""]["detail"]


@pytest.mark.parametrize("command", ["stats", "ls", "verify", "gc", "clear"])
def test_a_folder_that_is_no_store_is_named(command: str, tmp_path: Path) -> None:
    assert "is not a page store" in " ".join(hcache(command, "-d", tmp_path, status=2).split())
    assert names(tmp_path) == []


def test_wrong_options_are_explained(
    folder: Path, store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCACHE_CONFIG", '{"quota": 5}')
    assert "did you mean 'quota_bytes'" in hcache("stats", status=2)
    monkeypatch.setenv("HCACHE_CONFIG", json.dumps({"dirs": [str(folder)], "quota_bytes": FILE}))
    assert hcache_json("gc")["pages"] == 6, "bounds come from the environment"


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("ext4", "good"), *((kind, "fair") for kind in ("overlay", "lustre", "9p", "fuse.glusterfs"))],
)
def test_doctor_knows_file_systems(
    kind: str, verdict: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "file_system_of", lambda place: kind)
    found = doctor_checks(folder)["file system"]
    assert found["verdict"] == verdict and found["detail"].startswith(kind)
