"""``hcache stats``, ``ls``, ``verify``, ``gc`` and ``clear``: all may run beside a live server."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from hcache_backend.cli.common import (
    AsJson,
    Dirs,
    Folders,
    NamespaceDigits,
    errors,
    existing_store,
    explained,
    fail,
    human_bytes,
    print_json,
    progress_bar,
    screen,
    settings,
    table,
)
from hcache_backend.cli.page_codecs import codecs_of
from hcache_backend.config import HCacheConfig
from hcache_backend.server_report import ServerReport, read_report
from hcache_backend.store import FileOps, PageStore
from hcache_backend.store.folder import Folder
from hcache_backend.store.index import Entry
from hcache_backend.store.maintenance import find_unknown_files, verify_folder

_WRITER = b"hcachcli"  # a store has a writer; these commands write no pages
_SHOWN_AT_MOST = 20
_READ_AT_MOST = 3
"""Headers of so many pages are read for the codec of their namespace: servers delete files."""


def stats(folders: Folders = None, dirs: Dirs = None, as_json: AsJson = False) -> None:
    """Show how much each folder and each namespace holds, and which server was the last."""
    config = existing_store(settings(folders, dirs))
    with explained():
        found = [_folder_stats(path) for path in config.dirs]
    if as_json:
        print_json({"folders": found})
        return
    shown = table("Folders", "pages#", "bytes#", "free#", "direct I/O", "index", "folder")
    spaces = table("Namespaces", "namespace", "codec", "pages#", "bytes#", "last used", "folder")
    for folder in found:
        shown.add_row(
            f"{folder['pages']:,}",
            human_bytes(folder["bytes"]),
            human_bytes(folder["free_bytes"]),
            "yes" if folder["direct_io"] else "no",
            "complete" if folder["index_complete"] else "being completed",
            folder["folder"],
        )
        for name, space in folder["namespaces"].items():
            spaces.add_row(
                name[:8],
                space["codec"] or "-",
                f"{space['pages']:,}",
                human_bytes(space["bytes"]),
                _when(space["last_used"]),
                folder["folder"],
            )
    screen.print(shown)
    if spaces.row_count:
        screen.print()
        screen.print(spaces)
    _show_last_servers(config)


def list_pages(
    folders: Folders = None,
    dirs: Dirs = None,
    namespace: NamespaceDigits = None,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of page files shown.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List the page files by namespace and key, and which server was the last."""
    config = existing_store(settings(folders, dirs))
    rows: list[dict[str, Any]] = []
    with explained():
        for path in config.dirs:
            with _viewed(path) as folder:
                found = islice(_entries(folder, namespace), limit - len(rows))
                rows += [_row(path, entry) for entry in found]
    if as_json:
        print_json({"pages": rows, "last_servers": _last_servers(config)})
        return
    shown = table("", "namespace", "key", "share", "bytes#", "writer", "last used", "folder")
    for row in rows:
        shown.add_row(
            row["namespace"][:8],
            row["key"][:12],
            row["share"],
            human_bytes(row["bytes"]),
            row["writer"][:8],
            _when(row["last_used"]),
            row["folder"],
        )
    screen.print(shown)
    if len(rows) == limit:
        screen.print(f"(the first {limit}; more with --limit)")
    _show_last_servers(config)


