"""A profile of a GPU: copies beside products on its clock, and what the product does then."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from hcache_backend.plan import contention, measure
from hcache_backend.plan.contention import PROGRAMS, Contention, engine_works
from hcache_backend.plan.measure import Bench, device_name
from hcache_kernels.launch import COPY_PROGRAMS, Launch, most_copy_programs, use_copies
from tests.cuda_standin import device
from tests.cuda_standin.device import CUDA
from tests.unit.partition.test_profile import TINY

SECONDS = {2: 9e-3, 4: 5e-3, 8: 2.2e-3, 16: 2e-3, 32: 2e-3}
"""Of a copy, by its programs."""
PRODUCT, ENGINE = 1.5e-3, 2.1e-3
ROW, TOKENS = 1024, 512


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    most_copy_programs.cache_clear()
    yield
    most_copy_programs.cache_clear()
    use_copies(COPY_PROGRAMS, engine=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Goes on by what a copy takes, when the stream runs it."""
    now, run, copy = [0.0], Launch.run, device.CopyEngine.cudaMemcpyBatchAsync

    def launch(self: Launch) -> None:
        run(self)
        goes_on(now, SECONDS[self.grid[0]])

    def by_engine(*given: Any) -> Any:
        goes_on(now, ENGINE)
        return copy(*given)

    monkeypatch.setattr(device.CopyEngine, "cudaMemcpyBatchAsync", staticmethod(by_engine))
    monkeypatch.setattr(Launch, "run", launch)
    monkeypatch.setattr(device, "clock", lambda: now[0])
    monkeypatch.setattr(contention, "_COLD_BYTES", 1 << 16)
    monkeypatch.setattr(contention, "_LEAST", 1)
    return now


def goes_on(now: list[float], seconds: float) -> None:
    torch.cuda.current_stream().put(lambda: now.__setitem__(0, now[0] + seconds))


def small(now: list[float]) -> Contention:
    """Copies with work for 32 programs."""
    return Contention(CUDA, ROW, lambda: goes_on(now, PRODUCT), 0.01, TOKENS)


def test_each_way_has_the_speed_of_the_clock(clock: list[float]) -> None:
    found = {way.programs: way for way in small(clock).measure()}
    assert set(found) == {*PROGRAMS, None}
    for programs, seconds in {**SECONDS, None: ENGINE}.items():
        assert found[programs].alone == pytest.approx(ROW * TOKENS / seconds)


def test_the_copy_engine_is_tried_with_two_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_works(CUDA)
    monkeypatch.setattr(device.CopyEngine, "cudaMemcpyBatchAsync", lambda *_: (1,))
    assert not engine_works(CUDA)


def test_copies_of_a_profile_are_those_of_its_device(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contention, "PRODUCT_TOKENS", 64)
    bench = Bench(TINY, CUDA, torch.float32, 0.02)
    original = functional.linear

    def linear(*given: Any) -> torch.Tensor:
        goes_on(clock, PRODUCT)
        return original(*given)

    monkeypatch.setattr(functional, "linear", linear)
    monkeypatch.setattr(measure, "Contention", lambda *given: Contention(*given, tokens=TOKENS))
    assert {way.programs for way in bench.copies()} == {*PROGRAMS, None}
    assert device_name(CUDA) == "a stand-in"

    def broken(*given: Any) -> Contention:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(measure, "Contention", broken)
    assert bench.copies() == ()  # the rest of a profile is worth having


def test_work_is_timed_when_the_device_has_done_it() -> None:
    done: list[int] = []
    bench = Bench(TINY, CUDA, torch.float32, 0.02)

    def work() -> None:
        torch.cuda.current_stream().put(lambda: done.append(len(done)))

    assert bench._time(work, 0.0) > 0
    assert len(done) > 1
