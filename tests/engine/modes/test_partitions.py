"""Partitions on a real server: whatever is stored of a layer, the output is that of no cache."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server
from hcache_backend.cli.metrics_page import fetch
from hcache_backend.format.page import PageLayout, hidden_layer
from hcache_backend.partition.costs import Partition, describe
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    random_tokens,
)
from tests.engine.harness.ours import (
    assert_hidden_mode,
    assert_no_cache_output,
    assert_no_cache_output_up_to_ties,
    assert_nothing_went_wrong,
    assert_own_pages_of_kv,
    assert_restored_from_l3,
    assert_sound_hidden_mode,
    faulty,
    file_backend,
    hidden_mode_env,
    our_server,
    partition,
    slow_profile,
)

pytestmark = pytest.mark.engine

LAYOUT = PageLayout(64, (hidden_layer(64, 256 * 4, 256),) * 4)
PARTITIONS = {  # all hidden: tests/engine/modes/test_architectures.py
    "all KV": (0, 0, 4),
    "half and half": (0, 2, 2),
    "one recomputed": (1, 3, 0),
    "two recomputed": (2, 2, 0),
    "all three": (1, 2, 1),
    "no hidden": (2, 0, 2),
}
# MHA; GQA; and models whose own layers compute otherwise what is recomputed.
CASES = [
    *((family, "all three") for family in ("llama", "qwen3")),
    *((family, "two recomputed") for family in ("olmo2", "opt")),
]
MORE_CASES = [
    case
    for case in (
        *((family, name) for family in ("llama", "qwen3") for name in PARTITIONS),
        *((family, "two recomputed") for family in ("gpt2", "qwen2", "phi3", "stablelm", "olmoe")),
    )
    if case not in CASES
]


def said(numbers: tuple[int, int, int]) -> str:
    how = "own pages" if numbers == PARTITIONS["all KV"] else "hidden mode"
    return f"hcache: {how}: {describe(Partition(*numbers))}, "


@pytest.mark.parametrize(
    ("family", "name"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_CASES)],
)
def test_output_is_that_of_no_cache(
    family: str, name: str, model_cache: Path, tmp_path: Path
) -> None:
    model = build_model(family, model_cache)
    hcache = {"partition": partition(*PARTITIONS[name])}
    with Server(our_server(model, tmp_path, hcache=hcache)) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=300))
        if name == "all KV":
            assert_own_pages_of_kv(server)
        else:
            assert_hidden_mode(server)
        assert said(PARTITIONS[name]) in server.log_text()  # and nothing was replaced by KV
        assert_nothing_went_wrong(server)
    assert_restored_from_l3(conversations, 64)
    assert_no_cache_output(model, conversations)


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


def test_spans_behind_a_prefix_and_restores_of_several_requests(
    model: Path, tmp_path: Path
) -> None:
    trace, hold = tmp_path / "trace", tmp_path / "hold"
    options = our_server(
        model,
        tmp_path,
        hcache={"partition": partition(2, 1, 1), "restore": "layerwise"},
        metrics=True,
        extra_env={"HCACHE_RESTORE_TRACE": str(trace), **faulty("prefetches_held", hold)},
    )
    with Server(options) as server:
        shared = random_tokens(256, 9)
        conversations = make_conversations(3, turns=3, tokens=200, prefix=shared)
        converse(server, conversations, turns=2)
        # The shared prefix comes back first; what follows it is restored behind it.
        server.generate([*shared, 1], 1)
        trace.write_text("")
        converse_at_once(server, conversations, hold, behind=256)
        assert_sound_hidden_mode(server)
    for conversation in conversations:
        last = conversation.turns[-1]
        assert last.cached.device >= 256
        assert last.cached.device + last.cached.storage >= last.history_tokens - 64
    spans = [c.turns[-1].cached.storage for c in conversations]
    loads = [json.loads(line) for line in trace.read_text().splitlines()]
    restored = [load["tokens"] for load in loads if load["stage"] == "load"]
    assert max(restored) > max(spans), "no restore held two requests"
    assert_no_cache_output(model, conversations)


def test_one_rank_measures_for_all(model: Path, tmp_path: Path) -> None:
    with Server(our_server(model, tmp_path, hcache={"mode": "auto"}, tp=2)) as server:
        log = server.log_text()
        assert log.count("measuring a quick profile") == 1
        chosen = re.findall(r"hcache: partition: (.*);", log)
        assert len(chosen) == 2 and len(set(chosen)) == 1
        conversations = converse(server, make_conversations(1, turns=2))
        assert_nothing_went_wrong(server)
    assert_no_cache_output(model, conversations)


def test_stored_layers_are_recomputed_if_that_is_faster(model: Path, tmp_path: Path) -> None:
    # A layer takes as long over the bus as by computation: two of four are recomputed, although
    # all are stored.
    profile = slow_profile(tmp_path, hidden_copy=1.0, dense=1.0)
    hcache = {"profile": str(profile), "restore": "layerwise"}
    options = our_server(
        model, tmp_path, hcache=hcache, max_total_tokens=1024, hicache_ratio=8.0, metrics=True
    )
    with Server(options) as server:
        conversations = make_conversations(2, turns=4, tokens=150)
        converse(server, conversations, turns=2)
        assert said((0, 4, 0)) in server.log_text()
        converse(server, conversations, turns=3, flush=False)
        assert_restored_from_l3(conversations, 64)
        ask(server, [random_tokens(900, 77)], flush=False)
        converse(server, conversations, flush=False)
        cached = [conversation.turns[-1].cached for conversation in conversations]
        assert sum(hit.host for hit in cached) >= 300, cached
        assert_nothing_went_wrong(server)
        counted = fetch(server.url).counters
        two_layers = 2 * LAYOUT.segment_bytes[0] // 64 * counted["tokens"]["restored"]
        assert counted["bytes"]["restored_hidden"] == two_layers
    assert_no_cache_output(model, conversations)


def test_pools_too_small_for_what_lacks_layers(model: Path, tmp_path: Path) -> None:
    """write_back, where restored nodes are evicted and would be backed up a second time."""
    hcache = {
        "partition": partition(1, 2, 1),
        "profile": str(slow_profile(tmp_path, hidden_copy=1.0, kv_load=1.0, dense=1.0)),
    }
    options = our_server(
        model,
        tmp_path,
        hcache=hcache,
        write_policy="write_back",
        page_size=16,
        max_total_tokens=1536,
        hicache_ratio=1.34,
    )
    with Server(options) as server:
        conversations = make_conversations(6, turns=3, tokens=120, seed=5)
        converse(server, conversations, flush=False, concurrent=True)
        again = make_conversations(6, turns=3, tokens=120, seed=5)
        converse(server, again, flush=False, concurrent=True)
        server.flush_cache()
        last = make_conversations(6, turns=3, tokens=120, seed=5)
        converse(server, last, flush=False, concurrent=True)
        assert_sound_hidden_mode(server)
    assert any(t.cached.host + t.cached.storage > 0 for c in [*again, *last] for t in c.turns)
    assert_no_cache_output(model, [*conversations, *again, *last])


def test_auto_keeps_the_profile_that_it_measured_and_what_it_decided_by_it(
    model: Path, tmp_path: Path
) -> None:
    hcache = {"mode": "auto"}
    for start in range(2):
        options = our_server(model, tmp_path, hcache=hcache, log=tmp_path / f"{start}.log")
        with Server(options) as server:
            conversations = converse(server, make_conversations(1, turns=2))
            log = server.log_text()
        assert ("measuring a quick profile" in log) == (start == 0)
        assert (", as the store has it: the best for " in log) == (start == 1)
        assert_restored_from_l3(conversations, 64)
        assert_no_cache_output(model, conversations)
    for kept in ("profile-*.json", "partition-*.json"):
        assert len(list((tmp_path / "l3").glob(kept))) == 1


@pytest.mark.parametrize(
    ("mode", "l3"),
    [("hidden", "ours"), ("kv", "ours"), pytest.param("kv", "file", marks=pytest.mark.long)],
)
def test_a_profile_that_cannot_be_read_stops_the_server(
    mode: str, l3: str, model: Path, tmp_path: Path
) -> None:
    path = "/nowhere/profile.json"
    hcache = {"profile": path, "mode": mode, "min_gain": 1.0}
    if l3 == "ours":
        server = Server(our_server(model, tmp_path, hcache=hcache))
    else:
        server = Server(file_backend(model, tmp_path, extra_env=hidden_mode_env(**hcache)))
    server.launch()
    assert server.wait_exit() != 0
    message = f"hcache: option 'profile': cannot read the profile {path}"
    assert message in server.log_text()


def test_every_method_with_encoded_hidden_states_and_overlap_scheduling(
    model: Path, tmp_path: Path
) -> None:
    hcache = {"partition": partition(1, 2, 1), "codec": "exp4"}
    options = our_server(model, tmp_path, hcache=hcache, dtype="bfloat16", overlap=True)
    with Server(options) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=300))
        assert said((1, 2, 1)) in server.log_text()
        assert "codec exp4" in server.log_text()
        assert_nothing_went_wrong(server)
    assert_restored_from_l3(conversations, 64)
    assert_no_cache_output_up_to_ties(model, tmp_path, conversations)
