"""The parts of a workload, and how lengths and tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
_DOCUMENT, _PROMPT = 0, 1


class WorkloadError(ValueError):
    """A workload that cannot be made; the message names the option, its value, a right one."""


@dataclass(frozen=True)
class Turn:
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
        documents: Tokens of each document.
        prefilled: Documents are given to the server before the run, as ``hcache ingest`` does.
        arrivals: At the request rate come every request (a client that is ready is
            picked, as in SGLang's benchmark), or sessions (a request is sent as soon as it is
            ready).
        interval_s: Seconds between a reply and the next question of its session.
        max_parallel: Requests in flight at most; None: as the user says.
        seed: Of its tokens.
    """

    name: str
    sessions: tuple[Session, ...]
    documents: tuple[int, ...] = ()
    prefilled: bool = False
    arrivals: Literal["requests", "sessions"] = "requests"
    interval_s: float = 0.0
    max_parallel: int | None = None
    seed: int = field(default=0, kw_only=True)

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def longest(self) -> int:
        """Tokens of the longest history, its last reply included."""
        return max(self.history(session) for session in self.sessions)

    @property
    def asked(self) -> list[int]:
        """Places of the documents that sessions ask about, each once."""
        return sorted({s.document for s in self.sessions if s.document is not None})

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
            "arrivals": self.arrivals,
            "interval_s": self.interval_s,
            "seed": self.seed,
        }

    def scaled(self, scale: float) -> Workload:
        """The same with all lengths (at least 1 token) and intervals multiplied by ``scale``."""

        def tokens(count: int) -> int:
            return max(1, round(count * scale))

        def smaller(turn: Turn) -> Turn:
            return Turn(tokens(turn.prompt), tokens(turn.output))

        return replace(
            self,
            sessions=tuple(
                replace(session, turns=tuple(map(smaller, session.turns)))
                for session in self.sessions
            ),
            documents=tuple(map(tokens, self.documents)),
            interval_s=self.interval_s * scale,
        )

    def limited(self, max_tokens: int | None = None, max_rounds: int | None = None) -> Workload:
        """The same with histories of at most ``max_tokens``, and sessions of ``max_rounds``.

        Turns that would go beyond are left out; documents are cut so that the first question of
        each session fits.

        Raises:
            WorkloadError: A first question and its reply alone are longer than ``max_tokens``.
        """
        documents = list(self.documents)
        if max_tokens is not None:
            for session in self.sessions:
                first = session.turns[0].prompt + session.turns[0].output
                if first + (session.document is not None) > max_tokens:
                    raise WorkloadError(
                        f"--max-context {max_tokens}: a question and its reply of workload "
                        f"{self.name} take {first} tokens; give more, or a smaller --scale"
                    )
                if session.document is not None:
                    room = max_tokens - first
                    documents[session.document] = min(documents[session.document], room)
        sessions = []
        for session in self.sessions:
            total = 0 if session.document is None else documents[session.document]
            kept = []
            for turn in session.turns[:max_rounds]:
                total += turn.prompt + turn.output
                if max_tokens is not None and total > max_tokens:
                    break
                kept.append(turn)
            sessions.append(replace(session, turns=tuple(kept)))
        return replace(self, sessions=tuple(sessions), documents=tuple(documents))

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


def about_documents(
    name: str,
    documents: Lengths,
    asked: Sequence[int],
    prompts: Lengths,
    outputs: Lengths,
    **options: Any,
) -> Workload:
    """Sessions of one question, each about the document of its place in ``asked``, which is
    prefilled."""
    turns = map(Turn, prompts.tolist(), outputs.tolist())
    return Workload(
        name,
        tuple(Session((turn,), place) for turn, place in zip(turns, asked, strict=True)),
        tuple(documents.tolist()),
        prefilled=True,
        **options,
    )
