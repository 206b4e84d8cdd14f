"""Server processes and machines, without SGLang."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hcache_backend.cli import machine
from hcache_backend.cli.machine import MachineError, find_machine
from hcache_backend.cli.serving import ServerError, ServerProcess

FAKE_SERVER = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        self.reply(200, {})

    def do_POST(self):
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or "null")
        if self.path.startswith("/flush_cache"):
            return self.reply(400, "busy")
        key = self.headers["Authorization"].removeprefix("Bearer ")
        meta = {
            "cached_tokens_details": {"storage": 128},
            "child": child.pid,
            "authorised": key in sys.argv,
            "variable": os.environ["FAKE"],
        }
        self.reply(200, {"output_ids": body["input_ids"][:2], "meta_info": meta})

port = int(sys.argv[sys.argv.index("--port") + 1])
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def make_server(folder: Path, code: str = FAKE_SERVER, ready_s: float = 30.0) -> ServerProcess:
    return ServerProcess(
        [sys.executable, "-c", code], {"FAKE": "yes"}, folder / "server.log", ready_s
    )


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A killed orphan stays a zombie for as long as nobody reaps it.
    return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()


def test_a_server_is_ready_inside_the_block_and_its_group_gone_behind_it(tmp_path: Path) -> None:
    with make_server(tmp_path) as server:
        reply = server.generate([5, 6, 7], 2)
        assert reply.output_ids == [5, 6]
        assert reply.storage_tokens == 128
        assert reply.meta_info["authorised"]
        assert reply.meta_info["variable"] == "yes"
        child = reply.meta_info["child"]
        assert is_running(child)
        assert json.loads(server.request("POST", "/flush_cache").text) == "busy"
        with pytest.raises(ServerError, match=r"/flush_cache.* answered 400"):
            server.flush_cache()
    assert not is_running(child)


def test_a_server_that_ends_while_starting_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = make_server(tmp_path, "print('what went wrong'); raise SystemExit(3)")
    with pytest.raises(ServerError, match=r"(?s)exited with 3 while starting.*what went wrong"):
        server.start()


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    server = make_server(tmp_path, "import time; time.sleep(600)", ready_s=0.5)
    with pytest.raises(ServerError, match="not ready after"):
        server.start()


def test_outside_a_checkout_and_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as error:
        machine._cpu_machine(tmp_path / "tests" / "cpu_engine")
    assert "checkout" in str(error.value)
    assert "\n" not in str(error.value)


def test_without_sglang_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="SGLang is not installed"):
        find_machine()
