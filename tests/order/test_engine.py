"""SGLang's own scheduler, with overlap, under the checker: what users do to it, no wrong order."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server
from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env
from tests.engine.harness.conversations import converse, make_conversations, random_tokens
from tests.engine.harness.ours import assert_hidden_mode, our_server
from tests.order.edges import all_edges
from tests.order.plugin.hcache_order import Settings

HERE = Path(__file__).parent
LONG = pytest.mark.long
PARTITIONS = {
    "hidden": {"recompute": 0, "hidden": 4, "kv": 0},
    "recompute": {"recompute": 2, "hidden": 2, "kv": 0},
    "mixed": {"recompute": 2, "hidden": 1, "kv": 1},
}


def conversations(server: Server) -> None:
    """Turn after turn, flushed in between, then several at once."""
    converse(server, make_conversations(3, turns=3, tokens=200))
    server.flush_cache()
    converse(server, make_conversations(3, turns=3, tokens=150, seed=2), concurrent=True)


def pressure(server: Server) -> None:
    """More than the pool holds: eviction, and loads from host memory beside forward passes."""
    prompts = [random_tokens(300, seed) for seed in range(10)]
    for turn in range(2):
        server.generate_many([p + random_tokens(20 * turn, turn) for p in prompts], 12)


def eager(server: Server) -> None:
    """Prompts from L3: alone, together, behind a prefix that is on the device, and aborted."""
    prompts = [random_tokens(800, seed) for seed in (3, 4)]
    longer = prompts[0] + random_tokens(600, 77)
    for prompt in (*prompts, longer):
        server.generate(prompt, 1)
    server.flush_cache()
    (server.options.log.parent / "l3-rate").write_text("4000000")  # bytes per second
    for prompt in prompts:
        server.generate([*prompt, 5, 6, 7], 8)
    server.flush_cache()
    server.generate_many([[*prompt, 5, 6, 7] for prompt in prompts], 12)
    server.flush_cache()
    server.generate(prompts[0][:400], 1)
    server.generate([*longer, 1], 4)


SCENARIOS: dict[str, Callable[[Server], None]] = {
    f.__name__: f for f in (conversations, pressure, eager)
}


def check(model: Path, folder: Path, name: str, partition: str, **chosen: Any) -> dict[str, Any]:
    """Serve a scenario under the checker.

    Returns:
        The report, see ``plugin/hcache_order.py``.
    """
    settings = Settings(report=str(folder / "order.json"), **chosen)
    paths = [str(HERE / "plugin"), str(HERE.parents[1]), cpu_engine_env()["PYTHONPATH"]]
    hcache: dict[str, Any] = {"partition": PARTITIONS[partition], "check_every_pages": 4}
    environment = settings.environment() | {"PYTHONPATH": os.pathsep.join(paths)}
    if name == "eager":
        hcache["restore"] = "eager"
        (folder / "l3-rate").write_text("0")
        environment["HCACHE_CPU_L3_FILE"] = str(folder / "l3-rate")
    options = our_server(
        model,
        folder,
        hcache=hcache,
        page_size=16,
        overlap=True,
        max_total_tokens=2048,
        extra_env=environment,
    )
    with Server(options) as server:
        SCENARIOS[name](server)
        assert_hidden_mode(server)
        report, ask = Path(settings.report), Path(settings.report + ".ask")
        ask.touch()
        deadline = time.monotonic() + 60
        while not report.exists():
            assert time.monotonic() < deadline, server.log_text()[-2000:]
            time.sleep(0.1)
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["steps"] > 10
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("llama", tmp_path_factory.mktemp("models"))


EVERY_RUN = [("conversations", "mixed"), ("pressure", "hidden"), ("eager", "recompute")]


@pytest.mark.parametrize(
    ("name", "partition"),
    [
        pytest.param(name, partition, marks=() if (name, partition) in EVERY_RUN else LONG)
        for name in SCENARIOS
        for partition in PARTITIONS
    ],
)
def test_no_wrong_order(model: Path, tmp_path: Path, name: str, partition: str) -> None:
    found = check(model, tmp_path, name, partition)
    assert not found["findings"], "\n\n".join(found["findings"])


@LONG
@pytest.mark.parametrize(
    "chosen",
    [
        {"query": "random", "seed": 1},
        {"query": "random", "seed": 2, "newest_first": True},
        {"early_barrier": False},
    ],
    ids=", ".join,
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_wrong_order_whatever_the_device_does(
    model: Path, tmp_path: Path, name: str, chosen: dict[str, Any]
) -> None:
    found = check(model, tmp_path, name, "mixed", **chosen)
    assert not found["findings"], "\n\n".join(found["findings"])


@LONG
@pytest.mark.parametrize(
    ("what", "name", "partition"),
    [
        ("now.wait(made)", "eager", "recompute"),
        ("now.keep(span.prefix)", "eager", "recompute"),
        ("now.keep(slots)", "eager", "recompute"),
        ("stream.wait(streams.of(self.load_fence_stream).record())", "conversations", "mixed"),
    ],
    ids=["row 1", "row 2", "row 2b", "row 2c"],
)
def test_what_was_wrong_is_reported_when_its_edge_is_left_out(
    model: Path, tmp_path: Path, what: str, name: str, partition: str
) -> None:
    [edge] = [str(edge) for edge in all_edges() if edge.what == what]
    assert check(model, tmp_path, name, partition, left_out=edge)["findings"]
