"""Clients that talk to a server at once, with shared prefixes, and hang up when they please."""

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import requests

from bench.harness.server import Reply, Server, ServerError

from .conversations import Turn, random_tokens

PREFIXES = [random_tokens(160, 900 + number) for number in range(4)]
LONGEST_PROMPT = 700
SLOWEST_ABORT_S = 1.0


class Clients:
    """Multi-turn clients, that come back to conversations which they left; a part of the requests
    is aborted, by either way that a client has.

    Args:
        server: Whom they talk to.
        count: How many there are.
        aborted: Share of the requests that are aborted.
        kept: How many replies are kept; every reply is as likely as any other.
        seed: Of what they say; when they say it depends on the server.

    Attributes:
        turns: The replies that are kept.
        counts: ``conversations`` that were begun or gone back to; requests by how they ended:
            ``replied``, ``disconnected``, ``aborted``; and tokens of replied prompts by where they
            came from: ``device``, ``host``, ``storage``.
    """

    def __init__(self, server: Server, count: int, *, aborted: float, kept: int, seed: int = 0):
        self._server = server
        self._aborted = aborted
        self._kept = kept
        self._lock = threading.Lock()
        self._random = [random.Random(f"{seed} {client}") for client in range(count)]
        self._left: list[list[list[int]]] = [[] for _ in range(count)]  # histories, by client
        self._lottery = random.Random(seed)
        self.turns: list[Turn] = []
        self.counts: Counter[str] = Counter()

    def talk(self, seconds: float, until: Callable[[], bool]) -> None:
        """All of them, for so long and until that is so; the last replies are waited for."""
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(len(self._random)) as pool:
            talks = pool.map(
                lambda rng, left: self._talk(rng, left, deadline, until), self._random, self._left
            )
            list(talks)

    def begin(self, conversations: int) -> None:
        wanted = self.counts["conversations"] + conversations
        self.talk(0, until=lambda: self.counts["conversations"] >= wanted)

    def _talk(
        self, rng: random.Random, left: list[list[int]], deadline: float, until: Callable[[], bool]
    ) -> None:
        history: list[int] = []
        while time.monotonic() < deadline or not until():
            if not history or len(history) > LONGEST_PROMPT or rng.random() < 0.2:
                history = list(rng.choice(PREFIXES + left[-8:]))
                self._count("conversations")
            prompt = history + random_tokens(rng.randint(20, 100), rng.getrandbits(32))
            reply = self._ask(prompt, rng.randint(4, 24), rng)
            if reply is not None:
                self._keep(Turn(prompt, reply, len(history)))
                history = prompt + reply.output_ids
                if len(history) <= LONGEST_PROMPT:
                    left.append(history)

    def _ask(self, prompt: list[int], tokens: int, rng: random.Random) -> Reply | None:
        """The reply, or None when the request was aborted before it was complete."""
        body: dict[str, Any] = {
            "rid": uuid.uuid4().hex,
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        if rng.random() >= self._aborted:
            return self._generate(body)
        if rng.random() < 0.5:
            self._hang_up(body, rng.randrange(tokens))
            return None
        abort = threading.Timer(
            rng.uniform(0, SLOWEST_ABORT_S), self._server.abort_request, [body["rid"]]
        )
        abort.start()
        try:
            return self._generate(body, may_be_aborted=True)
        finally:
            abort.join()

    def _generate(self, body: dict[str, Any], *, may_be_aborted: bool = False) -> Reply | None:
        answer = requests.post(f"{self._server.url}/generate", json=body, timeout=600)
        if answer.status_code == 200:
            found = answer.json()
            if found["meta_info"]["finish_reason"]["type"] == "length":
                return Reply(found["output_ids"], found["meta_info"])
        if not may_be_aborted:
            raise ServerError(f"/generate answered {answer.status_code}: {answer.text}")
        self._count("aborted")
        return None

    def _hang_up(self, body: dict[str, Any], after: int) -> None:
        """Close the connection before the reply has begun, or once so many tokens came."""
        if after == 0:
            with suppress(requests.Timeout):
                requests.post(f"{self._server.url}/generate", json=body, timeout=(5, 0.05))
        else:
            stream = {**body, "stream": True}
            with requests.post(
                f"{self._server.url}/generate", json=stream, timeout=600, stream=True
            ) as answer:
                lines = (line for line in answer.iter_lines() if line)
                for _ in range(after):
                    next(lines, None)
        self._count("disconnected")

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _keep(self, turn: Turn) -> None:
        with self._lock:
            self.counts["replied"] += 1
            for where in ("device", "host", "storage"):
                self.counts[where] += getattr(turn.cached, where)
            if len(self.turns) < self._kept:
                self.turns.append(turn)
            elif (place := self._lottery.randrange(self.counts["replied"])) < self._kept:
                self.turns[place] = turn
