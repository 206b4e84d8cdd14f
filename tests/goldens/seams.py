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


Say = Callable[..., str | None]
Told = Callable[[str, Say], None]


def told(trace: Trace, owner: Any) -> tuple[Told, Told]:
    """Two functions: before, or after, each call of a method of ``owner`` the trace says a text,
    which is made of the arguments, after the call of its result and them; None: nothing."""

    def before(name: str, say: Say) -> None:
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            if text := say(*args, **kwargs):
                trace.say(text)
            return original(*args, **kwargs)

        around(owner, name, call)

    def after(name: str, say: Say) -> None:
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if text := say(result, *args, **kwargs):
                trace.say(text)
            return result

        around(owner, name, call)

    return before, after


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

    before, _ = told(trace, HybridCacheController)
    before(
        "prefetch",
        lambda controller, handle, tokens, *_, **__: (
            f"prefetch for {handle.rid}: look up {pages(len(tokens) // controller.page_size)}"
        ),
    )
    before(
        "write_storage",
        lambda controller, host, *_, **__: (
            f"write {pages(len(host) // controller.page_size)} to L3"
        ),
    )
    before("reset", lambda _: "flush L1 and L2")


# ---- the product ----


def _queued(what: str) -> Say:
    """Of a backup or a load: whether it was queued."""

    def say(found: Any, controller: Any, indices: Any, *_: Any, **__: Any) -> str:
        how = "queued" if found is not None else "refused"
        return f"{what} {pages(len(indices) // controller.page_size)}: {how}"

    return say


def _watch_host_pages(trace: Trace) -> None:
    from hcache_backend.arena import Arena
    from hcache_backend.capture.staging import StagedCapture
    from hcache_backend.sglang.controller import OwnPagesController
    from hcache_backend.sglang.host_pool import OwnPagesPool

    before, after = told(trace, OwnPagesController)
    before("begin_turn", lambda *_: trace.point())
    after("load", _queued("load"))
    after("write", _queued("back up"))
    before, _ = told(trace, OwnPagesPool)
    before(
        "backup_from_device_all_layer",
        lambda pool, _, host, *__: f"launch: backup of {pages(len(host) // pool.page_size)}",
    )
    before(
        "save_recomputed",
        lambda _, host, *__: f"launch: save {pages(len(host))} that were recomputed",
    )
    before(
        "free",
        lambda pool, indices: (
            f"free {pages(len(indices) // pool.page_size)} of the host" if len(indices) else None
        ),
    )
    before, _ = told(trace, Arena)
    before("lose", lambda _, host: f"lose {pages(len(host))} of the host" if len(host) else None)
    before, _ = told(trace, StagedCapture)
    before("back_up", lambda _, __, host: f"hand hidden states of {pages(len(host))} to the host")


def _watch_restores(trace: Trace) -> None:
    from hcache_backend.prefetch.eager import EagerRestores
    from hcache_backend.restore.pipeline import RestorePipeline
    from hcache_backend.restore.recompute import Recomputer

    def start(
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

    def adopted(handed: Any, _: Any, host_pages: Any) -> str | None:
        if handed is None:
            return None
        ready = f"{int(handed.ready.sum())} of {pages(len(host_pages))}"
        return f"hand out reserved device pages: {ready} are restored"

    before, after = told(trace, RestorePipeline)
    before("start", start)
    after("start", lambda *_, **__: trace.point())
    before(
        "start_recomputation",
        lambda _, recompute, positions, *__: (
            f"launch: recompute {len(positions)} tokens, {recompute.layers} layers"
        ),
    )
    before, _ = told(trace, Recomputer)
    before(
        "run",
        lambda recomputer, layers, positions, *_: trace.costs(
            len(positions) * layers / recomputer.layers * trace.settings.compute_seconds
        ),
    )
    before, after = told(trace, EagerRestores)
    after(
        "reserve",
        lambda _, __, ___, keys, *____: (
            f"reserve device pages for {pages(len(keys))} that are read"
        ),
    )
    after("adopt", adopted)
    before("end", lambda *_: "end of a prefetch with reserved device pages")


def _watch_l3(trace: Trace) -> None:
    from hcache_backend.sglang import controller
    from hcache_backend.sglang.controller import OwnPagesController
    from hcache_backend.tiers.shared_backend import SharedBackend
    from hcache_backend.tiers.storage import HCacheStorage
    from hcache_backend.tiers.tier import SharedTier

    named = Pages()
    # A batch of a prefetch is read in each turn of the scheduler, however fast the disk is.
    controller._MOST_STEPS = 1

    def exists(found: Any, _: Any, keys: Any, *__: Any, **___: Any) -> str:
        return f"store: exists {named(keys)} -> {getattr(found, 'kv_hit_pages', found)}"

    def read(_: Any, __: Any, keys: Any, *___: Any) -> None:
        """A batch of a prefetch: one in each turn of the scheduler."""
        trace.next_turn()
        trace.costs(len(keys) * trace.settings.read_seconds)

    def hang(*_: Any) -> None:
        """While a file says so, the shared tier does not answer."""
        while trace.asked("hang"):
            trace.next_look()

    before, after = told(trace, HCacheStorage)
    for name, what in (("__init__", "open"), ("close", "close"), ("clear", "clear")):
        before(name, lambda *_, what=what, **__: f"store: {what}")
    after("batch_exists_v2", exists)
    after(
        "batch_get_v1",
        lambda found, _, keys, *__, **___: f"store: get {named(keys)} -> {sum(found)}",
    )
    before("batch_set_v1", lambda _, keys, *__, **___: f"store: put {named(keys)}")
    before("use", lambda _, keys: f"store: use {named(keys)}" if keys else None)
    told(trace, OwnPagesController)[0]("_page_get_zero_copy", read)
    told(trace, SharedBackend)[0]("get", hang)
    _, after = told(trace, SharedTier)
    for name, taken in (("exists", ""), ("get", ""), ("put", " taken")):

        def shared(
            found: Any, _: Any, asked: Any, *__: Any, name: str = name, taken: str = taken
        ) -> str:
            return f"shared tier: {name} {pages(len(asked.keys))} -> {sum(found)}{taken}"

        after(name, shared)


def _watch_gate(trace: Trace) -> None:
    from hcache_backend.prefetch.gate import HitGate

    def takes(taken: int, _: Any, asked: Any, tokens: int, *__: Any, **___: Any) -> str:
        verdict = f"takes {taken} of" if taken else "refuses"
        return f"gate: {verdict} {tokens} tokens of {asked.request_id}"

    def agreed(_: Any, ended: Any, stalled: bool) -> str | None:
        if ended:
            trace.say(f"gate: ends the prefetch of {', '.join(one.request_id for one in ended)}")
        return "gate: L3 is overdue" if stalled else None

    before, after = told(trace, HitGate)
    after("takes", takes)
    after(
        "may_ask",
        lambda asks, _, rid, *__, **___: None if asks else f"gate: L3 is not asked for {rid}",
    )
    before("agreed", agreed)
