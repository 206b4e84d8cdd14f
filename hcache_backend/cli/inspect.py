"""``hcache stats`` and ``hcache ls``: what is in the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from hcache_backend.cli.common import (
    AsJson,
    Dirs,
    NamespaceDigits,
    existing_store,
    explained,
    human_bytes,
    print_json,
    screen,
    settings,
    table,
)
from hcache_backend.store.file_ops import FileOps
from hcache_backend.store.folder import Folder, open_folder
from hcache_backend.store.index import Entry
from hcache_backend.store.server_report import ServerReport, read_report


@contextmanager
def opened(path: Path) -> Iterator[Folder]:
    """A store folder, opened beside whoever uses it."""
    with closing(open_folder(path, FileOps(), create=False)) as folder:
        yield folder


def stats(dirs: Dirs = None, as_json: AsJson = False) -> None:
    """How much is stored, for each folder and each namespace, and by which server last."""
    config = existing_store(settings(dirs))
    with explained():
        found = [_folder_stats(path) for path in config.dirs]
    if as_json:
        print_json({"folders": found})
        return
    folders = table("Folders", "pages#", "bytes#", "free#", "direct I/O", "index", "folder")
    spaces = table("Namespaces", "namespace", "pages#", "bytes#", "last used", "folder")
    for folder in found:
        folders.add_row(
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
                f"{space['pages']:,}",
                human_bytes(space["bytes"]),
                _when(space["last_used"]),
                folder["folder"],
            )
    screen.print(folders)
    if spaces.row_count:
        screen.print()
        screen.print(spaces)
    for path in config.dirs:
        report = read_report(path)
        if report is not None:
            screen.print()
            screen.print(_last_server(path, report), highlight=False, soft_wrap=True)


def list_pages(
    dirs: Dirs = None,
    namespace: NamespaceDigits = None,
    limit: Annotated[int, typer.Option(min=1, help="How many page files at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """The page files, by namespace and key."""
    config = existing_store(settings(dirs))
    rows: list[dict[str, Any]] = []
    with explained():
        for path in config.dirs:
            with opened(path) as folder:
                for entry in folder.index.entries():
                    if len(rows) >= limit:
                        break
                    if namespace is None or entry.namespace.hex().startswith(namespace.lower()):
                        rows.append(_row(path, entry))
    if as_json:
        print_json({"pages": rows})
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


def _folder_stats(path: Path) -> dict[str, Any]:
    with opened(path) as folder:
        totals = folder.index.totals()
        spaces: dict[str, dict[str, Any]] = {}
        for entry in folder.index.entries():
            space = spaces.setdefault(
                entry.namespace.hex(), {"pages": 0, "bytes": 0, "last_used": 0.0}
            )
            space["pages"] += 1
            space["bytes"] += entry.record.file_bytes
            space["last_used"] = max(space["last_used"], entry.record.stamp / 1e9)
        report = read_report(path)
        return {
            "folder": str(path),
            "last_server": report.model_dump(mode="json") if report else None,
            "pages": totals.pages,
            "bytes": totals.bytes,
            "free_bytes": folder.ops.free_bytes(folder.root_fd),
            "direct_io": bool(folder.alignment.flags),
            "index_complete": not folder.index_is_partial,
            "namespaces": spaces,
        }


def _last_server(path: Path, report: ServerReport) -> str:
    """Mode of the server that opened the folder last, and why it is not hidden mode."""
    why = f" ({report.reason})" if report.reason is not None else ""
    codec = f", codec {report.codec}" if report.codec is not None else ""
    opened = _when(report.time)
    return f"Last server of {path}: {report.mode} mode{why}{codec}; {report.model}, {opened}"


def _row(path: Path, entry: Entry) -> dict[str, Any]:
    record = entry.record
    return {
        "folder": str(path),
        "namespace": entry.namespace.hex(),
        "key": entry.key.hex(),
        "share": f"{record.share.number} of {record.share.of}",
        "bytes": record.file_bytes,
        "writer": record.writer.hex(),
        "last_used": record.stamp / 1e9,
    }


def _when(stamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))
