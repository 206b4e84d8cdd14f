"""``hcache doctor`` and ``hcache config``: check a machine, an installation and a configuration."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib import metadata
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from rich.text import Text
from typer import Argument, Option

from hcache_backend import config as options
from hcache_backend.cli import common
from hcache_backend.cli.common import human_bytes
from hcache_backend.cli.store import opened
from hcache_backend.config import ConfigError, HCacheConfig
from hcache_backend.contract import check as contract
from hcache_backend.format.units import SHARD_COUNTS
from hcache_backend.plan.record import records
from hcache_backend.plan.restore import describe
from hcache_backend.server_report import read_report
from hcache_backend.sglang.compat import sglang_version, untested
from hcache_backend.store import FileOps, is_store_folder
from hcache_backend.store.direct_io import find_alignment
from hcache_backend.store.file_ops import FOLDER, try_lock
from hcache_backend.store.folder import device_of_root, existing_part, file_system_of, why_not
from hcache_backend.store.kvikio_ops import kvikio_state

_PROBE_BYTES = 64 << 20
_PIECE = 4 << 20
_LITTLE = 1 << 30  # as a quota somebody forgot its unit; as shared memory it is a container's
_CONFIG_HELP = f"TOML, JSON or YAML: SGLang's extra config, or {options.CONFIG_VARIABLE}."
_COLOURS = {"good": "green", "fair": "yellow", "bad": "red", "skip": "dim"}
_SHARED = "a network file system; the store's index needs file locks and a fast local disk"
_FILE_SYSTEMS = {
    "overlay": "its pages are lost with the container; mount a volume there",
    "tmpfs": "its pages take memory, and are lost at a restart",
    **dict.fromkeys(("9p", "virtiofs"), "a folder of the host of a virtual machine; use a disk"),
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
    folders: common.Folders = None,
    dirs: common.Dirs = None,
    file: Annotated[Path | None, Option("--config", "-c", help=_CONFIG_HELP)] = None,
    as_json: common.AsJson = False,
) -> None:
    """Check folders, disks, GPUs, memory and SGLang. Exit status 1: something cannot work."""
    given = _read(file)[1].model_dump(exclude_unset=True) if file else {}
    config = common.settings(folders, dirs, **given)
    found = {f"{path}: ": list(_check_folder(path, config)) for path in config.dirs}
    found[""] = [*_machine(), _kvikio(config), *_sglang()]
    checks = _listed(found)
    bad = any(check["verdict"] == "bad" for check in checks)
    common.output({"checks": checks}, as_json, lambda _: _show(found), failed=bad)


def _listed(found: dict[str, list[Check]]) -> list[dict[str, str]]:
    return [
        {**check._asdict(), "subject": f"{folder}{check.subject}".removesuffix(": folder")}
        for folder, checks in found.items()
        for check in checks
    ]


def _show(found: dict[str, list[Check]]) -> None:
    for folder, checks in found.items():
        shown = common.table(folder.removesuffix(": "), "", "what", "found")
        for subject, verdict, detail in checks:
            shown.add_row(Text(verdict, _COLOURS[verdict]), subject, detail)
        common.screen.print(shown)


def _check_place(path: Path, config: HCacheConfig) -> Iterator[Check]:
    """What can be seen of a folder without writing."""
    place = existing_part(path)
    if (problem := why_not(path, FileOps())) is not None:
        yield Check("folder", "bad", f"a server would not start with it: {problem}")
        if place != path or not os.access(path, os.X_OK) or not is_store_folder(path):
            return
    elif place != path:
        on_root = "dirs" in config.model_fields_set and place.stat().st_dev == device_of_root()
        hint = "; that is the disk of /, mount another one first if it is to have one"
        found = f"does not exist yet; will be made in {place}"
        yield _works("folder", found, hint if on_root else None)
    else:
        found = "a page store" if is_store_folder(path) else "will be a page store"
        yield Check("folder", "good", found)
    earlier = {existing_part(one).stat().st_dev for one in takewhile(path.__ne__, config.dirs)}
    if place.stat().st_dev in earlier:
        yield Check("disk", "fair", "that of an earlier folder, which reads no faster")
    kind = file_system_of(place)
    flaw = _FILE_SYSTEMS.get(kind) or _FILE_SYSTEMS.get(kind.partition(".")[0])
    yield _works("file system", kind, flaw and f": {flaw}")
    free, kept, quota = shutil.disk_usage(place).free, config.min_free_bytes, config.quota_bytes
    detail = f"{human_bytes(free)}, of which {human_bytes(kept)} stay free"
    if free <= kept:
        detail = f"{human_bytes(free)}: no room, option 'min_free_bytes' keeps {human_bytes(kept)}"
    yield Check("free", "good" if free > 2 * kept else "fair", detail)
    if quota is not None:
        room = max(0, free - kept)
        with suppress(OSError, sqlite3.Error), opened(path) as folder:
            room += folder.index.totals().bytes
        flaw = ": more than page files may take here" if quota > room else None
        flaw = '; few pages fit. Sizes have units, as in "500GB"' if quota < _LITTLE else flaw
        found = f"option 'quota_bytes' is {human_bytes(quota)}, room {human_bytes(room)}"
        yield _works("quota", found, flaw)


def _works(subject: str, found: str, flaw: str | None) -> Check:
    return Check(subject, "fair" if flaw else "good", f"{found}{flaw or ''}")


def _check_folder(path: Path, config: HCacheConfig) -> Iterator[Check]:
    checks = list(_check_place(path, config))
    yield from checks
    if len(checks) == 1:  # a folder that no server can use
        return
    try:
        yield from _probe(existing_part(path))
    except OSError as error:
        yield Check("writing", "bad", str(error))
    if (report := read_report(path)) is not None:
        best = report.pages == "own" and all(one.method == "spec" for one in report.projection)
        yield Check("last server", "good" if best else "fair", common.describe_server(report))
    for record in records(path):
        found = f"{describe(record.partition)}: {record.reason}"
        yield Check(f"partition of {record.model}", "good", found)


def _probe(place: Path) -> Iterator[Check]:
    """Write and read a file in a new folder in ``place``."""
    ops = FileOps()
    with ExitStack() as stack:
        name = tempfile.TemporaryDirectory(prefix=".hcache-doctor-", dir=place)
        folder = os.open(stack.enter_context(name), FOLDER)
        stack.callback(os.close, folder)
        form = find_alignment(ops, folder, "alignment")
        found = "no; reads and writes go through the page cache"
        if form.flags:
            found = f"yes; memory in multiples of {form.memory}, lengths of {form.length} bytes"
        yield Check("direct I/O", "good" if form.flags else "fair", found)
        room = memoryview(mmap.mmap(-1, _PIECE))
        room[:] = os.urandom(4096) * (_PIECE // 4096)
        file = ops.open("probe", os.O_RDWR | os.O_CREAT | form.flags, folder)
        stack.callback(ops.close, file)
        locked, times = try_lock(file), [time.perf_counter()]
        for offset in range(0, _PROBE_BYTES, _PIECE):
            ops.write(file, [room], offset)
        os.fdatasync(file)
        times.append(time.perf_counter())
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        for offset in range(0, _PROBE_BYTES, _PIECE):
            ops.read(file, [room], offset)
        times.append(time.perf_counter())
        rates = (int(_PROBE_BYTES / (end - start)) for start, end in pairwise(times))
        writing, reading = (f"{human_bytes(rate)}/s" for rate in rates)
        yield Check("speed", "good", f"writes {writing}, reads {reading} on one thread")
        supported = "supported" if locked else "not supported"
        yield Check("file locks", "good" if locked else "bad", supported)


def _machine() -> Iterator[Check]:
    command = "nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader"
    try:
        gpus = subprocess.check_output(command.split(), text=True, timeout=30)
        why = "nvidia-smi lists none"
    except (OSError, subprocess.SubprocessError) as error:
        gpus, why = "", str(error)
    found = "; ".join(f"{count} x {gpu}" for gpu, count in Counter(gpus.splitlines()).items())
    flaw = None if found else f"no GPU: servers on a CPU only ({why})"
    yield _works("GPU, driver", found, flaw)
    total, free = (os.sysconf(f"SC_{name}PHYS_PAGES") * mmap.PAGESIZE for name in ("", "AV"))
    found = f"{human_bytes(total)}, of which {human_bytes(free)} are not in use"
    yield Check("host memory", "good", found)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    flaw = None if limit < 0 else f", {human_bytes(limit)}: pinned memory needs more"
    yield _works("ulimit -l", "unlimited" if limit < 0 else "a limit", flaw)
    size = shutil.disk_usage(shm).total if (shm := Path("/dev/shm")).is_dir() else 0
    few = "; several GPUs need more (`docker run --shm-size 16g`)" if size < _LITTLE else None
    yield _works("/dev/shm", human_bytes(size), few)


def _kvikio(config: HCacheConfig) -> Check:
    mode, why = kvikio_state()
    if config.reader == "posix":
        return Check("KvikIO", "skip", f"{why}; not needed (reader: posix)")
    if mode == "nothing":
        return Check("KvikIO", "fair", f"{why}; pages are read by posix, although reader: kvikio")
    return Check("KvikIO", "good", f"{mode}: {why}; reads pages into host memory, without GDS")


def _sglang() -> Iterator[Check]:
    yield _seams()
    names = [entry.value for entry in metadata.entry_points(group="sglang.srt.plugins")]
    if ours := [name for name in names if name.startswith("hcache_backend.")]:
        yield Check("plugin", "good", f"SGLang sees {ours[0]}")
    else:
        where = f"in SGLang's Python environment (this one is {sys.executable})"
        missing = f"not registered with SGLang. Run `pip install hcache-backend` {where}"
        yield Check("plugin", "bad", missing)
    enabled = "not set: only servers started with this backend as L3 store hidden states"
    if os.environ.get(options.ENABLE_VARIABLE) == "1":
        enabled = "1: servers started from here store hidden states with any L3"
    if os.environ.get(options.CONFIG_VARIABLE):
        enabled += f"; {options.CONFIG_VARIABLE} is set"
    yield Check(options.ENABLE_VARIABLE, "good", enabled)


def _seams() -> Check:
    """Whether servers of this environment's SGLang have own pages, as far as its sources tell."""
    try:
        found = contract.installed()
    except ModuleNotFoundError:
        return Check("SGLang", "fair", "not installed in this Python environment")
    version, other = sglang_version(), untested()
    if found.problems:
        effect = "servers have plain pages" if other else "tested, but not as it is installed here"
        detail = f"{version}: {effect}; {found.describe()}"
        return Check("SGLang", "fair", detail)
    detail = f"{other or f'{version}: tested'}; {found.describe()}"
    return Check("SGLang", "fair" if other else "good", detail)


