"""What a profile makes of copies that were measured beside products, and how the process copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hcache_backend.plan import measure as partition_measure
from hcache_backend.plan.measure import Bench, Point, fit, measure, use_measured_copies
from hcache_backend.plan.profile import CopyWay
from hcache_kernels.launch import COPY_PROGRAMS, copies_by_engine, copy_programs, use_copies
from tests.unit.partition.test_profile import TINY, WAYS

CPU = torch.device("cpu")


class Beside(Bench):
    """A device where copies beside products were measured."""

    def copies(self) -> tuple[CopyWay, ...]:
        return WAYS


@pytest.fixture
def copies_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose copy engine can be asked, and afterwards copies as before."""
    monkeypatch.setattr(partition_measure, "engine_works", lambda device: True)
    yield
    use_copies(COPY_PROGRAMS, engine=False)


@pytest.mark.usefixtures("copies_as_before")
def test_rates_are_those_beside_each_other_and_the_process_copies_so() -> None:
    measured = measure(Beside(TINY, torch.device("cpu"), torch.float32, 0.02), None, [])
    assert measured.copies == WAYS
    assert copies_by_engine() and copy_programs(CPU) == 8
    # Hidden states by the copy engine, K and V by the kernel.
    shares = {"hidden_copy": 0.8, "kv_load": 0.5, "projection": 0.95, "dense": 1, "attention": 1}
    amounts = {
        "hidden_copy": TINY.hidden_bytes,
        "kv_load": TINY.kv_bytes,
        "projection": TINY.projection_flops,
        "dense": TINY.dense_flops,
    }
    for operation, share in shares.items():
        points = [
            Point(tokens, tokens * amounts[operation], seconds)
            if operation in amounts
            else Point(tokens, tokens**2 / 2 * TINY.attention_flops, seconds)
            for tokens, seconds in measured.points[operation]
        ]
        alone, found = fit(points), getattr(measured, operation)
        assert found.seconds == pytest.approx(alone.seconds)
        assert found.per_second == pytest.approx(alone.per_second * share)


@pytest.mark.parametrize("engine", [False, True])
def test_the_copy_engine_is_measured_on_a_stream_of_its_own(
    engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's default stream refuses its batches."""
    threads: set[str] = set()
    gather = partition_measure.gather_pages

    def gathering(*arguments: Any) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        return gather(*arguments)

    monkeypatch.setattr(partition_measure, "gather_pages", gathering)
    measured = Bench(TINY, torch.device("cpu"), torch.float32, 0.02, engine)
    assert measured.points("hidden_copy")
    assert threads == {"hcache-copy" if engine else threading.current_thread().name}


@pytest.mark.usefixtures("copies_as_before")
def test_a_profile_without_copies_changes_no_way_to_copy() -> None:
    use_copies(4, engine=True)
    use_measured_copies((), CPU)
    assert copies_by_engine() and copy_programs(CPU) == 4
    use_measured_copies(WAYS[1:], CPU)
    assert not copies_by_engine() and copy_programs(CPU) == 8


@pytest.mark.usefixtures("copies_as_before")
def test_a_profile_of_a_machine_with_more_does_not_ask_for_the_copy_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partition_measure, "engine_works", lambda device: False)
    use_measured_copies(WAYS, CPU)
    assert not copies_by_engine() and copy_programs(CPU) == 8
    monkeypatch.setattr(partition_measure, "engine_works", lambda device: True)
    use_measured_copies(WAYS, CPU, engine=False)
    assert not copies_by_engine()
    use_measured_copies(WAYS, CPU)
    assert copies_by_engine()
