"""``hcache verify``, ``hcache gc`` and ``hcache clear``; all safe beside a live server."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import Annotated, Any

import typer

from hcache_backend.cli.common import (
    WRITER,
    AsJson,
    Dirs,
    NamespaceDigits,
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
from hcache_backend.cli.inspect import opened
from hcache_backend.config import HCacheConfig
from hcache_backend.store.page_io import PageIO
from hcache_backend.store.rebuild import adopt_unknown_files
from hcache_backend.store.striped import StripedPageStore
from hcache_backend.store.verify import verify_folder

_SHOWN_AT_MOST = 20


def verify(
    dirs: Dirs = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="First make the index anew from the page files.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete what is damaged or leads nowhere.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read and verify every page. Ends with 1 when something was wrong and was not repaired."""
    config = existing_store(settings(dirs))
    results: dict[str, dict[str, Any]] = {}
    with explained(), progress_bar(hidden=as_json) as progress:
        for path in config.dirs:
            task = progress.add_task(str(path), total=None)

            def report(done: int, total: int, task: Any = task) -> None:
                progress.update(task, completed=done, total=total)

            adopted = 0
            if rebuild:
                with opened(path) as folder:
                    folder.set_index_aside()
            with opened(path) as folder:
                io = PageIO(folder.ops, config.buffer_bytes)
                if rebuild or (repair and folder.index_is_partial):
                    adopted = adopt_unknown_files(folder, io, progress=report).pages
                    folder.mark_index_complete()
                found = verify_folder(folder, io, repair=repair, progress=report)
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
        raise typer.Exit(1)


def collect(
    dirs: Dirs = None,
    quota_bytes: Annotated[
        int | None, typer.Option(min=1, help="Bytes of page files a folder may hold.")
    ] = None,
    min_free_bytes: Annotated[
        int | None, typer.Option(min=0, help="Bytes that must stay free on each file system.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evict least recently used pages until every folder is within its bounds.

    The bounds are those of HCACHE_CONFIG, where they are not given here. Leftovers of servers that
    were killed go too.
    """
    config = existing_store(settings(dirs, quota_bytes=quota_bytes, min_free_bytes=min_free_bytes))
    with explained(), closing(_store(config)) as store:
        for volume in store.volumes:
            volume.make_room(0, seconds=60.0)
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
    dirs: Dirs = None,
    namespace: NamespaceDigits = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete pages: all of them, or those of one namespace."""
    config = existing_store(settings(dirs))
    with explained():
        doomed: dict[bytes, int] = {}
        for path in config.dirs:
            with opened(path) as folder:
                for entry in folder.index.entries():
                    if namespace is None or entry.namespace.hex().startswith(namespace.lower()):
                        doomed[entry.namespace] = doomed.get(entry.namespace, 0) + 1
    if namespace is not None and len(doomed) > 1:
        fail(f"namespace {namespace!r} could be {len(doomed)} of them; give more digits")
    count = sum(doomed.values())
    if count and not yes:
        where = ", ".join(map(str, config.dirs))
        typer.confirm(f"Delete {count:,} pages in {where}?", abort=True, err=True)
    dropped = 0
    with (
        explained(),
        closing(_store(config)) as store,
        progress_bar(hidden=as_json) as progress,
    ):
        for name in progress.track(sorted(doomed), description="deleting"):
            dropped += sum(volume.drop(name) for volume in store.volumes)
    if as_json:
        print_json({"pages": dropped})
    else:
        screen.print(f"{dropped:,} pages deleted")


def _store(config: HCacheConfig) -> StripedPageStore:
    return StripedPageStore(config, WRITER, background=False)


def _show_findings(results: dict[str, dict[str, Any]]) -> None:
    shown = table(
        "", "right#", "bytes#", "damaged#", "missing#", "unknown#", "index#", "repaired#", "folder"
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
