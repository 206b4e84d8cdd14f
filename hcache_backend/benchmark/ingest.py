"""Has a server make and store the pages of documents, before anybody asks about them.

The paper, section 3.1: states of contexts that are known "can be generated and saved offline". A
document is sent as a prompt; the server computes it once, and HiCache writes its pages to L3. Every
group of documents is followed by a flush, which returns when L3 has all of them; only then does the
journal name them. So a document that the journal names is in L3, whenever the command was ended,
unless L3 had no room for it: the server's metrics count what it dropped or evicted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hcache_backend.benchmark.client import BenchError, Client, RequestError
from hcache_backend.benchmark.documents import Document

_IDENTITY = ("model_path", "weight_version", "dtype", "kv_cache_dtype", "page_size")


class Journal:
    """Which documents are in L3, one JSON line each; another server's or prefix's are others.

    Args:
        path: Of the file; it is made where it is missing.
        server: What the server says of itself.
        prefix: What stands before every document.

    Raises:
        BenchError: It cannot be read.
    """

    def __init__(self, path: Path, server: Mapping[str, Any], prefix: str) -> None:
        self.path = path
        served = json.dumps([server.get(name) for name in _IDENTITY])
        self._seed = served + "\n" + hashlib.sha256(prefix.encode()).hexdigest()
        self._keys: set[str] = set()
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, ValueError) as error:
            raise BenchError(f"--journal {path}: {error}") from None
        for number, line in enumerate(lines, 1):
            try:
                self._keys.add(json.loads(line)["key"])
            except (ValueError, KeyError, TypeError):
                if number < len(lines):  # the last line may have been cut by a kill
                    raise BenchError(
                        f"--journal {path}: line {number} is none of a journal; give another file"
                    ) from None
                self._drop_last(lines)

    def __contains__(self, document: Document) -> bool:
        return self._key(document) in self._keys

    def add(self, stored: Sequence[tuple[Document, int]]) -> None:
        """Note documents with their tokens; on disk when this returns.

        Raises:
            OSError: The file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for document, tokens in stored:
                key = self._key(document)
                self._keys.add(key)
                entry = {"key": key, "name": document.name, "tokens": tokens}
                file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _key(self, document: Document) -> str:
        return hashlib.sha256(f"{self._seed}\n{document.digest}".encode()).hexdigest()

    def _drop_last(self, lines: Sequence[str]) -> None:
        kept = "".join(f"{line}\n" for line in lines[:-1])
        self.path.write_text(kept, encoding="utf-8")


@dataclass
class Ingested:
    """What came of it.

    Attributes:
        stored: Documents that are in L3 now and were not in the journal.
        tokens: Of these.
        found_tokens: Of these, those that L3 already had.
        short: Of these, documents that are shorter than a page: nothing of them is stored.
        failed: Name of a document -> why the server refused it.
    """

    stored: int = 0
    tokens: int = 0
    found_tokens: int = 0
    short: int = 0
    failed: dict[str, str] = field(default_factory=dict)


async def ingest(
    client: Client,
    documents: Sequence[Document],
    journal: Journal,
    *,
    prefix: str = "",
    page_size: int = 1,
    max_parallel: int = 4,
    group: int = 32,
    settle_s: float | None = None,
    done: Callable[[], None] = lambda: None,
) -> Ingested:
    """Store documents that the journal does not name.

    A document that the server refuses is noted and left out.

    Args:
        prefix: Text before every document, as it stands before it in questions.
        max_parallel: Documents at a time.
        group: Documents between two flushes.
        settle_s: Instead of a flush, which needs an idle server, wait so many seconds for L3.
        done: Called after each document.

    Raises:
        BenchError: The server went away, or could not be flushed.
        DocumentError: A document changed or cannot be read any more.
        OSError: The journal cannot be written.
    """
    result = Ingested()
    missing = [document for document in documents if document not in journal]
    gate = asyncio.Semaphore(max_parallel)

    async def store(document: Document) -> tuple[Document, int] | None:
        async with gate:
            prompt = document.prompt(prefix)
            try:
                reply = await client.generate(prompt, 1)
            except RequestError as error:
                await _still_there(client)
                result.failed[document.name] = str(error)
                return None
            finally:
                done()
        result.stored += 1
        result.tokens += reply.prompt_tokens
        result.found_tokens += reply.cached.storage
        result.short += reply.prompt_tokens < page_size
        return document, reply.prompt_tokens

    for start in range(0, len(missing), group):
        tasks = [asyncio.ensure_future(store(one)) for one in missing[start : start + group]]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if settle_s is None:
            await client.flush()
        else:
            await asyncio.sleep(settle_s)
        journal.add([entry for entry in found if entry is not None])
    return result


async def _still_there(client: Client) -> None:
    """Raise a BenchError if a request failed because there is no server any more."""
    try:
        await client.server()
    except BenchError:
        raise BenchError(
            f"{client.url}: the server went away; start it and run the command again, which goes "
            "on where the journal ends"
        ) from None
