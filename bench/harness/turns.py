"""Servers that take turns at a history in L3, which on the CPU engine is as slow as one wants."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.harness.client import Reply, StreamingClient
from bench.harness.machine import Machine
from bench.harness.methods import PAGE_SIZE, Method, server_options
from bench.harness.options import ADMIN_KEY
from bench.harness.restorer import (
    Restore,
    Restorer,
    forget_files,
    l3_bytes,
    restored_from_l3,
    restorer,
)

QUESTION = PAGE_SIZE
"""Tokens after the history, which are computed in any case."""
_NEW = 1_000_000
"""Numbers of histories from here on are asked for once."""
NO_L3 = "none"
"""Name of the method that computes every history."""


class Answer(NamedTuple):
    """How a server answered.

    Attributes:
        seconds: Until the first token.
        share: Of the history, that came from L3.
        restore: What the trace shows of it, if ours or SGLang's loads were traced.
        from_l3: Tokens of the prompt that came from L3.
    """

    seconds: float
    share: float
    output_ids: tuple[int, ...]
    restore: Restore | None
    from_l3: int = 0


def question(number: int) -> list[int]:
    """Random tokens that nobody has asked before."""
    source = random.Random(f"question {number}")
    return [source.randrange(1024) for _ in range(QUESTION)]


def random_history(tokens: int, number: int = 0) -> list[int]:
    """Random tokens; the same for a number."""
    source = random.Random(f"history {number}")
    return [source.randrange(1024) for _ in range(tokens)]


@dataclass
class Turns:
    """Servers of the methods, all but one of them stopped.

    Attributes:
        history: Token ids that each of them has in its L3; whole pages.
        question: Token ids of the question of a number, behind the history.
        computing: Seconds that computing history and question take.
        bytes: What each method stores of the history.
    """

    servers: Mapping[str, Restorer]
    history: Sequence[int] = ()
    question: Callable[[int], list[int]] = question
    computing: float = 0.0
    bytes: Mapping[str, int] = field(default_factory=dict)
    _questions: int = field(default=0, repr=False)

    @property
    def tokens(self) -> int:
        """Of the history."""
        return len(self.history)

    def store(self, history: Sequence[int]) -> None:
        """Have every server compute the history and write it to its L3."""
        self.history = history
        for restored in self.servers.values():
            with restored.turn():
                restored.store(history)
        self.bytes = {name: l3_bytes(restored.l3) for name, restored in self.servers.items()}

    def time_computing(self) -> None:
        """Measure :attr:`computing`."""
        prompts = [self.new_question() for _ in range(3)]
        self.computing = median(self.ask(NO_L3, prompt).seconds for prompt in prompts)

    def new_question(self) -> list[int]:
        """History and a question that nobody has asked before."""
        self._questions += 1
        return [*self.history, *self.question(self._questions)]

    def new_history(self) -> list[int]:
        """A prompt of the same length of which no server has anything."""
        self._questions += 1
        before = random_history(self.tokens, self._questions + _NEW)
        return [*before, *self.question(self._questions)]

    def ask(self, name: str, prompt: Sequence[int], reply_tokens: int = 1) -> Answer:
        """Ask one server, with its L3 out of the page cache; it forgets what it then has.

        Args:
            reply_tokens: Of the reply, at most: it ends where the model ends it.
        """
        restored = self.servers[name]
        with restored.turn():
            forget_files(restored.l3)
            restored.skip_trace()
            reply = asyncio.run(_streamed(restored.server.url, prompt, reply_tokens))
            restore = restored_from_l3(restored.events())
            restored.server.flush_cache(300)
        from_l3 = reply.cached.storage
        share = from_l3 / self.tokens if self.tokens else 0.0
        return Answer(reply.ttft_s, share, tuple(reply.output_ids), restore, from_l3)

    def seconds_of_question(self, name: str) -> float:
        """Seconds to the first token where the server has the history on the device."""
        restored, seconds = self.servers[name], []
        with restored.turn():
            restored.server.generate(self.history, 1)
            for _ in range(5):
                prompt = self.new_question()
                start = time.perf_counter()
                restored.server.generate(prompt, 1)
                seconds.append(time.perf_counter() - start)
            restored.server.flush_cache(300)
        return median(seconds)

    def slow_down(self, speed: float, like: str) -> float:
        """Let L3 bring what method ``like`` stores of the history ``speed`` times as fast as it is
        computed; 0: no limit. On the CPU engine only.

        Returns:
            Bytes per second.
        """
        rate = self.bytes[like] * speed / self.computing
        for restored in self.servers.values():
            restored.slow_down(l3=rate)
        return rate


async def _streamed(url: str, prompt: Sequence[int], reply_tokens: int) -> Reply:
    async with StreamingClient(url, ADMIN_KEY) as client:
        return await client.generate(prompt, reply_tokens, ends=True)


@contextmanager
def taking_turns(
    machine: Machine,
    model: Path,
    methods: Mapping[str, Method],
    tokens: int,
    folder: Path | None = None,
    **options: Any,
) -> Iterator[Turns]:
    """Servers of ``methods``, one of them :data:`NO_L3`, as long as the block lasts, with a random
    history in L3.

    Args:
        model: Its folder.
        tokens: Of the history; whole pages.
        folder: For those of the servers; default: the one that the model's is in.
        options: Further fields of :class:`ServerOptions`.
    """
    with empty_servers(machine, model, methods, tokens, folder, **options) as turns:
        turns.store(random_history(tokens))
        turns.time_computing()
        yield turns


@contextmanager
def empty_servers(
    machine: Machine,
    model: Path,
    methods: Mapping[str, Method],
    tokens: int,
    folder: Path | None = None,
    **options: Any,
) -> Iterator[Turns]:
    """The servers of :func:`taking_turns` with nothing in L3; a history has ``tokens`` at most."""
    with ExitStack() as stack:
        servers: dict[str, Restorer] = {}
        for name, method in methods.items():
            place = (folder or model.parent) / f"{model.name}-{tokens}-{name}"
            served = server_options(
                method,
                machine,
                model,
                place,
                pool_tokens=3 * (tokens + PAGE_SIZE + QUESTION),
                extra_args=("--mem-fraction-static", "0.5"),  # the others' weights count as used
                **options,
            )
            restored = stack.enter_context(restorer(served, place / "l3"))
            stack.callback(restored.server.signal, signal.SIGCONT)
            restored.server.signal(signal.SIGSTOP)
            servers[name] = restored
        yield Turns(servers)
