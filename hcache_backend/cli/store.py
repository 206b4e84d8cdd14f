"""``hcache stats``, ``ls``, ``verify``, ``gc`` and ``clear``: all may run beside a live server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from hcache_backend.cli import common
from hcache_backend.cli.common import AsJson, Dirs, Folders, human_bytes, say, screen, when
from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import BLOCK
from hcache_backend.format.file import DamagedFileError, header_length, parse_header
from hcache_backend.format.page import FORMAT_VERSION, LAYER_ENTRY, MAGIC, PREFIX, TOKENS
from hcache_backend.server_report import ServerReport, read_report
from hcache_backend.store import FileOps, PageStore
from hcache_backend.store.folder import Folder
from hcache_backend.store.index import Entry
from hcache_backend.store.maintenance import find_unknown_files, verify_folder

NamespaceDigits = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Only this namespace (first hexadecimal digits)."),
]
_WRITER = b"hcachcli"  # a store has a writer; these commands write no pages
_SHOWN_AT_MOST = 20
_READ_AT_MOST = 3
"""Headers that are read at most for the codec of a namespace: servers delete files meanwhile."""
_KINDS = ("damaged", "missing", "unknown", "index")


def stats(folders: Folders = None, dirs: Dirs = None, as_json: AsJson = False) -> None:
    """Show how much each folder and each namespace holds, and which server was the last."""
    config = common.existing_store(folders, dirs)
    with common.explained():
        found = [_folder_stats(path) for path in config.dirs]
    if as_json:
        common.print_json({"folders": found})
        return
    heads = ("pages#", "bytes#", "free#", "direct I/O", "index", "folder")
    shown = common.table("Folders", *heads)
    heads = ("namespace", "codec", "pages#", "bytes#", "last used", "folder")
    spaces = common.table("Namespaces", *heads)
    for folder in found:
        path, sizes = folder["folder"], (folder["bytes"], folder["free_bytes"])
        direct = "yes" if folder["direct_io"] else "no"
        index = "complete" if folder["index_complete"] else "being completed"
        shown.add_row(f"{folder['pages']:,}", *map(human_bytes, sizes), direct, index, path)
        for name, space in folder["namespaces"].items():
            counts = f"{space['pages']:,}", human_bytes(space["bytes"])
            spaces.add_row(name[:8], space["codec"] or "-", *counts, when(space["last_used"]), path)
    screen.print(shown)
    if spaces.row_count:
        screen.print("", spaces, sep="\n")
    _show_last_servers(config)


def list_pages(
    folders: Folders = None,
    dirs: Dirs = None,
    namespace: NamespaceDigits = None,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of page files shown.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List the page files by namespace and key, and which server was the last."""
    config = common.existing_store(folders, dirs)
    rows: list[dict[str, Any]] = []
    with common.explained():
        for path in config.dirs:
            with _viewed(path) as folder:
                for entry in islice(_entries(folder, namespace), limit - len(rows)):
                    row: dict[str, Any] = {
                        "folder": str(path),
                        "namespace": entry.name.namespace.hex(),
                        "key": entry.name.key.hex(),
                        "share": f"{entry.name.share.number} of {entry.name.share.of}",
                        "bytes": entry.file_bytes,
                        "writer": entry.writer.hex(),
                        "last_used": entry.rank / 1e9,
                    }
                    rows.append(row)
    if as_json:
        reports = {str(path): report for path, report in _last_servers(config)}
        servers = {path: report.model_dump(mode="json") for path, report in reports.items()}
        common.print_json({"pages": rows, "last_servers": servers})
        return
    heads = ("namespace", "key", "share", "bytes#", "writer", "last used", "folder")
    shown = common.table("", *heads)
    for row in rows:
        size, used = row["bytes"], row["last_used"]
        name = row["namespace"][:8], row["key"][:12], row["share"]
        shown.add_row(*name, human_bytes(size), row["writer"][:8], when(used), row["folder"])
    screen.print(shown)
    if len(rows) == limit:
        say(f"(the first {limit}; more with --limit)")
    _show_last_servers(config)


