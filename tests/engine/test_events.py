"""SGLang's publisher of KV events says what L3 stores and evicts."""

import json
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


class Subscriber:
    """Hears SGLang's publisher at a port."""

    def __init__(self, port: int) -> None:
        self._events: list[dict[str, Any]] = []
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._handshakes = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def is_connected(self) -> bool:
        """A publisher drops what it publishes before."""
        return bool(self._handshakes.poll(50))

    def heard(self, kind: str) -> list[dict[str, Any]]:
        """Events of that kind about L3 that have come so far."""
        while self._socket.poll(50):
            _, _, payload = self._socket.recv_multipart()
            _, batch, *_ = msgspec.msgpack.decode(payload)
            self._events += [event for event in batch if event.get("medium") == "DISK"]
        return [event for event in self._events if event["type"] == kind]

    def pages(self, kind: str) -> list[int]:
        return [name for event in self.heard(kind) for name in event["block_hashes"]]


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
    subscriber = Subscriber(port)
    with Server(options) as server:
        server.until(subscriber.is_connected, "a subscriber")
        prompts = [random_tokens(TOKENS, 40 + number) for number in range(3)]
        for number, prompt in enumerate(prompts, 1):
            server.generate(prompt, 1)
            server.wait_backed_up()
            wanted = number * TOKENS // PAGE
            server.until(
                lambda wanted=wanted: len(subscriber.pages("BlockStored")) >= wanted,
                "events of stored pages",
            )
        stored = subscriber.heard("BlockStored")
        assert {e["block_size"] for e in stored} == {PAGE}
        tokens = {tuple(e["token_ids"]) for e in stored if e["parent_block_hash"] is None}
        assert {tuple(prompt[:PAGE]) for prompt in prompts} == {t[:PAGE] for t in tokens}
        assert all(len(e["token_ids"]) == PAGE * len(e["block_hashes"]) for e in stored)
        server.until(lambda: bool(subscriber.pages("BlockRemoved")), "events of evicted pages")
        there = set(subscriber.pages("BlockStored")) - set(subscriber.pages("BlockRemoved"))
        assert len(there) == len(ours.stored_pages(tmp_path)) <= ROOM
        ours.assert_nothing_went_wrong(server)
        if mode == "kv":
            ours.assert_own_pages_of_kv(server)


def test_without_a_publisher_the_option_is_not_used(model: Path, tmp_path: Path) -> None:
    options = ours.our_server(model, tmp_path, hcache={"mode": "kv", "events": True})
    with Server(options) as server:
        server.wait_for_log("hcache: option 'events' is not used: it needs --kv-events-config")
        server.generate(random_tokens(200, 1), 1)
