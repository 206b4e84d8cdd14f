"""The clients of benchmarks and of ``examples/ingest.py``, against servers that answer as SGLang
does, or do not."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from bench.harness.client import Reply, RequestError, StreamingClient
from bench.harness.server import CachedTokens
from tests.kit.http import serving

INGEST = str(Path(__file__).resolve().parents[3] / "examples" / "ingest.py")


def chunk(ids: Sequence[int], count: int, finished: bool = False, **meta: Any) -> dict[str, Any]:
    reason = {"type": "length"} if finished else None
    common = {"prompt_tokens": 5, "cached_tokens": 0, "finish_reason": reason}
    return {"output_ids": list(ids), "meta_info": {**common, "completion_tokens": count, **meta}}


TOO_LONG = {"error": {"message": "too long"}}
ABORTED = chunk([1], 1, finish_reason={"type": "abort", "message": "cut"})


def events(*sent: dict[str, Any]) -> str:
    """The text of a streamed reply."""
    return "".join(f"data: {json.dumps(event)}\n\n" for event in sent) + "data: [DONE]\n\n"


def generate(url: str) -> Reply:
    async def one() -> Reply:
        async with StreamingClient(url) as client:
            return await client.generate([3, 4], 3)

    return asyncio.run(one())


@pytest.mark.parametrize(
    ("sent", "ids", "gaps"),
    [
        ([chunk([7], 1), chunk([7, 8, 9], 3, True)], [7, 8, 9], 2),
        ([chunk([7], 1), chunk([8], 2), chunk([9], 3, True)], [7, 8, 9], 2),
        ([chunk([], 0), chunk([4], 1), chunk([4], 1, True)], [4], 0),
    ],
    ids=["all so far", "only the new ones", "an event without a new token"],
)
def test_a_stream_is_put_together(sent: list[dict[str, Any]], ids: list[int], gaps: int) -> None:
    asked: list[Any] = []
    split = {"device": 1, "host": 2, "storage": 3}
    sent[-1]["meta_info"] |= {"cached_tokens": 6, "cached_tokens_details": split}
    with serving(lambda path, body: asked.append(body) or (200, events(*sent))) as url:
        reply = generate(url)
    assert (reply.output_ids, reply.prompt_tokens, len(reply.gaps_s)) == (ids, 5, gaps)
    assert reply.cached == CachedTokens(1, 2, 3)
    sampling = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    assert asked == [{"input_ids": [3, 4], "sampling_params": sampling, "stream": True}]


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (400, TOO_LONG, "400: too long"),
        (500, "boom", "500: boom"),
        (200, events({"error": {"message": "no room", "code": 400}}), "no room"),
        (200, events(ABORTED), "cut"),
        (200, events(chunk([1], 1)), "the stream ended after 1 tokens"),
    ],
)
def test_a_request_that_fails_says_why(status: int, answer: Any, message: str) -> None:
    with serving(lambda *_: (status, answer)) as url, pytest.raises(RequestError, match=message):
        generate(url)


def test_a_redirect_takes_the_key_nowhere() -> None:
    asked = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(307)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(RequestError, match=r"^307"):
            generate(url)
        server.shutdown()
        thread.join()
    assert asked == ["/generate"]


@pytest.mark.parametrize("key", ["s3cr3t\n", "s3cr3t\r\nX: y", "s3cr3t\0"])
def test_a_key_that_no_header_can_carry_is_not_quoted(key: str) -> None:
    async def one() -> None:
        async with StreamingClient("http://127.0.0.1:9", key) as client:
            await client.generate([1], 1)

    with pytest.raises(RequestError) as error:
        asyncio.run(one())
    assert "s3cr3t" not in str(error.value)


def test_a_key_of_the_environment_is_on_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCACHE_API_KEY", "s3cr3t")
    assert "s3cr3t" not in ingest("http://127.0.0.1:9", "--help").stdout


def ingest(url: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, INGEST, "--url", url, *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def test_documents_are_sent_behind_their_prefix_then_the_caches_are_flushed(tmp_path: Path) -> None:
    asked: list[Any] = []

    def answer(path: str, body: Any) -> tuple[int, object]:
        asked.append(path if path.startswith("/flush") else body["text"])
        if "bad" in str(body):
            return 400, TOO_LONG
        details = {"cached_tokens_details": {"storage": 2}}
        return 200, ABORTED if "cut" in str(body) else chunk([1], 1, True, **details)

    (tmp_path / "prefix").write_text("> ")
    (tmp_path / "a.txt").write_text("whole\nfile")
    lines = [json.dumps({"text": text}) for text in ("one", "bad", "cut", "two")]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    found = (tmp_path / "a.txt", tmp_path / "d.jsonl", "--prefix-file", tmp_path / "prefix")
    with serving(answer) as url:
        done = ingest(url, *found, "--parallel", 2)
    assert sorted(asked[:-1]) == ["> bad", "> cut", "> one", "> two", "> whole\nfile"]
    assert asked[-1] == "/flush_cache?timeout=120"
    said = {"documents": 3, "refused": 2, "tokens": 15, "tokens_found_in_l3": 6}
    assert (done.returncode, json.loads(done.stdout)) == (1, said)
    assert "d.jsonl:2: 400: " in done.stderr and "d.jsonl:3: 200: " in done.stderr


def test_no_text_stands_before_token_ids(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"input_ids": [1]}')
    (tmp_path / "prefix").write_text("> ")
    given = (tmp_path / "d.jsonl", "--prefix-file", tmp_path / "prefix")
    with serving(lambda *_: (200, {})) as url:
        assert "d.jsonl:1: a text cannot stand before input_ids" in ingest(url, *given).stderr
