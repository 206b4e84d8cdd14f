"""What L3 has after the end of a server: by SIGTERM, as operators end one, and by SIGKILL."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.harness.server import Server
from hcache_backend.sglang.compat import is_first
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    random_tokens,
)

pytestmark = [pytest.mark.engine, pytest.mark.versions]

PAGE = 64


@pytest.fixture(
    params=[
        pytest.param({"mode": "kv"}, id="kv", marks=pytest.mark.long),
        pytest.param({"mode": "hidden"}, id="hidden"),
        pytest.param({"mode": "plain"}, id="plain", marks=pytest.mark.long),
    ]
)
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = request.param
    return chosen


def ask_to_end(server: Server) -> None:
    """SIGTERM to the launcher, as an operator or a container's runtime sends it."""
    assert server.process is not None
    psutil.Process(server.process.pid).terminate()


def asked_again(server: Server, conversations: Sequence[Conversation]) -> Sequence[Conversation]:
    return ask(server, [[*c.history, 1] for c in conversations])


def found(asked: Sequence[Conversation]) -> list[int]:
    """Tokens of each history that a new server has from L3."""
    # What one has brought to host memory another one has from there.
    return [c.turns[0].cached.total for c in asked]


def whole_pages(conversations: Sequence[Conversation]) -> list[int]:
    return [len(c.history) // PAGE * PAGE for c in conversations]


def test_what_is_queued_for_l3_is_written_when_a_server_is_asked_to_end(
    mode: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    trigger = tmp_path / "trigger"
    options = ours.our_server(model, tmp_path, hcache=mode, extra_env=ours.faulty("disk", trigger))
    conversations = make_conversations(3, turns=1, tokens=600)
    with Server(options) as server:
        trigger.write_text("held writes")
        converse(server, conversations, flush=False)
        ask_to_end(server)
        server.wait_for_log("shutting down: up to 10 s to write [1-9]")
        trigger.unlink()
        assert server.wait_exit() == 0
        ours.assert_nothing_went_wrong(server)
    with Server(options) as server:
        assert found(asked_again(server, conversations)) == whole_pages(conversations)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_write_back_stores_beginnings_that_the_device_keeps(
    end: str, ranks: int, mode: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """All conversations begin with the same 8 pages, which are always in use: HiCache never evicts
    them, so it never writes them."""
    options = ours.our_server(
        model, tmp_path, hcache=mode, write_policy="write_back", max_total_tokens=2048, tp=ranks
    )
    prefix = random_tokens(8 * PAGE, 99)
    conversations = make_conversations(5, turns=3, tokens=150, prefix=prefix)
    with Server(options) as server:
        converse(server, conversations, flush=False)
        server.wait_backed_up()
        if end == "SIGTERM":
            ask_to_end(server)
            assert server.wait_exit() == 0
        else:
            server.signal(signal.SIGKILL)
        ours.assert_nothing_went_wrong(server)
    with Server(options) as server:
        again = asked_again(server, conversations)
    after, whole = found(again), whole_pages(conversations)
    if end == "SIGTERM":
        assert after == whole
    else:  # the ends of those that were used last were on the device only
        assert after[0] == whole[0] and min(after) > 8 * PAGE
    ours.assert_no_cache_output(model, [*conversations, *again])


def test_priorities_that_would_lose_requests(model: Path, tmp_path: Path) -> None:
    """SGLang 0.5.21 forgets requests that were preempted for one whose prefetch still runs."""
    args = ["--enable-priority-scheduling"]
    server = Server(ours.our_server(model, tmp_path, extra_args=args))
    if is_first():
        try:
            server.launch()
            assert server.wait_exit() != 0
        finally:
            server.kill()
        assert "add --disable-priority-preemption, or use SGLang 0.5.22" in server.log_text()
        args.append("--disable-priority-preemption")
    with Server(
        ours.our_server(model, tmp_path, extra_args=args, log=tmp_path / "serves.log")
    ) as fine:
        replies = converse(fine, make_conversations(2, turns=2), concurrent=True)
    ours.assert_no_cache_output(model, replies)


def test_memory_is_released_and_weights_change_right_after_a_reply(
    model: Path, tmp_path: Path
) -> None:
    """SGLang ends a server that does that while a backup runs, which an L3 makes likely, or in the
    turn of the last reply, which is long on a busy machine. An update of weights is refused, or
    ends the server."""
    options = ours.our_server(
        model,
        tmp_path,
        hcache={"mode": "kv"},
        max_total_tokens=8192,
        extra_env=ours.faulty("turns_end_late", trigger := tmp_path / "late"),
    )
    with Server(options) as server:
        for seed in range(8):
            server.generate(random_tokens(1500, seed), 4)
            server.release_memory()
            server.generate(random_tokens(1500, 100 + seed), 4)
            server.update_weights_from_disk(model)
            trigger.unlink() if trigger.exists() else trigger.touch()
        ours.assert_nothing_went_wrong(server)