def verify(
    folders: Folders = None,
    dirs: Dirs = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="First rebuild the index from the page files.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete damaged pages and entries without a file.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read and verify every page. Exit status 1: problems were found and not repaired."""
    config = common.existing_store(folders, dirs)
    with common.explained(), common.progress_bar(hidden=as_json) as bar:
        results = {str(path): _verified(path, bar, rebuild, repair) for path in config.dirs}
    if as_json:
        common.print_json({"folders": results})
    else:
        _show_findings(results)
    if any(result["problems"] > result["repaired"] for result in results.values()):
        if not (repair or as_json):
            say("Delete damaged pages with: hcache verify --repair")
        raise typer.Exit(1)


def collect(
    folders: Folders = None,
    dirs: Dirs = None,
    quota_bytes: Annotated[
        str | None, typer.Option(help="Page files that each folder may hold, such as 500GB.")
    ] = None,
    min_free_bytes: Annotated[
        str | None, typer.Option(help="What must stay free on each file system, such as 4GiB.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evict least recently used pages until every folder is within its bounds.

    Bounds that are not given here are those of HCACHE_CONFIG. Temporary files of killed servers
    are deleted too.
    """
    bounds = {"quota_bytes": quota_bytes, "min_free_bytes": min_free_bytes}
    config = common.existing_store(folders, dirs, **bounds)
    with common.explained(), closing(PageStore(config, _WRITER, background=False)) as store:
        for disk in store.disks:
            disk.make_room(0, seconds=60.0)
        result = {
            "pages": store.stats.pages_evicted,
            "bytes": store.stats.bytes_evicted,
            "not_removable": store.stats.evict_errors,
        }
    if as_json:
        common.print_json(result)
    else:
        say(f"{result['pages']:,} pages evicted, {human_bytes(result['bytes'])}")


def clear(
    folders: Folders = None,
    dirs: Dirs = None,
    namespace: NamespaceDigits = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete all pages, or those of one namespace."""
    config = common.existing_store(folders, dirs)
    with common.explained():
        doomed: Counter[bytes] = Counter()
        for path in config.dirs:
            with _viewed(path) as folder:
                doomed.update(entry.name.namespace for entry in _entries(folder, namespace))
    if namespace is not None and len(doomed) > 1:
        common.fail(f"{len(doomed)} namespaces begin with {namespace!r}; give more digits")
    if namespace is not None and not doomed:
        say(f"no namespace begins with {namespace!r}; `hcache stats` lists them", common.errors)
        raise typer.Exit(1)
    if (count := doomed.total()) and not yes:
        where = ", ".join(map(str, config.dirs))
        typer.confirm(f"Delete {count:,} pages in {where}?", abort=True, err=True)
    with (
        common.explained(),
        closing(PageStore(config, _WRITER, background=False)) as store,
        common.progress_bar(hidden=as_json) as progress,
    ):
        dropped = sum(map(store.drop, progress.track(sorted(doomed), description="deleting")))
    if as_json:
        common.print_json({"pages": dropped})
    else:
        say(f"{dropped:,} pages deleted")


def _verified(path: Path, bar: Progress, rebuild: bool, repair: bool) -> dict[str, Any]:
    task = bar.add_task(str(path), total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    adopted = 0
    if rebuild:
        with _opened(path) as folder:
            folder.set_index_aside()
    with _opened(path) if rebuild or repair else _viewed(path) as view:
        if isinstance(view, Folder) and (rebuild or view.index_is_partial):
            adopted = len(find_unknown_files(view, adopt=True, progress=report).pages)
            view.mark_index_complete()
        found = verify_folder(view, repair=repair, progress=report)
    return {**asdict(found), "adopted": adopted, "problems": found.problems}


def _viewed(path: Path) -> closing[Folder]:
    """A store folder to look at, beside the servers that use it; it need not be writable."""
    return closing(Folder(path, FileOps(), readonly=True))


def _opened(path: Path) -> closing[Folder]:
    """A store folder to change, opened beside the servers that use it."""
    return closing(Folder(path, FileOps()))


def _entries(folder: Folder, namespace: str | None) -> Iterator[Entry]:
    """The entries of ``folder`` whose namespace begins with these hexadecimal digits."""
    digits = (namespace or "").lower()
    return (e for e in folder.index.entries() if e.name.namespace.hex().startswith(digits))


def _folder_stats(path: Path) -> dict[str, Any]:
    with _viewed(path) as folder:
        totals = folder.index.totals()
        spaces: dict[str, dict[str, Any]] = {}
        for entry in folder.index.entries():
            space = spaces.setdefault(
                entry.name.namespace.hex(), {"pages": 0, "bytes": 0, "last_used": 0.0}
            )
            if space.get("codec") is None and space["pages"] < _READ_AT_MOST:
                space["codec"] = codecs_of(path / "pages" / entry.name.bucket / entry.name.file)
            space["pages"] += 1
            space["bytes"] += entry.file_bytes
            space["last_used"] = max(space["last_used"], entry.rank / 1e9)
        report = read_report(path)
        return {
            "folder": str(path),
            "last_server": report.model_dump(mode="json") if report else None,
            "pages": totals.pages,
            "bytes": totals.bytes,
            "free_bytes": folder.ops.free_bytes(folder.root_fd),
            "direct_io": bool(folder.io.alignment.flags),
            "index_complete": not folder.index_is_partial,
            "namespaces": spaces,
        }


def codecs_of(file: Path) -> str | None:
    """Names of the codecs of the layers in a page file, with commas between them.

    Returns:
        None if the file cannot be read, or holds no page of our own form. Only headers are read.
    """
    try:
        with file.open("rb") as opened:
            first = opened.read(BLOCK)
            rest = opened.read(header_length(memoryview(first)) - BLOCK)
            header = parse_header(memoryview(first + rest))
            page = opened.read(header.layout.table.segments[0].length)
    except (OSError, DamagedFileError):
        return None
    if len(page) < PREFIX.size:
        return None
    magic, version, layers, _, _, page_size = PREFIX.unpack_from(page)
    start = TOKENS + 8 * page_size
    table = page[start : start + layers * LAYER_ENTRY.size]
    if (magic, version) != (MAGIC, FORMAT_VERSION) or len(table) < layers * LAYER_ENTRY.size:
        return None
    stored = dict.fromkeys(code for method, _, code in LAYER_ENTRY.iter_unpack(table) if method)
    return ", ".join(code.rstrip(b"\0").decode("ascii", "replace") for code in stored)


def _last_servers(config: HCacheConfig) -> list[tuple[Path, ServerReport]]:
    """Folders with the report of the server that opened them last."""
    reports = ((path, read_report(path)) for path in config.dirs)
    return [(path, report) for path, report in reports if report is not None]


def _show_last_servers(config: HCacheConfig) -> None:
    for path, report in _last_servers(config):
        reason = f" ({report.reason})" if report.reason is not None else ""
        codec = f", codec {report.codec}" if report.codec is not None else ""
        pages = f"{report.mode} mode, {report.pages} pages{reason}{codec}"
        say(f"\nLast server of {path}: {pages}; {report.model}, {when(report.time)}")


def _show_findings(results: dict[str, dict[str, Any]]) -> None:
    heads = ("intact#", "bytes#", *(f"{kind}#" for kind in _KINDS), "repaired#", "folder")
    shown = common.table("", *heads)
    for path, found in results.items():
        counts = [len(found[kind]) for kind in _KINDS]
        bad = (f"[red]{count:,}[/red]" if count else "0" for count in counts)
        intact = f"{found['pages']:,}", human_bytes(found["bytes"])
        shown.add_row(*intact, *bad, f"{found['repaired']:,}", path)
    screen.print(shown)
    for path, found in results.items():
        lines = [f"{name}: {reason}" for name, reason in found["damaged"] + found["unknown"]]
        lines += [f"{name}: no such file" for name in found["missing"]] + found["index"]
        if len(lines) > _SHOWN_AT_MOST:
            lines[_SHOWN_AT_MOST:] = [f"and {len(lines) - _SHOWN_AT_MOST} more (see --json)"]
        for line in lines:
            say(f"{path}: {line}")
