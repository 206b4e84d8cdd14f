"""SGLang's own scheduler, with overlap, under the checker: what users do to it, no wrong order."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from bench.harness.models import build_model
from bench.harness.server import Server, ServerOptions
from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env
from tests.engine.harness.conversations import converse, make_conversations, random_tokens
from tests.engine.harness.ours import assert_hidden_mode, assert_own_pages_of_kv, faulty, our_server
from tests.engine.hits.eager_servers import read_batches, until_more
from tests.order.edges import all_edges
from tests.order.plugin.hcache_order import Settings
from tests.order.reports import SERVED
from tests.order.waits import in_service

HERE = Path(__file__).parent
LONG = pytest.mark.long
PARTITIONS = {
    "hidden": {"recompute": 0, "hidden": 4, "kv": 0},
    "recompute": {"recompute": 2, "hidden": 2, "kv": 0},
    "mixed": {"recompute": 2, "hidden": 1, "kv": 1},
    "kv": {"recompute": 0, "hidden": 0, "kv": 4},
    "hidden and kv": {"recompute": 0, "hidden": 2, "kv": 2},
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


def together(*calls: Callable[[], object]) -> None:
    """All calls at once; raises what one of them raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


def l3_rate(server: Server, bytes_per_second: int) -> None:
    """How fast L3 is from now on; 0: no limit."""
    (server.options.log.parent / "l3-rate").write_text(str(bytes_per_second))


def eager(server: Server) -> None:
    """Prompts from L3: alone, together, and behind a prefix that is on the device."""
    prompts = [random_tokens(800, seed) for seed in (3, 4)]
    longer = prompts[0] + random_tokens(600, 77)
    for prompt in (*prompts, longer):
        server.generate(prompt, 1)
    server.flush_cache()
    l3_rate(server, 4_000_000)
    for prompt in prompts:
        server.generate([*prompt, 5, 6, 7], 8)
    server.flush_cache()
    server.generate_many([[*prompt, 5, 6, 7] for prompt in prompts], 12)
    server.flush_cache()
    server.generate(prompts[0][:400], 1)
    server.generate([*longer, 1], 4)


def from_the_back(server: Server) -> None:
    """Fronts that slices recompute while the back is read: of one prompt, of two at once, and of
    one behind a prefix that is on the device; then one whose request is aborted meanwhile."""
    prompts = [random_tokens(800, seed) for seed in (3, 4)]
    longer = prompts[0] + random_tokens(600, 77)
    read_batches(server, None)
    for prompt in (*prompts, longer):
        server.generate(prompt, 1)
    for asked, prefix in (prompts[:1], 0), (prompts, 0), ([longer], 400):
        server.flush_cache()
        if prefix:
            server.generate(longer[:prefix], 1)
        _with_a_front(server, partial(server.generate_many, [[*p, 5, 6] for p in asked], 8))
    server.flush_cache()
    read_batches(server, 0)
    together(
        partial(_abort, server, "prefetch", prompts[0]),
        partial(server.generate, random_tokens(300, 5), 8),
    )
    _with_a_front(server, partial(server.generate, [*prompts[1], 5], 8))


def _with_a_front(server: Server, ask: Callable[[], object]) -> None:
    """L3 is read, and then only, when some pages of what is asked for are recomputed."""
    read_batches(server, 0)
    with ThreadPoolExecutor(1) as pool:
        with until_more(server, "l3_tokens", "recomputed", 1):
            asking = pool.submit(ask)
        read_batches(server, None)
        asking.result()


def decode(server: Server) -> None:
    """Batches that shrink from nine requests to one; then the same behind what L3 has of them."""
    prompts = [random_tokens(70, seed) for seed in range(9)]
    for turn in range(2):
        together(
            *(
                partial(server.generate, [*prompt, turn], 3 + 3 * place)
                for place, prompt in enumerate(prompts)
            )
        )
        server.flush_cache()


def turns(server: Server) -> None:
    """Conversations whose every turn comes from L3."""
    converse(server, make_conversations(2, turns=2, tokens=200))


