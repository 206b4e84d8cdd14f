"""Servers that write traces, and what a script asks of them."""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import requests

from bench.harness.server import CachedTokens, Reply, Server, ServerOptions
from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env
from tests.engine.harness.conversations import Conversation, make_conversations
from tests.engine.harness.ours import our_server, slow_profile
from tests.goldens.plugin.hcache_golden import VARIABLE
from tests.goldens.recorder import Settings
from tests.goldens.repeats import turns_once

HERE = Path(__file__).parent
PAGE = 16
QUESTION, REPLY = 70, 8


def traced(options: ServerOptions, **settings: Any) -> ServerOptions:
    """The same server, which writes its trace to the folder of its log; ``settings`` as
    ``Settings`` has them."""
    trace = Settings(str(options.log.parent), **settings)
    env = dict(options.extra_env)
    paths = [str(HERE / "plugin"), str(HERE.parents[1]), env.get("PYTHONPATH", "")]
    paths.append(cpu_engine_env()["PYTHONPATH"])
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), VARIABLE: json.dumps(asdict(trace))}
    return replace(options, extra_env=env)


def our_traced_server(
    model: Path, folder: Path, hcache: dict[str, Any], *, trace: Mapping[str, Any], **options: Any
) -> ServerOptions:
    """One with our backend, nothing of which goes by how fast this machine is."""
    hcache = {"profile": str(slow_profile(folder)), **hcache}
    options = {"page_size": PAGE} | options
    return traced(our_server(model, folder, hcache=hcache, **options), **trace)


class Script:
    """What users do to a server, one step after the other, and the trace of it by its ``ranks``."""

    def __init__(self, server: Server, ranks: int = 1) -> None:
        self.server = server
        self._folder = server.options.log.parent
        self._ranks = range(ranks)
        self._replies: list[str] = []

    def ask(
        self, *requests_: tuple[str, Sequence[int]], tokens: int = REPLY, **body: Any
    ) -> list[Any]:
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
        places = {"the device": cached.device, "the host": cached.host, "L3": cached.storage}
        found = [f"{tokens} from {place}" for place, tokens in places.items() if tokens]
        return (
            f"reply {rid}: {len(answer['output_ids'])} tokens"
            f"{'; of the prompt ' if found else ''}{', '.join(found)}"
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
        """Replies, then the trace of each rank; of those that are alike, that of the first."""
        self.settle()
        found, before = ["# replies", *self._replies], list[str]()
        for rank in self._ranks:
            trace = (self._folder / f"trace.{rank}").read_text().splitlines()
            same = trace == before
            found += ["", f"# rank {rank}{', as the one before' if same else ''}"]
            found += [] if same else turns_once(trace)
            before = trace
        return found


def conversation(script: Script, turns: int = 3) -> Conversation:
    [found] = make_conversations(1, turns, tokens=QUESTION, seed=9)
    for turn in range(turns):
        prompt = found.next_prompt()
        [answer] = script.ask((f"turn {turn}", prompt))
        found.add(prompt, Reply(answer["output_ids"], answer["meta_info"]))
        script.flush()
    return found
