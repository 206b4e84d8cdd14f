"""Documents in files, the journal, and what is sent in which order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner, Result

from hcache_backend.cli.common import Failure, RequestError
from hcache_backend.cli.ingest import (
    Document,
    Journal,
    Server,
    UnusableServer,
    find_documents,
    store_documents,
)
from hcache_backend.cli.main import app

SERVER = {"model_path": "m", "weight_version": "1", "page_size": 64}


def lines(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def contents(paths: Sequence[Path], prefix: str = "") -> list[Any]:
    return [document.content for document in find_documents(paths, SERVER, prefix)]


def test_a_folder_is_searched_for_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("second")
    (tmp_path / "a.txt").write_text("première")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    found = list(find_documents([tmp_path], SERVER))
    assert [document.name for document in found] == [
        str(tmp_path / "a.txt"),
        str(tmp_path / "b" / "two.md"),
    ]
    assert [document.content for document in found] == ["première", "second"]


def test_a_jsonl_file_has_a_document_in_each_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", {"text": "one"}, {"input_ids": [1, 2], "id": "x"})
    path.write_text(path.read_text() + "\n")
    found = list(find_documents([path], SERVER))
    assert [document.name for document in found] == [f"{path}:1", f"{path}:2 (x)"]
    assert contents([path]) == ["one", [1, 2]]


def test_the_same_content_twice_is_one_document(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", {"text": "same"}, {"text": "same"}, {"text": "other"})
    (tmp_path / "e.txt").write_text("same")
    assert contents([tmp_path]) == ["same", "other"]
    assert contents([path]) == ["same", "other"]


@pytest.mark.parametrize(
    "line",
    [
        '{"txt": "x"}',
        '["text"]',
        '{"text": ""}',
        '{"input_ids": []}',
        '{"input_ids": [1, "2"]}',
        '{"text": "x", "input_ids": [1]}',
        "{",
    ],
)
def test_a_line_of_another_form_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "d.jsonl").write_text(line)
    with pytest.raises(Failure, match=r"d.jsonl:1: expected"):
        contents([tmp_path])


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No such file.*none.txt"):
        contents([tmp_path / "none.txt"])
    with pytest.raises(Failure, match="no document is there"):
        contents([tmp_path])
    (tmp_path / "a.bin").write_bytes(b"ab\xff")
    with pytest.raises(Failure, match=r"a.bin: not UTF-8 text at byte 2"):
        contents([tmp_path])


def test_token_ids_have_no_place_for_a_prefix(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", {"input_ids": [1]})
    with pytest.raises(Failure, match="--prefix-file is a text"):
        contents([path], "> ")


@dataclass
class Notes:
    """A server that computes everything but documents with ``bad`` in them.

    Attributes:
        seen: Prompts, and ``flush`` with the journal's lines at that time.
        gone_after: Prompts after which the server is gone.
        all_there: Prompts wait for one another here.
    """

    journal: Path
    seen: list[str] = field(default_factory=list)
    gone_after: int = 10**9
    in_flight: int = 0
    most: int = 0
    all_there: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    lock: threading.Lock = field(default_factory=threading.Lock)
    url = "http://server"

    def prefill(self, prompt: Any) -> tuple[int, int]:
        with self.lock:
            if len([seen for seen in self.seen if seen[0] != "f"]) >= self.gone_after:
                raise RequestError("refused")
            self.seen.append(prompt)
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
        self.all_there.wait()
        with self.lock:
            self.in_flight -= 1
        if "bad" in prompt:
            raise RequestError("too long")
        return len(prompt), 1

    def flush(self) -> None:
        assert not self.in_flight
        noted = self.journal.read_text().count("\n") if self.journal.exists() else 0
        self.seen.append(f"flush {noted}")

    def info(self) -> dict[str, Any]:
        if len(self.seen) > self.gone_after:
            raise UnusableServer("nobody")
        return SERVER


def store(notes: Notes, documents: Sequence[Document], **options: Any) -> Any:
    result = store_documents(cast(Server, notes), documents, Journal(notes.journal), **options)
    return SimpleNamespace(**result)


def texts(
    folder: Path, *contents: str, prefix: str = "", server: Mapping[str, Any] = SERVER
) -> list[Document]:
    path = lines(folder / "texts.jsonl", *({"text": text} for text in contents))
    return list(find_documents([path], server, prefix))


def noted(journal: Path, *documents: Document) -> list[bool]:
    keys = Journal(journal).keys
    return [document.key in keys for document in documents]


def test_the_journal_names_documents_only_after_the_flush(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "journal")
    documents = texts(tmp_path, *"abcde", prefix="> ")
    result = store(notes, documents, group=2)
    assert [seen for seen in notes.seen if seen[0] == "f"] == ["flush 0", "flush 2", "flush 4"]
    assert sorted(seen for seen in notes.seen if seen[0] == ">") == [f"> {c}" for c in "abcde"]
    assert (result.stored, result.tokens, result.tokens_found_in_l3) == (5, 15, 5)
    assert notes.journal.read_text().count("\n") == 5


def test_it_goes_on_where_the_journal_ends(tmp_path: Path) -> None:
    documents = texts(tmp_path, *"abcdef")
    store(Notes(tmp_path / "journal"), documents[:4])
    again = Notes(tmp_path / "journal")
    result = store(again, documents)
    assert sorted(again.seen[:2]) == ["e", "f"]
    assert result.stored == 2
    assert store(Notes(tmp_path / "journal"), documents).stored == 0


@pytest.mark.parametrize("other", [{"server": {**SERVER, "weight_version": "2"}}, {"prefix": "p"}])
def test_another_server_or_prefix_has_nothing_yet(tmp_path: Path, other: dict[str, Any]) -> None:
    path, documents = tmp_path / "journal", texts(tmp_path, "a")
    store(Notes(path), documents)
    assert noted(path, *documents, *texts(tmp_path, "a", **other)) == [True, False]


def test_a_last_line_that_a_kill_cut_is_dropped(tmp_path: Path) -> None:
    path, documents = tmp_path / "journal", texts(tmp_path, "a", "b")
    store(Notes(path), documents[:1])
    whole = path.read_text()
    path.write_text(whole + '{"key": "12')
    assert noted(path, *documents) == [True, False]
    assert path.read_text() == whole
    store(Notes(path), documents)
    assert noted(path, *documents) == [True, True]


@pytest.mark.parametrize("text", ["first\nsecond\n", "one line without its end", '{"key": 1}\nx'])
def test_a_file_that_is_no_journal_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "journal"
    path.write_text(text)
    with pytest.raises(Failure, match="it has other lines than a journal"):
        Journal(path)
    assert path.read_text() == text
    with pytest.raises(OSError, match=str(tmp_path)):
        Journal(tmp_path)


def test_a_document_that_is_refused_is_left_out(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "journal")
    documents = texts(tmp_path, "a", "bad", "c")
    result = store(notes, documents)
    assert result.failed == {documents[1].name: "too long"}
    assert result.stored == 2
    assert noted(notes.journal, *documents) == [True, False, True]


def test_a_server_that_goes_away_ends_it_with_what_to_do(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "journal", gone_after=3)
    documents = texts(tmp_path, *"abcde")
    with pytest.raises(UnusableServer, match="nobody"):
        store(notes, documents, group=2, max_parallel=1)
    assert noted(notes.journal, *documents) == [True, True, False, False, False]


def test_no_more_documents_are_in_flight_than_allowed(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "journal", all_there=threading.Barrier(3, timeout=60))
    done: list[int] = []
    store(notes, texts(tmp_path, *"abcdefghi"), max_parallel=3, done=lambda: done.append(1))
    assert notes.most == 3
    assert len(done) == 9


def test_a_server_in_use_is_not_flushed(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "journal")
    assert store(notes, texts(tmp_path, "a"), settle_s=0.0).stored == 1
    assert notes.seen == ["a"]


def test_documents_shorter_than_a_page_are_counted(tmp_path: Path) -> None:
    result = store(Notes(tmp_path / "journal"), texts(tmp_path, "abc", "abcd"), page_size=4)
    assert (result.stored, result.shorter_than_a_page) == (2, 1)


class Handler(BaseHTTPRequestHandler):
    """An SGLang server without an L3 backend and without metrics."""

    def do_GET(self) -> None:
        self.answer(200, SERVER) if self.path == "/server_info" else self.answer(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body.get("text", "")
        if "hang" in text:
            self.server.hang.wait(60)  # type: ignore[attr-defined]
        if "bad" in text:
            self.answer(400, {"error": {"message": "too long"}})
            return
        details = {"cached_tokens_details": {"storage": 2}, "finish_reason": {"type": "length"}}
        self.answer(200, {"meta_info": {"prompt_tokens": len(text), **details}})

    def answer(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        """No line for each request."""


class Hanging(ThreadingHTTPServer):
    """Answers a document with ``hang`` in it when ``hang`` is set."""

    hang: threading.Event


@pytest.fixture
def url() -> Iterator[str]:
    with Hanging(("127.0.0.1", 0), Handler) as server:
        server.hang = threading.Event()
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.hang.set()
        server.shutdown()


def test_the_command_says_what_became_of_the_documents(url: str, tmp_path: Path) -> None:
    (tmp_path / "prefix").write_text("> ")
    documents = lines(tmp_path / "d.jsonl", {"text": "a" * 70}, {"text": "bad"}, {"text": "b"})
    given = ("ingest", documents, "--url", url, "--journal", tmp_path / "journal", "--group", "2")

    def ingest(*options: object) -> Result:
        return CliRunner().invoke(app, [str(part) for part in (*given, *options)])

    first = ingest("--json", "--prefix-file", tmp_path / "prefix")
    found = json.loads(first.stdout)
    assert first.exit_code == 1
    assert (found["stored"], found["tokens"], found["tokens_found_in_l3"]) == (2, 75, 4)
    assert found["failed"] == {f"{documents}:2": "400: too long"}
    assert "has no /metrics" in found["l3"]["missing"]
    assert "without an L3 backend" in first.stderr
    again = ingest("--prefix-file", tmp_path / "prefix")
    assert again.exit_code == 1
    said = " ".join(again.stdout.split())
    assert "2 already stored" in said and f"{documents}:2: 400: too long" in said
    (tmp_path / "d.jsonl").write_text("{")
    assert ingest().exit_code == 2


def test_an_interrupted_command_does_not_wait_for_its_server(url: str, tmp_path: Path) -> None:
    documents = lines(tmp_path / "d.jsonl", {"text": "a"}, {"text": "hang"})
    journal = tmp_path / "journal"
    given = ("ingest", documents, "--url", url, "--journal", journal, "--group", "1")
    command = [sys.executable, "-m", "hcache_backend.cli.main", *map(str, given)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        while not journal.exists() or not journal.read_text():
            assert run.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)  # the second document is under way
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=30)
    assert run.returncode == 130
    assert "a later run continues from the journal" in said
    assert len(Journal(journal).keys) == 1
