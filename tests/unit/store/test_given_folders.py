"""Folders as administrators make them: what opens, and that ``hcache doctor`` says the same."""

import json
import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from store_testing import content, ext4_image, get, key, names, open_quiet, put
from typer.testing import CliRunner

from hcache_backend.cli.main import app
from hcache_backend.store import folder as folder_module
from hcache_backend.store.folder import MARKER

pytestmark = pytest.mark.slow

ROOT, USER = 0, 1000


Make = Callable[[Path], object]


def holding(*inside: str, marker: str | None = None) -> Make:
    def make(path: Path) -> None:
        path.mkdir()
        for name in inside:
            (path / name).mkdir(mode=0o700)
        if marker is not None:
            (path / MARKER).write_text(marker)

    return make


def owned_by(user: int, group: int, mode: int) -> Make:
    def make(path: Path) -> None:
        path.mkdir()
        os.chown(path, user, group)
        path.chmod(mode)

    return make


def below_a_folder(mode: int) -> Make:
    return lambda path: path.parent.chmod(mode)


def a_link(path: Path) -> None:
    (path.parent / "target").mkdir()
    path.symlink_to(path.parent / "target")


# What stands there -> whether root, and an ordinary user, can have a store there; or why not.
FOLDERS: dict[str, tuple[Make, str | None, str | None]] = {
    "empty": (holding(), None, "Permission denied"),
    "missing": (below_a_folder(0o777), None, None),
    "missing in a folder of root": (below_a_folder(0o755), None, "Permission denied"),
    "ext4's root": (holding("lost+found"), None, "Permission denied"),
    "snapshots": (holding(".snapshot", ".zfs"), None, "Permission denied"),
    "wastebasket, quota": (holding(".Trash-1000", "aquota.user"), None, "Permission denied"),
    "a home": (holding("thesis", "photos"), "it holds 'photos', 'thesis'", "'thesis'"),
    "fsGroup": (owned_by(0, USER, 0o2775), None, None),
    "everybody's": (owned_by(0, 0, 0o2777), None, None),
    "a user's": (owned_by(USER, USER, 0o755), None, None),
    "a user's, closed": (owned_by(USER, USER, 0o700), None, None),
    "root's": (owned_by(0, 0, 0o755), None, "Permission denied"),
    "no search": (owned_by(0, USER, 0o660), None, "Permission denied"),
    "a file": (Path.touch, "Not a directory", "Not a directory"),
    "a dangling link": (lambda path: path.symlink_to("nowhere"), *2 * ["a link to nothing"]),
    "a link": (a_link, None, "Permission denied"),
    "format of the future": (holding(marker='{"format": 9}'), "format 9", "format 9"),
    "a torn marker": (holding("pages", "lost+found", marker="{"), None, "Permission denied"),
    "a torn marker, strangers": (holding("work", marker="{"), "is damaged", "is damaged"),
}


