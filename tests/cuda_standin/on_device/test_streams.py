"""The backend's streams over CUDA's: what waits is right, and what does not wait is found."""

import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu.program import registered
from hcache_backend import streams
from hcache_backend.streams import _CudaStream
from tests.cuda_standin import device
from tests.cuda_standin.device import CUDA
from tests.gpu import test_save_and_restore as rounds


def test_work_of_another_stream_is_late_unless_it_is_waited_for() -> None:
    side = streams.new_stream(CUDA, "side")
    ones = torch.zeros(4, dtype=torch.uint8, device=CUDA)
    side.wait(streams.current_stream(CUDA).record())
    side.run(lambda: ones.fill_(1))
    assert ones.tolist() == [0] * 4
    streams.current_stream(CUDA).wait(side.record())
    assert ones.tolist() == [1] * 4


def test_the_current_stream_is_the_one_that_work_is_given_within_its_block() -> None:
    side = streams.wrap_engine_stream(torch.cuda.Stream())
    with side.as_current():
        made = torch.ones(2, device=CUDA)
        streams.run_here(CUDA, made.add_, 1)
        side.keep(made)
    assert made.cpu().view(torch.uint8)[0] == device.POISON  # of a stream that nobody waited for
    side.record().synchronize()
    assert made.tolist() == [2, 2]


def test_an_event_says_when_its_stream_has_passed_and_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter((1.0, 1.5))
    monkeypatch.setattr(device, "clock", lambda: next(seconds))
    side = streams.new_stream(CUDA, "side")
    start, end = side.record(timed=True), side.record(timed=True)
    assert not start.query()
    end.synchronize()
    assert start.query()
    assert start.elapsed_time(end) == pytest.approx(500)


def test_memory_of_the_host_is_copied_without_a_wait() -> None:
    held = streams.to_device(np.arange(4), CUDA)
    assert held.is_cuda and held.tolist() == [0, 1, 2, 3]
    source = streams.host_tensor((4,), torch.int64, CUDA)
    source.fill_(1)
    there = source.to(CUDA, non_blocking=True)
    source.fill_(2)  # before the copy ran
    assert there.tolist() == [2] * 4


def test_memory_that_torch_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that measured the machine takes the same decisions as one that did not."""
    kept = [3 << 30]
    info = {"mem_get_info": lambda device: ((60 << 30) - sum(kept), 80 << 30)}
    for name, value in {"empty_cache": kept.clear, **info}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert streams.free_memory(CUDA) == 60 << 30
    kept.append(1 << 30)
    streams.release_memory(torch.device("cpu"))
    assert kept
    streams.release_memory(CUDA)
    assert not kept


def test_registered_memory_is_reached_and_a_failure_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, there = torch.zeros(4), torch.ones(4, device=CUDA)
    with registered(memory, CUDA):
        memory.copy_(there, non_blocking=True)
        assert memory.tolist() == [0] * 4
    assert memory.tolist() == [1] * 4  # the end of the block waits
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(RuntimeError, match="16 bytes: CUDA error 2"), registered(memory, CUDA):
        pass


def test_a_graph_is_told_while_it_is_recorded() -> None:
    graph, seen, static = torch.cuda.CUDAGraph(), [], torch.zeros(2, device=CUDA)
    with torch.cuda.graph(graph):
        seen.append(streams.recording_graph())
        doubled = static * 2
    assert seen == [True] and not streams.recording_graph()
    static.fill_(3)
    graph.replay()
    assert doubled.tolist() == [6, 6]


def test_a_transfer_that_nobody_waits_for_gives_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured() -> bool:
        engine = rounds.Engine("cuda")
        slots = rounds.slots_of([3]).to(CUDA)
        hidden = torch.randn(rounds.LAYERS, len(slots), rounds.WIDTH, device=CUDA).to(rounds.DTYPE)
        rounds.save(engine, random.Random(1), slots, hidden)
        engine.settle()
        return torch.equal(engine.stored(slots), hidden.cpu())

    assert captured()
    monkeypatch.setattr(device, "POISON", 0)  # a kernel that writes to such a slot does no harm
    wait = _CudaStream.wait

    def wait_elsewhere(self: Any, event: Any) -> None:
        if sys._getframe(1).f_code.co_qualname != "StagedCapture.end":
            wait(self, event)

    monkeypatch.setattr(_CudaStream, "wait", wait_elsewhere)
    assert not captured()
