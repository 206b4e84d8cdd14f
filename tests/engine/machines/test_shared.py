"""What one machine wrote to the shared L3, another one restores."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness import mooncake
from bench.harness.server import Server, ServerOptions
from hcache_backend.cli.metrics_page import fetch
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    Conversation,
    converse,
    make_conversations,
    random_tokens,
)

from .shared_l3 import assert_absent, assert_found, from_l3, machine, until_all_is_shared, values

pytestmark = pytest.mark.engine

STALL_S = 10.0
KINDS: dict[str, dict[str, Any]] = {"hidden": {}, "own": {"mode": "kv"}, "plain": {"mode": "plain"}}


@pytest.mark.parametrize(
    ("kind", "tp"),
    [
        ("hidden", 1),
        pytest.param("own", 1, marks=pytest.mark.long),
        pytest.param("plain", 1, marks=pytest.mark.long),
        pytest.param("hidden", 2, marks=pytest.mark.long),
        pytest.param("own", 2, marks=pytest.mark.long),
    ],
)
def test_conversations_of_a_lost_machine_go_on_elsewhere(
    kind: str, tp: int, model: Path, tmp_path: Path
) -> None:
    """From the shared L3 first, then from the disk of the machine that they moved to; none that is
    damaged."""
    with Server(machine(model, tmp_path, "first", {**KINDS[kind]}, tp=tp)) as first:
        conversations = converse(first, make_conversations(2, 1))
        until_all_is_shared(first, tmp_path)
        sound = values(tmp_path)
        [lost] = converse(first, make_conversations(1, 1, seed=1))
        until_all_is_shared(first, tmp_path)
        ours.assert_nothing_went_wrong(first)
    for path in values(tmp_path) - sound:
        ours.flip_bit(path, path.stat().st_size // 4)
    with Server(machine(model, tmp_path, "second", {**KINDS[kind]}, tp=tp)) as second:
        moved = from_l3(second, [c.history for c in conversations])
        assert_found(moved)
        damaged = from_l3(second, [lost.history])
        assert_absent(damaged)
        until_kept(second, len(sound))
        (tmp_path / "shared").rename(tmp_path / "gone")
        again = from_l3(second, [c.history for c in conversations])
        assert_found(again)
        log = second.log_text()
        assert "shared L3: file" in log
        ours.assert_nothing_went_wrong(second)
    ours.assert_no_cache_output(model, [*conversations, *moved, *damaged, *again])


@pytest.mark.long
def test_machines_with_different_devices_share_pages(model: Path, tmp_path: Path) -> None:
    """By profiles, on each of which another partition is the fastest; another dtype shares none."""
    prompts = [random_tokens(200, seed) for seed in range(2)]
    asked = []
    for device, slow in (("first", "kv_load"), ("second", "projection")):
        profile = ours.slow_profile(tmp_path, device, **{slow: 1.0, "dense": 1.0})
        hcache = {"mode": "auto", "profile": str(profile)}
        with Server(machine(model, tmp_path, device, hcache)) as server:
            asked.append(from_l3(server, prompts))
            until_all_is_shared(server, tmp_path)
            ours.assert_nothing_went_wrong(server)
    assert_absent(asked[0])
    assert_found(asked[1])
    with Server(machine(model, tmp_path, "third", {}, dtype="bfloat16")) as server:
        assert_absent(from_l3(server, prompts))
        ours.assert_nothing_went_wrong(server)
    ours.assert_no_cache_output(model, [*asked[0], *asked[1]])


def until_kept(server: Server, count: int) -> None:
    folder = server.options.log.parent
    server.until(lambda: len(ours.stored_pages(folder)) >= count, "pages to be kept")


# ---- Mooncake's store ----


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[mooncake.Cluster]:
    if (why := mooncake.missing()) is not None:
        pytest.skip(f"no Mooncake: {why}")
    with mooncake.cluster(tmp_path) as cluster:
        yield cluster


def mooncake_machine(
    model: Path, folder: Path, name: str, cluster: mooncake.Cluster, **hcache: Any
) -> ServerOptions:
    config = mooncake.store_config(cluster)
    del config["prefetch_threshold"]  # SGLang's own
    shared = {"backend": "mooncake", "config": config}
    hcache = {"mode": "kv", "shared": shared, **hcache}
    return machine(model, folder, name, hcache, extra_args=("--enable-metrics",), fork=False)


def counted(server: Server, event: str) -> float:
    return fetch(server.url).counters["shared"].get(event, 0)


def all_in(cluster: mooncake.Cluster, server: Server) -> list[str]:
    folder = server.options.log.parent
    server.until(
        lambda: counted(server, "written") == len(ours.stored_pages(folder)), "all to be shared"
    )
    return mooncake.keys(cluster)


def until_it_answers(server: Server, asked: list[Conversation]) -> None:
    """Every new text is looked for there, unless that is left alone."""

    def answers() -> bool:
        asked.extend(from_l3(server, [random_tokens(40, 1000 + len(asked))]))
        return not fetch(server.url).state["shared_silent"]

    server.until(answers, "the shared L3 to answer")


@pytest.mark.long
def test_mooncake_shared_by_two_machines_stalls_and_dies_and_requests_go_on(
    model: Path, tmp_path: Path, cluster: mooncake.Cluster
) -> None:
    """The second machine's disk has room for half of what the first one wrote."""
    asked: list[Conversation] = []
    prompts = [random_tokens(200, seed) for seed in range(5)]
    with Server(mooncake_machine(model, tmp_path, "first", cluster)) as first:
        asked += from_l3(first, prompts)
        sound = set(all_in(cluster, first))
        asked += from_l3(first, [(lost := random_tokens(200, 50))])
        mooncake.damage(cluster, set(all_in(cluster, first)) - sound)
        pages = ours.stored_pages(tmp_path / "first")
    quota = sum(path.stat().st_size for path in pages) // 2
    with Server(mooncake_machine(model, tmp_path, "second", cluster, quota_bytes=quota)) as second:
        asked += (found := from_l3(second, prompts[:2]))
        assert_found(found)
        assert counted(second, "read") > 0
        until_kept(second, 24)
        asked += (damaged := from_l3(second, [lost]))
        assert_absent(damaged)

        with cluster.stalled():
            asked += (near := from_l3(second, prompts[:2]))
            assert_found(near)
            asked += (far := from_l3(second, prompts[2:3]))
            assert_absent(far)
            assert fetch(second.url).state["shared_silent"]
            time.sleep(STALL_S)
        until_it_answers(second, asked)
        asked += (far := from_l3(second, prompts[3:4]))
        assert_found(far)

        cluster.kill()
        asked += from_l3(second, prompts[:1])
        asked += (far := from_l3(second, prompts[4:]))
        assert_absent(far)
        cluster.start()
        until_it_answers(second, asked)
        before = counted(second, "written")
        asked += from_l3(second, [random_tokens(200, 99)])
        second.until(lambda: counted(second, "written") > before, "pages to go to the new cluster")

        sizes = [path.stat().st_size for path in ours.stored_pages(tmp_path / "second")]
        assert sum(sizes) <= quota
        ours.assert_nothing_went_wrong(second)
    ours.assert_no_cache_output(model, asked)
