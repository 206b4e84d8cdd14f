"""The clients of ``hcache ingest`` and of benchmarks, against servers that answer as SGLang does,
or do not."""

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


TOO_LONG = {"error": {"message": "too long"}}
ABORTED = chunk([1], 1, finish_reason={"type": "abort", "message": "cut"})


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


def answers(status: int, body: object) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text)

    return handler


async def _ask(
    path: str,
    handler: Handler,
    what: Callable[[StreamingClient], Awaitable[Any]],
    key: str | None,
) -> Any:
    app = web.Application()
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        port = runner.addresses[0][1]
        async with StreamingClient(f"http://127.0.0.1:{port}/", key) as client:
            return await what(client)
    finally:
        await runner.cleanup()


def ask(path: str, handler: Handler, what: Callable[..., Any], key: str | None = None) -> Any:
    """What a client does with a server that has ``handler`` at ``path``."""
    return asyncio.run(_ask(path, handler, what, key))


def generate(handler: Handler, prompt: Sequence[int] | str = (1, 2), **given: Any) -> Reply:
    key = given.pop("key", None)
    reply: Reply = ask("/generate", handler, lambda one: one.generate(prompt, 3, **given), key)
    return reply


@pytest.mark.parametrize(
    ("events", "ids", "gaps"),
    [
        ([chunk([7], 1), chunk([7, 8], 2), chunk([7, 8, 9], 3, True)], [7, 8, 9], 2),
        ([chunk([7], 1), chunk([8], 2), chunk([9], 3, True)], [7, 8, 9], 2),
        ([chunk([1], 1), chunk([1, 2, 3], 3, True)], [1, 2, 3], 2),
        ([chunk([], 0), chunk([4], 1), chunk([4], 1, True)], [4], 0),
    ],
    ids=["all so far", "only the new ones", "two at once", "an event without a new token"],
)
def test_a_stream_is_put_together(events: list[dict[str, Any]], ids: list[int], gaps: int) -> None:
    reply = generate(streams(*events))
    assert (reply.output_ids, reply.prompt_tokens, len(reply.gaps_s)) == (ids, 5, gaps)
    assert all(gap > 0 for gap in reply.gaps_s)


def test_a_request_asks_for_exactly_so_many_tokens_or_until_a_message_ends() -> None:
    seen: list[Any] = []
    generate(streams(chunk([1], 1, True), seen=seen), [3, 4], key="secret")
    stop = chunk([1], 1, True, finish_reason={"type": "stop"})
    assert generate(streams(stop, seen=seen), "a text", ignore_eos=False).stopped
    (ids, header), (text, no_header) = seen
    asked = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    assert (ids["input_ids"], ids["sampling_params"], ids["stream"]) == ([3, 4], asked, True)
    assert (text["text"], text["sampling_params"]) == ("a text", {**asked, "ignore_eos": False})
    assert (header, no_header) == ("Bearer secret", None)


def test_hits_are_split_where_the_server_says_so() -> None:
    split = {"device": 1, "host": 2, "storage": 3}
    events = [
        chunk([1], 1, True, cached_tokens=6, **meta)
        for meta in ({}, {"cached_tokens_details": split})
    ]
    found = [generate(streams(event)).cached for event in events]
    assert found == [CachedTokens(unsplit=6), CachedTokens(1, 2, 3)]


async def gone(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def prefill(handler: Handler) -> Any:
    return ask("/generate", handler, lambda one: asyncio.to_thread(one._server.prefill, [1, 2]))


@pytest.mark.parametrize(
    ("send", "handler", "message"),
    [
        (generate, answers(400, TOO_LONG), "400: too long"),
        (generate, answers(500, "boom"), "500: boom"),
        (generate, streams({"error": {"message": "no room", "code": 400}}), "no room"),
        (generate, streams(ABORTED), "cut"),
        (generate, streams(chunk([1], 1)), "the stream ended after 1 tokens"),
        (generate, gone, "isconnected"),
        (prefill, answers(400, TOO_LONG), "400: too long"),
        (prefill, answers(200, ABORTED), "cut"),
        (prefill, answers(200, "?"), "Expecting value"),
    ],
)
def test_a_request_that_fails_says_why(
    send: Callable[[Handler], Any], handler: Handler, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        send(handler)


@pytest.mark.parametrize("storage", [0, 3])
def test_a_prefilled_prompt_says_what_l3_had(storage: int) -> None:
    found = chunk([1], 1, True, cached_tokens_details={"storage": storage} if storage else None)
    assert prefill(answers(200, found)) == (5, storage)


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
        ask(path, handler, what)


def test_an_unreachable_server_is_named() -> None:
    server = Server("http://127.0.0.1:9")
    with pytest.raises(
        UnusableServer,
        match=r"^no usable SGLang server at http://127.0.0.1:9 \(.*\)\. Start one, .* --url$",
    ):
        server.info()
    with pytest.raises(UnusableServer, match="flush_cache: the server does not answer"):
        server.flush()
