"""Servers that write traces, and what a script asks of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from bench.harness.server import CachedTokens, Server, ServerOptions
from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env
from tests.engine.harness.conversations import random_tokens
from tests.engine.harness.ours import our_server, slow_profile
from tests.goldens.plugin.hcache_golden import VARIABLE
from tests.goldens.recorder import Settings

HERE = Path(__file__).parent
PAGE = 16
QUESTION, REPLY = 70, 8


def traced(
    model: Path,
    folder: Path,
    *,
    trace: dict[str, Any] | None = None,
    hcache: dict[str, Any] | None = None,
    extra_env: dict[str, str] | None = None,
    **options: Any,
) -> ServerOptions:
    """A server with our backend that writes its trace to ``folder``; ``trace`` as ``Settings``."""
    settings = Settings(str(folder), **(trace or {}))
    env = extra_env or {}
    paths = [str(HERE / "plugin"), str(HERE.parents[1]), *env.pop("PYTHONPATH", "").split(os.pathsep)]
    paths.append(cpu_engine_env()["PYTHONPATH"])
    env |= {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        VARIABLE: json.dumps(settings.as_dict()),
    }
    # Nothing goes by how fast this machine is.
    hcache = {"profile": str(slow_profile(folder)), **(hcache or {})}
    return our_server(model, folder, hcache=hcache, page_size=PAGE, extra_env=env, **options)


class Script:
    """What users do to a server, one step after the other, and the trace of it.

    Args:
        server: It runs.
        ranks: Processes that write traces.
    """

    def __init__(self, server: Server, ranks: int = 1) -> None:
        self.server = server
        self._folder = server.options.log.parent
        self._ranks = range(ranks)
        self._replies: list[str] = []
        self._digests: list[str] = []

    def ask(self, *requests_: tuple[str, Sequence[int]], tokens: int = REPLY, **body: Any) -> list[Any]:
        """Requests of these ids and prompts, which come in one turn; what was answered."""

        def post(rid: str, prompt: Sequence[int]) -> Any:
            name = f"{len(requests_)}/{rid}" if len(requests_) > 1 else rid
            sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
            asked = {"rid": name, "input_ids": list(prompt), "sampling_params": sampling, **body}
            return requests.post(f"{self.server.url}/generate", json=asked, timeout=600).json()

        with ThreadPoolExecutor(len(requests_)) as pool:
            said = list(pool.map(lambda one: post(*one), requests_))
        for (rid, _), answer in zip(requests_, said, strict=True):
            self._replies.append(self._reply(rid, answer))
        self.settle()
        return said

    def _reply(self, rid: str, answer: Any) -> str:
        if "meta_info" not in answer:
            return f"reply {rid}: error"
        meta = answer["meta_info"]
        reason = (meta.get("finish_reason") or {}).get("type")
        if reason != "length":
            return f"reply {rid}: {reason}"
        cached = CachedTokens.of(meta)
        return (
            f"reply {rid}: {len(answer['output_ids'])} tokens; of the prompt {cached.device} from "
            f"the device, {cached.host} from the host, {cached.storage} from L3"
        )

    def settle(self, title: str = "") -> None:
        """Wait until the server has nothing to do; then a part of its trace begins, if it has a
        ``title``."""
        marks = [self._folder / f"mark.{rank}" for rank in self._ranks]
        for mark in marks:
            new = mark.with_suffix(".new")
            new.write_text(title)
            new.rename(mark)
        self.server.until(lambda: not any(mark.exists() for mark in marks), "the server to rest")
        if title:
            self._replies.append(f"== {title}")

    def flush(self) -> None:
        self.server.flush_cache()
        self.settle()

    def lines(self) -> list[str]:
        """Replies, then the trace of each rank."""
        self.settle()
        found = ["# replies", *self._replies]
        for rank in self._ranks:
            trace = (self._folder / f"trace.{rank}").read_text().splitlines()
            found += ["", f"# rank {rank}", *trace]
        return found


def conversation(script: Script) -> str:
    """Three turns of a conversation, the last two from L3; a digest of the replies."""
    history: list[int] = []
    digest = hashlib.sha256()
    for turn in range(3):
        history += random_tokens(QUESTION, 900 + turn)
        [answer] = script.ask((f"turn {turn}", history), tokens=12)
        history += answer["output_ids"]
        digest.update(json.dumps(answer["output_ids"]).encode())
        script.flush()
    return digest.hexdigest()[:16]
