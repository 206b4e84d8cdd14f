"""A profile of a GPU: what is timed is what the device has done."""

import torch

from hcache_backend.plan.measure import Bench, device_name
from tests.cuda_standin.device import CUDA
from tests.unit.partition.test_profile import TINY


def test_work_is_timed_when_the_device_has_done_it() -> None:
    done: list[int] = []
    bench = Bench(TINY, CUDA, torch.float32, 0.02)

    def work() -> None:
        torch.cuda.current_stream().put(lambda: done.append(len(done)))

    assert bench._time(work, 0.0) > 0
    assert len(done) > 1
    assert device_name(CUDA) == "a stand-in"
