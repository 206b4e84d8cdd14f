"""The ``hcache`` command, beside an open store as beside a live server."""

from __future__ import annotations

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
    commands_inside,
    content,
    doctors_checks,
    get,
    hcache,
    hcache_json,
    key,
    look_after,
    names,
    open_quiet,
    page_files,
    put,
)

from hcache_backend.cli import doctor
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


def folder_stats(folder: Path) -> dict[str, Any]:
    [found] = hcache_json("stats", "-d", folder)["folders"]
    return dict(found)


def verified(folder: Path, *options: str, status: int = 0) -> dict[str, Any]:
    [found] = hcache_json("verify", *options, "-d", folder, status=status)["folders"].values()
    return dict(found)


def test_stats_counts_pages(folder: Path, store: PageStore) -> None:
    found = folder_stats(folder)
    assert (found["pages"], found["bytes"]) == (6, 6 * FILE)
    assert found["namespaces"][NAMESPACE.hex()]["pages"] == 4
    assert "6" in hcache("stats", "-d", folder)


def test_ls_lists_page_files(folder: Path, store: PageStore) -> None:
    pages = hcache_json("ls", "-d", folder)["pages"]
    assert {page["key"] for page in pages} == {key(number).hex() for number in range(6)}
    other = hcache_json("ls", "-d", folder, "-n", OTHER_NAMESPACE.hex()[:6])["pages"]
    assert len(other) == 2
    assert len(hcache_json("ls", "-d", folder, "--limit", 3)["pages"]) == 3
    assert key(0).hex()[:12] in hcache("ls", "-d", folder)


def test_verify_finds_and_repairs(folder: Path, store: PageStore) -> None:
    assert "6" in hcache("verify", "-d", folder)
    damaged, missing, *_ = page_files(folder)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    missing.unlink()
    (damaged.parent / "notes.txt").write_text("?")
    found = verified(folder, status=1)
    kinds = ("damaged", "missing", "unknown")
    assert (found["pages"], *(len(found[kind]) for kind in kinds)) == (4, 1, 1, 1)
    assert damaged.exists(), "without --repair nothing is changed"
    assert "checksum" in hcache("verify", "-d", folder, status=1)
    assert verified(folder, "--repair")["repaired"] == 3
    clean = verified(folder)
    assert (clean["pages"], clean["problems"]) == (4, 0)
    assert_sound(store)


def test_verify_rebuilds_the_index_under_a_live_server(folder: Path, store: PageStore) -> None:
    found = verified(folder, "--rebuild")
    assert (found["adopted"], found["pages"], found["problems"]) == (6, 6, 0)
    look_after(store)
    assert put(store, 7) == [True]
    assert all(get(store, number) == content(key(number)) for number in (0, 1, 2, 3, 7))
    assert_sound(store)
    assert folder_stats(folder)["pages"] == 7