def _abort(server: Server, where: str, prompt: list[int]) -> None:
    """A request that the plugin aborts there; it may still end before."""
    body = {"rid": f"abort in {where} {time.monotonic_ns()}", "input_ids": prompt}
    requests.post(
        f"{server.url}/generate",
        json=body | {"sampling_params": {"max_new_tokens": 8}},
        timeout=600,
    )


def aborts(server: Server) -> None:
    """Requests that are aborted in the middle of something, beside one that goes on."""
    prompts = [random_tokens(320, seed) for seed in range(3)]
    server.generate_many(prompts, 1)
    server.flush_cache()
    l3_rate(server, 4_000_000)
    for turn in range(2):
        short, long = random_tokens(40, turn), random_tokens(400, turn)
        together(
            partial(_abort, server, "prefetch", prompts[0] + short),
            partial(_abort, server, "load", prompts[1] + short),
            partial(_abort, server, "prefill", prompts[2] + long),
            partial(server.generate, [*prompts[0], turn], 8),
        )
        server.flush_cache()


def flushes(server: Server) -> None:
    """Flushes at the first moment at which SGLang allows it, while others go on asking."""
    prompts = [random_tokens(320, seed) for seed in range(3)]
    server.generate_many(prompts, 1)
    l3_rate(server, 4_000_000)
    for turn in range(4):
        together(
            partial(server.flush_cache, timeout=300),
            partial(_abort, server, "prefetch", prompts[turn % 3]),
            partial(server.generate, [*prompts[0], turn], 3 + 2 * turn),
            partial(server.generate, [*prompts[1], turn], 3 + 2 * turn),
        )


class Scenario(NamedTuple):
    """What users do to a server, and to which."""

    use: Callable[[Server], None]
    # What the report must say for the scenario to have been one.
    happened: Callable[[dict[str, Any]], object] = lambda found: found["steps"] > 10
    partitions: tuple[str, ...] = ("mixed",)  # which ones it runs with, see ``PARTITIONS``
    restore: str = "layerwise"
    tp: int = 1
    chunk: int | None = None  # tokens of a prefill's longest step
    decode_graphs: bool = False
    codec: str = "none"  # any other is that of a bfloat16 server
    fault: str = ""  # one of ``tests/engine/faults``, by the file ``in-step``
    recompute_ms: float = 10.0
    waits: tuple[str, ...] = ()  # where our code on the scheduler's thread may wait
    model: str = "llama"
    options: dict[str, Any] = {}  # of the server, besides  # noqa: RUF012


def _was_replayed(found: dict[str, Any]) -> bool:
    return bool(found["replays"] > found["steps"] / 2)


def _was_aborted(found: dict[str, Any]) -> bool:
    return set(found["aborts"]) == {"prefetch", "load", "prefill"}


def _was_cut_off(found: dict[str, Any]) -> bool:
    return "prefetch" in found["aborts"]


