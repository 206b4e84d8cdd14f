"""Run-time attach and detach by the admin API: every answer of it, and what must not change."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import requests
from typer.testing import CliRunner

from bench.harness.models import build_model
from bench.harness.server import Server, ServerOptions
from hcache_backend.cli.main import app
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    random_tokens,
    turns_of,
)

pytestmark = pytest.mark.engine

PATH = "/hicache/storage-backend"


class Kind(NamedTuple):
    """A server of a model and this environment is in this mode."""

    model: str
    env: dict[str, str]
    mode: str


KINDS = {
    "hidden": Kind("llama", ours.hidden_mode_env(), "hidden mode, own pages; codec none"),
    "latents": Kind(
        *("deepseek", ours.hidden_mode_env(mode="kv")),
        "kv mode, own pages; option 'mode' is 'kv'; codec none",
    ),
    "plain": Kind(
        "llama", {}, "kv mode, plain pages; the server was started without HCACHE_ENABLE=1"
    ),
}


@pytest.fixture(
    scope="module",
    params=["hidden", "plain", pytest.param("latents", marks=pytest.mark.long)],
)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def server(
    kind: Kind, model_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("attach") / "server.log"
    options = ServerOptions(build_model(kind.model, model_cache), log, extra_env=kind.env)
    with Server(options) as server:
        yield server
        ours.assert_nothing_went_wrong(server)


@pytest.fixture(autouse=True)
def detached(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").detach_storage()


def storage_hits(server: Server, conversation: Conversation) -> int:
    """Tokens of the first prompt that come from L3 when it is sent again."""
    (again,) = ask(server, [conversation.turns[0].prompt])
    return again.turns[0].cached.storage


def test_status_policies_and_refusals(server: Server, tmp_path: Path) -> None:
    for method in ("PUT", "GET", "DELETE"):
        assert requests.request(method, server.url + PATH, json={}).status_code == 401
    assert server.storage_info().json()["hicache_storage_backend"] is None
    ours.attach(server, ours.attach_config(tmp_path), hicache_storage_prefetch_policy="timeout")
    info = server.storage_info().json()
    assert info["hicache_storage_backend"] == "dynamic"
    assert str(tmp_path) in info["hicache_storage_backend_extra_config"]
    assert info["hicache_storage_prefetch_policy"] == "timeout"
    ours.attach(
        server,
        ours.attach_config(tmp_path),
        hicache_storage_prefetch_policy="wait_complete",
        hicache_write_policy="write_through",
    )
    assert server.storage_info().json()["hicache_storage_prefetch_policy"] == "wait_complete"
    refused = server.attach_storage("file")
    assert refused.status_code == 400
    assert "already enabled with backend 'dynamic'" in refused.text
    refused = server.attach_storage("dynamic", hicache_write_policy="write_sometimes")
    assert refused.status_code == 400
    for _ in range(2):  # it is idempotent
        server.detach_storage()
        assert server.storage_info().json()["hicache_storage_backend"] is None


def test_data_survives_a_detach_and_ends_with_clear(
    kind: Kind, server: Server, tmp_path: Path
) -> None:
    model = Path(server.options.model)
    ours.attach(server, ours.attach_config(tmp_path))
    (conversation,) = ask(server, [random_tokens(768, seed=31)])
    assert storage_hits(server, conversation) > 700
    server.detach_storage()
    assert len(ours.stored_pages(tmp_path)) >= 12
    assert storage_hits(server, conversation) == 0
    ours.attach(server, ours.attach_config(tmp_path / "elsewhere"))
    assert storage_hits(server, conversation) == 0
    server.detach_storage()
    ours.attach(server, ours.attach_config(tmp_path))
    assert storage_hits(server, conversation) > 700
    assert server.clear_storage().status_code == 200
    assert ours.stored_pages(tmp_path) == []
    assert storage_hits(server, conversation) == 0  # which stores it again
    assert storage_hits(server, conversation) > 700
    ours.assert_no_cache_output(model, [conversation])
    told = CliRunner().invoke(app, ["stats", "--dir", str(tmp_path / "l3")]).stdout
    assert f"Last server of {tmp_path / 'l3'}: {model}, started " in told
    assert f": {kind.mode}" in told


def test_pages_of_other_weights_are_misses_after_an_attach(
    server: Server, model_cache: Path, tmp_path: Path
) -> None:
    model = Path(server.options.model)
    ours.attach(server, ours.attach_config(tmp_path))
    (conversation,) = ask(server, [random_tokens(300, seed=32)])
    server.detach_storage()
    other = build_model(model.name.rpartition("-")[0], model_cache, seed=1)
    server.update_weights_from_disk(other)
    ours.attach(server, ours.attach_config(tmp_path))
    under_other = [*ask(server, conversation.questions), *ask(server, conversation.questions)]
    assert [c.turns[0].cached.storage for c in under_other] == [0, 256]
    server.detach_storage()
    server.update_weights_from_disk(model)
    ours.attach(server, ours.attach_config(tmp_path))
    assert storage_hits(server, conversation) == 256
    ours.assert_no_cache_output(model, [conversation])
    ours.assert_no_cache_output(other, under_other)


@pytest.mark.versions
def test_pages_behind_nodes_that_predate_the_attach_have_the_keys_of_the_whole_prefix(
    server: Server, tmp_path: Path
) -> None:
    model = Path(server.options.model)
    old = Conversation([random_tokens(320, seed=33)])
    converse(server, [old], flush=False)
    ours.attach(server, ours.attach_config(tmp_path))
    old.questions.append(random_tokens(320, seed=34))
    converse(server, [old])
    assert old.turns[1].cached.device > 0
    before = {path.name for path in ours.stored_pages(tmp_path)}
    assert before
    # The same text from its beginning: other keys would make other files of the same pages.
    (again,) = ask(server, [old.turns[1].prompt])
    every = {path.name for path in ours.stored_pages(tmp_path)}
    assert before <= every
    assert len(every) == (len(old.history) - 1) // server.options.page_size
    assert storage_hits(server, again) >= len(again.turns[0].prompt) - 64
    ours.assert_no_cache_output(model, [old, again])


def test_a_rank_that_cannot_open_the_store_fails_the_attach_on_all_and_blocks_none(
    model: Path, tmp_path: Path
) -> None:
    trigger = tmp_path / "trigger"
    trigger.touch()
    env = ours.faulty("no_store_on_rank_1", trigger)
    with Server(ServerOptions(model, tmp_path / "server.log", tp=2, extra_env=env)) as server:
        answer = server.attach_storage("dynamic", ours.attach_config(tmp_path))
        assert answer.status_code == 400
        assert "Permission denied" in answer.text
        assert "(on tensor-parallel rank 1)" in answer.text
        assert server.generate([1, 2, 3], 2).output_ids
        trigger.unlink()
        ours.attach(server, ours.attach_config(tmp_path))
        conversations = converse(server, make_conversations(1, turns=2, tokens=300))
        ours.assert_restored_from_l3(conversations, 64)
    ours.assert_no_cache_output(model, conversations)


def test_a_rank_that_cannot_open_the_store_stops_the_start_of_all(
    model: Path, tmp_path: Path
) -> None:
    env = ours.faulty("no_store_on_rank_1")
    server = Server(ours.our_server(model, tmp_path, tp=2, extra_env=env))
    server.launch()
    assert server.wait_exit() != 0  # the first rank that ends takes the other with it
    log = server.log_text()
    assert log.count("Permission denied") == 1
    assert "every folder must be one that this user can create and write" in log
    assert log.count("Received sigquit") == 1
    assert "Traceback" not in log


@pytest.mark.parametrize("cycles", [3, pytest.param(30, marks=pytest.mark.long)])
def test_cycles_of_attach_and_detach_leak_nothing(cycles: int, model: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    env = {
        **ours.hidden_mode_env(),
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the one that can be looked into
        **ours.faulty("report_holdings", report),
    }
    # Three conversations fill the device pool, so that loads and evictions go on all the time.
    options = ServerOptions(
        model, tmp_path / "server.log", page_size=16, max_total_tokens=1536, extra_env=env
    )
    seen = []
    conversations = []
    with Server(options) as server:
        for cycle in range(cycles):
            ours.attach(server, ours.attach_config(tmp_path))
            load = make_conversations(3, turns=2, tokens=150, seed=cycle % 3)
            converse(server, load, flush=cycle % 2 == 0, concurrent=cycle % 4 < 2)
            conversations += load
            server.detach_storage()
            seen.append(ours.holdings(server, report))
        ours.assert_nothing_went_wrong(server)
    assert any(turn.cached.storage for turn in turns_of(conversations))
    assert any(told["host_tokens"] for told in seen)
    for told in seen:
        assert told["host_tokens"] == told["host_tokens_in_tree"]
    for what in ("threads", "descriptors"):
        assert max(told[what] for told in seen[-3:]) <= max(told[what] for told in seen[:3]), seen
    ours.assert_no_cache_output(model, conversations[-6:])
