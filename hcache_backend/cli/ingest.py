"""``hcache ingest``: pages of documents, made offline through a running server.

The paper, section 3.1: states of contexts that are known "can be generated and saved offline". A
document is sent as a prompt; the server computes it once, and HiCache writes its pages to L3. After
every group of documents the caches are flushed, and the flush ends when L3 has every page; only
then does the journal name the documents. A document in the journal is in L3, even if the command
was killed, unless L3 had no room for it: the server's metrics count pages that L3 dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from hcache_backend.cli import common
from hcache_backend.cli.common import RequestError, ask, explained, say
from hcache_backend.cli.metrics_page import METRICS_LAG_S, look, moved

_SILENCE_S = 600.0
"""The longest pause within an answer."""
_IDENTITY = ("model_path", "weight_version", "dtype", "kv_cache_dtype", "page_size")
_LINES = ".jsonl"
SHOWN_FAILURES = 10
_SMALL = "it may be too small for all documents"


class UnusableServer(RuntimeError):
    """A server cannot be used; one line that says why and what to do."""


class DocumentError(ValueError):
    """A document cannot be read; the message names the file, and the form that it must have."""


@dataclass(frozen=True)
class Server:
    """An SGLang server; ``key`` is its (admin) API key. Methods may be called in any thread."""

    url: str
    key: str | None = None

    def info(self) -> dict[str, Any]:
        """Its arguments, version and limits; raises UnusableServer if it is no SGLang server."""
        try:
            found: dict[str, Any] = json.loads(ask(self.url, "server_info", 30.0, key=self.key))
            return found
        except (RequestError, ValueError) as error:
            raise UnusableServer(
                f"no usable SGLang server at {self.url} (/server_info: {error}). Start one, or "
                "pass its address with --url"
            ) from None

    def flush(self, seconds: float = 120.0) -> None:
        """Empty device and host caches when the server is idle; L3 has every page by then.

        Raises:
            UnusableServer: It was refused, or the server was not idle within ``seconds``.
        """
        path = f"flush_cache?timeout={seconds:g}"
        try:
            ask(self.url, path, seconds + 30, body={}, key=self.key)
        except RequestError as error:
            raise UnusableServer(f"{self.url}/flush_cache: {error}") from None

    def prefill(self, prompt: Sequence[int] | str) -> tuple[int, int]:
        """Have the server compute a prompt: token ids, or a text for the server to tokenize.

        Returns:
            Its tokens, and how many of them were read from L3 instead of computed.

        Raises:
            RequestError: It was refused, or did not end well.
        """
        body = greedy_request(prompt, 1)
        answer = ask(self.url, "generate", _SILENCE_S, body=body, key=self.key)
        try:
            meta = json.loads(answer)["meta_info"]
        except (ValueError, LookupError) as error:
            raise RequestError(str(error)) from None
        check_finished(meta)
        details = meta.get("cached_tokens_details") or {}
        return int(meta["prompt_tokens"]), int(details.get("storage") or 0)


def greedy_request(prompt: Sequence[int] | str, output_tokens: int) -> dict[str, Any]:
    """The body of a request for exactly ``output_tokens`` tokens."""
    sampling = {"temperature": 0.0, "max_new_tokens": output_tokens, "ignore_eos": True}
    kind = "text" if isinstance(prompt, str) else "input_ids"
    return {kind: prompt, "sampling_params": sampling}


def check_finished(meta: Mapping[str, Any]) -> None:
    """Raise a RequestError if the server aborted the request with this ``meta_info``."""
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise RequestError(str(reason.get("message", "aborted")))


class Document(NamedTuple):
    """One document.

    Attributes:
        name: Its path, with the number and the ``id`` of its line in a JSONL file.
        content: The prefix and its text, or its token ids.
        key: Its name in the journal; the same content has another one on another server (by
            ``_IDENTITY``), or behind another prefix.
    """

    name: str
    content: str | list[int]
    key: str


def find_documents(
    paths: Iterable[Path], server: Mapping[str, Any], prefix: str = ""
) -> Iterator[Document]:
    """All documents of files and folders in the order of their names, read one by one.

    A file is a document, in UTF-8. A ``.jsonl`` file has one in each line: an object with ``text``,
    or ``input_ids`` (token ids), and optionally an ``id``. Folders are searched; hidden files and
    empty ones are left out. The same content twice is one document.

    Raises:
        DocumentError: One cannot be read, or has token ids although there is a prefix; or there is
            no document.
    """
    seed = json.dumps([server.get(name) for name in _IDENTITY]) + "\n" + _digest(prefix)
    seen: set[str] = set()
    for path in (file for given in paths for file in _files(given)):
        try:
            for name, content in _contents(path):
                key = _digest(f"{seed}\n{_digest(json.dumps(content))}")
                if prefix and not isinstance(content, str):
                    raise DocumentError(
                        f"{name}: has 'input_ids', and --prefix-file is a text: put its tokens "
                        "before those of the document, and leave --prefix-file out"
                    )
                if key not in seen:
                    seen.add(key)
                    whole = prefix + content if isinstance(content, str) else content
                    yield Document(name, whole, key)
        except OSError as error:
            raise DocumentError(f"{path}: {error.strerror}") from None
    if not seen:
        raise DocumentError(f"{', '.join(map(str, paths))}: no document is there")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    below = [file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file()]
    return [path / file for file in below if not any(part[0] == "." for part in file.parts)]


def _contents(path: Path) -> Iterator[tuple[str, str | list[int]]]:
    """Names and contents of the documents of a file."""
    with path.open("rb") as file:
        parts = enumerate(file, 1) if path.suffix == _LINES else [(0, file.read())]
        for line, data in parts:
            name = f"{path}:{line}" if line else str(path)
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                raise DocumentError(f"{name}: not UTF-8 text at byte {error.start}") from None
            if text.strip():
                yield _entry(name, text) if line else (name, text)


def _entry(where: str, line: str) -> tuple[str, str | list[int]]:
    """Name and content of the document in a line of a ``.jsonl`` file."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise DocumentError(f"{where}: not JSON: {error}") from None
    if isinstance(entry, dict):
        name = f"{where} ({entry['id']})" if "id" in entry else where
        text, ids = entry.get("text"), entry.get("input_ids")
        if isinstance(text, str) and text and ids is None:
            return name, text
        if text is None and isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return name, ids
    expected = '{"text": ...} or {"input_ids": [...]}'
    raise DocumentError(f"{where}: expected {expected}, found {line[:60].strip()}")


