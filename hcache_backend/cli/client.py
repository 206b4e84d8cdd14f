"""Speaks with an SGLang server: streamed requests with their times, and what it says of itself."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp

_LINE_BYTES = 1 << 22
"""A line of a stream holds the whole reply so far; its ids are no longer than this."""
_SHORT = aiohttp.ClientTimeout(total=30)
_DATA, _DONE = b"data:", b"[DONE]"


class BenchError(RuntimeError):
    """A benchmark cannot go on; one line that says why and what to do."""


class RequestError(RuntimeError):
    """The server refused a request, or did not finish it."""


class Cached(NamedTuple):
    """Prompt tokens that were not computed, by where they were found.

    ``unsplit`` are those of a server that does not say where (``--enable-cache-report``).
    """

    device: int = 0
    host: int = 0
    storage: int = 0
    unsplit: int = 0

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class Reply:
    """How one request was answered.

    Attributes:
        ttft_s: From sending to the first token.
        latency_s: From sending to the last token.
        gaps_s: Between a token and the one before it, for each but the first. Tokens that came
            together share the time since those before them evenly.
    """

    output_ids: list[int]
    prompt_tokens: int
    cached: Cached
    ttft_s: float
    latency_s: float
    gaps_s: list[float]


class Client:
    """``async with Client(url) as client:``.

    Args:
        url: ``http://HOST:PORT``.
        api_key: Sent as a bearer token, where the server wants one.
        timeout_s: How long a stream may say nothing.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_read=timeout_s)

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=_LINE_BYTES,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def server(self) -> dict[str, Any]:
        """What the server says of itself: its arguments, its version, what a request may hold.

        Raises:
            BenchError: There is no SGLang server at the address.
        """
        try:
            async with self._session.get(f"{self.url}/server_info", timeout=_SHORT) as answer:
                if answer.status == 200:
                    found: dict[str, Any] = await answer.json()
                    return found
                status = answer.status
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise BenchError(
                f"--url {self.url}: no SGLang server answers there ({_why(error)}); start one, or "
                "leave --url out and one is started"
            ) from None
        hint = "; give its --api-key" if status in (401, 403) else ": is it an SGLang server?"
        raise BenchError(f"--url {self.url}: /server_info answered {status}{hint}")

    async def flush(self, timeout_s: float = 120.0) -> None:
        """Empty device and host caches once the server is idle; L3 has everything by then.

        Raises:
            BenchError: It was refused, or the server was not idle in time.
        """
        try:
            async with self._session.post(
                f"{self.url}/flush_cache",
                params={"timeout": f"{timeout_s:g}"},
                timeout=aiohttp.ClientTimeout(total=timeout_s + 30),
            ) as answer:
                status, text = answer.status, (await answer.text()).strip()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BenchError(f"{self.url}/flush_cache: {_why(error)}") from None
        if status in (401, 403):
            raise BenchError(f"{self.url}/flush_cache answered {status}: give its --api-key")
        if status != 200:
            raise BenchError(f"{self.url}/flush_cache answered {status}: {text}")

    async def generate(self, prompt: Sequence[int] | str, output_tokens: int) -> Reply:
        """One greedy request for exactly ``output_tokens`` tokens.

        Args:
            prompt: Token ids, or a text for the server to tokenize.

        Raises:
            RequestError: It was refused, or did not end well.
        """
        body: dict[str, Any] = {
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": output_tokens,
                "ignore_eos": True,
            },
            "stream": True,
        }
        if isinstance(prompt, str):
            body["text"] = prompt
        else:
            body["input_ids"] = list(prompt)
        stream = _Stream(time.perf_counter())
        try:
            async with self._session.post(f"{self.url}/generate", json=body) as answer:
                if answer.status != 200:
                    raise RequestError(f"{answer.status}: {_message(await answer.text())}")
                async for event in _events(answer.content):
                    stream.add(event, time.perf_counter())
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise RequestError(_why(error)) from None
        return stream.reply()


class _Stream:
    """Puts the events of one stream together."""

    def __init__(self, sent: float) -> None:
        self._sent = self._last = sent
        self._ids: list[int] = []
        self._ttft: float | None = None
        self._gaps: list[float] = []
        self._meta: Mapping[str, Any] = {}

    def add(self, event: bytes, now: float) -> None:
        """An event that came at ``now``, of the clock of ``sent``."""
        said = json.loads(event)
        if "error" in said:
            raise RequestError(_message(event.decode(errors="replace")))
        self._meta = said["meta_info"]
        reason = self._meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise RequestError(str(reason.get("message", "aborted")))
        before = len(self._ids)
        ids = said["output_ids"]
        # A server sends all ids so far, or with --incremental-streaming-output only the new ones.
        so_far = len(ids) == self._meta["completion_tokens"]
        self._ids = list(ids) if so_far else self._ids + list(ids)
        new = len(self._ids) - before
        if not new:
            return
        if self._ttft is None:
            self._ttft = now - self._sent
            new -= 1
            self._gaps += [0.0] * new
        else:
            self._gaps += [(now - self._last) / new] * new
        self._last = now

    def reply(self) -> Reply:
        if self._ttft is None or not self._meta.get("finish_reason"):
            raise RequestError(f"the stream ended after {len(self._ids)} tokens")
        return Reply(
            output_ids=self._ids,
            prompt_tokens=int(self._meta["prompt_tokens"]),
            cached=_cached(self._meta),
            ttft_s=self._ttft,
            latency_s=self._last - self._sent,
            gaps_s=self._gaps,
        )


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    async for line in content:
        data = line.strip()
        if data.startswith(_DATA):
            event = data[len(_DATA) :].strip()
            if event != _DONE:
                yield event


def _cached(meta: Mapping[str, Any]) -> Cached:
    details = meta.get("cached_tokens_details")
    if not details:
        return Cached(unsplit=int(meta.get("cached_tokens") or 0))
    return Cached(*(int(details.get(name) or 0) for name in ("device", "host", "storage")))


def _message(text: str) -> str:
    """What an error of SGLang says, without its wrapping."""
    try:
        error = json.loads(text).get("error", text)
    except (ValueError, AttributeError):
        error = text
    return str(error.get("message", error) if isinstance(error, Mapping) else error).strip()


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
