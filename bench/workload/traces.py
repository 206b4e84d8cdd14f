"""Four hours of requests by many users, as pages, which pass through a page store.

A page is a number; sequences that begin alike begin with the same pages. Lengths, times and who
asks are drawn from a seed, so the seed freezes a trace. Two assumptions hold for all traces: time
between a reply and the next question is log-normal with a mean of 2 minutes and a long tail (half
of the questions come within 40 s, one in twenty after more than 7 minutes), and a few users, or
documents, or system prompts, get most of the requests (Zipf's law).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from bench.workload.base import lognormal, zipf

PAGE_TOKENS = 128
SPAN_S = 4 * 3600.0  # sessions begin within it
THINK_S, THINK_SPREAD = 120.0, 1.5
USER_SKEW = 0.9
AGENT_RESULT_MEAN, AGENT_CALL_MEAN = 200.0, 60.0  # tokens of a tool's result, and of a call
RAG_SKEW = 1.0
# Of ShareGPT4 in the HCache paper (EuroSys '25, section 2.3, figure 3): mean tokens of a question
# and a reply, and the cap of a history. With that many rounds half of the histories are over 2.5K
# tokens, as there; the spread is our own choice.
CHAT_PROMPT, CHAT_REPLY, HISTORY_CAP = 66.8, 358.8, 16_384
CHAT_ROUNDS, CHAT_ROUNDS_SPREAD = 6.0, 1.0


class Request(NamedTuple):
    """A prompt and its reply, at ``time`` in seconds: the pages of both, and how many of them are
    the prompt's."""

    time: float
    pages: Sequence[int]
    prompt: int


@dataclass
class _Text:
    """Tokens of a sequence, and its whole pages."""

    tokens: int = 0
    pages: list[int] = field(default_factory=list)

    def copy(self) -> _Text:
        return _Text(self.tokens, [*self.pages])


class _Source:
    """Draws lengths, times and choices; numbers new pages."""

    def __init__(self, seed: int, trace: int) -> None:
        self.chance = np.random.default_rng([seed, trace])
        self._new = count()

    def length(self, mean: float, spread: float) -> int:
        return int(lognormal(self.chance, mean, spread, 1)[0])

    def text(self, mean: float, spread: float) -> _Text:
        text = _Text()
        self.extend(text, mean, spread)
        return text

    def extend(self, text: _Text, mean: float, spread: float) -> None:
        """Add about ``mean`` new tokens."""
        text.tokens += self.length(mean, spread)
        while len(text.pages) < text.tokens // PAGE_TOKENS:
            text.pages.append(next(self._new))

    def pause(self, mean: float = THINK_S) -> float:
        return float(self.chance.lognormal(np.log(mean) - THINK_SPREAD**2 / 2, THINK_SPREAD))

    def sessions(self, number: int, users: int, skew: float) -> Iterator[tuple[float, int]]:
        """When sessions begin, in order, and whose they are."""
        starts = np.sort(self.chance.uniform(0, SPAN_S, number))
        return zip(starts.tolist(), zipf(self.chance, users, skew, number).tolist(), strict=True)

    def turn(self, time: float, history: _Text, prompt: float, reply: float) -> Request:
        """A question and its reply, whose mean tokens are given; ``history`` grows by both."""
        self.extend(history, prompt, 1.0)
        asked = len(history.pages)
        self.extend(history, reply, 0.6)
        return Request(time, tuple(history.pages), asked)

    def conversation(
        self, time: float, history: _Text, turns: int, prompt: float, reply: float
    ) -> Iterator[Request]:
        for _ in range(turns):
            yield self.turn(time, history, prompt, reply)
            time += self.pause()


def chat(seed: int) -> list[Request]:
    """Conversations with the paper's lengths and rounds; half of the sessions go on with one."""
    source = _Source(seed, 0)
    found: list[Request] = []
    last: dict[int, tuple[float, _Text]] = {}
    for time, user in source.sessions(600, 200, USER_SKEW):
        end, history = last.get(user, (0.0, _Text()))
        if source.chance.random() < 0.5 or history.tokens > HISTORY_CAP // 2:
            history = _Text()
        turns = source.length(CHAT_ROUNDS, CHAT_ROUNDS_SPREAD)
        found += source.conversation(max(time, end), history, turns, CHAT_PROMPT, CHAT_REPLY)
        last[user] = found[-1].time + source.pause(), history
    return _in_order(found)


def system_prompts(seed: int) -> list[Request]:
    """Short conversations behind one of 60 system prompts of 2,000 tokens."""
    source = _Source(seed, 1)
    found: list[Request] = []
    prompts = [source.text(2000, 0.6) for _ in range(60)]
    for time, application in source.sessions(1500, 60, RAG_SKEW):
        turns = source.length(2.5, 0.7)
        found += source.conversation(time, prompts[application].copy(), turns, 100, 250)
    return _in_order(found)


def agents(seed: int) -> list[Request]:
    """Tasks on 60 users' projects with one of 6 sets of tools: short branches from a growing trunk.

    Up to four branches of a few turns run beside each other; then the trunk goes on with their
    results, and the user looks at it.
    """
    source = _Source(seed, 2)
    found: list[Request] = []
    tools = [source.text(3000, 0.3) for _ in range(6)]
    projects = [tools[user % 6].copy() for user in range(60)]
    for project in projects:
        source.extend(project, 2000, 0.6)
    for start, user in source.sessions(100, 60, USER_SKEW):
        trunk, time = projects[user].copy(), start
        source.extend(trunk, 250, 0.6)
        for _ in range(source.length(5, 0.4)):
            ends = [time]
            for _ in range(int(source.chance.integers(1, 5))):
                branch, now = trunk.copy(), time
                for _ in range(source.length(3, 0.5)):
                    found.append(source.turn(now, branch, AGENT_RESULT_MEAN, AGENT_CALL_MEAN))
                    now += source.pause(10)
                ends.append(now)
            time = max(ends)
            found.append(source.turn(time, trunk, 400, 100))
            time += source.pause()
    return _in_order(found)


def documents(seed: int) -> list[Request]:
    """Questions about 80 documents of 12,000 tokens; half of a user's sessions read on."""
    source = _Source(seed, 3)
    found: list[Request] = []
    texts = [source.text(12_000, 0.6) for _ in range(80)]
    popular = zipf(source.chance, 80, RAG_SKEW, 700).tolist()
    last: dict[int, int] = {}
    for text, (time, user) in zip(popular, source.sessions(700, 150, USER_SKEW), strict=True):
        if user not in last or source.chance.random() < 0.5:
            last[user] = text
        turns = source.length(3, 0.5)
        found += source.conversation(time, texts[last[user]].copy(), turns, 60, 200)
    return _in_order(found)


def _in_order(requests: list[Request]) -> list[Request]:
    return sorted(requests, key=lambda request: request.time)


TRACES = {"chat": chat, "system prompts": system_prompts, "agents": agents, "documents": documents}
