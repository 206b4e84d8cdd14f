"""What ``hcache ingest`` gives to a server: documents in files, and the journal of those stored.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from hcache_backend.cli.client import Client, RequestError, UnusableServer

LINES = ".jsonl"


class DocumentError(ValueError):
    """A document cannot be read; the message names the file, and what would be right."""


class Document(NamedTuple):
    """One document.

    Attributes:
        name: Its path, with the number or the ``id`` of its line in a JSONL file.
        content: Its text, or its token ids.
        digest: SHA-256 of the content.
    """

    name: str
    content: str | list[int]
    digest: str


def find_documents(paths: Sequence[Path], has_prefix: bool) -> Iterator[Document]:
    """All documents of files and folders, in the order of their names; each is read when its turn
    comes.

    A file is a document, in UTF-8. A ``.jsonl`` file has one in each line: an object with ``text``,
    or ``input_ids`` (token ids), and an ``id`` where it likes. Folders are searched; hidden files
    are left out. The same content twice is one document.

    Args:
        has_prefix: A text is to stand before every document: token ids have no place for it.

    Raises:
        DocumentError: One cannot be read, or there is none.
    """
    seen: set[str] = set()
    for path in (file for given in paths for file in _files(given)):
        try:
            for name, content in _contents(path):
                if has_prefix and not isinstance(content, str):
                    raise DocumentError(
                        f"{name}: has 'input_ids', and --prefix-file is a text: put its tokens "
                        "before those of the document, and leave --prefix-file out"
                    )
                digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
                if digest not in seen:
                    seen.add(digest)
                    yield Document(name, content, digest)
        except OSError as error:
            raise DocumentError(f"{path}: {error.strerror}") from None
    if not seen:
        raise DocumentError(f"{', '.join(map(str, paths))}: no document is there")


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for below in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in below.relative_to(path).parts)
        if below.is_file() and not hidden:
            yield below


def _contents(path: Path) -> Iterator[tuple[str, str | list[int]]]:
    """Names and contents of the documents of a file."""
    if path.suffix != LINES:
        content = _text(path.read_bytes(), str(path))
        if content.strip():  # an empty file is none
            yield str(path), content
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _entry(line, f"{path}:{number}")


def _entry(line: bytes, where: str) -> tuple[str, str | list[int]]:
    try:
        entry = json.loads(_text(line, where))
    except json.JSONDecodeError as error:
        raise DocumentError(f"{where}: not JSON: {error}") from None
    if isinstance(entry, dict):
        name = f"{where} ({entry['id']})" if "id" in entry else where
        text, ids = entry.get("text"), entry.get("input_ids")
        if isinstance(text, str) and text and ids is None:
            return name, text
        if text is None and isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return name, ids
    raise DocumentError(
        f'{where}: expected {{"text": ...}} or {{"input_ids": [...]}}, found '
        f"{line.decode()[:60].strip()}"
    )


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{where}: not UTF-8 text at byte {error.start}") from None


_IDENTITY = ("model_path", "weight_version", "dtype", "kv_cache_dtype", "page_size")


class Journal:
    """Which documents are in L3, one JSON line each; another server's or prefix's are others.

    The file at ``path`` is created if it is missing; ``server`` is what the server says of itself.

    Raises:
        UnusableServer: It cannot be read.
    """

    def __init__(self, path: Path, server: Mapping[str, Any], prefix: str) -> None:
        self.path = path
        served = json.dumps([server.get(name) for name in _IDENTITY])
        self._seed = served + "\n" + hashlib.sha256(prefix.encode()).hexdigest()
        self._keys: set[str] = set()
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, ValueError) as error:
            raise UnusableServer(f"--journal {path}: {error}") from None
        for number, line in enumerate(lines, 1):
            try:
                self._keys.add(json.loads(line)["key"])
            except (ValueError, KeyError, TypeError):
                if number < len(lines):  # the last line may have been cut by a kill
                    raise UnusableServer(
                        f"--journal {path}: line {number} is not a journal entry; use another file"
                    ) from None
                path.write_text("".join(f"{kept}\n" for kept in lines[:-1]), encoding="utf-8")

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


@dataclass
class Ingested:
    """What became of the documents.

    Attributes:
        stored: Documents that are in L3 now and were not in the journal.
        tokens: Tokens of the stored documents.
        tokens_found_in_l3: Tokens of theirs that L3 already had.
        shorter_than_a_page: Stored documents that fill no page: L3 has nothing of them.
        failed: Name of a document -> why the server refused it.
    """

    stored: int = 0
    tokens: int = 0
    tokens_found_in_l3: int = 0
    shorter_than_a_page: int = 0
    failed: dict[str, str] = field(default_factory=dict)


async def store_documents(
    client: Client,
    documents: Iterable[Document],
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
        group: Documents between two flushes.
        settle_s: Instead of a flush, which needs an idle server, wait this many seconds for L3.
        done: Called after each document.

    Raises:
        UnusableServer: The server went away, or could not be flushed.
        DocumentError: A document cannot be read.
        OSError: The journal cannot be written.
    """
    result = Ingested()
    missing = (document for document in documents if document not in journal)
    gate = asyncio.Semaphore(max_parallel)

    async def store(document: Document) -> tuple[Document, int] | None:
        async with gate:
            content = document.content
            try:
                prefilled = await client.prefill(
                    prefix + content if isinstance(content, str) else content
                )
            except RequestError as error:
                await _still_there(client)
                result.failed[document.name] = str(error)
                return None
            finally:
                done()
        result.stored += 1
        result.tokens += prefilled.tokens
        result.tokens_found_in_l3 += prefilled.found_in_l3
        result.shorter_than_a_page += prefilled.tokens < page_size
        return document, prefilled.tokens

    while some := list(islice(missing, group)):
        tasks = [asyncio.ensure_future(store(one)) for one in some]
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
    """Raise a UnusableServer if a request failed because there is no server any more."""
    try:
        await client.server()
    except UnusableServer:
        raise UnusableServer(
            f"{client.url}: the server went away; start it and run the command again, which goes "
            "on where the journal ends"
        ) from None
