"""``hcache doctor``: check that this machine and this installation can run the store."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import typer

from hcache_backend.cli.common import (
    AsJson,
    Dirs,
    Folders,
    explained,
    human_bytes,
    print_json,
    screen,
    settings,
    table,
)
from hcache_backend.config import CONFIG_VARIABLE, ENABLE_VARIABLE, HCacheConfig
from hcache_backend.kvikio_state import kvikio_state
from hcache_backend.partition.costs import describe
from hcache_backend.partition.profile import Profile
from hcache_backend.partition.record import PartitionRecord, kept_profiles, records
from hcache_backend.server_report import ServerReport, read_report
from hcache_backend.store import FileOps, is_store_folder
from hcache_backend.store.file_ops import probe_alignment, try_lock
from hcache_backend.store.folder import existing_part, file_system_of, why_not

_PROBE_BYTES = 64 << 20
_PIECE = 4 << 20
_COLOURS = {"good": "green", "fair": "yellow", "bad": "red", "skip": "dim"}
_SHARED = "a network file system; the store's index needs file locks and a fast local disk"
_FILE_SYSTEMS = {
    "overlay": "its pages are lost with the container; mount a volume there",
    "tmpfs": "its pages take memory, and are lost at a restart",
    "9p": "a folder of the host of a virtual machine; use a disk",
    "virtiofs": "a folder of the host of a virtual machine; use a disk",
    **dict.fromkeys(("ceph", "lustre", "gpfs", "beegfs", "glusterfs", "fuse"), _SHARED),
}
"""What is wrong with file systems on which a server starts nevertheless."""
_PLUGIN_GROUP = "sglang.srt.plugins"


class Check(NamedTuple):
    """The result of one check.

    Attributes:
        subject: What was checked.
        verdict: ``good``; ``fair``: works, but slower or with less; ``bad``: does not work;
            ``skip``: is not there and not needed.
        detail: What was found, and what to do about it.
    """

    subject: str
    verdict: Literal["good", "fair", "bad", "skip"]
    detail: str


def doctor(folders: Folders = None, dirs: Dirs = None, as_json: AsJson = False) -> None:
    """Check folders, disks, KvikIO and SGLang. Exit status 1: something cannot work."""
    config = settings(folders, dirs)
    with explained():
        checks = [check for path in config.dirs for check in _look_at_folder(path, config)]
    checks += [_kvikio(config), *_sglang()]
    if as_json:
        print_json({"checks": [check._asdict() for check in checks]})
    else:
        _show(checks)
    if any(check.verdict == "bad" for check in checks):
        raise typer.Exit(1)


def _show(checks: Sequence[Check]) -> None:
    """A table for each folder, and one for the rest."""
    for place, group in groupby(checks, _folder_of):
        shown = table(place, "", "what", "found")
        for check in group:
            colour = _COLOURS[check.verdict]
            what = check.subject.removeprefix(f"{place}: ") if check.subject != place else "folder"
            shown.add_row(f"[{colour}]{check.verdict}[/{colour}]", what, check.detail)
        screen.print(shown, highlight=False)


def _folder_of(check: Check) -> str:
    """The folder that a check is about, or nothing."""
    return check.subject.partition(": ")[0] if check.subject.startswith("/") else ""


def _look_at_folder(path: Path, config: HCacheConfig) -> Iterator[Check]:
    place = existing_part(path)
    if (problem := why_not(path, FileOps())) is not None:
        yield Check(str(path), "bad", f"a server would not start with it: {problem}")
        if place != path or not os.access(path, os.X_OK) or not is_store_folder(path):
            return
    elif place != path:
        yield Check(str(path), "good", f"does not exist yet; will be made in {place}")
    elif is_store_folder(path):
        yield Check(str(path), "good", "a page store")
    else:
        yield Check(str(path), "good", "will be a page store")
    kind = file_system_of(place)
    flaw = _FILE_SYSTEMS.get(kind) or _FILE_SYSTEMS.get(kind.partition(".")[0])
    found = f"{kind}: {flaw}" if flaw else kind
    yield Check(f"{path}: file system", "fair" if flaw else "good", found)
    free, kept = shutil.disk_usage(place).free, config.min_free_bytes
    detail = f"{human_bytes(free)}, of which {human_bytes(kept)} stay free"
    if free <= kept:
        detail = f"{human_bytes(free)}: no room, option 'min_free_bytes' keeps {human_bytes(kept)}"
    yield Check(f"{path}: free", "good" if free > 2 * kept else "fair", detail)
    yield from _try_out(path, place)
    report = read_report(path)
    if report is not None:
        yield _last_server(path, report)
    profiles = list(kept_profiles(path))
    for _, record in records(path):
        of_model = [profile for profile in profiles if profile.model == record.shape]
        yield _partition(path, record, of_model)
    for profile in profiles:
        yield _copies(path, profile)


def _last_server(path: Path, report: ServerReport) -> Check:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.time))
    parts = [f"{report.model}, started {started}: {report.mode} mode, {report.pages} pages"]
    if report.reason is not None:
        parts.append(report.reason)
    if report.codec is not None:
        parts.append(f"codec {report.codec}")
    for group in report.projection:
        how = "by spec" if group.method == "spec" else "by their attention modules"
        numbers = ", ".join(map(str, group.layers))
        parts.append(f"layers {numbers} {how}: {group.detail} ({group.exactness})")
    if report.recomputation is not None:
        parts.append(f"recomputed layers: {report.recomputation}")
    if report.partition is not None:
        parts.append(f"stored: {report.partition}")
    if report.behind is not None:
        parts.append(f"shared L3: {report.behind}")
    if report.tokens_per_second:
        rates = (f"{name} {rate:,.0f}" for name, rate in report.tokens_per_second.items())
        parts.append(f"tokens per second: {', '.join(rates)}")
    best = report.pages == "own" and all(group.method == "spec" for group in report.projection)
    return Check(f"{path}: last server", "good" if best else "fair", "; ".join(parts))


def _partition(path: Path, record: PartitionRecord, profiles: Sequence[Profile]) -> Check:
    """What is stored of each layer of a model, and whether another partition were faster here."""
    found = f"{describe(record.partition)}: {record.reason}"
    for profile in profiles:
        better = record.better(profile)
        if better is not None:
            partition, times = better
            found += (
                f"; restores would be {times:.2f} times as fast with {describe(partition)} on "
                f"{profile.device} (hcache plan --apply; pages stored so far become misses)"
            )
            return Check(f"{path}: partition of {record.model}", "fair", found)
    return Check(f"{path}: partition of {record.model}", "good", found)


def _copies(path: Path, profile: Profile) -> Check:
    """How a server with this profile copies over the bus."""
    subject = f"{path}: copies to {profile.device}"
    if not profile.copies:
        return Check(subject, "good", "measured alone, not during matrix products")
    return Check(subject, "good", profile.copies[0].describe())


def _try_out(path: Path, place: Path) -> Iterator[Check]:
    try:
        with tempfile.TemporaryDirectory(prefix=".hcache-doctor-", dir=place) as folder:
            yield from _probe(path, Path(folder))
    except OSError as error:
        yield Check(f"{path}: writing", "bad", str(error))


def _probe(path: Path, folder: Path) -> Iterator[Check]:
    ops = FileOps()
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        alignment = probe_alignment(ops, fd, "alignment")
        yield Check(
            f"{path}: direct I/O",
            "good" if alignment.flags else "fair",
            f"yes; memory in multiples of {alignment.memory}, lengths of {alignment.length} bytes"
            if alignment.flags
            else "no; reads and writes go through the page cache",
        )
        room = memoryview(mmap.mmap(-1, _PIECE))
        room[:] = os.urandom(4096) * (_PIECE // 4096)
        file = ops.open("probe", os.O_RDWR | os.O_CREAT | alignment.flags, fd)
        try:
            locked = try_lock(file)
            offsets = range(0, _PROBE_BYTES, _PIECE)

            def write_all() -> None:
                for offset in offsets:
                    ops.write(file, [room], offset)
                os.fdatasync(file)

            writing = _speed(write_all)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            reading = _speed(lambda: [ops.read(file, [room], offset) for offset in offsets])
        finally:
            ops.close(file)
        yield Check(f"{path}: speed", "good", f"writes {writing}, reads {reading} on one thread")
        supported = "supported" if locked else "not supported"
        yield Check(f"{path}: file locks", "good" if locked else "bad", supported)
    finally:
        os.close(fd)


def _speed(work: Callable[[], object]) -> str:
    start = time.perf_counter()
    work()
    return f"{human_bytes(int(_PROBE_BYTES / (time.perf_counter() - start)))}/s"


def _kvikio(config: HCacheConfig) -> Check:
    mode, why = kvikio_state()
    if config.reader == "posix":
        return Check("KvikIO", "skip", f"{why}; not needed (reader: posix)")
    if mode == "nothing":
        return Check("KvikIO", "fair", f"{why}; pages are read by posix, although reader: kvikio")
    return Check("KvikIO", "good", f"{mode}: {why}; reads pages into host memory, without GDS")


def _sglang() -> Iterator[Check]:
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        yield Check("SGLang", "fair", "not installed in this Python environment")
    else:
        yield Check("SGLang", "good", version)
    plugins = (entry.value for entry in metadata.entry_points(group=_PLUGIN_GROUP))
    ours = next((name for name in plugins if name.startswith("hcache_backend.")), None)
    if ours is not None:
        yield Check("plugin", "good", f"SGLang sees {ours}")
    else:
        yield Check(
            "plugin",
            "bad",
            "not registered with SGLang. Run `pip install hcache-backend` in SGLang's Python "
            f"environment (this one is {sys.executable})",
        )
    if os.environ.get(ENABLE_VARIABLE) == "1":
        enabled = "1: servers started from here store hidden states with any L3"
    else:
        enabled = "not set: only servers started with this backend as L3 store hidden states"
    if os.environ.get(CONFIG_VARIABLE):
        enabled += f"; {CONFIG_VARIABLE} is set"
    yield Check(ENABLE_VARIABLE, "good", enabled)
