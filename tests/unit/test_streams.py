"""Streams and events of CUDA, as far as they can be tried without it."""

from typing import Any

import pytest
import torch

from hcache_backend import streams


def test_an_event_is_used_again_when_nobody_holds_it_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Event:
        def __init__(self, **_: object) -> None:
            self.recorded = 0

        def record(self, stream: object) -> None:
            self.recorded += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(streams._CudaEvent, "_free", {False: [], True: []})
    stream: Any = streams._CudaStream(None)
    first, second = stream.record(), stream.record()
    one, other = first.event, second.event
    assert one is not other
    del first
    third, timed = stream.record(), stream.record(timed=True)
    assert third.event is one and one.recorded == 2
    assert timed.event is not other and other.recorded == 1


def test_a_stream_that_sglang_has_too_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class CudaStream:
        """torch hands out two streams in turn."""

        made = 0

        def __init__(self, device: object, priority: int) -> None:
            self.cuda_stream = 1 + CudaStream.made % 2
            CudaStream.made += 1

    monkeypatch.setattr(torch.cuda, "Stream", CudaStream)
    door, device = streams.Door(), torch.device("cuda")
    for _ in range(3):  # checks of the start have the streams of service
        door.new_stream(device, "copy")
    assert CudaStream.made == 1
    door.wrap_engine_stream(CudaStream(device, 0))
    assert not caplog.records
    shared = CudaStream(device, 0)
    door.wrap_engine_stream(shared)
    door.wrap_engine_stream(shared)
    (record,) = caplog.records
    assert "stream 'copy' is also SGLang's: they wait for each other" in record.getMessage()
