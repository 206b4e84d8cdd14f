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
from hcache_backend.cli.store import open_folder
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
from hcache_backend.store.folder import device_of_root, existing_part, file_system_of, problem_with
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
    from_file = _read(file)[1].model_dump(exclude_unset=True) if file else {}
    config = common.settings(folders, dirs, **from_file)
    by_folder = {f"{path}: ": list(_check_folder(path, config)) for path in config.dirs}
    by_folder[""] = [*_check_machine(), _check_kvikio(config), *_check_sglang()]
    checks = _checks_as_json(by_folder)
    bad = any(check["verdict"] == "bad" for check in checks)
    common.output({"checks": checks}, as_json, lambda _: _show(by_folder), failed=bad)


def _checks_as_json(by_folder: dict[str, list[Check]]) -> list[dict[str, str]]:
    """All checks as JSON; keys of ``by_folder`` (``FOLDER: ``, or empty) begin their subjects."""
    return [
        {**check._asdict(), "subject": f"{folder}{check.subject}".removesuffix(": folder")}
        for folder, checks in by_folder.items()
        for check in checks
    ]


def _show(by_folder: dict[str, list[Check]]) -> None:
    for folder, checks in by_folder.items():
        table = common.table(folder.removesuffix(": "), "", "what", "found")
        for subject, verdict, detail in checks:
            table.add_row(Text(verdict, _COLOURS[verdict]), subject, detail)
        common.screen.print(table)


def _check_unwritten(path: Path, config: HCacheConfig) -> Iterator[Check]:
    """What can be seen of a folder without writing; one bad check alone: no server can use it."""
    existing = existing_part(path)
    if (problem := problem_with(path, FileOps())) is not None:
        yield Check("folder", "bad", f"a server would not start with it: {problem}")
        if existing != path or not os.access(path, os.X_OK) or not is_store_folder(path):
            return
    elif existing != path:
        on_root = "dirs" in config.model_fields_set and existing.stat().st_dev == device_of_root()
        hint = "; that is the disk of /, mount another one first if it is to have one"
        detail = f"does not exist yet; will be made in {existing}"
        yield _good_or_fair("folder", detail, hint if on_root else None)
    else:
        detail = "a page store" if is_store_folder(path) else "will be a page store"
        yield Check("folder", "good", detail)
    earlier = {existing_part(one).stat().st_dev for one in takewhile(path.__ne__, config.dirs)}
    if existing.stat().st_dev in earlier:
        yield Check("disk", "fair", "that of an earlier folder, which reads no faster")
    kind = file_system_of(existing)
    flaw = _FILE_SYSTEMS.get(kind) or _FILE_SYSTEMS.get(kind.partition(".")[0])
    yield _good_or_fair("file system", kind, flaw and f": {flaw}")
    free, kept, quota = shutil.disk_usage(existing).free, config.min_free_bytes, config.quota_bytes
    detail = f"{human_bytes(free)}, of which {human_bytes(kept)} stay free"
    if free <= kept:
        detail = f"{human_bytes(free)}: no room, option 'min_free_bytes' keeps {human_bytes(kept)}"
    yield Check("free", "good" if free > 2 * kept else "fair", detail)
    if quota is not None:
        room = max(0, free - kept)
        with suppress(OSError, sqlite3.Error), open_folder(path) as folder:
            room += folder.index.totals().bytes
        flaw = ": more than page files may take here" if quota > room else None
        flaw = '; few pages fit. Sizes have units, as in "500GB"' if quota < _LITTLE else flaw
        detail = f"option 'quota_bytes' is {human_bytes(quota)}, room {human_bytes(room)}"
        yield _good_or_fair("quota", detail, flaw)


def _good_or_fair(subject: str, detail: str, flaw: str | None) -> Check:
    return Check(subject, "fair" if flaw else "good", f"{detail}{flaw or ''}")


def _check_folder(path: Path, config: HCacheConfig) -> Iterator[Check]:
    """Checks of one folder of the store: by reading, then by writing, then what servers left."""
    checks = list(_check_unwritten(path, config))
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
        detail = f"{describe(record.partition)}: {record.reason}"
        yield Check(f"partition of {record.model}", "good", detail)


