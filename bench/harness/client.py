"""Streamed requests to an SGLang server, with their times."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from bench.harness.server import CachedTokens

_DATA, _DONE = b"data:", b"[DONE]"
_LINE_BYTES = 1 << 22  # a line of a stream holds the whole reply so far
_SILENCE_S = 600.0  # the longest pause within an answer


class RequestError(Exception):
    """A server refused a request, or did not finish it."""


@dataclass(frozen=True)
class Reply:
    """How one request was answered.

    Attributes:
        ttft_s: From sending to the first token.
        gaps_s: Between a token and the one before it, for each but the first. Tokens that came
            together share the time since those before them evenly.
        stopped: The last token is one that ends a reply.
    """

    output_ids: list[int]
    prompt_tokens: int
    cached: CachedTokens
    ttft_s: float
    gaps_s: list[float]
    stopped: bool = False


class StreamingClient:
    """Notes when each token of a reply came; ``async with StreamingClient(url, key) as ...``."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=_LINE_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def generate(
        self, prompt: Sequence[int], output_tokens: int, *, ignore_eos: bool = True
    ) -> Reply:
        """One greedy request; ``ignore_eos``: no token ends the reply before its length.

        Raises:
            RequestError: It was refused, or did not end well.
        """
        sampling = {"temperature": 0.0, "max_new_tokens": output_tokens, "ignore_eos": ignore_eos}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        stream = _Stream(time.perf_counter())
        try:
            url = f"{self._url}/generate"
            async with self._session.post(url, json=body, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise RequestError(f"{answer.status}: {error_text(await answer.text())}")
                async for line in answer.content:
                    event = line.strip().removeprefix(_DATA).strip()
                    if line.startswith(_DATA) and event != _DONE:
                        stream.add(event, time.perf_counter())
        except TimeoutError:
            raise RequestError("no answer in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RequestError(str(error) or type(error).__name__) from None
        return stream.reply()


class _Stream:
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
            raise RequestError(error_text(event.decode(errors="replace")))
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
        first = self._ttft is None
        if first:
            self._ttft = now - self._sent
        self._gaps += [0.0] * (new - 1) if first else [(now - self._last) / new] * new
        self._last = now

    def reply(self) -> Reply:
        if self._ttft is None or not self._meta.get("finish_reason"):
            raise RequestError(f"the stream ended after {len(self._ids)} tokens")
        return Reply(
            output_ids=self._ids,
            prompt_tokens=int(self._meta["prompt_tokens"]),
            cached=CachedTokens.of(self._meta),
            ttft_s=self._ttft,
            gaps_s=self._gaps,
            stopped=self._meta["finish_reason"]["type"] == "stop",
        )


def error_text(text: str) -> str:
    """The message in an error of SGLang."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, LookupError, TypeError):
        return text.strip()
    return str(error.get("message", error) if isinstance(error, Mapping) else error).strip()
