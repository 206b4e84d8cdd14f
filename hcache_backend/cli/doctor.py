"""``hcache doctor`` and ``hcache config``: check a machine, an installation and a configuration."""

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
from typing import Annotated, Any, Literal, NamedTuple

import typer

from hcache_backend import config as options
from hcache_backend.cli import common
from hcache_backend.cli.common import human_bytes, say, screen
from hcache_backend.config import ConfigError, HCacheConfig
from hcache_backend.plan.costs import describe
from hcache_backend.plan.profile import Profile
from hcache_backend.plan.record import PartitionRecord, kept_profiles, records
from hcache_backend.server_report import ServerReport, read_report
from hcache_backend.store import FileOps, is_store_folder
from hcache_backend.store.file_ops import probe_alignment, try_lock
from hcache_backend.store.folder import existing_part, file_system_of, why_not
from hcache_backend.store.kvikio_state import kvikio_state

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
"""The flaw of file systems on which a server starts nevertheless."""


class Check(NamedTuple):
    """The result of one check. ``fair``: works, but slower or with less; ``bad``: does not work;
    ``skip``: is not there and not needed. ``detail`` says what was found, and what to do."""

    subject: str
    verdict: Literal["good", "fair", "bad", "skip"]
    detail: str


def doctor(
    folders: common.Folders = None, dirs: common.Dirs = None, as_json: common.AsJson = False
) -> None:
    """Check folders, disks, KvikIO and SGLang. Exit status 1: something cannot work."""
    config = common.settings(folders, dirs)
    with common.explained():
        checks = [check for path in config.dirs for check in _look_at_folder(path, config)]
    checks += [_kvikio(config), *_sglang()]
    if as_json:
        common.print_json({"checks": [check._asdict() for check in checks]})
    else:
        for folder, group in groupby(checks, _folder_of):
            shown = common.table(folder, "", "what", "found")
            for subject, verdict, detail in group:
                what = "folder" if subject == folder else subject.removeprefix(f"{folder}: ")
                shown.add_row(f"[{_COLOURS[verdict]}]{verdict}[/]", what, detail)
            screen.print(shown, highlight=False)
    if any(check.verdict == "bad" for check in checks):
        raise typer.Exit(1)


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
    else:
        found = "a page store" if is_store_folder(path) else "will be a page store"
        yield Check(str(path), "good", found)
    kind = file_system_of(place)
    flaw = _FILE_SYSTEMS.get(kind) or _FILE_SYSTEMS.get(kind.partition(".")[0])
    found = f"{kind}: {flaw}" if flaw else kind
    yield Check(f"{path}: file system", "fair" if flaw else "good", found)
    free, kept = shutil.disk_usage(place).free, config.min_free_bytes
    detail = f"{human_bytes(free)}, of which {human_bytes(kept)} stay free"
    if free <= kept:
        detail = f"{human_bytes(free)}: no room, option 'min_free_bytes' keeps {human_bytes(kept)}"
    yield Check(f"{path}: free", "good" if free > 2 * kept else "fair", detail)
    try:
        with tempfile.TemporaryDirectory(prefix=".hcache-doctor-", dir=place) as folder:
            yield from _probe(path, Path(folder))
    except OSError as error:
        yield Check(f"{path}: writing", "bad", str(error))
    report = read_report(path)
    if report is not None:
        yield _last_server(path, report)
    profiles = list(kept_profiles(path))
    for _, record in records(path):
        yield _partition(path, record, [one for one in profiles if one.model == record.shape])
    for profile in profiles:
        copies = "measured alone, not during matrix products"
        copies = profile.copies[0].describe() if profile.copies else copies
        yield Check(f"{path}: copies to {profile.device}", "good", copies)


