"""A conversation has its beginning in L3, or nothing of it is written: all pages on the disk are
reached by look-ups."""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.harness.models import build_model
from bench.harness.server import Server, ServerOptions
from tests.engine.harness import ours
from tests.engine.harness.conversations import Conversation, converse, make_conversations

pytestmark = pytest.mark.engine
LONG = pytest.mark.long
PAGE = 16

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "kv": ("qwen3", {"mode": "kv"}),
    "hidden": ("llama", {"partition": ours.partition(0, 4, 0)}),
    "plain": ("llama", {"mode": "plain"}),
    "windows": ("mellum", {"mode": "kv"}),
    "states": ("qwen3_5", {"mode": "kv"}),
    "two ranks": ("qwen3", {"mode": "kv"}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "states": {"extra_env": {"SGLANG_MAMBA_CONV_DTYPE": "float32"}},
    "two ranks": {"tp": 2},
}
EACH = ["kv", *(pytest.param(kind, marks=LONG) for kind in KINDS if kind != "kv")]
ALONE = [pytest.param(kind, 1, marks=LONG) for kind in KINDS]


def reached(folder: Path, conversations: Sequence[Conversation]) -> tuple[int, int]:
    """Pages of full attention on the disk that look-ups of these conversations reach, and all."""
    stored = {path.name.split(".")[1] for path in ours.stored_pages(folder)}
    chains, found = set[str](), set[str]()
    for conversation in conversations:
        digest, there = b"", True
        for start in range(0, len(conversation.history) - PAGE + 1, PAGE):
            tokens = np.array(conversation.history[start : start + PAGE], "<u4")
            digest = hashlib.sha256(digest + tokens.tobytes()).digest()  # SGLang's key
            chains.add(digest.hex())
            there = there and digest.hex() in stored
            found |= {digest.hex()} if there else set()
    return len(found), len(stored & chains)


def assert_all_are_reached(
    server: Server,
    folder: Path,
    conversations: Sequence[Conversation],
    least: int,
    late: int = 0,
) -> None:
    """``late``: pages whose beginning another server evicted while they were written."""
    server.flush_cache()  # it waits for what is queued
    on_the_way, there = reached(folder, conversations)
    assert there - late <= on_the_way <= there
    assert there >= least
    if "qwen3_5" not in str(server.options.model):  # Transformers reads its weights otherwise
        ours.assert_no_cache_output(Path(server.options.model), list(conversations))


@pytest.mark.parametrize("kind", EACH)
def test_an_attach_and_a_clear_behind_a_warm_cache(
    kind: str, model_cache: Path, tmp_path: Path
) -> None:
    name, hcache = KINDS[kind]
    same: dict[str, Any] = {"page_size": PAGE, "extra_env": {}} | OPTIONS.get(kind, {})
    same["extra_env"] = same["extra_env"] | ours.hidden_mode_env(**hcache)
    options = ServerOptions(build_model(name, model_cache), tmp_path / "log", **same)
    talks = make_conversations(3, turns=6, tokens=100)
    with Server(options) as server:
        converse(server, talks[:2], turns=2, flush=False)
        ours.attach(server, ours.attach_config(tmp_path))
        converse(server, talks[:1], turns=4, flush=False)
        server.detach_storage()
        converse(server, talks[2:], turns=3, flush=False)
        ours.attach(server, ours.attach_config(tmp_path))
        converse(server, talks, turns=4, flush=False)
        server.clear_storage()
        converse(server, talks, turns=5, flush=False)
        server.flush_cache()
        before = [len(talk.history) // PAGE for talk in talks]
        converse(server, talks, flush=False)
        assert_all_are_reached(server, tmp_path, talks, sum(before))
        ours.assert_nothing_went_wrong(server)
    if kind != "states":  # those end at multiples of 64 tokens
        assert [talk.turns[-1].cached.storage // PAGE for talk in talks] == before


@pytest.mark.parametrize(("kind", "servers"), [("kv", 2), *ALONE])
def test_a_store_that_is_smaller_than_what_is_in_use(
    kind: str, servers: int, model_cache: Path, tmp_path: Path
) -> None:
    """Conversations stay on the device, so L3 evicts their beginnings before their ends."""
    name, hcache = KINDS[kind]
    model = build_model(name, model_cache)
    same: dict[str, Any] = {"page_size": PAGE} | OPTIONS.get(kind, {})
    talks = make_conversations(6, turns=4, tokens=60)
    with Server(ours.our_server(model, tmp_path, hcache=hcache, **same)) as server:
        converse(server, talks[:1], turns=2)
        size = max(path.stat().st_blocks * 512 for path in ours.stored_pages(tmp_path))
    small = hcache | {"quota_bytes": 60 * size, "min_free_bytes": 0}
    folder = tmp_path / "small"
    parts = [make_conversations(6, turns=4, tokens=60)[n::servers] for n in range(servers)]
    logs = [tmp_path / f"log {number}" for number in range(servers)]
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                Server(ours.our_server(model, folder, hcache=small, log=log, **same))
            )
            for log in logs
        ]
        for turns in range(1, 5):
            for server, part in zip(running, parts, strict=True):
                converse(server, part, turns=turns, flush=False)
        for server in running:
            server.flush_cache()
        every, late = [talk for part in parts for talk in part], 6 * (servers - 1)  # of one turn
        assert_all_are_reached(running[0], folder, every, 20, late)
        for server in running:
            ours.assert_nothing_went_wrong(server)
