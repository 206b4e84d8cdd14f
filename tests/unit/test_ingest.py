"""Documents in files, the journal, and what is sent in which order."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hcache_backend.cli.common import Failure
from hcache_backend.cli.ingest import Document, Journal, Server, find_documents, store_documents
from hcache_backend.cli.main import app
from tests.kit.http import serving

SERVER = {"model_path": "m", "weight_version": "1", "page_size": 64}


def lines(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def contents(paths: Sequence[Path], prefix: str = "") -> list[Any]:
    return [document.content for document in find_documents(paths, SERVER, prefix)]


def test_documents_are_files_and_lines_each_content_once(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("second")
    (tmp_path / "a.txt").write_text("première")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    path = lines(tmp_path / "d.jsonl", {"text": "one"}, {"input_ids": [1, 2], "id": "x"})
    path.write_text(path.read_text() + '\n{"text": "second"}\n{"text": "last"}\n')
    found = {document.name: document.content for document in find_documents([tmp_path], SERVER)}
    assert found == {
        str(tmp_path / "a.txt"): "première",
        str(tmp_path / "b" / "two.md"): "second",
        f"{path}:1": "one",
        f"{path}:2 (x)": [1, 2],
        f"{path}:5": "last",
    }


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
    ids = lines(tmp_path / "d.jsonl", {"input_ids": [1]})
    with pytest.raises(Failure, match="--prefix-file is a text"):
        contents([ids], "> ")
    (tmp_path / "a.bin").write_bytes(b"ab\xff")
    with pytest.raises(Failure, match=r"a.bin: not UTF-8 text at byte 2"):
        contents([tmp_path])


@dataclass
class Sglang:
    """An SGLang server without an L3 backend and without metrics.

    It refuses documents with ``bad`` in them, and answers those with ``hang`` when that is set.

    Attributes:
        seen: Prompts, and ``flush`` with the lines of ``journal`` at that time.
        gone_after: Prompts after which the server is gone.
        all_there: Prompts wait for one another here.
    """

    journal: Path
    url: str = ""
    seen: list[str] = field(default_factory=list)
    gone_after: int = 10**9
    in_flight: int = 0
    most: int = 0
    all_there: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    hang: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, body: Any) -> tuple[int, object]:
        with self.lock:
            prompts = [seen for seen in self.seen if not seen.startswith("flush")]
            if len(prompts) >= self.gone_after or path == "/metrics":
                return 404, {}
            if path == "/server_info":
                return 200, SERVER
            if path.startswith("/flush_cache?timeout="):
                noted = self.journal.read_text().count("\n") if self.journal.exists() else 0
                self.seen.append(f"flush {noted}")
                return (400 if self.in_flight else 200), {}
            self.seen.append(text := body["text"])
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
        self.all_there.wait()
        if "hang" in text:
            self.hang.wait(60)
        with self.lock:
            self.in_flight -= 1
        if "bad" in text:
            return 400, {"error": {"message": "too long"}}
        details = {"cached_tokens_details": {"storage": 1}, "finish_reason": {"type": "length"}}
        return 200, {"meta_info": {"prompt_tokens": len(text), **details}}


@pytest.fixture
def sglang(tmp_path: Path) -> Iterator[Sglang]:
    sglang = Sglang(tmp_path / "journal")
    with serving(sglang.answer) as sglang.url:
        yield sglang
        sglang.hang.set()


def command(sglang: Sglang, documents: Path, *options: object) -> list[str]:
    given = ("ingest", documents, "--url", sglang.url, "--journal", sglang.journal, *options)
    return [str(part) for part in given]


def store(sglang: Sglang, documents: Sequence[Document], **options: Any) -> Any:
    journal = Journal(sglang.journal)
    return SimpleNamespace(**store_documents(Server(sglang.url), documents, journal, **options))


def texts(
    folder: Path, *contents: str, prefix: str = "", server: Mapping[str, Any] = SERVER
) -> list[Document]:
    path = lines(folder / "texts.jsonl", *({"text": text} for text in contents))
    return list(find_documents([path], server, prefix))


def noted(journal: Path, *documents: Document) -> list[bool]:
    keys = Journal(journal).keys
    return [document.key in keys for document in documents]


def test_the_journal_names_documents_only_after_the_flush(sglang: Sglang, tmp_path: Path) -> None:
    documents = texts(tmp_path, *"abcde", prefix="> ")
    result = store(sglang, documents, group=2)
    assert [seen for seen in sglang.seen if seen[0] == "f"] == ["flush 0", "flush 2", "flush 4"]
    assert sorted(seen for seen in sglang.seen if seen[0] == ">") == [f"> {c}" for c in "abcde"]
    assert (result.stored, result.tokens, result.tokens_found_in_l3) == (5, 15, 5)
    assert sglang.journal.read_text().count("\n") == 5


def test_it_goes_on_where_the_journal_ends(sglang: Sglang, tmp_path: Path) -> None:
    documents = texts(tmp_path, *"abcdef")
    store(sglang, documents[:4])
    sglang.seen.clear()
    assert [store(sglang, documents).stored for _ in range(2)] == [2, 0]
    assert sorted(sglang.seen[:2]) == ["e", "f"]


@pytest.mark.parametrize("other", [{"server": {**SERVER, "weight_version": "2"}}, {"prefix": "p"}])
def test_another_server_or_prefix_has_nothing_yet(
    sglang: Sglang, tmp_path: Path, other: dict[str, Any]
) -> None:
    documents = texts(tmp_path, "a")
    store(sglang, documents)
    others = texts(tmp_path, "a", **other)
    assert noted(sglang.journal, *documents, *others) == [True, False]


def test_a_last_line_that_a_kill_cut_is_dropped(sglang: Sglang, tmp_path: Path) -> None:
    path, documents = sglang.journal, texts(tmp_path, "a", "b")
    store(sglang, documents[:1])
    whole = path.read_text()
    path.write_text(whole + '{"key": "12')
    assert noted(path, *documents) == [True, False]
    assert path.read_text() == whole
    store(sglang, documents)
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


def test_a_document_that_is_refused_is_left_out(sglang: Sglang, tmp_path: Path) -> None:
    documents = texts(tmp_path, "a", "bad", "c")
    result = store(sglang, documents)
    assert result.failed == {documents[1].name: "400: too long"}
    assert result.stored == 2
    assert noted(sglang.journal, *documents) == [True, False, True]


def test_no_more_documents_are_in_flight_than_allowed(sglang: Sglang, tmp_path: Path) -> None:
    sglang.all_there = threading.Barrier(3, timeout=60)
    done: list[int] = []
    store(sglang, texts(tmp_path, *"abcdefghi"), max_parallel=3, done=lambda: done.append(1))
    assert (sglang.most, len(done)) == (3, 9)


def test_a_server_in_use_is_not_flushed_and_short_documents_are_counted(
    sglang: Sglang, tmp_path: Path
) -> None:
    result = store(sglang, texts(tmp_path, "abc", "abcd"), settle_s=0.0, page_size=4)
    assert sorted(sglang.seen) == ["abc", "abcd"]
    assert (result.stored, result.shorter_than_a_page) == (2, 1)


def test_the_command_says_what_became_of_the_documents(sglang: Sglang, tmp_path: Path) -> None:
    (tmp_path / "prefix").write_text("> ")
    documents = lines(tmp_path / "d.jsonl", {"text": "a" * 70}, {"text": "bad"}, {"text": "b"})
    given = command(sglang, documents, "--group", 2, "--prefix-file", tmp_path / "prefix")
    first = CliRunner().invoke(app, [*given, "--json"])
    found = json.loads(first.stdout)
    assert first.exit_code == 1
    assert (found["stored"], found["tokens"], found["tokens_found_in_l3"]) == (2, 75, 2)
    assert found["failed"] == {f"{documents}:2": "400: too long"}
    assert "has no /metrics" in found["l3"]["missing"]
    assert "without an L3 backend" in first.stderr
    again = CliRunner().invoke(app, given)
    assert again.exit_code == 1
    said = " ".join(again.stdout.split())
    assert "2 already stored" in said and f"{documents}:2: 400: too long" in said


def test_a_server_that_goes_away_ends_it_with_what_to_do(sglang: Sglang, tmp_path: Path) -> None:
    documents, sglang.gone_after = texts(tmp_path, *"abcde"), 3
    given = command(sglang, tmp_path / "texts.jsonl", "--group", 2, "--max-parallel", 1)
    ended = CliRunner().invoke(app, given)
    assert ended.exit_code == 2
    said = " ".join(ended.stderr.split())
    assert "no usable SGLang server" in said and "a later run continues from the journal" in said
    assert noted(sglang.journal, *documents) == [True, True, False, False, False]


def test_an_interrupted_command_does_not_wait_for_its_server(
    sglang: Sglang, tmp_path: Path
) -> None:
    documents = lines(tmp_path / "d.jsonl", {"text": "a"}, {"text": "hang"})
    journal = sglang.journal
    given = command(sglang, documents, "--group", 1)
    program = [sys.executable, "-m", "hcache_backend.cli.main", *given]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as run:
        while "hang" not in sglang.seen:
            assert run.poll() is None
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=30)
    assert run.returncode == 130
    assert "a later run continues from the journal" in said
    assert len(Journal(journal).keys) == 1