def _probe(place: Path) -> Iterator[Check]:
    """Direct I/O, speed and locks of a disk, by a file in a new folder in ``place``."""
    ops = FileOps()
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix=".hcache-doctor-", dir=place)
        folder = os.open(stack.enter_context(temporary), FOLDER)
        stack.callback(os.close, folder)
        flags, memory, length = find_alignment(ops, folder, "alignment")
        detail = "no; reads and writes go through the page cache"
        if flags:
            detail = f"yes; memory in multiples of {memory}, lengths of {length} bytes"
        yield Check("direct I/O", "good" if flags else "fair", detail)
        room = memoryview(mmap.mmap(-1, _PIECE))
        room[:] = os.urandom(4096) * (_PIECE // 4096)
        file = ops.open("probe", os.O_RDWR | os.O_CREAT | flags, folder)
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


def _check_machine() -> Iterator[Check]:
    command = "nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader"
    try:
        gpus = subprocess.check_output(command.split(), text=True, timeout=30)
        why = "nvidia-smi lists none"
    except (OSError, subprocess.SubprocessError) as error:
        gpus, why = "", str(error)
    listed = "; ".join(f"{count} x {gpu}" for gpu, count in Counter(gpus.splitlines()).items())
    flaw = None if listed else f"no GPU: servers on a CPU only ({why})"
    yield _good_or_fair("GPU, driver", listed, flaw)
    total, free = (os.sysconf(f"SC_{name}PHYS_PAGES") * mmap.PAGESIZE for name in ("", "AV"))
    detail = f"{human_bytes(total)}, of which {human_bytes(free)} are not in use"
    yield Check("host memory", "good", detail)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)  # below 0: none
    flaw = None if limit < 0 else f", {human_bytes(limit)}: pinned memory needs more"
    yield _good_or_fair("ulimit -l", "unlimited" if limit < 0 else "a limit", flaw)
    size = shutil.disk_usage(shm).total if (shm := Path("/dev/shm")).is_dir() else 0
    few = "; several GPUs need more (`docker run --shm-size 16g`)" if size < _LITTLE else None
    yield _good_or_fair("/dev/shm", human_bytes(size), few)


def _check_kvikio(config: HCacheConfig) -> Check:
    mode, why = kvikio_state()  # how KvikIO reads files on this machine, or "nothing"
    if config.reader == "posix":
        return Check("KvikIO", "skip", f"{why}; not needed (reader: posix)")
    if mode == "nothing":
        return Check("KvikIO", "fair", f"{why}; pages are read by posix, although reader: kvikio")
    return Check("KvikIO", "good", f"{mode}: {why}; reads pages into host memory, without GDS")


def _check_sglang() -> Iterator[Check]:
    yield _check_seams()
    names = [entry.value for entry in metadata.entry_points(group="sglang.srt.plugins")]
    if ours := [name for name in names if name.startswith("hcache_backend.")]:
        yield Check("plugin", "good", f"SGLang sees {ours[0]}")
    else:
        environment = f"in SGLang's Python environment (this one is {sys.executable})"
        missing = f"not registered with SGLang. Run `pip install hcache-backend` {environment}"
        yield Check("plugin", "bad", missing)
    enabled = "not set: only servers started with this backend as L3 store hidden states"
    if os.environ.get(options.ENABLE_VARIABLE) == "1":
        enabled = "1: servers started from here store hidden states with any L3"
    if os.environ.get(options.CONFIG_VARIABLE):
        enabled += f"; {options.CONFIG_VARIABLE} is set"
    yield Check(options.ENABLE_VARIABLE, "good", enabled)


def _check_seams() -> Check:
    """Whether servers of this environment's SGLang have own pages, as far as its sources tell."""
    try:
        result = contract.check_installed()
    except ModuleNotFoundError:
        return Check("SGLang", "fair", "not installed in this Python environment")
    version, other = sglang_version(), untested()
    if result.problems:
        effect = "servers have plain pages" if other else "tested, but not as it is installed here"
        return Check("SGLang", "fair", f"{version}: {effect}; {result.describe()}")
    detail = f"{other or f'{version}: tested'}; {result.describe()}"
    return Check("SGLang", "fair" if other else "good", detail)


def config(
    file: Annotated[Path, Argument(help=_CONFIG_HELP)], as_json: common.AsJson = False
) -> None:
    """Check a configuration without a server. Exit status 2: a server would not start with it.
    What this machine's disks and folders cannot do is a warning: the server's may be others."""
    kind, checked, of_file = _read(file)
    by_folder = {f"{path}: ": list(_check_unwritten(path, checked)) for path in checked.dirs}
    checks = _checks_as_json({"": of_file, **by_folder})
    values = checked.model_dump(mode="json", exclude_unset=True)
    why = "" if kind == "extra config" else ", because it has no key of SGLang's extra config"
    bad = sum(check["verdict"] == "bad" for check in checks)
    but = f" in its options, and {bad} folder(s) that do not work here" if bad else ""
    lines = [f"{file}: no errors{but}; read as {kind}{why}"]
    lines += (f"  {name} = {value!r}" for name, value in values.items())
    lines += (
        f"  {check['verdict']}: {check['subject']}: {check['detail']}"
        for check in checks
        if check["verdict"] != "good" or "not exist" in check["detail"]
    )
    report = {"kind": kind, "options": values, "checks": checks}
    common.output(report, as_json, lambda _: common.say(*lines))


def _read(file: Path) -> tuple[str, HCacheConfig, list[Check]]:
    """What a file is ("extra config", HCACHE_CONFIG), its options, and doubts; or ConfigError."""
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
    counts, lcm = ", ".join(map(str, SHARD_COUNTS)), table.get("tp_lcm_size", 1)
    if lcm < 1:
        raise ConfigError(f"{kind}: 'tp_lcm_size' is {lcm}; it must be one of {counts}")
    flaw = f"{lcm}: with own pages a server takes {counts}, or its number of ranks"
    checks = [] if lcm in SHARD_COUNTS else [Check("tp_lcm_size", "fair", flaw)]
    return kind, checked, checks
