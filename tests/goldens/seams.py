"""The adapter: which functions the recorder watches, and what traces call them.

When functions move or get other names, this changes and no trace does.
"""

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch.distributed as dist

from tests.goldens.recorder import Clock, Trace
from tests.kit.scheduler import aborts, around


def watch(trace: Trace) -> None:
    """Before the model is loaded."""
    trace.not_waited_for |= {"hcache-stages", "hcache-stage-1"}
    _watch_scheduler(trace)
    _watch_all_reduce(trace)
    _watch_work(trace)
    for told, table in ((_say_before, BEFORE), (_say_after, AFTER)):
        for owner, texts in table.items():
            for name, text in texts.items():
                around(resolve_name(owner), name, partial(told, trace, text))


def _say_before(trace: Trace, text: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    if said := text(*args, **kwargs):
        trace.say(said)
    return original(*args, **kwargs)


def _say_after(trace: Trace, text: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    if said := text(result, *args, **kwargs):
        trace.say(said)
    return result


# ---- how things are written ----


def pages(count: int) -> str:
    return f"{count} page{'' if count == 1 else 's'}"


class Pages:
    """Names of pages in L3: numbers in the order in which they first appear."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, keys: Iterable[str]) -> str:
        numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
        return f"{pages(len(numbers))} {runs(numbers)}".rstrip()


def runs(numbers: Sequence[int]) -> str:
    """``0-3, 7``: consecutive numbers together."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, run)) for run in found)


# ---- SGLang ----


def _watch_scheduler(trace: Trace) -> None:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.model_executor.model_runner import ModelRunner

    from hcache_backend.sglang.runtime import current

    def loop(original: Any, scheduler: Any, *args: Any) -> Any:
        clock = Clock(trace)
        for name, module in list(sys.modules.items()):
            if _has_virtual_time(name) and hasattr(module, "time"):
                setattr(module, "time", clock)  # noqa: B010
        runtime = current()
        runtime.l3.clock, runtime.l3.core_wait = clock.monotonic, lambda thread: 0.0
        if runtime.hit_gate is not None:
            runtime.hit_gate.gpu._clock = clock.monotonic
        trace.serves(dist.get_rank() if dist.is_initialized() else 0)
        return original(scheduler, *args)

    def ingest(original: Any, scheduler: Any) -> Any:
        trace.turn(lambda: bool(scheduler.is_fully_idle()))
        return original(scheduler)

    held: list[Any] = []
    aborted: dict[str, str] = {}

    def process(original: Any, scheduler: Any, received: Sequence[Any]) -> Any:
        received = _together(held, received) + aborts(scheduler, aborted)
        for one in received:
            _say_request(trace, one)
        original(scheduler, received)
        trace.begin_turn()

    def at_point(original: Any, *args: Any, **kwargs: Any) -> Any:
        trace.point()
        return original(*args, **kwargs)

    def run(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        trace.point()
        if batch.forward_mode.is_extend():
            how = zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True)
            parts = [f"{req.rid} {tokens} behind {prefix}" for req, tokens, prefix in how]
            trace.say(f"forward: prefill {', '.join(parts)}")
        else:
            rids = ", ".join(req.rid for req in batch.reqs)
            trace.say(f"forward: {batch.forward_mode.name.lower()} {rids}")
        result = original(scheduler, batch, *args, **kwargs)
        trace.point()
        return result

    def forward(original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if (ids := getattr(batch, "input_ids", None)) is not None:
            trace.costs(len(ids) * trace.settings.compute_seconds)
        return original(runner, batch, *args, **kwargs)

    def received(original: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        original(req, *args, **kwargs)
        # A prefill server that sends to nobody keeps pages all the same.
        req.skip_radix_cache_insert = False

    around(Scheduler, "run_event_loop", loop)
    around(Scheduler, "ingest_requests", ingest)
    around(Scheduler, "process_input_requests", process)
    around(Scheduler, "run_batch", run)
    around(Scheduler, "process_batch_result", at_point)
    around(UnifiedRadixCache, "check_hicache_events", at_point)
    around(UnifiedRadixCache, "check_prefetch_progress", at_point)
    around(ModelRunner, "forward", forward)
    around(Req, "__init__", received)


def _has_virtual_time(module: str) -> bool:
    """Not the store, nor the tiers around it: these wait for disks."""
    rooms = ("checks", "host", "krul", "prefetch", "sglang", "start")
    beside = ("metrics", "streams", "ranks")
    parts = module.split(".")
    timed = module == "hcache_backend.tiers.storage" or parts[-1] in beside
    return parts[0] == "hcache_backend" and (timed or (len(parts) > 1 and parts[1] in rooms))


def _together(held: list[Any], received: Sequence[Any]) -> list[Any]:
    """Requests whose ids begin with ``2/`` come when two of them are there, in their order."""
    ready = []
    for one in received:
        rid = getattr(one, "rid", None)
        number = rid.partition("/")[0] if isinstance(rid, str) and hasattr(one, "input_ids") else ""
        if not number.isdigit():
            ready.append(one)
            continue
        held.append(one)
        if len(held) == int(number):
            ready += sorted(held, key=lambda each: each.rid)
            held.clear()
    return ready


def _say_request(trace: Trace, request: Any) -> None:
    kind, rid = type(request).__name__, getattr(request, "rid", None)
    if hasattr(request, "input_ids"):
        trace.say(f"request {rid}: {len(request.input_ids)} tokens")
    elif kind == "AbortReq":
        trace.say(f"abort {rid}")
    elif kind != "FreezeGCReq":  # the server's own, some time after its start
        trace.say(kind.removesuffix("ReqInput"))


def _watch_all_reduce(trace: Trace) -> None:
    """Of small numbers between ranks; the model's own are not traced."""
    names = {dist.ReduceOp.MIN: "min", dist.ReduceOp.MAX: "max", dist.ReduceOp.SUM: "sum"}

    def all_reduce(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group", args[1] if len(args) > 1 else None)
        told = not tensor.is_floating_point() and dist.get_world_size(group=group) > 1
        own = tensor.flatten().tolist() if told else []
        result = original(tensor, *args, **kwargs)
        if told:
            op = names[kwargs.get("op", args[0] if args else dist.ReduceOp.SUM)]
            found = tensor.flatten().tolist()
            became = f" -> {found}" if found != own else ""
            trace.say(f"all-reduce {op} {own}{became}", polls=True)
        return result

    around(dist, "all_reduce", all_reduce)


def _watch_work(trace: Trace) -> None:
    """What takes time, and points beside those of SGLang's scheduler."""
    from hcache_backend.prefetch import reader
    from hcache_backend.prefetch.gate import HitGate
    from hcache_backend.restore.pipeline import RestorePipeline
    from hcache_backend.restore.recompute import Recomputer
    from hcache_backend.sglang import radix_cache
    from hcache_backend.sglang.controller import OwnPagesController
    from hcache_backend.tiers.shared_backend import SharedBackend

    def turn(original: Any, controller: Any, *args: Any) -> Any:
        trace.point()
        return original(controller, *args)

    def start(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        trace.point()
        return result

    def run(original: Any, recomputer: Any, layers: int, positions: Any, *others: Any) -> Any:
        share = layers / recomputer.layers
        trace.costs(len(positions) * share * trace.settings.compute_seconds)
        return original(recomputer, layers, positions, *others)

    def apply_verdicts(original: Any, gate: Any, ended: Any, stalled: bool) -> Any:
        if ended:
            trace.say(f"gate: ends the prefetch of {', '.join(one.request_id for one in ended)}")
        if stalled:
            trace.say("gate: L3 is overdue")
        return original(gate, ended, stalled)

    # A batch of a prefetch is read in each turn of the scheduler, however fast the disk is.
    reader._MOST_STEPS = 1

    def read(original: Any, controller: Any, operation: Any, keys: Any, *others: Any) -> Any:
        trace.next_turn()
        trace.costs(len(keys) * trace.settings.read_seconds)
        return original(controller, operation, keys, *others)

    def hang(original: Any, values: Any, *args: Any) -> Any:
        """While a file says so, the shared tier does not answer."""
        while trace.asked("hang"):
            trace.next_look()
        return original(values, *args)

    around(radix_cache, "propose_turn", turn)
    around(OwnPagesController, "_page_get_zero_copy", read)
    around(RestorePipeline, "start", start)
    around(Recomputer, "recompute", run)
    around(HitGate, "apply_verdicts", apply_verdicts)
    around(SharedBackend, "get", hang)


# ---- functions that each say a line ----


def _restore(
    _: Any,
    page_ids: Any,
    slots: Any,
    recompute: Any = None,
    first_layer: int = 0,
    *,
    ahead: bool = False,
) -> str:
    first = f", first {recompute.layers} layers recomputed" if recompute else ""
    since = f", from layer {first_layer} on" if first_layer else ""
    early = " ahead of the load" if ahead else ""
    return f"launch: restore {pages(len(page_ids))}{early}{first}{since}"


def _queued(result: Any) -> str:
    return "refused" if result is None else "queued"


_l3_pages = Pages()
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController"
_OWN_PAGES = "hcache_backend.sglang.controller:OwnPagesController"
_STORAGE = "hcache_backend.tiers.storage:HCacheStorage"
_EAGER = "hcache_backend.prefetch.reservations:EagerRestores"


def _step(work: Any) -> str:
    """What is done at the start in step with other ranks."""
    name = getattr(work, "__name__", type(work).__name__)
    return str(name).strip("_").replace("_", " ")


BEFORE: dict[str, dict[str, Any]] = {
    _CONTROLLER: {
        "prefetch": lambda controller, handle, tokens, *_, **__: (
            f"prefetch for {handle.rid}: look up {pages(len(tokens) // controller.page_size)}"
        ),
        "write_storage": lambda controller, host_indices, *_, **__: (
            f"write {pages(len(host_indices) // controller.page_size)} to L3"
        ),
        "reset": lambda controller: "flush L1 and L2",
    },
    "hcache_backend.sglang.host_pool:OwnPagesPool": {
        "backup_from_device_all_layer": lambda pool, _device_pool, host, *_: (
            f"launch: backup of {pages(len(host) // pool.page_size)}"
        ),
        "save_recomputed": lambda pool, host_pages, *_: (
            f"launch: save {pages(len(host_pages))} that were recomputed"
        ),
        "free": lambda pool, indices: (
            f"free {pages(len(indices) // pool.page_size)} of the host" if len(indices) else ""
        ),
    },
    "hcache_backend.arena:Arena": {
        "mark_unfit": lambda arena, host_pages: (
            f"{pages(len(host_pages))} of the host cannot be encoded" if len(host_pages) else ""
        ),
    },
    "hcache_backend.capture.staging:StagedCapture": {
        "back_up": lambda capture, slots, host_pages: (
            f"hand hidden states of {pages(len(host_pages))} to the host"
        ),
    },
    "hcache_backend.restore.pipeline:RestorePipeline": {
        "start": _restore,
        "start_recomputation": lambda pipeline, recompute: (
            f"launch: recompute {len(recompute.slots)} tokens, {recompute.layers} layers"
        ),
    },
    _EAGER: {"end": lambda *_: "end of a prefetch with reserved device pages"},
    "hcache_backend.start.build:Start": {"step": lambda _, work, *__, **___: f"step {_step(work)}"},
    _STORAGE: {
        "__init__": lambda *_, **__: "store: open",
        "close": lambda *_, **__: "store: close",
        "clear": lambda *_, **__: "store: clear",
        "batch_set_v1": lambda storage, keys, *_, **__: f"store: put {_l3_pages(keys)}",
        "use": lambda storage, keys: f"store: use {_l3_pages(keys)}" if keys else "",
    },
}
"""What a call says before it, of its arguments; nothing if that is empty."""

AFTER: dict[str, dict[str, Any]] = {
    "sglang.srt.managers.schedule_batch:ScheduleBatch": {
        "retract_decode": lambda result, *_, **__: (
            f"retract {', '.join(req.rid for req in result[0])}"
        ),
    },
    "sglang.srt.distributed.parallel_state:GroupCoordinator": {
        "all_gather_object": lambda _, group, *__, **___: (
            f"gather objects of {group.world_size} ranks" if group.world_size > 1 else ""
        ),
    },
    "hcache_backend.restore.exchange:Exchange": {
        "gather_now": lambda _, ranks, shards, fetch: (
            f"exchange shards of {shards[0].numel()} bytes"
        ),
    },
    _OWN_PAGES: {
        "load": lambda device, controller, host_indices, *_, **__: (
            f"load {pages(len(host_indices) // controller.page_size)}: {_queued(device)}"
        ),
        "write": lambda host, controller, device_indices, *_, **__: (
            f"back up {pages(len(device_indices) // controller.page_size)}: {_queued(host)}"
        ),
    },
    _EAGER: {
        "reserve": lambda _, eager, prefetch, keys, *__: (
            f"reserve device pages for {pages(len(keys))} that are read"
        ),
        "hand_out": lambda handed, eager, host_pages: (
            f"hand out reserved device pages: {int(handed.ready.sum())} of "
            f"{pages(len(host_pages))} are restored"
            if handed is not None
            else ""
        ),
    },
    _STORAGE: {
        "batch_exists_v2": lambda found, storage, keys, *_, **__: (
            f"store: exists {_l3_pages(keys)} -> {getattr(found, 'kv_hit_pages', found)}"
        ),
        "batch_get_v1": lambda found, storage, keys, *_, **__: (
            f"store: get {_l3_pages(keys)} -> {sum(found)}"
        ),
    },
    "hcache_backend.tiers.tier:SharedTier": {
        "exists": lambda found, shared, asked: (
            f"shared tier: exists {pages(len(asked.keys))} -> {sum(found)}"
        ),
        "get": lambda found, shared, asked, memory: (
            f"shared tier: get {pages(len(asked.keys))} -> {sum(found)}"
        ),
        "put": lambda taken, shared, given, memory: (
            f"shared tier: put {pages(len(given.keys))} -> {sum(taken)} taken"
        ),
    },
    "hcache_backend.prefetch.gate:HitGate": {
        "tokens_to_read": lambda taken, gate, asked, tokens, *_, **__: (
            f"gate: {f'takes {taken} of' if taken else 'refuses'} {tokens} tokens of "
            f"{asked.request_id}"
        ),
        "may_ask": lambda asks, gate, rid, *_, **__: (
            "" if asks else f"gate: L3 is not asked for {rid}"
        ),
    },
}
"""Likewise behind it, of its result and its arguments."""
