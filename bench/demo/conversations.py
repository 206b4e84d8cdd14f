"""The demo's conversations, held with one SGLang server per method."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness.machine import Machine
from bench.harness.methods import METHODS, PAGE_SIZE, server_options
from bench.harness.restorer import (
    Restore,
    Restorer,
    page_files,
    recomputed,
    restored_from_l3,
    restorer,
)
from bench.harness.server import Reply
from hcache_backend.trace import TraceEvent

POOL_TOKENS = 4096


@dataclass(frozen=True)
class Script:
    """What the conversations ask: random tokens, the same for every method.

    Attributes:
        question_tokens: Tokens that each turn adds to the history, beside its reply.
        reply_tokens: Tokens of each reply.
    """

    conversations: int = 2
    turns: int = 2
    question_tokens: int = 700
    reply_tokens: int = 20
    vocabulary: int = 1024

    def question(self, conversation: int, turn: int) -> list[int]:
        """Token ids of one question."""
        source = random.Random(f"{conversation}/{turn}")
        return [source.randrange(self.vocabulary) for _ in range(self.question_tokens)]


@dataclass(frozen=True)
class Turn:
    """One turn of one conversation on one server.

    Attributes:
        history_tokens: Prompt tokens that earlier turns had prefilled or generated.
        l3_tokens: Prompt tokens that came from L3.
        output_ids: The reply.
        restore: None where no history came back.
    """

    conversation: int
    turn: int
    history_tokens: int
    l3_tokens: int
    output_ids: tuple[int, ...]
    restore: Restore | None


@dataclass(frozen=True)
class MethodRun:
    """All turns of one method, in the same order for every method.

    Attributes:
        stored_tokens: Tokens in the pages that were left in L3.
        stored_bytes: Bytes of these pages on disk.
        note: What the server said about its mode; empty where there is nothing to say.
    """

    turns: Sequence[Turn]
    stored_tokens: int = 0
    stored_bytes: int = 0
    note: str = ""


def run_method(
    method: str,
    script: Script,
    model: Path,
    machine: Machine,
    folder: Path,
    advance: Callable[[str], None],
    dtype: str = "float32",
    codec: str = "none",
) -> MethodRun:
    """Hold all conversations with a fresh server; L1 and L2 are flushed after every request.

    Args:
        method: One of the harness's methods.
        folder: An empty folder for the log, the trace and L3.
        advance: Called :func:`steps` times, with what comes next.
        dtype: Type that the model is served in.
        codec: Option ``codec`` of HCache.

    Raises:
        ServerError: The server did not start, or a request failed.
    """
    name = METHODS[method].title + ("" if codec == "none" else f", {codec}")
    from_l3, l3 = METHODS[method].storage is not None, folder / "l3"
    options = server_options(
        METHODS[method],
        machine,
        model,
        folder,
        pool_tokens=POOL_TOKENS,
        hcache={"codec": codec},
        dtype=dtype,
        attention_backend=machine.exact_attention,
    )
    advance(f"{name}: starting SGLang")
    with restorer(options, l3) as server:
        session = _Session(script, server, from_l3)
        turns = []
        for turn in range(script.turns):
            for conversation in range(script.conversations):
                advance(f"{name}: turn {turn + 1} of conversation {conversation + 1}")
                turns.append(session.hold_turn(conversation, turn))
        log = server.server.log_text()
    note = _mode_line(log) if METHODS[method].storage == "dynamic" else ""
    sizes = [path.stat().st_size for path in page_files(l3)]
    return MethodRun(turns, PAGE_SIZE * len(sizes), sum(sizes), note)


def steps(script: Script) -> int:
    """How often :func:`run_method` calls ``advance``."""
    return 1 + script.turns * script.conversations


class _Session:
    """One server and the conversations it holds."""

    def __init__(self, script: Script, server: Restorer, from_l3: bool) -> None:
        self._script, self._server, self._from_l3 = script, server, from_l3
        self._histories: list[list[int]] = [[] for _ in range(script.conversations)]

    def hold_turn(self, conversation: int, turn: int) -> Turn:
        """Ask the next question of a conversation, then flush L1 and L2."""
        history = self._histories[conversation]
        restore: Restore | None = None
        if history and not self._from_l3:
            # Computed alone, so that the time is that of the history and of nothing else.
            restore = recomputed(self._generate(history, 1)[1])
        prompt = [*history, *self._script.question(conversation, turn)]
        reply, events = self._generate(prompt, self._script.reply_tokens)
        if history and self._from_l3:
            restore = restored_from_l3(events)
        self._histories[conversation] = prompt + reply.output_ids
        return Turn(
            conversation=conversation,
            turn=turn,
            history_tokens=len(history),
            l3_tokens=reply.cached.storage,
            output_ids=tuple(reply.output_ids),
            restore=restore,
        )

    def _generate(self, prompt: list[int], new_tokens: int) -> tuple[Reply, list[TraceEvent]]:
        reply = self._server.server.generate(prompt, new_tokens)
        self._server.server.flush_cache()
        return reply, self._server.events()


def _mode_line(log: str) -> str:
    """What our plugin said about the pages that it stores."""
    match = re.search(r"hcache: ((?:hidden|KV) mode.*)", log)
    return match[1].strip() if match else "the hcache plugin said nothing: is it installed?"
