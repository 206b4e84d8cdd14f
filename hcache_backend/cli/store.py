"""``hcache stats``, ``ls``, ``verify``, ``gc`` and ``clear``: all may run beside a live server."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from typer import Option

from hcache_backend.cli import common
from hcache_backend.cli.common import AsJson, Dirs, Folders, listing, output, say, screen
from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import BLOCK
from hcache_backend.format.file import DamagedFileError, header_length, parse_header
from hcache_backend.format.page import FORMAT_VERSION, LAYER_ENTRY, MAGIC, PREFIX, TOKENS
from hcache_backend.server_report import read_report
from hcache_backend.store import FileOps, PageStore
from hcache_backend.store.folder import Folder
from hcache_backend.store.index import Entry
from hcache_backend.store.maintenance import find_unknown_files, verify_folder

Namespace = Annotated[
    str | None, Option("--namespace", "-n", help="Only this namespace (first hexadecimal digits).")
]
_WRITER = b"hcachcli"  # a store has a writer; these commands write no pages
_SHOWN_AT_MOST = 20
_READ_AT_MOST = 3  # headers for the codec of a namespace: servers delete files meanwhile


def stats(folders: Folders = None, dirs: Dirs = None, as_json: AsJson = False) -> None:
    """Show how much each folder and each namespace holds, and which server was the last."""
    config = common.existing_store(folders, dirs)
    by_folder = [_folder_stats(path) for path in config.dirs]
    output({"folders": by_folder}, as_json, partial(_show_stats, config))


def _folder_stats(path: Path) -> dict[str, Any]:
    with open_folder(path) as folder:
        totals = folder.index.totals()
        spaces: dict[str, dict[str, Any]] = {}
        for entry in folder.index.entries():
            new = {"pages": 0, "bytes": 0, "last_used": 0.0}
            space = spaces.setdefault(entry.name.namespace.hex(), new)
            if space.get("codec") is None and space["pages"] < _READ_AT_MOST:
                space["codec"] = codecs_of(path / "pages" / entry.name.bucket / entry.name.file)
            space["pages"] += 1
            space["bytes"] += entry.file_bytes
            space["last_used"] = max(space["last_used"], entry.rank / 1e9)  # rank: nanoseconds
        report = read_report(path)
        return {
            "folder": str(path),
            "last_server": report and report.model_dump(mode="json"),
            "pages": totals.files,
            "bytes": totals.bytes,
            "free_bytes": folder.ops.free_bytes(folder.root_fd),
            "direct_io": bool(folder.io.alignment.flags),
            "index_complete": not folder.index_is_partial,
            "namespaces": spaces,
        }


def _show_stats(config: HCacheConfig, stats: dict[str, Any]) -> None:
    keys = "pages# bytes# free_bytes# direct_io index_complete folder"
    screen.print(listing("Folders", keys, stats["folders"]))
    spaces = [
        {**space, "namespace": name, "folder": folder["folder"]}
        for folder in stats["folders"]
        for name, space in folder["namespaces"].items()
    ]
    if spaces:
        keys = "namespace codec pages# bytes# last_used folder"
        screen.print("", listing("Namespaces", keys, spaces), sep="\n")
    _show_last_servers(config.dirs)


def ls(
    folders: Folders = None,
    dirs: Dirs = None,
    namespace: Namespace = None,
    limit: Annotated[int, Option(min=1, help="Largest number of page files shown.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List the page files by namespace and key, and which server was the last."""
    config = common.existing_store(folders, dirs)
    rows: list[dict[str, Any]] = []
    for path in config.dirs:
        with open_folder(path) as folder:
            rows += (
                {
                    "folder": str(path),
                    "namespace": entry.name.namespace.hex(),
                    "key": entry.name.key.hex(),
                    "shard": f"{entry.name.shard.number} of {entry.name.shard.of}",
                    "bytes": entry.file_bytes,
                    "writer": entry.writer.hex(),
                    "last_used": entry.rank / 1e9,
                }
                for entry in islice(_entries(folder, namespace), limit - len(rows))
            )
    reports = ((str(path), read_report(path)) for path in config.dirs)
    servers = {path: report.model_dump(mode="json") for path, report in reports if report}
    output({"pages": rows, "last_servers": servers}, as_json, partial(_show_pages, config, limit))


def _show_pages(config: HCacheConfig, limit: int, shown: dict[str, Any]) -> None:
    keys = "namespace key shard bytes# writer last_used folder"
    screen.print(listing("", keys, shown["pages"]))
    if len(shown["pages"]) == limit:
        say(f"(the first {limit}; more with --limit)")
    _show_last_servers(config.dirs)


