"""Which mode a server ends up in, what it says about it, and how configurations are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server, ServerOptions
from tests.engine.harness.conversations import Conversation, converse, make_conversations
from tests.engine.harness.ours import (
    assert_hidden_mode,
    assert_no_cache_output,
    assert_nothing_went_wrong,
    assert_restored_from_l3,
    extra_config,
    faulty,
    our_server,
    stored_pages,
    told,
)

pytestmark = [pytest.mark.engine, pytest.mark.versions]


def attach_error(server: Server, config: dict[str, object]) -> str:
    """The message of a refused attach; the server answers afterwards as before."""
    answer = server.attach_storage("dynamic", config)
    assert answer.status_code == 400
    assert server.generate([1, 2, 3], 2).output_ids
    return answer.text


class TestServerThatWasStartedWithoutUs:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("plain")
        env = faulty("report_hooks", folder / "hooks")
        # Spawned afresh, as real deployments start.
        options = ServerOptions(model, folder / "server.log", fork=False, extra_env=env)
        with Server(options) as server:
            yield server

    def test_nothing_but_the_bootstrap_hook_exists(self, server: Server) -> None:
        assert server.generate([1, 2, 3], 2).output_ids
        assert "hcache:" not in server.log_text()
        hooks = told(server, server.options.log.parent / "hooks")
        assert hooks == ["sglang.srt.model_executor.model_runner.ModelRunner.load_model"]

    def test_an_attach_stores_plain_kv_and_says_so(
        self, server: Server, model: Path, tmp_path: Path
    ) -> None:
        answer = server.attach_storage("dynamic", extra_config(tmp_path, mode="auto"))
        assert answer.status_code == 200, answer.text
        server.wait_for_log(
            r"hcache: KV mode \(plain KV pages\): the server was started without HCACHE_ENABLE=1"
        )
        conversations = converse(server, make_conversations(2, turns=2))
        assert_restored_from_l3(conversations, 64)
        assert_no_cache_output(model, conversations)
        server.detach_storage()
        assert stored_pages(tmp_path)  # detach leaves the data


class TestServerThatWaitsForABackend:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("waiting")
        env = {"HCACHE_ENABLE": "1", "HCACHE_CONFIG": '{"mode": "hidden", "check_every_pages": 1}'}
        with Server(ServerOptions(model, folder / "server.log", extra_env=env)) as server:
            yield server

    def test_an_attach_finds_the_hidden_states_that_are_there(
        self, server: Server, model: Path, tmp_path: Path
    ) -> None:
        assert_hidden_mode(server)
        # This prompt predates the attach: its node is on the device, captured and without a key.
        old, new = make_conversations(2, turns=2, tokens=300)
        last = old.questions.pop()
        converse(server, [old], flush=False)
        answer = server.attach_storage("dynamic", extra_config(tmp_path))
        assert answer.status_code == 200, answer.text
        old.questions.append(last)
        converse(server, [old, new])
        assert_restored_from_l3([new], 64)
        assert old.turns[1].cached.device > 0
        again = Conversation([old.turns[1].prompt])
        converse(server, [again])
        assert_no_cache_output(model, [old, new, again])
        server.detach_storage()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"dirz": ["/tmp"]},
                r"hcache: unknown option 'dirz' \(value \['/tmp'\]\); did you mean 'dirs'?",
            ),
            ({"dirs": "relative"}, "hcache: option 'dirs' is 'relative': must be a list of"),
            ({"dirs": ["relative"]}, "every folder must be an absolute path, not 'relative'"),
            ({"dirs": ["/proc/no"]}, "hcache: option 'dirs' is ['/proc/no']:"),
            ({"check_every_pages": -1}, "option 'check_every_pages' is -1: Input should be"),
            ({"mode": "kv"}, "option 'mode' is 'kv' but this server runs with 'hidden'"),
            ({"codec": "int8"}, "option 'codec' is 'int8' but this server runs with 'none'"),
            (
                {"restore": "eager"},
                "option 'restore' is 'eager' but this server was started with 'layerwise'",
            ),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_a_wrong_option_is_refused_with_its_reason(
        self, options: dict[str, object], message: str, server: Server, tmp_path: Path
    ) -> None:
        text = attach_error(server, extra_config(tmp_path, **options))
        assert message.replace("\\", "") in text.replace("\\", "")

    def test_options_in_the_wrong_place_are_refused(self, server: Server, tmp_path: Path) -> None:
        config = extra_config(tmp_path)
        assert "it belongs under the key 'hcache'" in attach_error(
            server, {**config, "dirs": ["/tmp"]}
        )
        assert "'interface_v1' is 0; it must be 1" in attach_error(
            server, {**config, "interface_v1": 0}
        )


def test_a_wrong_option_at_start_up_stops_the_server_with_its_message(
    model: Path, tmp_path: Path
) -> None:
    server = Server(our_server(model, tmp_path, hcache={"restore_chunk_token": 1024}))
    server.launch()
    assert server.wait_exit() != 0
    assert (
        "ConfigError: hcache: unknown option 'restore_chunk_token' (value 1024); "
        "did you mean 'restore_chunk_tokens'?"
    ) in server.log_text()


@pytest.mark.parametrize("layers", [(0, 4, 0), (1, 2, 1)], ids=["hidden", "all three"])
def test_hidden_pages_travel_through_sglangs_own_file_backend_and_still_prove_themselves(
    layers: tuple[int, int, int], model: Path, tmp_path: Path
) -> None:
    partition = dict(zip(("recompute", "hidden", "kv"), layers, strict=True))
    l3 = tmp_path / "l3"
    options = ServerOptions(
        model,
        tmp_path / "server.log",
        storage_backend="file",
        extra_config={"prefetch_threshold": 16},
        extra_env={
            "HCACHE_ENABLE": "1",
            "HCACHE_CONFIG": json.dumps(
                {"mode": "hidden", "check_every_pages": 1, "partition": partition}
            ),
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(l3),
        },
    )
    with Server(options) as server:
        conversations = make_conversations(2, turns=3, tokens=300)
        rest = [conversation.questions.pop() for conversation in conversations]
        converse(server, conversations)
        assert_hidden_mode(server)
        assert_restored_from_l3(conversations, 64)
        for path in l3.glob("*.bin"):  # this backend has no checksum of its own
            data = bytearray(path.read_bytes())
            data[5000] ^= 1
            path.write_bytes(data)
        for conversation, question in zip(conversations, rest, strict=True):
            conversation.questions.append(question)
        converse(server, conversations)
        assert all(c.turns[2].cached.storage == 0 for c in conversations)
        assert "is not ours (checksum): a miss" in server.log_text()
        assert_nothing_went_wrong(server)
    assert_no_cache_output(model, conversations)


def test_auto_chooses_kv_where_hidden_states_are_not_smaller(
    model_cache: Path, tmp_path: Path
) -> None:
    model = build_model("qwen3", model_cache)  # two of four heads: KV is as small
    with Server(our_server(model, tmp_path, hcache={"mode": "auto"})) as server:
        conversations = converse(server, make_conversations(2, turns=2))
        assert (
            "hcache: KV mode (plain KV pages): the partition has no hidden states: "
        ) in server.log_text()
        assert_restored_from_l3(conversations, 64)
    assert_no_cache_output(model, conversations)