def as_user(user: int, work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a process of a user."""

    def run() -> None:
        try:
            if user != ROOT:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            answer.send((True, work()))
        except BaseException:
            answer.send((False, traceback.format_exc()))

    answers, answer = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    fine, result = answers.recv()
    process.join()
    assert fine, result
    return result


def opening(path: Path) -> str | None:
    """Why no store opens there; it must keep pages if it does."""
    try:
        store = open_quiet(path)
    except OSError as error:
        return str(error)
    assert put(store, *range(6)) == [True] * 6
    assert get(store, 5) == content(key(5))
    store.close()
    return None


def doctors_verdict(path: Path) -> tuple[int, str]:
    """Exit status of ``hcache doctor``, and what it says of a folder."""
    before = sorted(path.parent.rglob("*"))
    done = CliRunner().invoke(app, ["doctor", "-d", str(path), "--json"])
    assert sorted(path.parent.rglob("*")) == before, "it changed something"
    checks = {c["subject"]: c["detail"] for c in json.loads(done.stdout)["checks"]}
    return done.exit_code, checks[str(path)]


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user can get to."""
    if os.geteuid() != ROOT:
        pytest.skip("only root can make folders of other users")
    folder = Path(tempfile.mkdtemp(prefix="hcache-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("user", [ROOT, USER], ids=["root", "an ordinary user"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_opens_if_and_only_if_the_doctor_says_so(
    kind: str, user: int, reachable: Path
) -> None:
    path = reachable / "given"
    make, of_root, of_user = FOLDERS[kind]
    make(path)
    strangers = names(path) if path.is_dir() else []
    why_not = of_root if user == ROOT else of_user
    status, said = as_user(user, partial(doctors_verdict, path))
    refused = as_user(user, partial(opening, path))
    assert (status == 0) == (refused is None) == (why_not is None), (said, refused)
    if why_not is not None:
        assert why_not in said and why_not in str(refused)
    if path.is_dir() and os.access(path, os.R_OK):
        assert set(strangers) <= set(names(path)), "what was there is left alone"


def test_a_folder_of_somebody_else_is_warned_of_and_ours_is_narrowed(
    reachable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = reachable / "given"
    owned_by(0, USER, 0o2775)(path)

    def warned() -> list[str]:
        assert opening(path) is None
        return [line for line in caplog.messages if "mode 2775" in line]

    [line] = as_user(USER, warned)
    assert "belongs to user 0" in line
    assert opening(path) is None  # root does not change what is a store already
    other = reachable / "ours"
    owned_by(0, 0, 0o777)(other)
    assert opening(other) is None
    assert other.stat().st_mode & 0o777 == 0o700


def test_what_others_own_or_may_write_inside_is_warned_of(
    reachable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = reachable / "given"
    owned_by(USER, USER, 0o700)(path)
    for part, change, said in (
        (path, None, "belongs to user 1000"),
        (path / "pages", lambda part: part.chmod(0o777), "mode 777 and belongs to user 0"),
        (path / "index", lambda part: os.chown(part, USER, USER), "belongs to user 1000"),
    ):
        if change is not None:
            os.chown(path, 0, 0)
            for each in (path / "pages", path / "index", path / "sessions"):
                os.chown(each, 0, 0)
                each.chmod(0o700)
            change(part)
        caplog.clear()
        assert opening(path) is None
        [line] = [line for line in caplog.messages if "other users may replace pages" in line]
        assert f"{part} has" in line and said in line


def test_users_of_one_folder_are_told_that_they_are_two(reachable: Path) -> None:
    path = reachable / "given"
    owned_by(0, 0, 0o777)(path)
    assert as_user(USER, partial(opening, path)) is None
    path.chmod(0o777)
    for work in (opening, lambda path: doctors_verdict(path)[1]):
        assert "Permission denied" in as_user(USER + 1, partial(work, path))


def test_a_network_file_system_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts, at = tmp_path / "mounts", os.fsencode(tmp_path)
    others = b"/dev/root / ext4 rw 0 0\nnone /caf\xe9 tmpfs rw 0 0\n"
    mounts.write_bytes(others + b"server:/x %s/n\\011f\\134s nfs4 rw 0 0\n" % at)
    monkeypatch.setattr(folder_module, "_MOUNTS", mounts)
    (tmp_path / "n\tf\\s").mkdir()
    for path in (tmp_path / "n\tf\\s", tmp_path / "n\tf\\s" / "store"):
        status, said = doctors_verdict(path)
        assert status == 1 and "its file system is nfs4" in said
        assert "its file system is nfs4" in str(opening(path))
    assert doctors_verdict(tmp_path / "here")[0] == 0
    assert opening(tmp_path / "here") is None


def test_the_root_of_a_real_ext4_becomes_a_store(
    tmp_path: Path, mount: Callable[..., Path]
) -> None:
    disk = mount("-o", "loop", str(ext4_image(tmp_path / "image", 512)))
    assert names(disk) == ["lost+found"]
    for verdict in ("will be a page store", "a page store"):
        assert doctors_verdict(disk) == (0, verdict)
        assert opening(disk) is None
    assert "lost+found" in names(disk)


def test_a_read_only_file_system_is_said_to_be_that(mount: Callable[..., Path]) -> None:
    disk = mount("-t", "tmpfs", "-o", "ro", "tmpfs")
    for path in (disk, disk / "store"):
        status, said = doctors_verdict(path)
        assert status == 1 and "Read-only file system" in said
        assert "Read-only file system" in str(opening(path))