def verify(
    folders: Folders = None,
    dirs: Dirs = None,
    rebuild: Annotated[bool, Option("--rebuild", help="First make a new index.")] = False,
    repair: Annotated[bool, Option("--repair", help="Delete damaged pages and entries.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read and verify every page. Exit status 1: problems were found and not repaired."""
    config = common.existing_store(folders, dirs)
    with common.progress_bar(hidden=as_json) as bar:
        results = {str(path): _verify_path(path, bar, rebuild, repair) for path in config.dirs}
    failed = any(result["problems"] > result["repaired"] for result in results.values())
    output({"folders": results}, as_json, _show_findings, failed=failed)


def _verify_path(path: Path, bar: Progress, rebuild: bool, repair: bool) -> dict[str, Any]:
    """The findings in a folder as JSON, with the number of files that a new index adopted."""
    task, adopted = bar.add_task(str(path), total=None), 0

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    if rebuild:
        with open_folder(path, to_write=True) as folder:
            folder.set_index_aside()
    with open_folder(path, to_write=rebuild or repair) as folder:
        if rebuild or (repair and folder.index_is_partial):
            adopted = find_unknown_files(folder, adopt=True, progress=report).adopted
            folder.mark_index_complete()
        findings = verify_folder(folder, repair=repair, progress=report)
    return {**asdict(findings), "adopted": adopted, "problems": findings.problems}


def _show_findings(results: dict[str, Any]) -> None:
    kinds, rows, lines = ("damaged", "missing", "unknown", "index"), [], list[str]()
    for path, result in results["folders"].items():
        counts = {kind: len(result[kind]) for kind in kinds}
        rows.append({**result, **counts, "intact": result["pages"], "folder": path})
        problems = [f"{name}: {reason}" for name, reason in result["damaged"] + result["unknown"]]
        problems += [f"{name}: no such file" for name in result["missing"]] + result["index"]
        lines += [f"{path}: {problem}" for problem in problems[:_SHOWN_AT_MOST]]
        if len(problems) > _SHOWN_AT_MOST:
            lines.append(f"{path}: and {len(problems) - _SHOWN_AT_MOST} more (see --json)")
    keys = "intact# bytes# damaged# missing# unknown# index# repaired# folder"
    screen.print(listing("", keys, rows))
    if lines:
        say(*lines)
    if any(row["repaired"] < row["problems"] for row in rows):
        say("Delete damaged pages with: hcache verify --repair")


def gc(
    folders: Folders = None,
    dirs: Dirs = None,
    quota_bytes: Annotated[str | None, Option(help="Largest size of a folder, as 500GB.")] = None,
    min_free_bytes: Annotated[
        str | None, Option(help="What stays free on a disk, as 4GiB.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evict least recently used pages until every folder is within its quota and leaves enough
    free. The bounds are by default those of HCACHE_CONFIG. Deletes old temporary files too."""
    bounds = {"quota_bytes": quota_bytes, "min_free_bytes": min_free_bytes}
    config = common.existing_store(folders, dirs, **bounds)
    with closing(PageStore(config, _WRITER, background=False)) as store:
        for disk in store.disks:
            disk.make_room(0, seconds=60.0)
        counts = store.stats
    pages, size = counts.pages_evicted, counts.bytes_evicted
    text = f"{pages:,} pages evicted, {common.human_bytes(size)}"
    result = {"pages": pages, "bytes": size, "not_removable": counts.evict_errors}
    output(result, as_json, lambda _: say(text))


def clear(
    folders: Folders = None,
    dirs: Dirs = None,
    namespace: Namespace = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete all pages, or those of one namespace."""
    config = common.existing_store(folders, dirs)
    doomed: Counter[bytes] = Counter()
    for path in config.dirs:
        with open_folder(path) as folder:
            doomed.update(entry.name.namespace for entry in _entries(folder, namespace))
    if namespace is not None and len(doomed) != 1:
        raise common.Failure(f"{len(doomed)} namespaces begin with {namespace!r}: see hcache stats")
    if (count := doomed.total()) and not yes:
        listed = ", ".join(map(str, config.dirs))
        typer.confirm(f"Delete {count:,} pages in {listed}?", abort=True, err=True)
    with (
        closing(PageStore(config, _WRITER, background=False)) as store,
        common.progress_bar(hidden=as_json) as progress,
    ):
        dropped = sum(map(store.drop, progress.track(sorted(doomed), description="deleting")))
    output({"pages": dropped}, as_json, lambda _: say(f"{dropped:,} pages deleted"))


def open_folder(path: Path, *, to_write: bool = False) -> closing[Folder]:
    """A store folder, opened beside the servers that use it; it can only be read by default."""
    return closing(Folder(path, FileOps(), readonly=not to_write))


def _entries(folder: Folder, namespace: str | None) -> Iterator[Entry]:
    """The entries of a folder whose namespace begins with these hexadecimal digits; None: all."""
    digits = (namespace or "").lower()
    return (e for e in folder.index.entries() if e.name.namespace.hex().startswith(digits))


def codecs_of(file: Path) -> str | None:
    """Names of the codecs of the layers in a page file, with commas between them. None if the file
    cannot be read, or holds no page of our own form. Reads headers, waits for no FIFO."""
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            first = stream.read(BLOCK)
            rest = stream.read(header_length(memoryview(first)) - BLOCK)
            header = parse_header(memoryview(first + rest))
            page = stream.read(header.layout.table.segments[0].length)
        magic, version, layers, _, _, page_size = PREFIX.unpack_from(page)
        start = TOKENS + 8 * page_size
        table = LAYER_ENTRY.iter_unpack(page[start : start + layers * LAYER_ENTRY.size])
        stored = dict.fromkeys(code for method, _, code in table if method)
    except (OSError, DamagedFileError, struct.error):
        return None
    if (magic, version) != (MAGIC, FORMAT_VERSION):
        return None
    return ", ".join(code.rstrip(b"\0").decode("ascii", "replace") for code in stored)


def _show_last_servers(folders: Iterable[Path]) -> None:
    for path in folders:
        if (report := read_report(path)) is not None:
            say(f"\nLast server of {path}: {common.describe_server(report)}")
