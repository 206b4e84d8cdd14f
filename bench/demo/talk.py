"""A conversation about a text that every machine has, on one server after the other."""

import asyncio
import inspect
import random
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from bench.harness.client import Reply, StreamingClient
from bench.harness.machine import Machine
from bench.harness.methods import METHODS, Method, server_options
from bench.harness.program import Advance
from bench.harness.restorer import l3_bytes
from bench.harness.server import ADMIN_KEY, CachedTokens, Server
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

REPLY_TOKENS = 48
PAGE = 64
QUESTIONS = (
    "In two sentences: what is this code for?",
    "Which function would you call to add a prefix to every line? Answer in one sentence.",
    "Write one line of Python that calls it.",
)
COMPUTED, FILE, OURS = "computed", "file", "ours"
METHODS_OF = {COMPUTED: "recompute", FILE: "file", OURS: "hcache-eager"}
SHOWN = {COMPUTED: "computed", FILE: "SGLang `file`", OURS: "hcache"}
Heads = Literal["multi-head", "grouped-query"]
FORMS: Mapping[Heads, Mapping[str, Any]] = {
    # By default a CPU stores K and V of this one: it projects slowly compared with its copies.
    "multi-head": {"mode": "hidden"},
    "grouped-query": {},
}
"""Options of ours besides the defaults. Every hit is read, also on a machine that is busy."""


class Talk(Protocol):
    """A conversation, as token ids."""

    def question(self, number: int) -> list[int]:
        """The tokens that the next prompt adds to all before it."""

    def text(self, reply: Sequence[int]) -> str | None:
        """A reply in words, if the model speaks any."""


class Words:
    """Questions about a module of the standard library, in the model's chat template."""

    def __init__(self, model: Path, tokens: int) -> None:
        stub_torchvision()
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        source = self._tokenizer.encode(inspect.getsource(textwrap), add_special_tokens=False)
        self._source = self._tokenizer.decode(source[:tokens])

    def question(self, number: int) -> list[int]:
        asked = QUESTIONS[number]
        if not number:
            asked = f"This is a part of a Python module:\n\n{self._source}\n\n{asked}"
        start = "" if not number else "<|im_end|>\n"
        said = f"{start}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        ids: list[int] = self._tokenizer.encode(said, add_special_tokens=False)
        return ids

    def text(self, reply: Sequence[int]) -> str | None:
        return str(self._tokenizer.decode(reply, skip_special_tokens=True)).strip()


class Tokens:
    """Random tokens, for a random model."""

    def __init__(self, vocabulary: int, tokens: int) -> None:
        self._vocabulary, self._tokens = vocabulary, tokens

    def question(self, number: int) -> list[int]:
        dice = random.Random(number)
        return [dice.randrange(self._vocabulary) for _ in range(20 if number else self._tokens)]

    def text(self, reply: Sequence[int]) -> str | None:
        return None


@dataclass(frozen=True)
class Turn:
    """One question behind ``history`` tokens. ``reply`` is without the end of the message."""

    history: int
    ttft_ms: float
    cached: CachedTokens
    reply: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """A conversation on one server; ``bytes_per_token`` of its L3, if it has one."""

    turns: Sequence[Turn]
    bytes_per_token: float | None


def converse(
    method: str,
    heads: Heads,
    model: Path,
    talk: Talk,
    machine: Machine,
    folder: Path,
    said: Advance,
) -> Run:
    """Have the conversation on a server of ``method``; device and host memory are emptied between
    turns, as if others had used them meanwhile.

    Raises:
        ServerError: The server did not start.
        RequestError: A request failed.
    """
    way: Method = METHODS[METHODS_OF[method]]
    place = folder / method
    hcache = FORMS[heads] if method == OURS else None
    options = server_options(way, machine, model, place, pool_tokens=8192, hcache=hcache)
    turns: list[Turn] = []
    history: list[int] = []
    place.mkdir(parents=True, exist_ok=True)
    with Server(options) as server:
        for number in range(len(QUESTIONS)):
            said(f"{heads}, {SHOWN[method]}: question {number + 1}")
            prompt = history + talk.question(number)
            turn = _ask(server, prompt, len(history))
            turns.append(turn)
            history = [*prompt, *turn.reply]
            server.flush_cache(300)
        stored = l3_bytes(place / "l3")
    whole = len(history) // PAGE * PAGE
    return Run(turns, stored / whole if stored else None)


def _ask(server: Server, prompt: Sequence[int], history: int) -> Turn:
    """One streamed request, greedy, up to the end of the message."""

    async def ask() -> Reply:
        async with StreamingClient(server.url, ADMIN_KEY) as client:
            return await client.generate(prompt, REPLY_TOKENS, ignore_eos=False)

    reply = asyncio.run(ask())
    ids = reply.output_ids[:-1] if reply.stopped else reply.output_ids
    return Turn(history, 1e3 * reply.ttft_s, reply.cached, tuple(ids))