def verify(
    folders: Folders = None,
    dirs: Dirs = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="First rebuild the index from the page files.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Delete damaged pages and index entries without a file."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read and verify every page. Exit status 1: problems were found and not repaired."""
    config = existing_store(settings(folders, dirs))
    results: dict[str, dict[str, Any]] = {}
    with explained(), progress_bar(hidden=as_json) as progress:
        for path in config.dirs:
            task = progress.add_task(str(path), total=None)

            def report(done: int, total: int, task: Any = task) -> None:
                progress.update(task, completed=done, total=total)

            adopted = 0
            if rebuild:
                with _opened(path) as folder:
                    folder.set_index_aside()
            if rebuild or repair:
                with _opened(path) as folder:
                    if rebuild or folder.index_is_partial:
                        adopted = len(find_unknown_files(folder, adopt=True, progress=report).pages)
                        folder.mark_index_complete()
                    found = verify_folder(folder, repair=repair, progress=report)
            else:
                with _viewed(path) as view:
                    found = verify_folder(view, progress=report)
            results[str(path)] = {
                **asdict(found),
                "adopted": adopted,
                "problems": found.problems,
            }
    if as_json:
        print_json({"folders": results})
    else:
        _show_findings(results)
    if any(result["problems"] > result["repaired"] for result in results.values()):
        if not (repair or as_json):
            screen.print("Delete damaged pages with: hcache verify --repair")
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
    config = existing_store(
        settings(folders, dirs, quota_bytes=quota_bytes, min_free_bytes=min_free_bytes)
    )
    with explained(), closing(_store(config)) as store:
        for disk in store.disks:
            disk.make_room(0, seconds=60.0)
        result = {
            "pages": store.stats.pages_evicted,
            "bytes": store.stats.bytes_evicted,
            "not_removable": store.stats.evict_errors,
        }
    if as_json:
        print_json(result)
    else:
        screen.print(f"{result['pages']:,} pages evicted, {human_bytes(result['bytes'])}")


def clear(
    folders: Folders = None,
    dirs: Dirs = None,
    namespace: NamespaceDigits = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete all pages, or those of one namespace."""
    config = existing_store(settings(folders, dirs))
    with explained():
        doomed: Counter[bytes] = Counter()
        for path in config.dirs:
            with _viewed(path) as folder:
                doomed.update(entry.name.namespace for entry in _entries(folder, namespace))
    if namespace is not None and len(doomed) > 1:
        fail(f"{len(doomed)} namespaces begin with {namespace!r}; give more digits")
    if namespace is not None and not doomed:
        errors.print(f"no namespace begins with {namespace!r}; `hcache stats` lists them")
        raise typer.Exit(1)
    count = doomed.total()
    if count and not yes:
        where = ", ".join(map(str, config.dirs))
        typer.confirm(f"Delete {count:,} pages in {where}?", abort=True, err=True)
    dropped = 0
    with explained(), closing(_store(config)) as store, progress_bar(hidden=as_json) as progress:
        for name in progress.track(sorted(doomed), description="deleting"):
            dropped += store.drop(name)
    if as_json:
        print_json({"pages": dropped})
    else:
        screen.print(f"{dropped:,} pages deleted")


def _viewed(path: Path) -> closing[Folder]:
    """A store folder to look at, beside the servers that use it; it need not be writable."""
    return closing(Folder(path, FileOps(), HCacheConfig().buffer_bytes, readonly=True))


def _opened(path: Path) -> closing[Folder]:
    """A store folder to change, opened beside the servers that use it."""
    return closing(Folder(path, FileOps(), HCacheConfig().buffer_bytes))


def _entries(folder: Folder, namespace: str | None) -> Iterator[Entry]:
    """The entries of ``folder`` whose namespace begins with these hexadecimal digits."""
    digits = (namespace or "").lower()
    for entry in folder.index.entries():
        if entry.name.namespace.hex().startswith(digits):
            yield entry


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


def _last_servers(config: HCacheConfig) -> dict[str, Any]:
    """By folder, what the server that opened it last said about itself."""
    reports = {str(path): read_report(path) for path in config.dirs}
    return {path: found.model_dump(mode="json") for path, found in reports.items() if found}


def _show_last_servers(config: HCacheConfig) -> None:
    for path in config.dirs:
        report = read_report(path)
        if report is not None:
            screen.print()
            screen.print(_last_server(path, report), highlight=False, soft_wrap=True)


def _last_server(path: Path, report: ServerReport) -> str:
    """What pages the server that opened the folder last has, and why no other ones."""
    why = f" ({report.reason})" if report.reason is not None else ""
    codec = f", codec {report.codec}" if report.codec is not None else ""
    opened = _when(report.time)
    pages = f"{report.mode} mode, {report.pages} pages"
    return f"Last server of {path}: {pages}{why}{codec}; {report.model}, {opened}"


def _row(path: Path, entry: Entry) -> dict[str, Any]:
    namespace, key, share = entry.name
    return {
        "folder": str(path),
        "namespace": namespace.hex(),
        "key": key.hex(),
        "share": f"{share.number} of {share.of}",
        "bytes": entry.file_bytes,
        "writer": entry.writer.hex(),
        "last_used": entry.rank / 1e9,
    }


def _when(stamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))


def _store(config: HCacheConfig) -> PageStore:
    return PageStore(config, _WRITER, background=False)


def _show_findings(results: dict[str, dict[str, Any]]) -> None:
    shown = table(
        "", "intact#", "bytes#", "damaged#", "missing#", "unknown#", "index#", "repaired#", "folder"
    )
    for path, found in results.items():
        counts = [len(found[kind]) for kind in ("damaged", "missing", "unknown", "index")]
        shown.add_row(
            f"{found['pages']:,}",
            human_bytes(found["bytes"]),
            *(f"[red]{count:,}[/red]" if count else "0" for count in counts),
            f"{found['repaired']:,}",
            path,
        )
    screen.print(shown)
    for path, found in results.items():
        lines = [f"{name}: {reason}" for name, reason in found["damaged"] + found["unknown"]]
        lines += [f"{name}: no such file" for name in found["missing"]] + found["index"]
        for line in lines[:_SHOWN_AT_MOST]:
            screen.print(f"{path}: {line}", highlight=False, soft_wrap=True)
        if len(lines) > _SHOWN_AT_MOST:
            screen.print(f"{path}: and {len(lines) - _SHOWN_AT_MOST} more (see --json)")
