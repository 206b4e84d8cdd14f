"""A device that is a thread, and the machine around it."""

from collections.abc import Iterator

import pytest

from hcache_backend.streams import WorkerStream
from tests.unit.capture.machine import Machine


@pytest.fixture
def device() -> Iterator[WorkerStream]:
    stream = WorkerStream("test-device")
    with stream.as_current():
        yield stream


@pytest.fixture(params=[True, False], ids=["plain", "encoded"])
def machine(device: WorkerStream, request: pytest.FixtureRequest) -> Machine:
    return Machine(is_view=request.param)
