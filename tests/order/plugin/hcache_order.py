"""SGLang plugin: the scheduler of a CPU server on modelled streams, under the checker.

``HCACHE_ORDER`` is a JSON object, see :class:`Settings`. Each rank writes what was found there to
``<report>.<rank>`` when the file ``<report>.<rank>.ask`` appears.
"""

import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.kit.scheduler import aborts, around

VARIABLE = "HCACHE_ORDER"
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


@dataclass
class Settings:
    """How a server is checked."""

    report: str  # file for what was found, without the rank
    query: str = "lazy"  # how events answer, see ``Query``
    seed: int = 0  # for random answers
    # SGLang's read barrier is published before each forward pass, as its decode graphs do.
    early_barrier: bool = True
    newest_first: bool = False  # the page allocator hands out first what was freed last
    decode_graphs: bool = False  # decode steps are replays of recorded graphs
    recorded_copies: bool = True  # these have the copies of the product
    failing_begins: bool = False  # every third step of requests cannot begin to be captured
    left_out: str | None = None  # an edge that is passed over, as ``tests.order.edges`` names it

    def environment(self) -> dict[str, str]:
        """For the server's process."""
        return {VARIABLE: json.dumps(asdict(self)), "SGLANG_ENABLE_WAR_BARRIER": "1"}


