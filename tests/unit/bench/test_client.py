"""The clients against servers that answer as SGLang does, or do not."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from aiohttp import web

from bench.harness.client import Reply, StreamingClient
from bench.harness.server import CachedTokens
from hcache_backend.cli.common import RequestError
from hcache_backend.cli.ingest import Server, UnusableServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SERVER, FLUSH = StreamingClient.server, StreamingClient.flush


def chunk(ids: Sequence[int], count: int, finished: bool = False, **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": list(ids),
        "meta_info": {
            "prompt_tokens": 5,
            "completion_tokens": count,
            "cached_tokens": 0,
            "finish_reason": {"type": "length"} if finished else None,
            **meta,
        },
    }


def streams(*events: dict[str, Any], seen: list[Any] | None = None) -> Handler:
    """A ``/generate`` that sends ``events``; what it was asked goes to ``seen``."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append((await request.json(), request.headers.get("Authorization")))
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    return handler


def answers(status: int, body: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    return handler


def as_json(body: object) -> Handler:
    return answers(200, json.dumps(body))


async def ask(
    path: str,
    handler: Handler,
    what: Callable[[StreamingClient], Awaitable[Any]],
    key: str | None = None,
) -> Any:
    """What a client does with a server that has ``handler`` at ``path``."""
    app = web.Application()
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        async with StreamingClient(f"http://127.0.0.1:{port}/", key) as client:
            return await what(client)
    finally:
        await runner.cleanup()


def generate(
    handler: Handler, prompt: Sequence[int] | str = (1, 2), key: str | None = None
) -> Reply:
    async def one(client: StreamingClient) -> Reply:
        return await client.generate(prompt, 3)

    reply = asyncio.run(ask("/generate", handler, one, key))
    assert isinstance(reply, Reply)
    return reply


@pytest.mark.parametrize(
    "events",
    [
        [chunk([7], 1), chunk([7, 8], 2), chunk([7, 8, 9], 3, True)],
        [chunk([7], 1), chunk([8], 2), chunk([9], 3, True)],
    ],
    ids=["all so far", "only the new ones"],
)
def test_a_stream_is_put_together(events: list[dict[str, Any]]) -> None:
    reply = generate(streams(*events))
    assert reply.output_ids == [7, 8, 9]
    assert reply.prompt_tokens == 5
    assert len(reply.gaps_s) == 2
    assert reply.ttft_s + sum(reply.gaps_s) == pytest.approx(reply.latency_s)


def test_tokens_that_come_together_share_the_time_since_those_before() -> None:
    reply = generate(streams(chunk([1], 1), chunk([1, 2, 3], 3, True)))
    assert len(reply.gaps_s) == 2
    assert reply.gaps_s[0] == reply.gaps_s[1] > 0
    # An event without a new token is no token.
    reply = generate(streams(chunk([], 0), chunk([4], 1), chunk([4], 1, True)))
    assert (reply.output_ids, reply.gaps_s) == ([4], [])


def test_a_request_asks_for_exactly_so_many_tokens() -> None:
    seen: list[Any] = []
    generate(streams(chunk([1], 1, True), seen=seen), [3, 4], key="secret")
    generate(streams(chunk([1], 1, True), seen=seen), "a text")
    (body, header), (text_body, no_header) = seen
    assert body["input_ids"] == [3, 4]
    assert body["stream"] is True
    asked = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    assert body["sampling_params"] == asked
    assert (header, no_header) == ("Bearer secret", None)
    assert text_body["text"] == "a text"
    assert "input_ids" not in text_body


def test_a_reply_may_end_at_the_token_that_ends_a_message() -> None:
    seen: list[Any] = []
    end = chunk([7, 2], 2, True, finish_reason={"type": "stop"})
    handler = streams(chunk([7], 1), end, seen=seen)

    async def one(client: StreamingClient) -> Reply:
        return await client.generate([1], 3, ignore_eos=False)

    reply = asyncio.run(ask("/generate", handler, one))
    assert reply.stopped and reply.output_ids == [7, 2]
    assert seen[0][0]["sampling_params"]["ignore_eos"] is False
    assert not generate(streams(chunk([7], 1, True))).stopped


def split(**tokens: int) -> dict[str, Any]:
    return {"cached_tokens": sum(tokens.values()), "cached_tokens_details": tokens}


@pytest.mark.parametrize(
    ("meta", "cached"),
    [
        ({}, CachedTokens()),
        ({"cached_tokens": 4}, CachedTokens(unsplit=4)),
        (split(device=1, host=2, storage=3), CachedTokens(1, 2, 3)),
        (split(device=1, host=2), CachedTokens(1, 2)),
    ],
)
def test_hits_are_split_where_the_server_says_so(
    meta: dict[str, Any], cached: CachedTokens
) -> None:
    reply = generate(streams(chunk([1], 1, True, **meta)))
    assert reply.cached == cached
    assert reply.cached.total == meta.get("cached_tokens", 0)


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (answers(400, '{"error": {"message": "too long"}}'), "400: too long"),
        (answers(500, "boom"), "500: boom"),
        (streams({"error": {"message": "no room", "code": 400}}), "no room"),
        (streams(chunk([1], 1, finish_reason={"type": "abort", "message": "cut"})), "cut"),
        (streams(chunk([1], 1)), "the stream ended after 1 tokens"),
        (streams(), "the stream ended after 0 tokens"),
    ],
)
def test_a_request_that_fails_says_why(handler: Handler, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate(handler)


def prefill(handler: Handler) -> Any:
    async def one(client: StreamingClient) -> tuple[int, int]:
        return await asyncio.to_thread(client._server.prefill, [1, 2])

    return asyncio.run(ask("/generate", handler, one))


def test_a_prefilled_prompt_says_what_l3_had() -> None:
    found = prefill(as_json(chunk([1], 1, True, cached_tokens_details={"storage": 3})))
    assert found == (5, 3)
    assert prefill(as_json(chunk([1], 1, True))) == (5, 0)
    with pytest.raises(RequestError, match="400: too long"):
        prefill(answers(400, '{"error": {"message": "too long"}}'))
    with pytest.raises(RequestError, match="cut"):
        prefill(as_json(chunk([1], 1, finish_reason={"type": "abort", "message": "cut"})))
    with pytest.raises(RequestError, match="Expecting value"):
        prefill(answers(200, "?"))


def test_a_server_that_is_gone_fails_the_request() -> None:
    async def gone(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with pytest.raises(RequestError, match="isconnected"):
        generate(gone)


def test_what_a_server_says_of_itself() -> None:
    found = asyncio.run(ask("/server_info", as_json({"page_size": 64}), StreamingClient.server))
    assert found == {"page_size": 64}


@pytest.mark.parametrize(
    ("path", "handler", "what", "message"),
    [
        ("/server_info", answers(401, ""), SERVER, "/server_info: 401: give its --api-key"),
        ("/other", answers(200, ""), SERVER, "/server_info: 404: "),
        ("/server_info", answers(200, "<html>"), SERVER, "no usable SGLang server at "),
        ("/flush_cache", answers(400, "not idle"), FLUSH, "flush_cache: 400: not idle"),
        ("/flush_cache", answers(401, ""), FLUSH, "give its --api-key"),
    ],
)
def test_what_is_no_usable_server_is_named(
    path: str, handler: Handler, what: Callable[..., Any], message: str
) -> None:
    with pytest.raises(UnusableServer, match=message):
        asyncio.run(ask(path, handler, what))


def test_an_unreachable_server_is_named() -> None:
    server = Server("http://127.0.0.1:9")
    with pytest.raises(
        UnusableServer,
        match=r"^no usable SGLang server at http://127.0.0.1:9 \(.*\)\. Start one, .* --url$",
    ):
        server.info()
    with pytest.raises(UnusableServer, match="flush_cache: the server does not answer"):
        server.flush()


def test_a_flush_waits_for_an_idle_server() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(f"{request.method} {request.query['timeout']}")
        return web.Response()

    asyncio.run(ask("/flush_cache", handler, StreamingClient.flush))
    assert seen == ["POST 120"]
