"""Requests of ``hcache ingest`` to an SGLang server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import aiohttp

_LINE_BYTES = 1 << 22
"""A line of a stream holds the whole reply so far; its ids are no longer than this."""
_SILENCE_S = 600.0
"""How long an answer may pause."""
_SHORT = aiohttp.ClientTimeout(total=30)


class UnusableServer(RuntimeError):
    """A server cannot be used; one line that says why and what to do."""


class RequestError(RuntimeError):
    """The server refused a request, or did not finish it."""


class Prefilled(NamedTuple):
    """A prompt that a server has computed.

    Attributes:
        tokens: Its length.
        found_in_l3: The tokens that were read from L3 instead of computed.
    """

    tokens: int
    found_in_l3: int


class Client:
    """``async with Client("http://HOST:PORT") as client:``; ``api_key`` is the bearer token."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=_LINE_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def server(self) -> dict[str, Any]:
        """What the server says of itself: its arguments, its version, what a request may hold.

        Raises:
            UnusableServer: There is no SGLang server at the address.
        """
        try:
            status, text = await self._ask("GET", "server_info", timeout=_SHORT)
            if status == 200:
                found: dict[str, Any] = json.loads(text)
                return found
        except (RequestError, ValueError) as error:
            raise UnusableServer(
                f"no SGLang server at {self.url} ({error}). Start one, or pass its address with "
                "--url"
            ) from None
        hint = "; give its --api-key" if status in (401, 403) else ": is it an SGLang server?"
        raise UnusableServer(f"--url {self.url}: /server_info answered {status}{hint}")

    async def flush(self, timeout_s: float = 120.0) -> None:
        """Empty device and host caches once the server is idle; L3 has everything by then.

        Raises:
            UnusableServer: It was refused, or the server was not idle in time.
        """
        limit = aiohttp.ClientTimeout(total=timeout_s + 30)
        try:
            status, text = await self._ask(
                "POST", "flush_cache", params={"timeout": f"{timeout_s:g}"}, timeout=limit
            )
        except RequestError as error:
            raise UnusableServer(f"{self.url}/flush_cache: {error}") from None
        if status != 200:
            hint = "give its --api-key" if status in (401, 403) else text.strip()
            raise UnusableServer(f"{self.url}/flush_cache answered {status}: {hint}")

    async def prefill(self, prompt: Sequence[int] | str) -> Prefilled:
        """Have the server compute ``prompt`` (token ids, or a text for the server to tokenize).

        Raises:
            RequestError: It was refused, or did not end well.
        """
        status, text = await self._ask("POST", "generate", json=greedy_request(prompt, 1))
        if status != 200:
            raise RequestError(f"{status}: {error_text(text)}")
        try:
            meta = json.loads(text)["meta_info"]
        except ValueError as error:
            raise RequestError(str(error)) from None
        check_finished(meta)
        details = meta.get("cached_tokens_details") or {}
        return Prefilled(int(meta["prompt_tokens"]), int(details.get("storage") or 0))

    async def _ask(self, method: str, path: str, **options: Any) -> tuple[int, str]:
        """Status and text of the answer; raises a RequestError if there is none."""
        try:
            async with self.session.request(method, f"{self.url}/{path}", **options) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise RequestError(why(error)) from None


def greedy_request(prompt: Sequence[int] | str, output_tokens: int) -> dict[str, Any]:
    """The body of a request for exactly ``output_tokens`` tokens."""
    return {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": output_tokens,
            "ignore_eos": True,
        },
    }


def check_finished(meta: Mapping[str, Any]) -> None:
    """Raise a RequestError if the server aborted the request with this ``meta_info``."""
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise RequestError(str(reason.get("message", "aborted")))


def error_text(text: str) -> str:
    """What an error of SGLang says, without its wrapping."""
    try:
        error = json.loads(text).get("error", text)
    except (ValueError, AttributeError):
        error = text
    return str(error.get("message", error) if isinstance(error, Mapping) else error).strip()


def why(error: BaseException) -> str:
    """What an exception of a connection says."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
