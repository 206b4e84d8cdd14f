"""Workloads that are not the paper's: SGLang's multi-turn one, agents, and retrieval (RAG)."""

from __future__ import annotations

import numpy as np

from bench.workload.base import (
    Session,
    Turn,
    Workload,
    WorkloadError,
    about_documents,
    lognormal,
    zipf,
)

AGENT_SYSTEM_TOKENS = 6_000
"""A system prompt with the definitions of a few dozen tools."""
AGENT_TURNS_MEAN, AGENT_TURNS_SPREAD = 20.0, 0.4
AGENT_RESULT_MEAN, AGENT_CALL_MEAN, AGENT_SPREAD = 200.0, 60.0, 0.8
"""Tokens of a tool's result, which is a prompt, and of a call, which is a reply."""
AGENT_TOOL_S = 2.0
RAG_DOCUMENT_MEAN, RAG_DOCUMENT_SPREAD = 3_000.0, 0.5
RAG_QUESTION_MEAN, RAG_ANSWER_MEAN, RAG_SPREAD = 40.0, 150.0, 0.4
RAG_DOCUMENTS = 64
RAG_SKEW = 1.0


def multiturn(
    clients: int,
    seed: int,
    *,
    request_length: int = 512,
    output_length: int = 64,
    rounds: tuple[int, int] = (5, 5),
    sub_question_input_length: int = 0,
    range_ratio: float = 1.0,
) -> Workload:
    """What ``bench_multiturn.py`` of SGLang asks: each round adds a question to the history.

    Args:
        clients: Conversations.
        request_length: Tokens of the first question.
        output_length: Tokens of each reply.
        rounds: Least and most rounds of a client.
        sub_question_input_length: Tokens of later questions; 0: as the first.
        range_ratio: Lengths are uniform between this share of them and all of them.

    Raises:
        WorkloadError: A value is out of its range.
    """
    if not 0 < range_ratio <= 1:
        raise WorkloadError(f"--range-ratio {range_ratio:g}: must be above 0 and at most 1")
    least, most = rounds
    if least > most:
        raise WorkloadError(f"--min-rounds {least}: must be at most --max-rounds, {most}")
    source = np.random.default_rng([seed, 4])

    def length(full: int) -> int:
        return int(source.integers(max(1, int(full * range_ratio)), full + 1))

    later = sub_question_input_length or request_length
    sessions = []
    for _ in range(clients):
        count = int(source.integers(least, most + 1))
        sessions.append(
            Session(
                tuple(
                    Turn(length(later if turn else request_length), length(output_length))
                    for turn in range(count)
                )
            )
        )
    return Workload("multiturn", tuple(sessions), seed=seed)


def agent(clients: int, seed: int) -> Workload:
    """Agents: one long prompt with the tools' definitions for all, then many short turns.

    A turn's prompt is the result of a tool (200 tokens on average), its reply the next call (60
    tokens); a tool takes 2 s; an agent has about 20 turns.
    """
    source = np.random.default_rng([seed, 5])
    sessions = []
    counts = lognormal(source, AGENT_TURNS_MEAN, AGENT_TURNS_SPREAD, clients)
    for count in counts.tolist():
        results = lognormal(source, AGENT_RESULT_MEAN, AGENT_SPREAD, count)
        calls = lognormal(source, AGENT_CALL_MEAN, AGENT_SPREAD, count)
        turns = tuple(map(Turn, results.tolist(), calls.tolist()))
        sessions.append(Session(turns, document=0))
    return Workload(
        "agent",
        tuple(sessions),
        (AGENT_SYSTEM_TOKENS,),
        arrivals="sessions",
        interval_s=AGENT_TOOL_S,
        seed=seed,
    )


def rag(
    clients: int, seed: int, skew: float = RAG_SKEW, documents: int = RAG_DOCUMENTS
) -> Workload:
    """Retrieval: documents are prefilled once, offline, then questions come, each about one.

    Documents have 3,000 tokens on average, questions 40, answers 150; which document a question
    finds follows Zipf's law.

    Args:
        clients: Questions.
        skew: The exponent of Zipf's law; 0: uniform.

    Raises:
        WorkloadError: The skew is negative.
    """
    if skew < 0:
        raise WorkloadError(f"--zipf-skew {skew:g}: must not be negative")
    source = np.random.default_rng([seed, 6])
    lengths = lognormal(source, RAG_DOCUMENT_MEAN, RAG_DOCUMENT_SPREAD, documents)
    found = zipf(source, documents, skew, clients).tolist()
    questions = lognormal(source, RAG_QUESTION_MEAN, RAG_SPREAD, clients)
    answers = lognormal(source, RAG_ANSWER_MEAN, RAG_SPREAD, clients)
    return about_documents("rag", lengths, found, questions, answers, seed=seed)
