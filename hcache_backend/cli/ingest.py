"""``hcache ingest``: pages of documents, made offline through a running server.

The paper, section 3.1: states of contexts that are known "can be generated and saved offline". A
document is sent as a prompt; the server computes it once, and HiCache writes its pages to L3. After
every group of documents the caches are flushed, and the flush ends when L3 has every page. The
journal names the documents only then. So a document in the journal is in L3, even if the command
was killed, unless L3 had no room for it: the server's metrics count pages that L3 dropped."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Argument, Option

from hcache_backend.cli import common
from hcache_backend.cli.common import Failure, RequestError, ask, say
from hcache_backend.cli.metrics_page import METRICS_LAG_S, look, moved

_SILENCE_S = 600.0  # the longest pause within an answer
_IDENTITY = ("model_path", "weight_version", "dtype", "kv_cache_dtype", "page_size")
_ENTRY = '{"key": "'  # the beginning of a line in a journal
_JOURNAL = Path("hcache-ingest.jsonl")


class UnusableServer(Failure):
    """A server cannot be used; one line that says why and what to do."""


@dataclass(frozen=True)
class Server:
    """An SGLang server; ``key`` is its (admin) API key. Methods may be called in any thread."""

    url: str
    key: str | None = None

    def info(self) -> dict[str, Any]:
        """Its arguments, version and limits; raises UnusableServer if it is no SGLang server."""
        try:
            return dict(json.loads(ask(self.url, "server_info", 30.0, key=self.key)))
        except (RequestError, ValueError, TypeError) as error:
            hint = "Start one, or pass its address with --url"
            why = f"no usable SGLang server at {self.url} (/server_info: {error}). {hint}"
            raise UnusableServer(why) from None

    def flush(self, seconds: float = 120.0) -> None:
        """Empty device and host caches when the server is idle; L3 has every page by then. Raises
        UnusableServer if that is refused, or takes longer than ``seconds``."""
        try:
            ask(self.url, f"flush_cache?timeout={seconds:g}", seconds + 30, body={}, key=self.key)
        except RequestError as error:
            raise UnusableServer(f"{self.url}/flush_cache: {error}") from None

    def prefill(self, prompt: Sequence[int] | str) -> tuple[int, int]:
        """Compute a prompt: token ids, or a text. Returns its tokens, and how many came from L3
        instead. Raises a RequestError if it does not end well."""
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
    """A document: its path, with number and ``id`` of a line; the prefix and its text, or its token
    ids; its key in the journal, which depends on server (``_IDENTITY``), prefix and content."""

    name: str
    content: str | list[int]
    key: str


def find_documents(
    paths: Iterable[Path], server: Mapping[str, Any], prefix: str = ""
) -> Iterator[Document]:
    """All documents of files and folders in the order of their names, read one by one. A file is a
    document, in UTF-8. A ``.jsonl`` file has one in each line: an object with ``text``, or
    ``input_ids`` (token ids), and optionally an ``id``. Folders are searched; hidden files and
    empty ones are left out. The same content twice is one document. Raises OSError, and a Failure
    if a document has another form, or there is none."""
    seed = json.dumps([server.get(name) for name in _IDENTITY]) + "\n" + _digest(prefix)
    seen: set[str] = set()
    for name, content in (found for path in paths for found in _contents(path)):
        if prefix and not isinstance(content, str):
            hint = "put its tokens before those of the document, and leave --prefix-file out"
            raise Failure(f"{name}: has 'input_ids', and --prefix-file is a text: {hint}")
        key = _digest(f"{seed}\n{_digest(json.dumps(content))}")
        if key not in seen:
            seen.add(key)
            yield Document(name, prefix + content if isinstance(content, str) else content, key)
    if not seen:
        raise Failure(f"{', '.join(map(str, paths))}: no document is there")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _contents(path: Path) -> Iterator[tuple[str, str | list[int]]]:
    """Names and contents of the documents of a file, or of all files below a folder."""
    if path.is_dir():
        names = sorted(below.relative_to(path) for below in path.rglob("*") if below.is_file())
        visible = [name for name in names if not any(part[0] == "." for part in name.parts)]
        yield from (found for name in visible for found in _contents(path / name))
        return
    by_line = path.suffix == ".jsonl"
    with path.open("rb") as file:
        for line, data in enumerate(file if by_line else [file.read()], 1):
            name = f"{path}:{line}" if by_line else str(path)
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                raise Failure(f"{name}: not UTF-8 text at byte {error.start}") from None
            if text.strip():
                yield _entry(name, text) if by_line else (name, text)


def _entry(where: str, line: str) -> tuple[str, str | list[int]]:
    """Name and content of the document in a line of a ``.jsonl`` file."""
    with suppress(json.JSONDecodeError):
        if isinstance(entry := json.loads(line), dict):
            name = f"{where} ({entry['id']})" if "id" in entry else where
            text, ids = entry.get("text"), entry.get("input_ids")
            if isinstance(text, str) and text and ids is None:
                return name, text
            if text is None and isinstance(ids, list) and ids and all(type(i) is int for i in ids):
                return name, ids
    expected = '{"text": ...} or {"input_ids": [...]}'
    raise Failure(f"{where}: expected {expected}, found {line[:60].strip()}")


class Journal:
    """Documents in L3: JSON lines in the file at ``path``, and their ``keys``. Raises OSError, and
    a Failure if the file is no journal; then it stays as it is."""

    def __init__(self, path: Path) -> None:
        *lines, cut = (path.read_text("utf-8") if path.exists() else "").split("\n")
        try:
            self.path, self.keys = path, {json.loads(line)["key"] for line in lines}
            ours = _ENTRY.startswith(cut[: len(_ENTRY)])
        except (ValueError, LookupError, TypeError):
            ours = False
        if not ours:
            raise Failure(f"--journal {path}: it has other lines than a journal; use another file")
        if cut:  # by a kill
            path.write_text("".join(f"{line}\n" for line in lines), "utf-8")

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
    The caches are flushed after each ``group``; if ``settle_s`` is given, L3 has that many seconds
    instead, because a flush needs an idle server. ``done`` is called after each document. Returns
    counts by name, and ``failed``: name of a document -> why the server refused it. Raises as
    :func:`find_documents`, and UnusableServer if the server went away or is not idle."""
    counts = Counter(stored=0, tokens=0, tokens_found_in_l3=0, shorter_than_a_page=0)
    failed: dict[str, str] = {}
    missing = (document for document in documents if document.key not in journal.keys)
    pool = ThreadPoolExecutor(max_parallel)
    try:
        while some := list(islice(missing, group)):
            stored = []
            answers = [pool.submit(server.prefill, document.content) for document in some]
            for document, answer in zip(some, answers, strict=True):
                try:
                    tokens, found = answer.result()
                    stored.append((document, tokens))
                    counts.update(stored=1, tokens=tokens, tokens_found_in_l3=found)
                    counts["shorter_than_a_page"] += tokens < page_size
                except RequestError as error:
                    failed[document.name] = str(error)
                    server.info()  # raises if the server went away
                done()
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
        Argument(help="Texts, folders, or .jsonl files: lines with 'text' or 'input_ids'."),
    ],
    url: Annotated[str, Option(help="The server whose L3 gets the pages.")] = common.SERVER,
    api_key: Annotated[str | None, Option(help="The server's (admin) API key.")] = None,
    prefix_file: Annotated[Path | None, Option(help="Text before each document.")] = None,
    journal: Annotated[Path, Option(help="Progress; a later run goes on there.")] = _JOURNAL,
    max_parallel: Annotated[int, Option(min=1, help="Documents at a time.")] = 4,
    group: Annotated[int, Option(min=1, help="Write progress after every N documents.")] = 32,
    settle: Annotated[
        float | None,
        Option(min=0, help="On a busy server: seconds to wait for L3, instead of a flush."),
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Fill the store with documents ahead of time: a server computes them and stores their pages.

    Questions then find them in L3, if they begin with the same text: the prefix file, then the
    document. Exit status: 0; 1 when the server refused documents; 2 when it could not run."""
    prefix = prefix_file.read_text(encoding="utf-8") if prefix_file is not None else ""
    server, notes = Server(url, api_key), Journal(journal)
    info = server.info()
    # Only keys are kept: a document is read again when it is sent.
    keys = {document.key for document in find_documents(documents, info, prefix)}
    known = len(keys & notes.keys)
    if not info.get("hicache_storage_backend"):
        warning = "the server was started without an L3 backend: unless one was attached since, "
        say(warning + "the pages are gone when it ends", console=common.errors, style="yellow")
    before, begun = look(url), time.monotonic()
    page_size, go_on = int(info.get("page_size") or 1), "a later run continues from the journal"
    try:
        with common.progress_bar(hidden=False) as bar:
            task = bar.add_task("documents", total=len(keys), completed=known)
            found, done = find_documents(documents, info, prefix), partial(bar.advance, task)
            limits = {"max_parallel": max_parallel, "group": group, "page_size": page_size}
            said = store_documents(server, found, notes, settle_s=settle, done=done, **limits)
    except KeyboardInterrupt:
        say(f"interrupted; {go_on}", console=common.errors)
        os._exit(130)  # threads may wait for the server for minutes
    except UnusableServer as error:
        raise UnusableServer(f"{error}; {go_on}") from None
    seconds = time.monotonic() - begun
    time.sleep(METRICS_LAG_S * (known < len(keys)))
    said |= {"already_stored": known, "seconds": seconds}
    said |= {"tokens_per_second": said["tokens"] / seconds, "l3": moved(before, look(url))}
    common.output(said, as_json, show, failed=bool(said["failed"]))


def show(said: dict[str, Any]) -> None:
    """Print the results of a run by their names in JSON; counts of 0 are left out."""
    for name, reason in said["failed"].items():
        say(f"- {name}: {reason}", style="yellow", markup=False)
    l3 = {f"{name} (L3)": value for name, value in said["l3"].items()}
    for name, value in {**said, "refused": len(said["failed"]), **l3}.items():
        if isinstance(value, int | float) and value:
            say(f"{value:>15,.0f}  {name.replace('_', ' ')}")
    if l3.get("pages_dropped (L3)") or l3.get("pages_evicted (L3)"):
        say("- L3 has too little room for all documents: see hcache top and its quota")
