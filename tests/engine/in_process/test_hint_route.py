"""The route of hints, as SGLang's HTTP server gets it: before its keys."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sglang.srt.runtime_context
from fastapi import FastAPI
from sglang.srt.utils.auth import add_api_key_middleware
from starlette.testclient import TestClient

from hcache_backend.sglang.hint_route import NAME
from hcache_backend.start.plugin import _before_routes

KEY = "secret"


class Manager:
    """SGLang's, of a server with our L3; ``sent`` goes to the scheduler."""

    model_config, context_len = SimpleNamespace(vocab_size=1000), 100

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.refuses = False

    def config_value(self, name: str) -> str:
        assert name == "hicache_storage_backend"
        return "dynamic"

    def auto_create_handle_loop(self) -> None: ...

    async def attach_hicache_storage_communicator(self, asked: Any) -> list[Any]:
        self.sent.append(asked)
        message = "no room" if self.refuses else '{"tokens": 3}'
        return [SimpleNamespace(success=not self.refuses, message=message)]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    found, server = Manager(), ModuleType("http_server")
    vars(server)["get_global_state"] = lambda: SimpleNamespace(tokenizer_manager=found)
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", server)
    serving = SimpleNamespace(admin_api_key=KEY)
    monkeypatch.setattr(sglang.srt.runtime_context, "get_serving", lambda: serving)
    return found


def posted(body: Any, key: str = KEY) -> tuple[int, Any]:
    app = FastAPI()
    for _ in range(2):  # SGLang may ask for admin routes, and then put the keys in front
        _before_routes(app)
    add_api_key_middleware(app, api_key=None, admin_api_key=KEY)
    headers = {"Authorization": f"Bearer {key}"}
    answer = TestClient(app).post("/hcache/hint", content=json.dumps(body), headers=headers)
    return answer.status_code, answer.json()


def test_a_hint_goes_to_the_scheduler(manager: Manager) -> None:
    assert posted({"action": "prefetch", "input_ids": [1, 2, 3]}) == (200, [{"tokens": 3}])
    [asked] = manager.sent
    assert asked.hicache_storage_backend == asked.hicache_storage_prefetch_policy == NAME
    assert json.loads(asked.hicache_storage_backend_extra_config_json)["seconds"] == 300.0


def test_what_the_scheduler_says_against_it_is_the_error(manager: Manager) -> None:
    manager.refuses = True
    status, told = posted({"action": "retain", "session": "mine"})
    assert (status, told) == (400, {"error": {"message": "hcache: no room"}})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([1], "hcache: Input should be an object"),
        ({"action": "retain", "input_ids": [-1]}, "hcache: 'input_ids' are of another model"),
        ({"action": "retain", "input_ids": [1], "seconds": 0}, "hcache: seconds: Input should be"),
    ],
)
def test_a_bad_hint_does_not_get_there(manager: Manager, body: Any, message: str) -> None:
    status, told = posted(body)
    assert status == 400
    assert told["error"]["message"].startswith(message)
    assert manager.sent == []


def test_another_key_is_refused(manager: Manager) -> None:
    assert posted({"action": "retain", "input_ids": [1]}, "wrong")[0] == 401