class Journal:
    """Documents in L3: JSON lines in the file at ``path``, and their ``keys``.

    Raises:
        UnusableServer: The file exists and cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path, keys = path, []
        try:
            *lines, cut = (path.read_text("utf-8") if path.exists() else "").split("\n")
            for line in lines:
                keys.append(json.loads(line)["key"])
            if cut:  # by a kill
                path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        except OSError as error:
            raise UnusableServer(f"--journal {path}: {error}") from None
        except (ValueError, LookupError, TypeError):
            entry = f"line {len(keys) + 1} is not a journal entry"
            raise UnusableServer(f"--journal {path}: {entry}; use another file") from None
        self.keys = set(keys)

    def add(self, stored: Sequence[tuple[Document, int]]) -> None:
        """Note documents with their tokens; on disk when this returns. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for document, tokens in stored:
                entry = {"key": document.key, "name": document.name, "tokens": tokens}
                file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.keys |= {document.key for document, _ in stored}


def store_documents(
    server: Server,
    documents: Iterable[Document],
    journal: Journal,
    *,
    page_size: int = 1,
    max_parallel: int = 4,
    group: int = 32,
    settle_s: float | None = None,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Store documents that the journal does not name; those that the server refuses are left out.

    Args:
        group: Documents between two flushes.
        settle_s: Instead of a flush, which needs an idle server, wait this many seconds for L3.
        done: Called after each document, in any thread.

    Returns:
        Counts by name (``stored`` documents, their ``tokens``, ...), and ``failed``: name of a
        document -> why the server refused it.

    Raises:
        UnusableServer: The server went away, or could not be flushed.
        DocumentError: A document cannot be read.
        OSError: The journal cannot be written.
    """
    counts = Counter(stored=0, tokens=0, tokens_found_in_l3=0, shorter_than_a_page=0)
    failed: dict[str, str] = {}

    def send(document: Document) -> tuple[int, int] | RequestError:
        try:
            return server.prefill(document.content)
        except RequestError as error:
            return error
        finally:
            done()

    missing = (document for document in documents if document.key not in journal.keys)
    pool = ThreadPoolExecutor(max_parallel)
    try:
        while some := list(islice(missing, group)):
            stored = []
            for document, answer in zip(some, pool.map(send, some), strict=True):
                if isinstance(answer, RequestError):
                    failed[document.name] = str(answer)
                    try:
                        server.info()
                    except UnusableServer:
                        raise UnusableServer(
                            f"{server.url}: the server went away; start it and run the command "
                            "again, which goes on where the journal ends"
                        ) from None
                    continue
                tokens, found = answer
                stored.append((document, tokens))
                counts.update(stored=1, tokens=tokens, tokens_found_in_l3=found)
                counts["shorter_than_a_page"] += tokens < page_size
            if settle_s is None:
                server.flush()
            else:
                time.sleep(settle_s)
            journal.add(stored)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return {**counts, "failed": failed}


def ingest(
    documents: Annotated[
        list[Path],
        typer.Argument(
            help="Text files, folders of them, or .jsonl files: an object with 'text' or "
            "'input_ids' in each line."
        ),
    ],
    url: Annotated[str, typer.Option(help="The server whose L3 gets the pages.")] = common.SERVER,
    api_key: Annotated[str | None, typer.Option(help="The server's (admin) API key.")] = None,
    prefix_file: Annotated[
        Path | None, typer.Option(help="Text before the document in every question.")
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
    as_json: common.AsJson = False,
) -> None:
    """Fill the store with documents ahead of time: a server computes them and stores their pages.

    Questions then find them in L3, if they begin with the same text: the prefix file, then the
    document. Exit status: 0; 1 when the server refused documents; 2 when it could not run.
    """
    with explained(UnusableServer, DocumentError):
        prefix = prefix_file.read_text(encoding="utf-8") if prefix_file is not None else ""
        server, notes = Server(url, api_key), Journal(journal)
        info = server.info()
        # Only keys are kept: a document is read again when it is sent.
        keys = {document.key for document in find_documents(documents, info, prefix)}
        known = len(keys & notes.keys)
        if not info.get("hicache_storage_backend"):
            warning = (
                "the server was started without an L3 backend: unless one was attached since, the "
                "pages are gone when it ends"
            )
            say(warning, common.errors, style="yellow")
        before, begun = look(url), time.monotonic()
        try:
            with common.progress_bar(hidden=False) as bar:
                task = bar.add_task("documents", total=len(keys), completed=known)
                said = store_documents(
                    server,
                    find_documents(documents, info, prefix),
                    notes,
                    page_size=int(info.get("page_size") or 1),
                    max_parallel=max_parallel,
                    group=group,
                    settle_s=settle,
                    done=lambda: bar.advance(task),
                )
        except KeyboardInterrupt:
            say("interrupted; a later run continues from the journal", common.errors)
            os._exit(130)  # threads may wait for the server for minutes
    seconds = time.monotonic() - begun
    time.sleep(METRICS_LAG_S * (known < len(keys)))
    said |= {
        "already_stored": known,
        "seconds": seconds,
        "tokens_per_second": said["tokens"] / seconds,
        "l3": moved(before, look(url)),
    }
    if as_json:
        common.print_json(said)
    else:
        show(said)
    if said["failed"]:
        raise typer.Exit(1)


def show(said: dict[str, Any]) -> None:
    """Print the results of a run, by their names in JSON."""
    l3, failed = said["l3"], list(said["failed"].items())
    names = ("stored", "already_stored", "tokens", "tokens_found_in_l3", "tokens_per_second")
    rows = [(name.replace("_", " "), f"{said[name]:,.0f}") for name in names]
    if "bytes_written" in l3:
        rows.append(("written to L3", common.human_bytes(l3["bytes_written"])))
    common.screen.print(common.table("", "", "#", rows=rows))
    notes = {
        "{:,} documents are shorter than a page and not stored in L3": said["shorter_than_a_page"],
        "L3 dropped {:,} pages: see hcache top and its quota": l3.get("pages_dropped"),
        f"L3 evicted {{:,}} pages to stay within its quota: {_SMALL}": l3.get("pages_evicted"),
        "{:,} documents were refused": len(failed),
    }
    lines = [text.format(count) for text, count in notes.items() if count]
    lines += [f"{name}: {reason}" for name, reason in failed[:SHOWN_FAILURES]]
    lines += [f"and {len(failed) - SHOWN_FAILURES} more"] * (len(failed) > SHOWN_FAILURES)
    for line in lines:
        say(f"- {line}", style="yellow", markup=False)
