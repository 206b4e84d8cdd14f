"""The adapter: which functions the recorder watches, and what traces call them.

When functions move or get other names, this changes and no trace does.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from tests.goldens.recorder import Clock, Trace
from tests.kit.scheduler import aborts, around


def watch(trace: Trace) -> None:
    """Before the model is loaded."""
    trace.not_waited_for |= {"hcache-stages", "hcache-stage-1"}
    _watch_scheduler(trace)
    _watch_collectives(trace)
    _watch_hicache(trace)
    _watch_host_pages(trace)
    _watch_restores(trace)
    _watch_l3(trace)
    _watch_gate(trace)


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
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.model_executor.model_runner import ModelRunner

    def loop(original: Any, scheduler: Any, *args: Any) -> Any:
        clock = Clock(trace)
        for name, module in list(sys.modules.items()):
            if _has_virtual_time(name) and hasattr(module, "time"):
                setattr(module, "time", clock)  # noqa: B010
        runtime = _runtime()
        runtime.l3.clock = clock.monotonic
        if runtime.hit_gate is not None:
            runtime.hit_gate.gpu._clock = clock.monotonic
        trace.rank = dist.get_rank() if dist.is_initialized() else 0
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

    def retract(original: Any, *args: Any, **kwargs: Any) -> Any:
        retracted, *others = original(*args, **kwargs)
        trace.say(f"retract {', '.join(req.rid for req in retracted)}")
        return (retracted, *others)

    around(Scheduler, "run_event_loop", loop)
    around(Scheduler, "ingest_requests", ingest)
    around(Scheduler, "process_input_requests", process)
    around(Scheduler, "run_batch", run)
    around(Scheduler, "process_batch_result", at_point)
    around(UnifiedRadixCache, "check_hicache_events", at_point)
    around(UnifiedRadixCache, "check_prefetch_progress", at_point)
    around(ModelRunner, "forward", forward)
    around(ScheduleBatch, "retract_decode", retract)
    around(Req, "__init__", received)


def _has_virtual_time(module: str) -> bool:
    """Not the store, nor the tiers around it: these wait for disks."""
    rooms = ("checks", "host", "krul", "prefetch", "sglang", "start")
    beside = ("metrics", "streams", "ranks")
    parts = module.split(".")
    timed = module == "hcache_backend.tiers.storage" or parts[-1] in beside
    return parts[0] == "hcache_backend" and (timed or (len(parts) > 1 and parts[1] in rooms))


def _runtime() -> Any:
    from hcache_backend.sglang.runtime import current

    return current()


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


def _watch_collectives(trace: Trace) -> None:
    """Those of small numbers between ranks; the model's own are not traced."""

    def all_reduce(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group", args[1] if len(args) > 1 else None)
        told = not tensor.is_floating_point() and dist.get_world_size(group=group) > 1
        own = tensor.flatten().tolist() if told else []
        result = original(tensor, *args, **kwargs)
        if told:
            op = kwargs.get("op", args[0] if args else dist.ReduceOp.SUM)
            found = tensor.flatten().tolist()
            became = f" -> {found}" if found != own else ""
            trace.say(f"all-reduce {_name(op)} {own}{became}", polls=True)
        return result

    def objects(original: Any, group: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(group, own, *args, **kwargs)
        if group.world_size > 1:
            trace.say(f"gather objects of {group.world_size} ranks")
        return result

    def exchange(original: Any, ranks: Any, shards: Any, fetch: Any) -> None:
        original(ranks, shards, fetch)
        trace.say(f"exchange shards of {shards[0].numel()} bytes")

    from sglang.srt.distributed.parallel_state import GroupCoordinator

    from hcache_backend.restore.exchange import Exchange

    around(dist, "all_reduce", all_reduce)
    around(Exchange, "gather_now", exchange)
    around(GroupCoordinator, "all_gather_object", objects)


def _name(op: Any) -> str:
    return {dist.ReduceOp.MIN: "min", dist.ReduceOp.MAX: "max", dist.ReduceOp.SUM: "sum"}.get(
        op, str(op)
    )


def _watch_hicache(trace: Trace) -> None:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    def prefetch(
        original: Any, controller: Any, handle: Any, tokens: Any, *a: Any, **kw: Any
    ) -> Any:
        trace.say(
            f"prefetch for {handle.rid}: look up {pages(len(tokens) // controller.page_size)}"
        )
        return original(controller, handle, tokens, *a, **kw)

    def write_storage(original: Any, controller: Any, host_indices: Any, *a: Any, **kw: Any) -> Any:
        trace.say(f"write {pages(len(host_indices) // controller.page_size)} to L3")
        return original(controller, host_indices, *a, **kw)

    def reset(original: Any, controller: Any) -> Any:
        trace.say("flush L1 and L2")
        return original(controller)

    around(HybridCacheController, "prefetch", prefetch)
    around(HybridCacheController, "write_storage", write_storage)
    around(HybridCacheController, "reset", reset)


# ---- the product ----


def _watch_host_pages(trace: Trace) -> None:
    from hcache_backend.arena import Arena
    from hcache_backend.capture.staging import StagedCapture
    from hcache_backend.sglang.controller import OwnPagesController
    from hcache_backend.sglang.host_pool import OwnPagesPool

    def turn(original: Any, controller: Any, *args: Any) -> Any:
        trace.point()
        return original(controller, *args)

    def write(original: Any, controller: Any, device_indices: Any, *a: Any, **kw: Any) -> Any:
        host = original(controller, device_indices, *a, **kw)
        how = "queued" if host is not None else "refused"
        trace.say(f"back up {pages(len(device_indices) // controller.page_size)}: {how}")
        return host

    def load(original: Any, controller: Any, host_indices: Any, *args: Any, **kwargs: Any) -> Any:
        device = original(controller, host_indices, *args, **kwargs)
        how = "queued" if device is not None else "refused"
        trace.say(f"load {pages(len(host_indices) // controller.page_size)}: {how}")
        return device

    def backup(original: Any, pool: Any, _device_pool: Any, host: Any, *args: Any) -> Any:
        trace.say(f"launch: backup of {pages(len(host) // pool.page_size)}")
        return original(pool, _device_pool, host, *args)

    def save(original: Any, pool: Any, host_pages: Any, *args: Any) -> Any:
        trace.say(f"launch: save {pages(len(host_pages))} that were recomputed")
        return original(pool, host_pages, *args)

    def free(original: Any, pool: Any, indices: Any) -> Any:
        if len(indices):
            trace.say(f"free {pages(len(indices) // pool.page_size)} of the host")
        return original(pool, indices)

    def lose(original: Any, arena: Any, host_pages: Any) -> Any:
        if len(host_pages):
            trace.say(f"lose {pages(len(host_pages))} of the host")
        return original(arena, host_pages)

    def rows(original: Any, capture: Any, slots: Any, host_pages: Any) -> Any:
        trace.say(f"hand hidden states of {pages(len(host_pages))} to the host")
        return original(capture, slots, host_pages)

    around(OwnPagesController, "begin_turn", turn)
    around(OwnPagesController, "load", load)
    around(OwnPagesController, "write", write)
    around(OwnPagesPool, "backup_from_device_all_layer", backup)
    around(OwnPagesPool, "save_recomputed", save)
    around(OwnPagesPool, "free", free)
    around(Arena, "lose", lose)
    around(StagedCapture, "back_up", rows)


def _watch_restores(trace: Trace) -> None:
    from hcache_backend.prefetch.eager import EagerRestores
    from hcache_backend.restore.pipeline import RestorePipeline
    from hcache_backend.restore.recompute import Recomputer

    def start(
        original: Any,
        pipeline: Any,
        page_ids: Any,
        slots: Any,
        recompute: Any = None,
        first_layer: int = 0,
        *,
        ahead: bool = False,
    ) -> Any:
        first = f", first {recompute.layers} layers recomputed" if recompute else ""
        since = f", from layer {first_layer} on" if first_layer else ""
        early = " ahead of the load" if ahead else ""
        trace.say(f"launch: restore {pages(len(page_ids))}{early}{first}{since}")
        result = original(pipeline, page_ids, slots, recompute, first_layer, ahead=ahead)
        trace.point()
        return result

    def recomputation(
        original: Any, pipeline: Any, recompute: Any, positions: Any, *others: Any
    ) -> Any:
        trace.say(f"launch: recompute {len(positions)} tokens, {recompute.layers} layers")
        return original(pipeline, recompute, positions, *others)

    def run(original: Any, recomputer: Any, layers: int, positions: Any, *others: Any) -> Any:
        share = layers / recomputer.layers
        trace.costs(len(positions) * share * trace.settings.compute_seconds)
        return original(recomputer, layers, positions, *others)

    def reserve(original: Any, eager: Any, prefetch: Any, keys: Any, *others: Any) -> Any:
        result = original(eager, prefetch, keys, *others)
        trace.say(f"reserve device pages for {pages(len(keys))} that are read")
        return result

    def adopt(original: Any, eager: Any, host_pages: Any) -> Any:
        handed = original(eager, host_pages)
        if handed is not None:
            ready = f"{int(handed.ready.sum())} of {pages(len(host_pages))}"
            trace.say(f"hand out reserved device pages: {ready} are restored")
        return handed

    def end(original: Any, eager: Any, prefetch: Any) -> Any:
        trace.say("end of a prefetch with reserved device pages")
        return original(eager, prefetch)

    around(RestorePipeline, "start", start)
    around(RestorePipeline, "start_recomputation", recomputation)
    around(Recomputer, "run", run)
    around(EagerRestores, "reserve", reserve)
    around(EagerRestores, "adopt", adopt)
    around(EagerRestores, "end", end)


def _watch_l3(trace: Trace) -> None:
    from hcache_backend.sglang import controller
    from hcache_backend.sglang.controller import OwnPagesController
    from hcache_backend.tiers.shared_backend import SharedBackend
    from hcache_backend.tiers.storage import HCacheStorage
    from hcache_backend.tiers.tier import SharedTier

    named = Pages()
    # A batch of a prefetch is read in each turn of the scheduler, however fast the disk is.
    controller._MOST_STEPS = 1

    def exists(original: Any, storage: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(storage, keys, *args, **kwargs)
        trace.say(f"store: exists {named(keys)} -> {getattr(found, 'kv_hit_pages', found)}")
        return found

    def get(original: Any, storage: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(storage, keys, *args, **kwargs)
        trace.say(f"store: get {named(keys)} -> {sum(found)}")
        return found

    def put(original: Any, storage: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        trace.say(f"store: put {named(keys)}")
        return original(storage, keys, *args, **kwargs)

    def use(original: Any, storage: Any, keys: Any) -> Any:
        if keys:
            trace.say(f"store: use {named(keys)}")
        return original(storage, keys)

    def simply(text: str) -> Callable[..., Any]:
        def told(original: Any, *args: Any, **kwargs: Any) -> Any:
            trace.say(text)
            return original(*args, **kwargs)

        return told

    def read(original: Any, controller: Any, operation: Any, keys: Any, *others: Any) -> Any:
        """A batch of a prefetch: one in each turn of the scheduler."""
        trace.next_turn()
        trace.costs(len(keys) * trace.settings.read_seconds)
        return original(controller, operation, keys, *others)

    def exists_shared(original: Any, shared: Any, asked: Any) -> Any:
        found = original(shared, asked)
        trace.say(f"shared tier: exists {pages(len(asked.keys))} -> {sum(found)}")
        return found

    def get_shared(original: Any, shared: Any, asked: Any, memory: Any) -> Any:
        found = original(shared, asked, memory)
        trace.say(f"shared tier: get {pages(len(asked.keys))} -> {sum(found)}")
        return found

    def hang(original: Any, values: Any, *args: Any) -> Any:
        """While a file says so, the shared tier does not answer."""
        while trace.asked("hang"):
            trace.next_look()
        return original(values, *args)

    def put_shared(original: Any, shared: Any, given: Any, memory: Any) -> Any:
        taken = original(shared, given, memory)
        trace.say(f"shared tier: put {pages(len(given.keys))} -> {sum(taken)} taken")
        return taken

    around(HCacheStorage, "__init__", simply("store: open"))
    around(HCacheStorage, "close", simply("store: close"))
    around(HCacheStorage, "clear", simply("store: clear"))
    around(HCacheStorage, "batch_exists_v2", exists)
    around(HCacheStorage, "batch_get_v1", get)
    around(HCacheStorage, "batch_set_v1", put)
    around(HCacheStorage, "use", use)
    around(OwnPagesController, "_page_get_zero_copy", read)
    around(SharedBackend, "get", hang)
    around(SharedTier, "exists", exists_shared)
    around(SharedTier, "get", get_shared)
    around(SharedTier, "put", put_shared)


def _watch_gate(trace: Trace) -> None:
    from hcache_backend.prefetch.gate import HitGate

    def takes(original: Any, gate: Any, asked: Any, tokens: int, *args: Any, **kwargs: Any) -> Any:
        taken = original(gate, asked, tokens, *args, **kwargs)
        verdict = f"takes {taken} of" if taken else "refuses"
        trace.say(f"gate: {verdict} {tokens} tokens of {asked.request_id}")
        return taken

    def may_ask(original: Any, gate: Any, rid: str, *args: Any, **kwargs: Any) -> Any:
        asks = original(gate, rid, *args, **kwargs)
        if not asks:
            trace.say(f"gate: L3 is not asked for {rid}")
        return asks

    def agreed(original: Any, gate: Any, ended: Any, stalled: bool) -> Any:
        if ended:
            trace.say(f"gate: ends the prefetch of {', '.join(one.request_id for one in ended)}")
        if stalled:
            trace.say("gate: L3 is overdue")
        return original(gate, ended, stalled)

    around(HitGate, "takes", takes)
    around(HitGate, "may_ask", may_ask)
    around(HitGate, "agreed", agreed)
