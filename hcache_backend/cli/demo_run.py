"""The demo's conversations, held with one SGLang server per method."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hcache_backend.cli.demo_report import L3_METHODS, MethodRun, Turn
from hcache_backend.cli.hicache_options import hicache_options, l3_options
from hcache_backend.cli.machine import Machine
from hcache_backend.cli.serving import Reply, ServerProcess
from hcache_backend.trace import (
    TRACE_VARIABLE,
    Restore,
    TraceEvent,
    read_trace,
    recomputed,
    restored_from_l3,
)

PAGE_SIZE = 64
POOL_TOKENS = 16384
_BACKENDS = {"kv_offload": "file", "hcache": "dynamic"}
_THRESHOLD = 16
_PAGE_FILES = {"kv_offload": "*.bin", "hcache": "*.page"}


@dataclass(frozen=True)
class Script:
    """What the conversations ask: random tokens, the same for every method.

    Attributes:
        question_tokens: Tokens that each turn adds to the history, beside its reply.
        reply_tokens: Tokens of each reply.
    """

    conversations: int = 4
    turns: int = 5
    question_tokens: int = 700
    reply_tokens: int = 20
    vocabulary: int = 1024

    @property
    def longest_prompt(self) -> int:
        """Tokens of the last turn's prompt and reply."""
        return self.turns * (self.question_tokens + self.reply_tokens)

    def question(self, conversation: int, turn: int) -> list[int]:
        """Token ids of one question."""
        source = random.Random(f"{conversation}/{turn}")
        return [source.randrange(self.vocabulary) for _ in range(self.question_tokens)]


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
        method: One of ``METHODS``.
        folder: An empty folder for the log, the trace and L3.
        advance: Called :func:`steps` times, with what comes next.
        dtype: Type that the model is served in.
        codec: Option ``codec`` of HCache.

    Raises:
        ServerError: The server did not start, or a request failed.
    """
    name = method if codec == "none" else f"{method}, {codec}"
    advance(f"{name}: starting SGLang")
    command, environment = launch(method, machine, model, folder, dtype, codec)
    with ServerProcess(command, environment, folder / "server.log") as server:
        session = _Session(method, script, server, folder / "trace.jsonl")
        turns = []
        for turn in range(script.turns):
            for conversation in range(script.conversations):
                advance(f"{name}: turn {turn + 1} of conversation {conversation + 1}")
                turns.append(session.hold_turn(conversation, turn))
        note = _mode_line(server.log_text()) if method == "hcache" else ""
    stored_tokens, stored_bytes = stored(method, folder / "l3")
    return MethodRun(turns, stored_tokens, stored_bytes, note)


def steps(script: Script) -> int:
    """How often :func:`run_method` calls ``advance``."""
    return 1 + script.turns * script.conversations


def launch(
    method: str,
    machine: Machine,
    model: Path,
    folder: Path,
    dtype: str = "float32",
    codec: str = "none",
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of the server of ``method``."""
    command = [
        *machine.launch_command(model),
        # The one backend that computes float32 exactly on every device.
        *("--attention-backend", "torch_native", "--dtype", dtype),
        *("--grammar-backend", "none", "--skip-tokenizer-init", "--skip-server-warmup"),
        *("--page-size", str(PAGE_SIZE), "--max-total-tokens", str(POOL_TOKENS)),
        *("--chunked-prefill-size", str(POOL_TOKENS), "--enable-cache-report"),
    ]
    environment = {
        **machine.environment,
        TRACE_VARIABLE: str(folder / "trace.jsonl"),
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    if method in L3_METHODS:
        options, where = l3_options(
            _BACKENDS[method], _THRESHOLD, folder / "l3", {"mode": "hidden", "codec": codec}
        )
        command += [*hicache_options(2), *options]
        environment |= where
    return command, environment


class _Session:
    """One server, the conversations it holds, and how far its trace has been read."""

    def __init__(self, method: str, script: Script, server: ServerProcess, trace: Path) -> None:
        self._from_l3 = method in L3_METHODS
        self._script = script
        self._server = server
        self._trace = trace
        self._offset = 0
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
            l3_tokens=reply.storage_tokens,
            output_ids=tuple(reply.output_ids),
            restore=restore,
        )

    def _generate(self, prompt: list[int], new_tokens: int) -> tuple[Reply, list[TraceEvent]]:
        reply = self._server.generate(prompt, new_tokens)
        self._server.flush_cache()
        events, self._offset = read_trace(self._trace, self._offset)
        return reply, events


def stored(method: str, folder: Path) -> tuple[int, int]:
    """Tokens and bytes of the pages in the L3 folder of ``method``."""
    if method not in L3_METHODS:
        return 0, 0
    sizes = [path.stat().st_size for path in folder.rglob(_PAGE_FILES[method])]
    return PAGE_SIZE * len(sizes), sum(sizes)


def _mode_line(log: str) -> str:
    """What our plugin said about the pages that it stores."""
    match = re.search(r"hcache: ((?:hidden|KV) mode.*)", log)
    return match[1].strip() if match else "the hcache plugin said nothing: is it installed?"
