"""The parts of a workload, and how lengths and tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
_DOCUMENT, _PROMPT = 0, 1


class WorkloadError(ValueError):
    """A workload that cannot be made; the message names the option, its value, a right one."""


class Turn(NamedTuple):
    """Tokens of one question, without the history before it, and of its reply."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Session:
    """The turns of one client; each sends the whole history before its question.

    ``document``: place in the workload's documents of the one before the first question, if any.
    """

    turns: tuple[Turn, ...]
    document: int | None = None


@dataclass(frozen=True)
class Workload:
    """All requests of one run.

    Attributes:
        name: As in ``--workload``.
        sessions: Clients, in the order of their arrival.
        documents: Tokens of each document; the server is given them before the run.
        interval_s: Seconds between a reply and the next question of its session.
        max_parallel: Requests in flight at most; None: as the user says.
        seed: Of its tokens.
    """

    name: str
    sessions: tuple[Session, ...]
    documents: tuple[int, ...] = ()
    interval_s: float = 0.0
    max_parallel: int | None = None
    seed: int = 0

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def longest(self) -> int:
        """Tokens of the longest history, its last reply included."""
        return max(self.history(session) for session in self.sessions)

    def history(self, session: Session) -> int:
        """Tokens of a session after its last reply."""
        before = 0 if session.document is None else self.documents[session.document]
        return before + sum(turn.prompt + turn.output for turn in session.turns)

    def describe(self) -> dict[str, Any]:
        """Counts and lengths, in tokens, for results."""
        turns = [turn for session in self.sessions for turn in session.turns]
        return {
            "name": self.name,
            "sessions": len(self.sessions),
            "requests": self.requests,
            "prompt_mean": mean(turn.prompt for turn in turns),
            "output_mean": mean(turn.output for turn in turns),
            "history_median": median(map(self.history, self.sessions)),
            "history_max": self.longest,
            "documents": len(self.documents),
            "interval_s": self.interval_s,
            "seed": self.seed,
        }

    def scaled(self, scale: float, max_rounds: int | None = None) -> Workload:
        """The same with all lengths (at least 1 token) and intervals multiplied by ``scale``, and
        at most so many turns of each session."""

        def tokens(count: int) -> int:
            return max(1, round(count * scale))

        sessions = (
            tuple(Turn(*map(tokens, turn)) for turn in session.turns[:max_rounds])
            for session in self.sessions
        )
        return replace(
            self,
            sessions=tuple(map(Session, sessions, (session.document for session in self.sessions))),
            documents=tuple(map(tokens, self.documents)),
            interval_s=self.interval_s * scale,
        )

    def document_ids(self, document: int | None, vocabulary: int) -> list[int]:
        """Tokens of a document, the same in every run; none of none."""
        if document is None:
            return []
        return self._draw(self.documents[document], vocabulary, _DOCUMENT, document)

    def prompt_ids(self, session: int, turn: int, vocabulary: int, run: int = 0) -> list[int]:
        """Tokens of a turn's question: others in every ``run`` of this workload on one server, so
        that none finds those of another."""
        count = self.sessions[session].turns[turn].prompt
        return self._draw(count, vocabulary, _PROMPT, run, session, turn)

    def _draw(self, count: int, vocabulary: int, *key: int) -> list[int]:
        source = np.random.default_rng([self.seed, *key])
        drawn: list[int] = source.integers(0, vocabulary, count).tolist()
        return drawn


def lognormal(source: np.random.Generator, mean: float, spread: float, count: int) -> Lengths:
    """``count`` whole numbers with a mean of ``mean`` and the tail of lengths of texts; ``spread``:
    standard deviation of the logarithm."""
    drawn = source.lognormal(np.log(mean) - spread**2 / 2, spread, count)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def zipf(source: np.random.Generator, items: int, skew: float, count: int) -> Lengths:
    """``count`` places in ``items``; place ``i`` has a share proportional to ``(i + 1) ** -skew``.
    A skew of 0 is the uniform distribution."""
    shares = np.arange(1, items + 1, dtype=np.float64) ** -skew
    return source.choice(items, count, p=shares / shares.sum())