def activate() -> None:
    if VARIABLE not in os.environ:
        return
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tests.order.checker import Checker
    from tests.order.clocks import Query

    settings = Settings(**json.loads(os.environ[VARIABLE]))
    checker = Checker(Query(settings.query), settings.seed)
    for name, stand_in in checker.stand_ins.items():
        setattr(torch.cpu, name, stand_in)  # SGLang makes its forward stream before all else

    used: list[Any] = []

    def begin(runner: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.distributed import get_tp_group

        if not used:
            used.append(runner)
            settings.report += f".{get_tp_group().rank_in_group}"
            _begin(checker, settings)

    HookRegistry.register(LOAD_MODEL, begin, HookType.BEFORE)


def _begin(checker: Any, settings: Settings) -> None:
    """In the scheduler's process and thread, before the weights are loaded."""
    from hcache_backend import streams
    from tests.order import edges, watch
    from tests.order.graphs import DecodeGraphs
    from tests.order.product import CheckedDoor

    edges.leave_out(settings.left_out)
    done: dict[str, Any] = {"steps": 0, "aborts": {}}  # forward passes; aborts by what was going on
    # Left when the process ends.
    checker.stack.enter_context(streams.through(CheckedDoor(checker)))
    _say_what_is_pinned(checker)
    _say_what_is_kept(checker)
    decode_graphs = DecodeGraphs(checker.stand_ins["Event"], copies=settings.recorded_copies)

    def found() -> dict[str, Any]:
        return {
            "findings": [str(finding) for finding in checker.findings],
            **done,
            "replays": decode_graphs.replays,
            "host_waits": [
                {**wait._asdict(), "times": times}
                for wait, times in checker.clocks.host_waits.most_common()
            ],
        }

    _watch_the_event_loop(checker, settings, done, found)
    _abort_in_the_middle(done)
    if settings.newest_first:
        _hand_out_newest_first()
    if settings.decode_graphs:
        decode_graphs.install(around)
    checker.stack.enter_context(watch.streams_are_kept(checker.memory))
    checker.stack.enter_context(watch.Watch(checker.memory))
    _pin_memory()


def _pin_memory() -> None:
    """The scheduler's thread pins what it sends to the device, as on a GPU: else it would wait."""
    from sglang.srt.platforms import current_platform

    scheduler = threading.get_ident()
    current_platform.is_pin_memory_available = lambda device=None: (
        threading.get_ident() == scheduler
    )


def _say_what_is_pinned(checker: Any) -> None:
    from hcache_backend.arena import Arena
    from hcache_backend.sglang.host_pool import OwnPagesPool

    def arena(original: Any, pool: Any) -> Any:
        return checker.pinned(original(pool), "arena")

    def touched(
        original: Any, arena: Any, pages: Any, *, write: bool, header: bool = False
    ) -> None:
        layout = arena.layout
        length = layout.header_bytes if header else layout.page_bytes
        checker.touch_pages(pages, layout.stride, length, "write" if write else "read")

    around(OwnPagesPool, "init_kv_buffer", arena)
    around(Arena, "host_access", touched)


def _say_what_is_kept(checker: Any) -> None:
    """SGLang keeps tensors for a stream where they are CUDA tensors, which here none is."""
    import sglang.srt.layers.logprob_processor as logprobs
    from sglang.srt.managers import utils
    from sglang.srt.mem_cache.l2_transfer import L2TransferEngine

    def keep(transfers: Any, stream: Any, resolved: Any = ()) -> None:
        indices = [i for t in transfers for i in (t.host_indices, t.device_indices)]
        for tensor in (*indices, *resolved):
            if tensor is not None:
                checker.memory.keep(tensor, stream.actor)

    def to_host(tensor: Any) -> Any:
        checker.memory.keep(tensor, checker.clocks.current)
        return tensor.to("cpu", non_blocking=True)

    L2TransferEngine._record_stream = staticmethod(keep)
    utils._async_d2h = logprobs.async_d2h = to_host


def _watch_the_event_loop(
    checker: Any, settings: Settings, done: dict[str, Any], found: Callable[[], dict[str, Any]]
) -> None:
    """What was set up before it is done; what comes is checked."""
    from sglang.srt.managers.scheduler import Scheduler

    from hcache_backend.sglang.hook_registry import Hook, install
    from hcache_backend.sglang.model_runner import FORWARD

    def run(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        _name_streams(checker, scheduler)
        allocator = scheduler.token_to_kv_pool_allocator
        tables = {
            "req_to_token": scheduler.req_to_token_pool.req_to_token,
            "full_to_swa": getattr(allocator, "full_to_swa_index_mapping", None),
        }
        for name, table in tables.items():
            if table is not None and (block := checker.memory.find(table)) is not None:
                block.name = name
        threading.Thread(target=_answer, args=(settings, found), daemon=True).start()
        if settings.failing_begins:
            _fail_to_begin()
        checker.begin()
        checker.clocks.host_waits.clear()
        return original(scheduler, *args, **kwargs)

    def forward(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        done["steps"] += 1
        if settings.early_barrier:
            event = checker.stand_ins["Event"]()
            event.record()
            runner.shared_read_done_event = event
        output = original(runner, *args, **kwargs)
        checker.clocks.last_pass = checker.clocks.record(checker.clocks.current)
        return output

    around(Scheduler, "run_event_loop", run)
    missing = install([Hook(FORWARD.target, forward)])
    assert missing is None, missing


def _name_streams(checker: Any, scheduler: Any) -> None:
    engine = scheduler.tree_cache.cache_controller.l2_transfer_engine
    named = {
        "schedule": scheduler.schedule_stream,
        "forward": getattr(scheduler, "forward_stream", None),
        "results": getattr(scheduler, "copy_stream", None),
        "device to host": engine.device_to_host_stream,
        "host to device": engine.host_to_device_stream,
    }
    for name, stream in named.items():
        if hasattr(stream, "actor"):
            checker.clocks.names[stream.actor] = name


def _abort_in_the_middle(done: dict[str, Any]) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    aborted: dict[str, str] = {}

    def turn(original: Any, scheduler: Any, received: list[Any]) -> None:
        original(scheduler, [*received, *aborts(scheduler, aborted)])
        done["aborts"] = dict(Counter(aborted.values()))

    around(Scheduler, "process_input_requests", turn)


def _answer(settings: Settings, found: Callable[[], dict[str, Any]]) -> None:
    ask, new = Path(settings.report + ".ask"), Path(settings.report + ".new")
    while True:
        if ask.exists():
            new.write_text(json.dumps(found(), indent=1))
            new.replace(settings.report)
            ask.unlink()
        time.sleep(0.1)


def _fail_to_begin() -> None:
    from hcache_backend.capture.staging import StagedCapture
    from tests.order import edges

    begins = itertools.count(1)

    def begin(original: Any, *args: Any) -> Any:
        if next(begins) % 3 == 0:
            raise RuntimeError("a test's fault")
        return original(*args)

    def give_up(original: Any, capture: Any) -> None:
        if not edges.is_left_out():
            original(capture)

    around(StagedCapture, "begin", begin)
    around(StagedCapture, "give_up_step", give_up)


def _hand_out_newest_first() -> None:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    def unsorted(original: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        original(allocator, *args, **kwargs)
        allocator.need_sort = False

    around(PagedTokenToKVPoolAllocator, "__init__", unsorted)
