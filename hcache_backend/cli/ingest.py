"""``hcache ingest``: pages of documents, made offline through a running server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hcache_backend.cli.common import (
    AsJson,
    errors,
    explained,
    human_bytes,
    print_json,
    progress_bar,
    screen,
    table,
)
from hcache_backend.cli.metrics_page import METRICS_LAG_S, look, moved

FAILED = 1
SHOWN_FAILURES = 10


def ingest(
    documents: Annotated[
        list[Path],
        typer.Argument(
            help="Text files, folders of them, or .jsonl files: an object with 'text' or "
            "'input_ids' in each line."
        ),
    ],
    url: Annotated[
        str, typer.Option(help="The server whose L3 gets the pages.")
    ] = "http://127.0.0.1:30000",
    api_key: Annotated[str | None, typer.Option(help="The server's (admin) API key.")] = None,
    prefix_file: Annotated[
        Path | None,
        typer.Option(
            help="Text that stands before the document in every question: system prompt, template."
        ),
    ] = None,
    journal: Annotated[
        Path, typer.Option(help="Progress file; a later run continues from it.")
    ] = Path("hcache-ingest.jsonl"),
    max_parallel: Annotated[int, typer.Option(min=1, help="Documents at a time.")] = 4,
    group: Annotated[int, typer.Option(min=1, help="Write progress after every N documents.")] = 32,
    settle: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="On a busy server: wait this many seconds before recording progress. Default: "
            "flush the caches, which is certain but needs an idle server.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fill the store with documents ahead of time: a server computes them and stores their pages.

    Questions then find them in L3, if they begin with the same text: the prefix file, then the
    document. Exit status: 0; 1 when the server refused documents; 2 when it could not run.
    """
    from hcache_backend.cli.client import Client, UnusableServer
    from hcache_backend.cli.documents import DocumentError, Journal, find_documents, store_documents

    with explained():
        prefix = prefix_file.read_text(encoding="utf-8") if prefix_file is not None else ""

    async def run() -> dict[str, Any]:
        # Only names and digests are kept: what is missing is read again when its turn comes.
        found = [one._replace(content="") for one in find_documents(documents, bool(prefix))]
        async with Client(url, api_key) as client:
            server = await client.server()
            if not server.get("hicache_storage_backend"):
                errors.print(
                    "the server was started without an L3 backend: unless one was attached since, "
                    "the pages are gone when it ends",
                    style="yellow",
                    soft_wrap=True,
                )
            notes = Journal(journal, server, prefix)
            missing = sum(document not in notes for document in found)
            before, begun = await asyncio.to_thread(look, url), time.monotonic()
            with progress_bar(hidden=False) as bar:
                task = bar.add_task("documents", total=len(found), completed=len(found) - missing)
                result = await store_documents(
                    client,
                    find_documents(documents, bool(prefix)),
                    notes,
                    prefix=prefix,
                    page_size=int(server.get("page_size") or 1),
                    max_parallel=max_parallel,
                    group=group,
                    settle_s=settle,
                    done=lambda: bar.advance(task),
                )
            seconds = time.monotonic() - begun
            if missing:
                await asyncio.sleep(METRICS_LAG_S)
            l3 = moved(before, await asyncio.to_thread(look, url))
        return {
            **asdict(result),
            "already_stored": len(found) - missing,
            "seconds": seconds,
            "tokens_per_second": result.tokens / seconds if seconds else 0.0,
            "l3": l3,
        }

    with explained(UnusableServer, DocumentError):
        said = asyncio.run(run())
    if as_json:
        print_json(said)
    else:
        show(said)
    if said["failed"]:
        raise typer.Exit(FAILED)


def show(said: dict[str, Any]) -> None:
    shown = table("", "", "#")
    shown.add_row("documents stored", f"{said['stored']:,}")
    shown.add_row("stored before", f"{said['already_stored']:,}")
    shown.add_row("refused", f"{len(said['failed']):,}")
    shown.add_row("tokens", f"{said['tokens']:,}")
    shown.add_row("tokens already in L3", f"{said['tokens_found_in_l3']:,}")
    shown.add_row("tokens per second", f"{said['tokens_per_second']:,.0f}")
    if "bytes_written" in said["l3"]:
        shown.add_row("L3 writes", human_bytes(said["l3"]["bytes_written"]))
    screen.print(shown)
    if said["shorter_than_a_page"]:
        _note(
            f"{said['shorter_than_a_page']} documents are shorter than a page and not stored in L3"
        )
    if said["l3"].get("pages_dropped"):
        _note(f"L3 dropped {said['l3']['pages_dropped']:,} pages: see hcache top and its quota")
    if said["l3"].get("pages_evicted"):
        _note(
            f"L3 evicted {said['l3']['pages_evicted']:,} pages to stay within its quota: it may be "
            "too small for all documents"
        )
    for name, why in list(said["failed"].items())[:SHOWN_FAILURES]:
        _note(f"{name}: {why}")
    if len(said["failed"]) > SHOWN_FAILURES:
        _note(f"and {len(said['failed']) - SHOWN_FAILURES} more")


def _note(text: str) -> None:
    screen.print(f"- {text}", style="yellow", highlight=False, soft_wrap=True, markup=False)
