"""Our metrics beside SGLang's, on a real server with --enable-metrics."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from typer.testing import CliRunner

from bench.harness.server import Server
from hcache_backend.cli.main import app
from hcache_backend.cli.metrics_page import MetricsPage, fetch
from tests.engine.harness import ours
from tests.engine.harness.conversations import converse, make_conversations

pytestmark = [pytest.mark.engine, pytest.mark.versions]

PAGE = 64
FILE_BYTES = 270_336
"""Bytes of a page file of the test model, which is 4096 bytes more than the page."""
QUOTA_PAGES = 40


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("metrics")
    options = ours.our_server(
        model,
        folder,
        hcache={"quota_bytes": QUOTA_PAGES * FILE_BYTES, "recompute": "never"},
        metrics=True,
    )
    with Server(options) as server:
        yield server


def until(server: Server, done: Callable[[MetricsPage], bool]) -> MetricsPage:
    """The metrics once `done`; counters of the store are at most a second behind."""
    pages: list[MetricsPage] = []

    def look() -> bool:
        pages.append(fetch(server.url))
        return done(pages[-1])

    server.until(look, "what the metrics should show")
    return pages[-1]


def test_a_conversation_shows_in_the_metrics(server: Server) -> None:
    begin = time.monotonic()
    conversations = converse(server, make_conversations(2, turns=2, tokens=300))
    ours.assert_restored_from_l3(conversations, PAGE)
    paths = ours.stored_pages(server.options.log.parent)
    files = len(paths)
    turns = [turn for conversation in conversations for turn in conversation.turns]
    restored = sum(turn.cached.storage for turn in turns)
    forwarded = sum(
        len(turn.prompt) - turn.cached.storage + len(turn.reply.output_ids) - 1 for turn in turns
    )
    page = until(server, lambda page: page.counters["tokens"].get("restored") == restored)
    said = page.state
    assert (said["mode"], said["codec"], said["suspended"]) == ("hidden", "none", None)
    tokens, store = page.counters["tokens"], page.counters["store"]
    assert tokens["captured"] == forwarded
    assert tokens["backed_up"] == files * PAGE
    assert tokens["restored"] == restored > 0
    assert page.counters["prompt"]["storage_hit"] == restored
    assert page.counters["bytes"]["captured"] == forwarded * 4 * 256 * 4
    assert page.counters["bytes"]["restored_hidden"] == restored * 4 * 256 * 4
    assert page.counters["pages"]["read"] == restored // PAGE == store["pages_read"]
    assert page.counters["pages"]["written"] == files == store["pages_written"]
    assert {path.stat().st_size for path in paths} == {FILE_BYTES}
    assert store["bytes_written"] == files * (FILE_BYTES - 4096)
    assert page.counters["lookups"]["found"] == restored // PAGE
    assert page.counters["lookups"]["absent"] > 0
    l3 = page.counters["l3_tokens"]
    assert l3 == {
        "found": restored,
        "hit": restored,
        "absent": sum(len(turn.prompt) // PAGE * PAGE for turn in turns) - restored,
    }
    assert page.counters["problems"] == {}
    for stage in ("l3_exists", "l3_read", "l3_write", "restore", "capture_transfer"):
        assert 0 < page.counters["stage_seconds"][stage] < time.monotonic() - begin, stage
    stages = page.counters["stages"]
    assert stages["l3_read"] == stages["restore"] == 2
    ours.assert_nothing_went_wrong(server)


def test_sglang_gets_its_own_storage_metrics(server: Server) -> None:
    text = requests.get(f"{server.url}/metrics", timeout=240).text
    read = fetch(server.url).counters["pages"]["read"]
    (total,) = [line for line in text.splitlines() if line.startswith("sglang:prefetch_pgs_sum{")]
    assert float(total.rpartition(" ")[2]) == read > 0
    assert "sglang:backup_bandwidth_sum{" in text


def test_evictions_show(server: Server) -> None:
    converse(server, make_conversations(10, turns=1, tokens=400, seed=7))
    page = until(server, lambda page: page.counters["store"].get("pages_evicted", 0) > 0)
    files = len(ours.stored_pages(server.options.log.parent))
    store = page.counters["store"]
    assert files <= QUOTA_PAGES
    assert store["pages_evicted"] == store["pages_written"] - files
    assert store["bytes_evicted"] == store["pages_evicted"] * FILE_BYTES


def test_a_damaged_page_is_counted_as_one(server: Server) -> None:
    conversations = make_conversations(1, turns=2, tokens=300, seed=8)
    (conversation,) = conversations
    converse(server, conversations, turns=1)
    newest = max(
        ours.stored_pages(server.options.log.parent), key=lambda path: path.stat().st_mtime_ns
    )
    ours.flip_bit(newest, -100)
    before = fetch(server.url).counters["l3_tokens"]
    converse(server, conversations)
    page = until(server, lambda page: page.counters["store"].get("bad_pages", 0) > 0)
    assert page.counters["store"]["bad_pages"] == 1
    assert page.counters["pages"]["missed"] >= 1
    turn, l3 = conversation.turns[1], page.counters["l3_tokens"]
    assert l3["found"] - before["found"] == turn.history_tokens // PAGE * PAGE
    assert l3["hit"] - before["hit"] == turn.cached.storage
    assert l3["unreadable"] == turn.history_tokens // PAGE * PAGE - turn.cached.storage > 0


def test_suspended_l3_shows_until_the_flush(server: Server, model: Path) -> None:
    server.update_weights_from_disk(model, flush=False)
    server.generate(list(range(1, 200)), 2)
    page = until(server, lambda page: page.state["suspended"] is not None)
    assert page.state["suspended"] == "flush_needed"
    assert page.counters["lookups"]["suspended"] == 3
    assert page.counters["l3_tokens"]["suspended"] == 3 * PAGE
    server.flush_cache()
    until(server, lambda page: page.state["suspended"] is None)


def test_top_shows_the_server(server: Server) -> None:
    result = CliRunner().invoke(app, ["top", "--json", "-i", "0.5", server.url])
    assert result.exit_code == 0, result.output
    (seen,) = json.loads(result.output)["servers"]
    assert seen["mode"] == "hidden"
    assert seen["totals"]["tokens"]["restored"] > 0
    assert seen["per_second"]["tokens"]["captured"] == 0  # nobody asks it anything
    assert seen["totals"]["stage_seconds"]["restore"] > 0
