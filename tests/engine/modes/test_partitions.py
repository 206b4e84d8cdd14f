"""Partitions on a real server: whatever is stored of a layer, the output is that of no cache."""

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.harness.server import Server
from bench.harness.trace import traced
from hcache_backend.cli.metrics_page import fetch
from hcache_backend.plan.restore import Partition, describe
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    random_tokens,
)

pytestmark = pytest.mark.engine


def converse_at_once(
    server: Server, conversations: Sequence[Conversation], hold: Path, behind: int
) -> None:
    """The next turn of all, which wait until each has read its history behind so many tokens.

    At least two of three then fall into one step, whichever of them `hold` still stops.
    """

    def pages_read() -> float:
        return fetch(server.url).counters["pages"].get("read", 0)

    prompts = [conversation.next_prompt() for conversation in conversations]
    pages = sum((len(c.history) - 1) // 64 - behind // 64 for c in conversations) + pages_read()
    with ThreadPoolExecutor(len(prompts)) as pool:
        hold.touch()
        replies = [pool.submit(server.generate, prompt, 16) for prompt in prompts]
        server.until(lambda: pages_read() >= pages, "the pages of every request")
        hold.unlink()
        for conversation, prompt, reply in zip(conversations, prompts, replies, strict=True):
            conversation.add(prompt, reply.result())


def test_spans_behind_a_prefix_of_several_requests(model: Path, tmp_path: Path) -> None:
    trace, hold = tmp_path / "trace", tmp_path / "hold"
    options = ours.our_server(
        model,
        tmp_path,
        hcache={"partition": ours.partition(2, 1, 1), "restore": "layerwise"},
        metrics=True,
        extra_env=ours.faulty("prefetches_held", hold),
    )
    with Server(traced(options, trace)) as server:
        shared = random_tokens(256, 9)
        conversations = make_conversations(3, turns=3, tokens=200, prefix=shared)
        converse(server, conversations, turns=2)
        # The shared prefix comes back first; what follows it is restored behind it.
        server.generate([*shared, 1], 1)
        trace.write_text("")
        converse_at_once(server, conversations, hold, behind=256)
        ours.assert_sound_hidden_mode(server)
    for conversation in conversations:
        last = conversation.turns[-1]
        assert last.cached.device >= 256
        assert last.cached.device + last.cached.storage >= last.history_tokens - 64
    spans = [c.turns[-1].cached.storage for c in conversations]
    loads = [json.loads(line) for line in trace.read_text().splitlines()]
    restored = [load["tokens"] for load in loads if load["stage"] == "load"]
    assert max(restored) > max(spans), "no restore held two requests"
    ours.assert_no_cache_output(model, conversations)


def test_stored_layers_are_recomputed_if_that_is_faster(model: Path, tmp_path: Path) -> None:
    # By the profile a layer takes as long over the bus as by computation, so two of four would be
    # recomputed, although all are stored. Prefills show that computing is much faster: all are.
    profile = ours.slow_profile(tmp_path, hidden_copy=1.0, dense=1.0)
    hcache = {"profile": str(profile), "restore": "layerwise"}
    options = ours.our_server(
        model, tmp_path, hcache=hcache, max_total_tokens=1024, hicache_ratio=8.0, metrics=True
    )
    with Server(options) as server:
        conversations = make_conversations(2, turns=4, tokens=150)
        converse(server, conversations, turns=2)
        assert f"hcache: hidden mode: {describe(Partition(0, 4, 0))}, " in server.log_text()
        converse(server, conversations, turns=3, flush=False)
        ours.assert_restored_from_l3(conversations, 64)
        ask(server, [random_tokens(900, 77)], flush=False)
        converse(server, conversations, flush=False)
        cached = [conversation.turns[-1].cached for conversation in conversations]
        assert sum(hit.host for hit in cached) >= 300, cached
        ours.assert_nothing_went_wrong(server)
        counted = fetch(server.url).counters
        assert counted["tokens"]["restored"] and "restored_hidden" not in counted["bytes"]
    ours.assert_no_cache_output(model, conversations)


def test_auto_keeps_what_one_rank_measured_and_decided(model: Path, tmp_path: Path) -> None:
    hcache = {"mode": "auto"}
    for start in range(2):
        options = ours.our_server(
            model, tmp_path, hcache=hcache, tp=2, log=tmp_path / f"{start}.log"
        )
        with Server(options) as server:
            conversations = converse(server, make_conversations(1, turns=2))
            ours.assert_nothing_went_wrong(server)
            log = server.log_text()
        assert log.count("measuring a quick profile") == (start == 0)
        chosen = re.findall(r"hcache: partition: (.*?)[;,]", log)
        assert len(chosen) == 2 and len(set(chosen)) == 1
        assert (", as the store has it: the best for " in log) == (start == 1)
        ours.assert_restored_from_l3(conversations, 64)
        ours.assert_no_cache_output(model, conversations)
    for kept in ("profile-*.json", "partition-*.json"):
        assert len(list((tmp_path / "l3").glob(kept))) == 1
