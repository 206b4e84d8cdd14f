"""Servers that take turns at a history in L3, which on the CPU engine is as slow as one wants."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.harness.machine import Machine
from bench.harness.methods import PAGE_SIZE, Method, server_options
from bench.harness.restorer import Restore, Restorer, l3_bytes, resting, restored_from_l3

QUESTION = PAGE_SIZE  # tokens after the history, which are computed in any case
_NEW = 1_000_000  # numbers of histories from here on are asked for once
NO_L3 = "none"  # name of the method that computes every history


class Answer(NamedTuple):
    """How a server answered.

    Attributes:
        seconds: Until the first token.
        share: Of the history, that came from L3.
        restore: As the trace shows it, if ours or SGLang's loads were traced.
    """

    seconds: float
    share: float
    output_ids: tuple[int, ...]
    restore: Restore | None


def differing(answers: Mapping[str, Answer]) -> int:
    """How many different replies there are beside one of them."""
    return len({answer.output_ids for answer in answers.values()}) - 1


@dataclass
class Turns:
    """Servers of the methods, all but one of them stopped; each has the history in its L3.

    Attributes:
        tokens: Of the history; whole pages.
        computing: Seconds of computing history and question.
        bytes: That each method stores of the history.
    """

    servers: Mapping[str, Restorer]
    tokens: int
    computing: float = 0.0
    bytes: Mapping[str, int] = field(default_factory=dict)
    _questions: int = field(default=0, repr=False)

    def new_question(self) -> list[int]:
        """History and a new question."""
        self._questions += 1
        return [*history(self.tokens), *question(self._questions)]

    def new_history(self) -> list[int]:
        """A prompt of the same length of which no server has anything."""
        self._questions += 1
        return [*history(self.tokens, self._questions + _NEW), *question(self._questions)]

    def ask(self, name: str, prompt: Sequence[int]) -> Answer:
        """Ask one server, with its L3 out of the page cache; it forgets the history again."""
        restored = self.servers[name]
        with restored.turn():
            ms, reply, events = restored.ask(prompt)
            restored.server.flush_cache(300)
        share = reply.cached.storage / self.tokens
        return Answer(ms / 1e3, share, tuple(reply.output_ids), restored_from_l3(events))

    def round(self, names: Sequence[str], number: int) -> dict[str, Answer]:
        """Ask these servers a new question, in an order that ``number`` draws."""
        prompt = self.new_question()
        order = random.Random(number).sample(names, len(names))
        return {name: self.ask(name, prompt) for name in order}

    def seconds_of_question(self, name: str) -> float:
        """Seconds to the first token if the server has the history on the device."""
        restored, seconds = self.servers[name], []
        with restored.turn():
            restored.server.generate(history(self.tokens), 1)
            for _ in range(5):
                seconds.append(restored.ask(self.new_question())[0] / 1e3)
            restored.server.flush_cache(300)
        return median(seconds)

    def slow_down(self, speed: float, like: str) -> float:
        """Let L3 bring the bytes that method ``like`` stores of the history ``speed`` times as fast
        as it is computed; 0: no limit. On the CPU engine only. Returns bytes per second."""
        rate = self.bytes[like] * speed / self.computing
        for restored in self.servers.values():
            restored.slow_down(l3=rate)
        return rate


@contextmanager
def taking_turns(
    machine: Machine,
    model: Path,
    methods: Mapping[str, Method],
    tokens: int,
    extra_args: Sequence[str] = (),
    **options: Any,
) -> Iterator[Turns]:
    """Servers of ``methods``, one of them :data:`NO_L3`, as long as the block lasts.

    Args:
        model: Its folder, beside which the servers have theirs.
        tokens: Of the history; whole pages.
        extra_args: Further arguments of all servers.
        options: Further fields of :class:`ServerOptions`.
    """
    with ExitStack() as stack:
        servers: dict[str, Restorer] = {}
        turns = Turns(servers, tokens)
        for name, method in methods.items():
            folder = model.parent / f"{model.name}-{tokens}-{name}"
            served = server_options(
                *(method, machine, model, folder),
                pool_tokens=3 * (tokens + PAGE_SIZE + QUESTION),
                # The others' weights count as used.
                extra_args=("--mem-fraction-static", "0.5", *extra_args),
                **options,
            )
            restored = stack.enter_context(resting(served, folder / "l3"))
            with restored.turn():
                restored.store(history(tokens))
            servers[name] = restored
        turns.bytes = {name: l3_bytes(restored.l3) for name, restored in servers.items()}
        prompts = [turns.new_question() for _ in range(3)]
        turns.computing = median(turns.ask(NO_L3, prompt).seconds for prompt in prompts)
        yield turns


def history(tokens: int, number: int = 0) -> list[int]:
    """Random tokens; the same for a number."""
    source = random.Random(f"history {number}")
    return [source.randrange(1024) for _ in range(tokens)]


def question(number: int) -> list[int]:
    """Random tokens behind a history; the same for a number."""
    source = random.Random(f"question {number}")
    return [source.randrange(1024) for _ in range(QUESTION)]