def config(
    file: Annotated[Path, Argument(help=_CONFIG_HELP)], as_json: common.AsJson = False
) -> None:
    """Check a configuration without a server. Exit status 2: a server would not start with it.
    What this machine's disks and folders cannot do is a warning: the server's may be others."""
    kind, checked, checks = _read(file)
    places = {f"{path}: ": list(_check_place(path, checked)) for path in checked.dirs}
    listed = _listed({"": checks, **places})
    found = checked.model_dump(mode="json", exclude_unset=True)
    why = "" if kind == "extra config" else ", because it has no key of SGLang's extra config"
    bad = sum(check["verdict"] == "bad" for check in listed)
    but = f" in its options, and {bad} folder(s) that do not work here" if bad else ""
    lines = [f"{file}: no errors{but}; read as {kind}{why}"]
    lines += (f"  {name} = {value!r}" for name, value in found.items())
    lines += (
        f"  {check['verdict']}: {check['subject']}: {check['detail']}"
        for check in listed
        if check["verdict"] != "good" or "not exist" in check["detail"]
    )
    report = {"kind": kind, "options": found, "checks": listed}
    common.output(report, as_json, lambda _: common.say(*lines))


def _read(file: Path) -> tuple[str, HCacheConfig, list[Check]]:
    """What a file is, its options, and what may be wrong with it; raises ConfigError."""
    table: Any = options.load_table(f"@{str(file).removeprefix('@')}", "config")
    if not isinstance(table, dict) or table.keys().isdisjoint(options.OUR_KEYS):
        kind = options.CONFIG_VARIABLE
        return kind, options.parse_config(table, kind), []
    kind = "extra config"
    name = table.get("backend_name") or "hcache"  # any other is right
    for key, wanted in {"backend_name": name, **options.OUR_BACKEND}.items():
        if (value := table.get(key)) != wanted:
            hint = "otherwise SGLang loads another backend, or none"
            raise ConfigError(f"{kind}: {key!r} is {value!r}; it must be {wanted!r}, {hint}")
    checked = options.start_config(table)
    which, heads = ", ".join(map(str, SHARD_COUNTS)), table.get("tp_lcm_size", 1)
    if heads < 1:
        raise ConfigError(f"{kind}: 'tp_lcm_size' is {heads}; it must be one of {which}")
    flaw = f"with own pages a server takes {which}, or its number of ranks"
    known = heads in SHARD_COUNTS
    return kind, checked, [] if known else [Check("tp_lcm_size", "fair", f"{heads}: {flaw}")]
