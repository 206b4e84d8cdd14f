"""The clients of ``hcache ingest`` and of benchmarks, against servers that answer as SGLang does,
or do not."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bench.harness.client import Reply, StreamingClient
from bench.harness.server import CachedTokens
from hcache_backend.cli.common import RequestError
from hcache_backend.cli.ingest import Server, UnusableServer
from tests.kit.http import serving


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


def prefill(url: str) -> tuple[int, int]:
    return Server(url).prefill([1, 2])


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
    ("send", "status", "answer", "message"),
    [
        (generate, 400, TOO_LONG, "400: too long"),
        (generate, 500, "boom", "500: boom"),
        (generate, 200, events({"error": {"message": "no room", "code": 400}}), "no room"),
        (generate, 200, events(ABORTED), "cut"),
        (generate, 200, events(chunk([1], 1)), "the stream ended after 1 tokens"),
        (prefill, 400, TOO_LONG, "400: too long"),
        (prefill, 200, ABORTED, "cut"),
        (prefill, 200, "?", "Expecting value"),
    ],
)
def test_a_request_that_fails_says_why(
    send: Callable[[str], Any], status: int, answer: Any, message: str
) -> None:
    with serving(lambda *_: (status, answer)) as url, pytest.raises(RequestError, match=message):
        send(url)


@pytest.mark.parametrize(("details", "found"), [({"storage": 3}, 3), (None, 0)])
def test_a_prefilled_prompt_says_what_l3_had(details: Any, found: int) -> None:
    with serving(lambda *_: (200, chunk([1], 1, True, cached_tokens_details=details))) as url:
        assert prefill(url) == (5, found)


@pytest.mark.parametrize(
    ("ask", "status", "answer", "message"),
    [
        (Server.info, 401, "", "/server_info: 401: give its --api-key"),
        (Server.info, 404, "", "/server_info: 404: "),
        (Server.info, 200, "<html>", "no usable SGLang server at "),
        (Server.flush, 400, "not idle", "flush_cache: 400: not idle"),
        (Server.flush, 401, "", "give its --api-key"),
    ],
)
def test_what_is_no_usable_server_is_named(
    ask: Callable[[Server], Any], status: int, answer: str, message: str
) -> None:
    with serving(lambda *_: (status, answer)) as url, pytest.raises(UnusableServer, match=message):
        ask(Server(url))


def test_an_unreachable_server_is_named() -> None:
    server = Server("http://127.0.0.1:9")
    with pytest.raises(
        UnusableServer,
        match=r"^no usable SGLang server at http://127.0.0.1:9 \(.*\)\. Start one, .* --url$",
    ):
        server.info()
    with pytest.raises(UnusableServer, match="flush_cache: the server does not answer"):
        server.flush()