ABORTED = "hcache_backend/restore/report.py:wait_until_copied"
"""An aborted prefetch frees its host pages when those that are being copied are there."""
_back = partial(
    Scenario,
    from_the_back,
    _was_cut_off,
    partitions=("hidden", "kv", "hidden and kv"),
    restore="auto",
    fault="batches_in_step",
    recompute_ms=1e4,
    waits=(
        # Ranks agree on every slice.
        "hcache_backend/sglang/groups.py:from_all_ranks",
        ABORTED,
    ),
)
EVERY = ("hidden", "recompute", "mixed", "kv")
UNFIT = "rows_do_not_fit"
"""Of the values only a part fits when encoded."""
KINDS = ("mixed", "kv")
SCENARIOS = {
    "conversations": Scenario(conversations, lambda found: found["steps"] > 150, EVERY),
    "pressure": Scenario(pressure, partitions=EVERY),
    "pressure, encoded": Scenario(pressure, partitions=KINDS, codec="exp4", fault=UNFIT),
    "conversations, encoded": Scenario(conversations, partitions=KINDS, codec="exp4", fault=UNFIT),
    "eager": Scenario(eager, partitions=EVERY, restore="auto"),
    "eager, encoded": Scenario(eager, partitions=KINDS, restore="auto", codec="exp4"),
    "from the back": _back(),
    "from the back, encoded": _back(codec="exp4"),
    "from the back, two ranks": _back(tp=2),
    "decode graphs": Scenario(decode, _was_replayed, EVERY, decode_graphs=True),
    "decode graphs, eager": Scenario(
        decode, _was_replayed, KINDS, restore="auto", decode_graphs=True
    ),
    "two ranks": Scenario(turns, tp=2),
    "two ranks, eager": Scenario(turns, partitions=KINDS, restore="auto", tp=2),
    "two ranks, encoded": Scenario(turns, partitions=KINDS, tp=2, codec="exp4", fault=UNFIT),
    "two ranks, eager, encoded": Scenario(
        turns, partitions=KINDS, restore="auto", tp=2, codec="exp4"
    ),
    "latents": Scenario(
        conversations, partitions=("kv",), restore="auto", recompute_ms=1e4, model="deepseek"
    ),
    "latents, two ranks": Scenario(turns, partitions=("kv",), tp=2, model="deepseek"),
    "latents, two ranks, eager": Scenario(
        turns, partitions=("kv",), restore="auto", tp=2, model="deepseek"
    ),
    "index keys": Scenario(
        conversations,
        partitions=("kv",),
        restore="auto",
        model="deepseek_v32",
        options={"attention_backend": "dsa", "page_size": 64, "max_total_tokens": 4096},
    ),
    # Windows or states come with the pages, by SGLang's own copies: it sends their indices to the
    # device.
    **{
        sides: Scenario(
            conversations,
            partitions=("kv",),
            restore="auto",
            waits=("hcache_backend/sglang/controller.py:_move_pool_indices",),
            model=model,
        )
        for sides, model in (("windows", "gpt_oss"), ("states", "qwen3_next"))
    },
    "aborts": Scenario(aborts, _was_aborted, chunk=256),
    "aborts, eager": Scenario(
        aborts, _was_aborted, KINDS, restore="auto", chunk=256, waits=(ABORTED,)
    ),
    "flushes": Scenario(flushes, _was_cut_off),
    "flushes, encoded": Scenario(
        *(flushes, _was_cut_off, KINDS), restore="auto", codec="exp4", fault=UNFIT, waits=(ABORTED,)
    ),
    "flushes, eager": Scenario(flushes, _was_cut_off, KINDS, restore="auto", waits=(ABORTED,)),
}


def checked_server(
    model: Path, folder: Path, scenario: Scenario, partition: str, **chosen: Any
) -> ServerOptions:
    """A server under the checker, which leaves its reports at ``folder / "order.json.<rank>"``."""
    settings = Settings(
        report=str(folder / "order.json"), decode_graphs=scenario.decode_graphs, **chosen
    )
    paths = [str(HERE / "plugin"), str(HERE.parents[1]), cpu_engine_env()["PYTHONPATH"]]
    fault = {}
    if scenario.fault:
        fault = faulty(scenario.fault, folder / "in-step")
        paths.append(fault.pop("PYTHONPATH"))
    (folder / "in-step").touch()
    (folder / "l3-rate").write_text("0")
    usual = {"page_size": 16, "max_total_tokens": 2048}
    return our_server(
        model,
        folder,
        hcache={
            "partition": PARTITIONS[partition],
            "check_every_pages": 4,
            "restore": scenario.restore,
            "codec": scenario.codec,
            "recompute_ms": scenario.recompute_ms,
        },
        metrics=True,
        dtype="float32" if scenario.codec == "none" else "bfloat16",
        overlap=True,
        tp=scenario.tp,
        chunked_prefill_size=scenario.chunk,
        extra_env={
            **settings.environment(),
            **fault,
            "PYTHONPATH": os.pathsep.join(paths),
            "HCACHE_CPU_L3_FILE": str(folder / "l3-rate"),
            "SGLANG_MAMBA_CONV_DTYPE": "float32",
        },
        **usual | scenario.options,
    )


