"""Restores by method over a rate: what is tried where, and how rounds are compared."""

import random
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import restores
from bench.harness.machine import Machine
from bench.harness.methods import HYBRID
from bench.harness.models import TinyLlama
from bench.harness.restorer import Restore
from bench.harness.rounds import median_interval
from bench.restores import PROGRAM, STUDIES, compared, measure

CPU, GPU = Machine("cpu", "a CPU", "0"), Machine("cuda", "a GPU", "0")
LOAD_S = 0.01


class Stand:
    """In the place of a server: loads take 10 ms, reads as long as their limit says."""

    def __init__(self, name: str, seen: list[Any]) -> None:
        self.name, self.seen, self.l3, self.rates = name, seen, Path(name), {"bus": 0.0, "l3": 0.0}

    @contextmanager
    def turn(self) -> Any:
        yield

    def slow_down(self, bus: float = 0.0, l3: float = 0.0) -> None:
        self.rates = {"bus": bus, "l3": l3}

    def store(self, history: list[int]) -> None:
        self.stored = history

    def restore(self, history: list[int]) -> Restore:
        assert history == self.stored
        self.seen.append((self.name, *self.rates.values()))
        read = 1e9 / self.rates["l3"] if self.rates["l3"] else 1.0
        return Restore(len(history), 1e3 * LOAD_S + read, read, 1e3 * LOAD_S, 50.0)

    def recompute(self, history: list[int]) -> Restore:
        return Restore(len(history), 100.0, ttft_ms=100.0)

    def said(self) -> str:
        return "a mode"


def run_study(
    monkeypatch: pytest.MonkeyPatch, machine: Machine = CPU, **given: Any
) -> tuple[dict[str, Any], list[Any]]:
    """Results of a study without servers, and what was restored over which bus and L3."""
    seen: list[Any] = []

    @contextmanager
    def restorer(options: Any, l3: Path) -> Any:
        yield Stand(options.log.parent.name, seen)

    monkeypatch.setattr(restores, "restorer", restorer)
    monkeypatch.setattr(restores, "l3_bytes", lambda folder: 5_000_000)
    monkeypatch.setattr(TinyLlama, "build", lambda self, folder: folder)
    asked = {"methods": None, "rates": None, "rounds": 1, "tokens": None, "scratch_dir": None}
    options = Namespace(**asked | {"model_path": None, "server_args": [], **given})
    run: Any = SimpleNamespace(given=options, machine=machine)
    return measure(run), seen


def test_a_limit_of_the_balanced_rate_goes_by_the_load_of_the_first_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, seen = run_study(monkeypatch, study="eager", rates=None)
    rows = {row["limit"]: row for row in found["rows"]}
    balanced = 5_000_000 / LOAD_S / 1e6
    assert list(rows) == [
        *(f"L3 at {rate} MB/s" for rate in (10, 25, 100, 200, 400)),
        "as it is",
        f"L3 at {balanced:g} MB/s, balanced",
    ]
    assert ("eager", 0.0, 10e6) in seen and ("kv", 0.0, balanced * 1e6) in seen
    assert rows["L3 at 10 MB/s"]["ms"]["layerwise"] == pytest.approx(110)
    assert rows["L3 at 10 MB/s"]["ratios"]["eager / kv"] == {"ratio": 1.0, "interval": None}
    assert found["stored"][0]["bytes_per_token"] == 5_000_000 / 4096
    assert "| L3 at 10 MB/s | 110.0 | 110.0 | 110.0 | 1.00 | - | 1.00 | - |" in PROGRAM.table(found)


def test_a_bus_is_slow_in_all_rows_of_its_study(monkeypatch: pytest.MonkeyPatch) -> None:
    _, seen = run_study(monkeypatch, study="eager_kv", rates=[25])
    assert {rates for _, *rates in map(tuple, seen[3:]) for rates in [tuple(rates)]} == {
        (50e6, 25e6)
    }


def test_without_the_cpu_engine_nothing_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seen = run_study(monkeypatch, GPU, study="methods", methods=["file", "recompute"])
    assert {row["limit"] for row in found["rows"]} == {"as it is"}
    assert set(seen) == {("file", 0.0, 0.0)}
    restore = found["rows"][0]
    assert restore["ms"] == {"file": 11.0, "recompute": 100.0}


def test_what_is_not_here_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restores, "find_spec", lambda name: None)
    monkeypatch.setattr("bench.harness.mooncake.missing", lambda: "a reason")
    chosen = ["file", "nixl", "mooncake", HYBRID]
    found, _ = run_study(monkeypatch, study="methods", methods=chosen)
    assert list(found["titles"]) == ["file"]
    assert found["left_out"] == {
        "nixl": "it is not installed; see requirements/peers.txt",
        "mooncake": "a reason",
        HYBRID: "--model-path must be a folder with a config.json that plans know",
    }


def test_a_method_is_compared_with_the_fastest_other_of_a_round() -> None:
    rounds = {"hidden": [10.0, 20.0], "kv": [8.0, 30.0], "auto": [5.0, 30.0]}
    found = compared(rounds, STUDIES["partition"].ratios)
    assert found["ms"] == {"hidden": 15.0, "kv": 19.0, "auto": 17.5}
    assert found["ratios"]["auto / the fastest other"]["ratio"] == pytest.approx((0.5 + 1.5) / 2)


@pytest.mark.parametrize(("count", "first"), [(6, 1), (8, 1), (9, 2), (15, 4), (25, 8)])
def test_the_ends_of_the_interval_are_those_of_the_sign_test(count: int, first: int) -> None:
    values = list(range(1, count + 1))
    random.Random(0).shuffle(values)
    assert median_interval(values) == (first, count + 1 - first)
    assert median_interval(values[:5]) is None
