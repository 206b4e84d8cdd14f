"""Prefetches, restores and loads that a test holds, what L3 loses, and pages of another format."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kit.scheduler import around


def other_format() -> None:
    """Pages are of a later format version: nobody else's are found."""
    from hcache_backend.sglang import weights

    weights.FORMAT_VERSION += 1


def hold_prefetches(active: Callable[[], bool]) -> None:
    """No prefetch is seen to be finished: requests queue up, and then go on together."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    def held(check: Any, *args: Any) -> bool:
        return not active() and check(*args)

    around(UnifiedRadixCache, "check_prefetch_progress", held)


def hold_a_layer(active: Callable[[], bool]) -> None:
    """The first projected layer of a restore waits until the trigger is gone.

    A file beside the trigger, its name ending in ``.held``, says that a restore got there.
    """
    from hcache_backend.projection.projector import Projector

    def held(project: Any, *args: Any, **kw: Any) -> None:
        while active():
            _tell(".held")
            time.sleep(0.01)
        project(*args, **kw)

    around(Projector, "project_to_pool", held)


def load_late(active: Callable[[], bool]) -> None:
    """Loads run beside the scheduler, as on a GPU, and begin when the trigger is gone.

    On a CPU the scheduler's thread would wait for all layers before it goes on. Here a forward pass
    waits for each: a file beside the trigger, its name ending in ``.waits``, says that one does;
    one ending in ``.sent`` that K and V were sent meanwhile.
    """
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
    from sglang.srt.managers.cache_controller import LayerLoadingEvent
    from sglang.srt.mem_cache.l2_transfer import L2TransferEngine

    from hcache_backend.streams import WorkerStream

    loads = WorkerStream("loads")

    def hold() -> None:
        while active():
            time.sleep(0.01)

    def beside(submit: Any, *args: Any, **kwargs: Any) -> Any:
        with loads.as_current():
            loads.run(hold)
            completion = submit(*args, **kwargs)
        return completion._replace(finish_event=loads.record())

    def complete(self: Any, layer: int) -> None:
        self.load_events[layer] = loads.record()

    def wait(self: Any, layer: int) -> None:
        if active() and not self.load_events[layer].query():
            _tell(".waits")
        self.load_events[layer].synchronize()

    def sent(send: Any, *args: Any, **kwargs: Any) -> Any:
        result = send(*args, **kwargs)
        if active():
            _tell(".sent")
        return result

    around(MooncakeKVManager, "send_kvcache", sent)
    around(L2TransferEngine, "submit_host_to_device", beside)
    LayerLoadingEvent.complete, LayerLoadingEvent.wait = complete, wait


def pair_prefetches(active: Callable[[], bool]) -> None:
    """No prefetch is seen to be finished before two are: their requests go on in one batch."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    asked: list[Any] = []
    paired = False

    def in_pairs(check: Any, self: Any, request: Any) -> Any:
        nonlocal paired
        if not active():
            return check(self, request)
        if request not in asked:
            asked.append(request)
        # Whoever is asked for first is so again in every turn.
        finished = len(asked) == 2 and not self.ongoing_prefetch
        paired = paired or (finished and request == asked[0])
        return paired and check(self, request)

    around(UnifiedRadixCache, "check_prefetch_progress", in_pairs)


def lose_what_was_looked_up(active: Callable[[], bool]) -> None:
    """L3 evicts all that it has, after a look-up and before the read.

    A file beside the trigger, its name ending in ``.lost``, says that there was something.
    """
    from hcache_backend.tiers.storage import HCacheStorage

    def then_lose(look_up: Any, self: Any, *args: Any) -> Any:
        found = look_up(self, *args)
        if active() and self._tier.drop(self._namespaces()):
            _tell(".lost")
        return found

    around(HCacheStorage, "_exists", then_lose)


def _tell(suffix: str) -> None:
    Path(os.environ["HCACHE_TEST_TRIGGER"]).with_suffix(suffix).touch()