def _last_server(path: Path, report: ServerReport) -> Check:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.time))
    parts = [f"{report.model}, started {started}: {report.mode} mode, {report.pages} pages"]
    parts += [report.reason] if report.reason is not None else []
    parts += [f"codec {report.codec}"] if report.codec is not None else []
    for group in report.projection:
        how = "by spec" if group.method == "spec" else "by their attention modules"
        numbers = ", ".join(map(str, group.layers))
        parts.append(f"layers {numbers} {how}: {group.detail} ({group.exactness})")
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in report.tokens_per_second.items())
    more = {
        "recomputed layers": report.recomputation,
        "stored": report.partition,
        "shared L3": report.behind,
        "tokens per second": rates or None,
    }
    parts += [f"{name}: {value}" for name, value in more.items() if value is not None]
    best = report.pages == "own" and all(group.method == "spec" for group in report.projection)
    return Check(f"{path}: last server", "good" if best else "fair", "; ".join(parts))


def _partition(path: Path, record: PartitionRecord, profiles: Sequence[Profile]) -> Check:
    """What is stored of each layer of a model, and whether another partition were faster here."""
    subject, found = f"{path}: partition of {record.model}", describe(record.partition)
    found += f": {record.reason}"
    for profile in profiles:
        if (better := record.better(profile)) is not None:
            partition, times = better
            found += (
                f"; restores would be {times:.2f} times as fast with {describe(partition)} on "
                f"{profile.device} (hcache plan --apply; pages stored so far become misses)"
            )
            return Check(subject, "fair", found)
    return Check(subject, "good", found)


def _probe(path: Path, folder: Path) -> Iterator[Check]:
    """Write and read a file in ``folder``."""
    ops, fd = FileOps(), os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        alignment = probe_alignment(ops, fd, "alignment")
        found = "no; reads and writes go through the page cache"
        if alignment.flags:
            memory, length = alignment.memory, alignment.length
            found = f"yes; memory in multiples of {memory}, lengths of {length} bytes"
        yield Check(f"{path}: direct I/O", "good" if alignment.flags else "fair", found)
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
        yield Check("SGLang", "good", metadata.version("sglang"))
    except metadata.PackageNotFoundError:
        yield Check("SGLang", "fair", "not installed in this Python environment")
    plugins = (entry.value for entry in metadata.entry_points(group="sglang.srt.plugins"))
    ours = next((name for name in plugins if name.startswith("hcache_backend.")), None)
    missing = (
        "not registered with SGLang. Run `pip install hcache-backend` in SGLang's Python "
        f"environment (this one is {sys.executable})"
    )
    yield Check("plugin", "good" if ours else "bad", f"SGLang sees {ours}" if ours else missing)
    enabled = "not set: only servers started with this backend as L3 store hidden states"
    if os.environ.get(options.ENABLE_VARIABLE) == "1":
        enabled = "1: servers started from here store hidden states with any L3"
    if os.environ.get(options.CONFIG_VARIABLE):
        enabled += f"; {options.CONFIG_VARIABLE} is set"
    yield Check(options.ENABLE_VARIABLE, "good", enabled)


def check_config(
    file: Annotated[
        Path,
        typer.Argument(
            help="TOML or JSON: the extra config of --hicache-storage-backend-extra-config, or the "
            f"table of {options.CONFIG_VARIABLE}."
        ),
    ],
    as_json: common.AsJson = False,
) -> None:
    """Check a configuration without a server. Exit status 2: a server would not start with it."""
    with common.explained(ConfigError, ValueError):
        text = f"@{file}" if file.suffix == ".toml" else file.read_text(encoding="utf-8")
        table: Any = options.load_table(text, str(file))
        if extra := isinstance(table, dict) and not {"hcache", "module_path"}.isdisjoint(table):
            names = {"module_path": options.MODULE_PATH, "class_name": options.CLASS_NAME}
            for key, wanted in names.items():
                if (found := table.get(key)) != wanted:
                    raise ConfigError(
                        f"extra config: {key!r} is {found!r}; it must be {wanted!r}, otherwise "
                        "SGLang loads another backend"
                    )
            config = options.start_config(table)
        else:
            config = options.parse_config(table, options.CONFIG_VARIABLE)
    found = config.model_dump(mode="json", exclude_unset=True)
    if as_json:
        kind = "extra config" if extra else options.CONFIG_VARIABLE
        common.print_json({"kind": kind, "options": found})
        return
    say(f"{file}: no errors")
    for name, value in found.items():
        say(f"  {name} = {value!r}", markup=False)
