"""SGLang's publisher of KV events says what L3 stores and evicts."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from bench.harness.server import Server, free_port
from tests.engine.harness import ours
from tests.engine.harness.conversations import random_tokens

pytestmark = pytest.mark.engine

PAGE, TOKENS, ROOM = 16, 320, 45
"""Room for so many pages: two prompts and a part of a third one."""
FILE_BYTES = 139264


@contextmanager
def subscribed(port: int) -> Iterator[list[dict[str, Any]]]:
    """Events of L3 that have come, once :func:`heard` was called."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(f"tcp://127.0.0.1:{port}")
    events: list[dict[str, Any]] = []
    events_of[port] = socket, events
    try:
        yield events
    finally:
        socket.close()
        context.term()


events_of: dict[int, tuple[Any, list[dict[str, Any]]]] = {}


def heard(port: int) -> list[dict[str, Any]]:
    socket, events = events_of[port]
    while socket.poll(50):
        _, _, payload = socket.recv_multipart()
        _, batch, *_ = msgspec.msgpack.decode(payload)
        events += [event for event in batch if event.get("medium") == "DISK"]
    return events


def is_told(pages: Callable[[], list[int]], wanted: int) -> bool:
    return len(pages()) >= wanted


@pytest.mark.parametrize("mode", ["kv", pytest.param("plain", marks=pytest.mark.long)])
def test_a_subscriber_hears_what_l3_stores_and_evicts(
    mode: str, model: Path, tmp_path: Path
) -> None:
    port = free_port()
    told = {"publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    options = ours.our_server(
        model,
        tmp_path,
        hcache={"mode": mode, "events": True, "quota_bytes": ROOM * FILE_BYTES},
        page_size=PAGE,
        extra_args=("--kv-events-config", json.dumps(told)),
    )
    with subscribed(port), Server(options) as server:
        prompts = [random_tokens(TOKENS, 40 + number) for number in range(3)]

        def pages_of(kind: str) -> list[int]:
            return [h for e in heard(port) if e["type"] == kind for h in e["block_hashes"]]

        for number, prompt in enumerate(prompts):
            server.generate(prompt, 1)
            server.wait_backed_up()
            told_of = partial(pages_of, "BlockStored")
            wanted = (number + 1) * TOKENS // PAGE
            server.until(partial(is_told, told_of, wanted), "events of stored pages")
        stored = [e for e in heard(port) if e["type"] == "BlockStored"]
        assert {e["block_size"] for e in stored} == {PAGE}
        tokens = {tuple(e["token_ids"]) for e in stored if e["parent_block_hash"] is None}
        assert {tuple(prompt[:PAGE]) for prompt in prompts} == {t[:PAGE] for t in tokens}
        assert all(len(e["token_ids"]) == PAGE * len(e["block_hashes"]) for e in stored)
        server.until(lambda: bool(pages_of("BlockRemoved")), "events of evicted pages")
        there = set(pages_of("BlockStored")) - set(pages_of("BlockRemoved"))
        assert len(there) == len(ours.stored_pages(tmp_path)) <= ROOM
        ours.assert_nothing_went_wrong(server)
        if mode == "kv":
            ours.assert_own_pages_of_kv(server)


def test_without_a_publisher_the_option_is_not_used(model: Path, tmp_path: Path) -> None:
    options = ours.our_server(model, tmp_path, hcache={"mode": "kv", "events": True})
    with Server(options) as server:
        server.wait_for_log("hcache: option 'events' is not used: it needs --kv-events-config")
        server.generate(random_tokens(200, 1), 1)
