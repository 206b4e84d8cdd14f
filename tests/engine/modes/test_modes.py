"""Which mode a server ends up in, what it says about it, and how configurations are refused."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.harness.server import Server, ServerOptions
from hcache_backend.start.plugin import LOAD_MODEL
from tests.engine.harness import ours
from tests.engine.harness.conversations import converse, make_conversations

pytestmark = [pytest.mark.engine, pytest.mark.versions]


def attach_error(server: Server, config: dict[str, object]) -> str:
    """The message of a refused attach; the server answers afterwards as before."""
    answer = server.attach_storage("dynamic", config)
    assert answer.status_code == 400
    assert server.generate([1, 2, 3], 2).output_ids
    return answer.text


@pytest.mark.long
@pytest.mark.parametrize("mode", ["hidden", "kv"])
def test_a_start_is_summed_up_in_at_most_six_lines(mode: str, model: Path, tmp_path: Path) -> None:
    options = ours.our_server(
        model,
        tmp_path,
        hcache={"mode": mode, "quota_bytes": "2GB"},
        fork=False,  # the level is read when Python starts
        extra_env={"HCACHE_CPU_LOG_LEVEL": "INFO"},
    )
    with Server(options) as server:
        log = server.log_text()
    lines = [line.split("hcache: ", 1)[1] for line in log.splitlines() if "hcache: " in line]
    lines = [line for line in lines if "is new, and on the file system of /" not in line]
    assert len(lines) <= 6, lines
    assert lines[0].startswith("hidden mode: " if mode == "hidden" else "KV mode, own pages: ")
    assert lines[-1] == f"L3 in {tmp_path / 'l3'}, at most 2.0 GB in each"
    assert all(said in "".join(lines) for said in ("4 layers ", "codec none", "host pages"))


class TestServerThatWasStartedWithoutUs:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("plain")
        env = ours.faulty("report_hooks", folder / "hooks")
        # Spawned afresh, as real deployments start.
        options = ServerOptions(model, folder / "server.log", fork=False, extra_env=env)
        with Server(options) as server:
            yield server

    def test_no_hook_but_that_of_the_bootstrap_exists(self, server: Server) -> None:
        assert server.process is not None
        command = psutil.Process(server.process.pid).cmdline()
        assert command[1:3] == ["-m", "sglang.launch_server"]
        assert server.generate([1, 2, 3], 2).output_ids
        assert "hcache:" not in server.log_text()
        hooks = ours.told(server, server.options.log.parent / "hooks")
        assert list(hooks) == [LOAD_MODEL]

    @pytest.mark.parametrize(
        ("outside", "hcache", "message"),
        [
            (
                *({}, {"mode": "hidden"}),
                "option 'mode' is 'hidden' but this server runs in kv mode (the server was started "
                "without HCACHE_ENABLE=1); it can only change at a restart",
            ),
            (
                *({}, {"dirz": ["/tmp"]}),
                "hcache: unknown option 'dirz'; did you mean 'dirs'?",
            ),
            ({"dirs": ["/tmp"]}, {}, "it belongs under the key 'hcache'"),
            ({"interface_v1": 0}, {}, "'interface_v1' is 0; it must be 1"),
        ],
        ids=["mode", "unknown", "place", "interface"],
    )
    def test_a_wrong_option_is_refused_with_its_reason(
        self,
        outside: dict[str, object],
        hcache: dict[str, object],
        message: str,
        server: Server,
        tmp_path: Path,
    ) -> None:
        text = attach_error(server, ours.attach_config(tmp_path, **hcache) | outside)
        assert message in text.replace("\\", "")
        assert not ours.stored_pages(tmp_path)


def test_a_wrong_option_stops_the_start(model: Path, tmp_path: Path) -> None:
    """All ranks, with one line."""
    options = ours.our_server(model, tmp_path, hcache={"partition": ours.partition(0, 5, 0)}, tp=2)
    server = Server(options)
    server.launch()
    assert server.wait_exit() != 0
    log = server.log_text()
    message = (
        "hcache: option 'partition' is {'recompute': 0, 'hidden': 5, 'kv': 0}: that is 5 layers, "
        "and the model has 4"
    )
    assert log.count(message) == 1
    assert "Traceback" not in log
    for too_late in ("cannot be used for now", "projection:", "partition:", "KV mode"):
        assert f"hcache: {too_late}" not in log


def test_pages_prove_themselves_in_sglangs_file_backend(model: Path, tmp_path: Path) -> None:
    env = ours.hidden_mode_env(partition=ours.partition(1, 2, 1))
    with Server(ours.file_backend(model, tmp_path, extra_env=env)) as server:
        conversations = make_conversations(2, turns=3, tokens=300)
        converse(server, conversations, turns=2)
        ours.assert_hidden_mode(server)
        ours.assert_restored_from_l3(conversations, 64)
        for path in (tmp_path / "l3").glob("*.bin"):  # this backend has no checksum of its own
            ours.flip_bit(path, 5000)
        converse(server, conversations)
        assert all(c.turns[2].cached.storage == 0 for c in conversations)
        assert "is not the requested one (checksum): counted as a miss" in server.log_text()
        ours.assert_nothing_went_wrong(server)
    ours.assert_no_cache_output(model, conversations)
