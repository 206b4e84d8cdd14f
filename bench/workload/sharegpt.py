"""Conversations from a file in the format of ShareGPT.

A JSON list of objects, each with ``conversations`` (or ``items``, as in OpenChat's ShareGPT4): a
list of ``{"from": "human" | "gpt", "value": TEXT}``. Questions are asked as they stand; a reply is
as long as the recorded one, and the history goes on with what the server really said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.workload.base import Session, Turn, Workload, WorkloadError
from bench.workload.paper import HISTORY_CAP, ROUND_INTERVAL_S

_ASKS = {"human", "user"}
_REPLIES = {"gpt", "chatgpt", "assistant", "bard", "bing"}
_TURN_LISTS = ("conversations", "conversation", "items")


class Tokenizer(Protocol):
    """What turns text into token ids."""

    def encode(self, text: str) -> Sequence[int]: ...


def sharegpt_file(
    path: Path, tokenizer: Tokenizer, clients: int, seed: int, max_tokens: int = HISTORY_CAP
) -> Workload:
    """``clients`` conversations of a file, chosen by ``seed``; rounds are 30 s apart.

    Args:
        max_tokens: Turns beyond it are left out, and conversations whose first is.

    Raises:
        WorkloadError: The file cannot be read, is no such file, or has too few conversations.
    """
    entries = _read(path)
    order = np.random.default_rng([seed, 7]).permutation(len(entries)).tolist()
    sessions: list[Session] = []
    for place in order:
        turns = _turns(entries[place], path, place, tokenizer, max_tokens)
        if turns:
            sessions.append(Session(tuple(turns)))
        if len(sessions) == clients:
            break
    if len(sessions) < clients:
        raise WorkloadError(
            f"--num-clients {clients}: {path} has only {len(sessions)} conversations that begin "
            f"with a question and a reply of at most {max_tokens} tokens"
        )
    return Workload(
        "sharegpt",
        tuple(sessions),
        arrivals="sessions",
        interval_s=ROUND_INTERVAL_S,
        seed=seed,
    )


def _read(path: Path) -> list[Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"--sharegpt {path}: {error.strerror}") from None
    except ValueError as error:
        raise WorkloadError(f"--sharegpt {path}: not JSON: {error}") from None
    if not isinstance(entries, list):
        raise WorkloadError(
            f"--sharegpt {path}: must be a list of conversations, and is {_kind(entries)}"
        )
    return entries


def _turns(
    entry: object, path: Path, place: int, tokenizer: Tokenizer, max_tokens: int
) -> list[Turn]:
    said = _said(entry, path, place)
    while said and said[0][0] not in _ASKS:  # a system prompt, or the end of an older conversation
        said = said[1:]
    turns: list[Turn] = []
    total = 0
    for (asker, question), (replier, reply) in zip(said[::2], said[1::2], strict=False):
        if asker not in _ASKS or replier not in _REPLIES:
            break
        ids, output = tuple(tokenizer.encode(question)), len(tokenizer.encode(reply))
        total += len(ids) + output
        if not ids or not output or total > max_tokens:
            break
        turns.append(Turn(len(ids), output, ids))
    return turns


def _said(entry: object, path: Path, place: int) -> list[tuple[str, str]]:
    """Who said what, in order."""
    where = f"--sharegpt {path}: conversation {place}"
    if not isinstance(entry, Mapping):
        raise WorkloadError(f"{where} must be an object, and is {_kind(entry)}")
    turns = next((entry[name] for name in _TURN_LISTS if name in entry), None)
    if not isinstance(turns, list):
        raise WorkloadError(f"{where} has no list {' or '.join(map(repr, _TURN_LISTS))}")
    said = []
    for turn in turns:
        speaker = turn.get("from", turn.get("role")) if isinstance(turn, Mapping) else None
        text = turn.get("value", turn.get("content")) if isinstance(turn, Mapping) else None
        if not isinstance(speaker, str) or not isinstance(text, str):
            raise WorkloadError(
                f"{where}: a turn must have the texts 'from' and 'value', and is {turn!r:.80}"
            )
        said.append((speaker.lower(), text))
    return said


def _kind(value: object) -> str:
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
    return kinds.get(type(value), repr(value)[:40])
