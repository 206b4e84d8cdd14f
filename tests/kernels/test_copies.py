"""How copies over the bus are launched: as many programs as were measured, or the copy engine."""

import ctypes
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hcache_kernels.copy_engine import NoCopyEngine, copy_segments
from hcache_kernels.launch import (
    COPY_PROGRAMS,
    MOST_COPY_PROGRAMS,
    Launch,
    alignment,
    copies_by_engine,
    copy_programs,
    most_copy_programs,
    use_copies,
)
from hcache_kernels.pages.kernel import gather_launch, gather_planes_launch
from hcache_kernels.staging import save_launch

N, ROW, PAGE = 64, 4096, 16


@pytest.fixture(autouse=True)
def copies_as_before() -> Iterator[None]:
    yield
    use_copies(COPY_PROGRAMS, engine=False)


def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches(**programs: int) -> list[Launch]:
    ids, memory = empty(N, dtype=torch.int64), empty(N, 4096 + 2 * PAGE * ROW)
    plane = empty(N, PAGE, 1, ROW)
    staged, layers = empty(2, N, ROW), empty(2, dtype=torch.int64)
    return [
        gather_launch(memory, ids, 4096, empty(N, PAGE * ROW), **programs),
        gather_planes_launch(memory, ids, 4096, [plane, plane], ids, **programs),
        gather_launch(memory, ids, 4096, empty(N, ROW), **programs, save=True),
        save_launch(staged, ids, ids, memory, layers, PAGE, range(PAGE), **programs),
    ]


def test_copies_have_as_many_programs_as_were_measured_to_be_best() -> None:
    assert {launch.grid for launch in launches()} == {(COPY_PROGRAMS,)}
    assert all(launch.warps <= 4 for launch in launches())  # other kernels want threads, too
    use_copies(4, engine=True)
    assert {launch.grid for launch in launches()} == {(4,)}
    assert copies_by_engine()
    assert {launch.grid for launch in launches(programs=8)} == {(8,)}


@pytest.mark.parametrize("processors", [4, 7, 40, 56, 108, 132, 142])
def test_a_copy_holds_at_most_a_quarter_of_the_multiprocessors(
    processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if each program has one of its own."""
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    most_copy_programs.cache_clear()
    device = torch.device("cuda", 0)
    try:
        for measured in (1, 16, 32, 1000):
            use_copies(measured, engine=False)
            assert 1 <= copy_programs(device) <= min(processors / 4, MOST_COPY_PROGRAMS)
    finally:
        most_copy_programs.cache_clear()


def test_16_bytes_at_once_are_said_to_be_there_only_where_addresses_are() -> None:
    room = torch.zeros(4096, dtype=torch.uint8)
    ids, memory = torch.tensor([1]), torch.zeros(2, 4096, dtype=torch.uint8)
    start = -room.data_ptr() % 16
    for shift, aligned in ((0, 16), (8, 8)):
        out = room[start + shift :][:1024].view(1, 1024)
        assert gather_launch(memory, ids, 1024, out).arguments["ALIGNED"] == aligned
    assert alignment(48, 4096) == 16


# ---- the copy engine ----


class Runtime(ModuleType):
    """CUDA's bindings, as if the memory of the GPU were the CPU's."""

    def __init__(self, error: int = 0) -> None:
        super().__init__("runtime")
        self.calls: list[tuple[int, int]] = []
        self.error = error

    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream="in stream order")

    class cudaMemcpyAttributes:
        srcAccessOrder: object = None

    def cudaMemcpyBatchAsync(self, *given: Any) -> tuple[int]:
        targets, sources, sizes, count, attributes, firsts, kinds, stream = given
        assert len(targets) == len(sources) == len(sizes) == count
        assert [one.srcAccessOrder for one in attributes] == ["in stream order"]
        assert (firsts, kinds) == ([0], 1)
        self.calls.append((count, stream))
        if not self.error:
            for target, source, size in zip(targets, sources, sizes, strict=True):
                ctypes.memmove(target, source, size)
        return (self.error,)


def use(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = ModuleType("cuda.bindings")
    if runtime is not None:
        bindings.runtime = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.delitem(sys.modules, "cuda.bindings.runtime", raising=False)


def test_the_copy_engine_brings_all_segments_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    use(runtime, monkeypatch)
    pages, ids = torch.randint(0, 256, (9, 512), dtype=torch.uint8), torch.tensor([8, 0, 3, 3])
    out = torch.zeros(6, 128, dtype=torch.uint8)
    copy_segments(pages, ids, 256, out[1:-1], stream=7)
    assert torch.equal(out[1:-1], pages[ids, 256:384])
    assert not out[0].any() and not out[-1].any()
    copy_segments(pages, ids[:0], 256, out[:0], stream=7)
    with pytest.raises(NoCopyEngine, match="default stream"):
        copy_segments(pages, ids, 256, out[1:-1], stream=0)
    assert runtime.calls == [(4, 7)]


def test_a_copy_engine_that_cannot_be_asked_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = torch.zeros(2, 512, dtype=torch.uint8), torch.tensor([1]), 0
    out = torch.zeros(1, 64, dtype=torch.uint8)
    other_arguments = Runtime()
    other_arguments.cudaMemcpyBatchAsync = lambda targets, sources, sizes: (0,)
    for runtime, why in (
        (Runtime(error=801), "cudaMemcpyBatchAsync: 801"),
        (other_arguments, "of these bindings"),
        (ModuleType("runtime"), "older than 12.8"),
        (None, "cuda-python"),
    ):
        use(runtime, monkeypatch)
        with pytest.raises(NoCopyEngine, match=why):
            copy_segments(*arguments, out, stream=7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu copy with a real stream")
def test_cudas_own_bindings_take_the_call() -> None:
    """Without a driver they say so, but only of a call that they understand."""
    arguments = torch.zeros(2, 512, dtype=torch.uint8), torch.tensor([1, 0]), 0
    with pytest.raises(NoCopyEngine, match=r"cudaMemcpyBatchAsync: .*cudaErrorInsufficientDriver"):
        copy_segments(*arguments, torch.zeros(2, 64, dtype=torch.uint8), stream=7)