def check(
    model: Path, folder: Path, name: str, partition: str, **chosen: Any
) -> list[dict[str, Any]]:
    """Serve a scenario under the checker; the report of each rank."""
    scenario = SCENARIOS[name]
    if scenario.model != "llama":
        model = build_model(scenario.model, folder)
    with Server(checked_server(model, folder, scenario, partition, **chosen)) as server:
        scenario.use(server)
        if partition == "kv":
            assert_own_pages_of_kv(server)
        else:
            assert_hidden_mode(server)
        reports = [folder / f"order.json.{rank}" for rank in range(scenario.tp)]
        for report in reports:
            Path(f"{report}.ask").touch()
        server.until(lambda: all(report.exists() for report in reports), "reports")
    found: list[dict[str, Any]] = [json.loads(report.read_text()) for report in reports]
    assert all(map(scenario.happened, found)), found
    return found


def findings(found: list[dict[str, Any]]) -> str:
    return "\n\n".join(finding for report in found for finding in report["findings"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("llama", tmp_path_factory.mktemp("models"))


EVERY_RUN = [
    ("conversations", "mixed"),
    ("eager", "kv"),
]


@pytest.mark.parametrize(
    ("name", "partition"),
    [
        pytest.param(name, partition, marks=() if (name, partition) in EVERY_RUN else LONG)
        for name, scenario in SCENARIOS.items()
        for partition in scenario.partitions
    ],
)
def test_no_wrong_order(model: Path, tmp_path: Path, name: str, partition: str) -> None:
    """With write_through: conversations are some 200 passes of prefill and decode, with backups,
    loads and checks in between."""
    found = check(model, tmp_path, name, partition)
    assert not findings(found)
    waits = {innermost for report in found for innermost, *_ in in_service(report)}
    assert not waits - set(SCENARIOS[name].waits)


RANDOM = {"query": "random", "seed": 1}
WHATEVER = (RANDOM, {"query": "random", "seed": 2, "newest_first": True}, {"early_barrier": False})


@LONG
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        pytest.param(name, chosen, id=f"{name}, {', '.join(chosen)}")
        for name, scenario in SCENARIOS.items()
        for chosen in (WHATEVER if scenario.partitions == EVERY else (RANDOM,))
        # A query that says yes at once ends a load before the abort.
        if scenario.use is not aborts and "mixed" in scenario.partitions
    ],
)
def test_no_wrong_order_whatever_the_device_does(
    model: Path, tmp_path: Path, name: str, chosen: dict[str, Any]
) -> None:
    assert not findings(check(model, tmp_path, name, "mixed", **chosen))


_OF_LATENTS = {
    "device to host reads what forward writes": "latents",
    "forward reads what hcache compute writes": "latents, two ranks",
}
"""Scenarios that report the same over latents."""


@LONG
@pytest.mark.parametrize(
    ("edge", "scenario"),
    [
        (edge, scenario)
        for edge, known in SERVED.items()
        for scenario in (
            *(known.scenario + like for like in ("", ", encoded")),
            *filter(None, [_OF_LATENTS.get(known.what)]),
        )
    ],
)
def test_every_edge_that_only_a_server_has_is_missed(
    model: Path, tmp_path: Path, edge: str, scenario: str
) -> None:
    _, what, partition, query = SERVED[edge]
    partition = "kv" if "latents" in scenario else partition
    found = check(model, tmp_path, scenario, partition, query=query, left_out=edge)
    assert what in findings(found).splitlines()


@LONG
@pytest.mark.parametrize("gives_up", [True, False])
def test_a_replay_whose_step_could_not_begin(model: Path, tmp_path: Path, gives_up: bool) -> None:
    [edge] = [str(edge) for edge in all_edges() if edge.what == "capture.give_up_step()"]
    left_out = None if gives_up else edge
    found = check(
        model, tmp_path, "decode graphs", "hidden", failing_begins=True, left_out=left_out
    )
    assert bool(findings(found)) is not gives_up
    # Rows were lost: backups wait for what is known of their own, and nothing else waits.
    held_up = [" < ".join(places) for report in found for places in in_service(report)]
    assert held_up and all("controller.py" in places for places in held_up), held_up


@LONG
def test_graphs_without_our_copies_are_found_out_at_the_start(model: Path, tmp_path: Path) -> None:
    scenario = SCENARIOS["decode graphs"]
    options = checked_server(model, tmp_path, scenario, "hidden", recorded_copies=False)
    with Server(options) as server:
        assert_own_pages_of_kv(server)
        said = "hcache: KV mode, own pages: hidden states do not get to host memory: rows not valid"
        assert said in server.log_text()