def test_verify_only_looks_at_an_index_that_a_reboot_left_open(
    folder: Path, store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    monkeypatch.setattr("hcache_backend.store.folder._boot_id", lambda: b"another boot")
    found = verified(folder)
    assert (found["pages"], found["problems"], found["adopted"]) == (6, 0, 0)
    assert not folder_stats(folder)["index_complete"]
    verified(folder, "--repair")
    assert folder_stats(folder)["index_complete"]


def test_gc_evicts_down_to_the_bounds(folder: Path, store: PageStore) -> None:
    assert hcache_json("gc", "-d", folder)["pages"] == 0
    found = hcache_json("gc", "-d", folder, "--quota-bytes", 4 * FILE)
    assert found["pages"] == 3, "down to the low water mark"
    assert len(page_files(folder)) == 3
    assert_sound(store)


def test_clear_deletes_what_it_was_asked_to(folder: Path, store: PageStore) -> None:
    hcache("clear", "-d", folder, status=1)  # not confirmed
    assert len(page_files(folder)) == 6
    found = hcache_json("clear", "-d", folder, "-y", "-n", OTHER_NAMESPACE.hex()[:8])
    assert found["pages"] == 2
    assert get(store, 0) == content(key(0))
    assert hcache_json("clear", "-d", folder, "-y")["pages"] == 4
    assert page_files(folder) == []


def test_doctor_looks_at_folders_and_leaves_nothing(folder: Path, store: PageStore) -> None:
    before = sorted(names(folder))
    checks = doctors_checks(folder)
    assert checks[str(folder)]["verdict"] == "good"
    assert "writes" in checks[f"{folder}: speed"]["detail"]
    assert sorted(names(folder)) == before
    new = folder.parent / "not" / "yet"
    assert "does not exist yet" in doctors_checks(new)[str(new)]["detail"]
    assert not new.exists()


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


@pytest.mark.parametrize("protect", [by_permissions, by_mount])
def test_a_store_that_cannot_be_written_can_be_looked_at(
    protect: Callable[[Path], list[str]], folder: Path, store: PageStore
) -> None:
    store.close()
    before = names(folder)
    inside = protect(folder)
    results = commands_inside(inside, folder, "stats", "ls", "verify", "doctor", "gc")
    assert [status for status, *_ in results] == [0, 0, 0, 1, 2], results
    stats, pages, verified, doctor = (json.loads(output) for _, output, _ in results[:4])
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
        results = commands_inside([], folder, "stats", "ls", "verify", "doctor")
    finally:
        folder.parent.chmod(0o700)
    assert [status for status, *_ in results] == [2, 2, 2, 1]
    for _, output, _ in results:
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
    assert verified(folder, "--rebuild")["pages"] == 6
    assert folder_stats(folder)["pages"] == 6


def test_doctor_says_when_the_disk_has_no_room(
    folder: Path, store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCACHE_CONFIG", json.dumps({"min_free_bytes": 1 << 60}))
    found = doctors_checks(folder)[f"{folder}: free"]
    assert found["verdict"] == "fair"
    assert "no room, option 'min_free_bytes' keeps 1.0 EiB" in found["detail"]


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


def test_what_is_shown_is_short_and_says_so(folder: Path, store: PageStore) -> None:
    assert "(the first 3; more with --limit)" in hcache("ls", "-d", folder, "--limit", 3)
    said = hcache("gc", "-d", folder, "--quota-bytes", 5 * FILE)
    assert "2 pages evicted, 40.0 KiB" in said
    put(store, 0, 1, 4, 5, namespace=OTHER_NAMESPACE)
    assert "2 namespaces begin with '6': see hcache stats" in hcache(
        "clear", "-d", folder, "-y", "-n", "6", status=2
    )
    assert " pages deleted" in hcache("clear", "-d", folder, "-y")


def test_a_namespace_that_is_not_there_is_said(folder: Path, store: PageStore) -> None:
    said = hcache("clear", folder, "-y", "-n", "99", status=2)
    assert "0 namespaces begin with '99'" in said
    assert folder_stats(folder)["pages"] == 6


@pytest.mark.parametrize(
    "kind", ["ext4", "overlay", "ceph", "lustre", "gpfs", "9p", "fuse.glusterfs"]
)
def test_doctor_knows_file_systems(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "file_system_of", lambda place: kind)
    found = doctors_checks(folder)[f"{folder}: file system"]
    assert found["verdict"] == ("good" if kind == "ext4" else "fair")
    assert found["detail"].startswith(kind)


@pytest.mark.parametrize("command", ["stats", "ls", "verify", "doctor"])
def test_tables_fit_into_80_columns(command: str, folder: Path, store: PageStore) -> None:
    shown = hcache(command, folder)
    tables = shown.split("Last server")[0].splitlines()
    assert max(len(line.replace(str(folder), "")) for line in tables) <= 80


def test_sizes_have_units(folder: Path, store: PageStore) -> None:
    assert hcache_json("gc", folder, "--quota-bytes", "1TB", "--min-free-bytes", "0")["pages"] == 0
    said = hcache("gc", folder, "--quota-bytes", "much", status=2)
    assert 'such as 500000000000 or "500GB"' in said
