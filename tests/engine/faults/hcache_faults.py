"""Faults that a test injects into a server's scheduler process, as an SGLang plugin of its own.

``HCACHE_TEST_FAULT`` names the faults (``one,other``). With ``HCACHE_TEST_TRIGGER`` they only work
while that file exists, so that a server can start, and serve for a while, in good order. With
``HCACHE_TEST_STAGE`` they only work in that pipeline stage.
"""

import contextlib
import json
import os
import pkgutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hcache_batches
import hcache_restores
import hcache_rows
import hcache_sums
import hcache_units

from tests.kit.scheduler import around

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def activate() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(LOAD_MODEL, _inject, HookType.BEFORE)


def _inject(*args: Any, **kwargs: Any) -> None:
    for name in os.environ["HCACHE_TEST_FAULT"].split(","):
        FAULTS[name]()


def _active() -> bool:
    trigger, stage = (os.environ.get(f"HCACHE_TEST_{name}") for name in ("TRIGGER", "STAGE"))
    if stage is not None:
        from sglang.srt.distributed.parallel_state import get_pp_group

        if get_pp_group().rank_in_group != int(stage):
            return False
    return trigger is None or Path(trigger).exists()


def _says(what: str) -> bool:
    """Whether that stands in the trigger."""
    with contextlib.suppress(FileNotFoundError):
        return what in Path(os.environ["HCACHE_TEST_TRIGGER"]).read_text()
    return False


def _is_rank_1() -> bool:
    from sglang.srt.distributed import get_tp_group

    return bool(get_tp_group().rank_in_group == 1)


def _wait_while(condition: Callable[[], bool]) -> None:
    while condition():
        time.sleep(0.01)


def _wrong_rope() -> None:
    """Projection believes that every token stands one place further on."""
    from hcache_backend.projection.projector import Projector

    def wrong(
        project: Any, self: Any, layer: Any, hidden: Any, positions: Any, *slots: Any, **kw: Any
    ) -> Any:
        positions = positions + 1 if _active() else positions
        return project(self, layer, hidden, positions, *slots, **kw)

    around(Projector, "project", wrong)
    around(Projector, "project_to_pool", wrong)


def _hold_decisions() -> None:
    """A server that has decided on its partition waits before it looks what others decided."""
    from hcache_backend.start import machine

    def held(settle: Any, *args: Any) -> Any:
        _wait_while(_active)
        return settle(*args)

    around(machine, "settle", held)


def _wrong_spec(**wrong: Any) -> Callable[[], None]:
    """The search hands out specs with parts of ``wrong``, as if they had been proven."""

    def inject() -> None:
        from dataclasses import replace

        from hcache_backend.checks import self_check as specs

        def faulty(find: Any, layer: Any, *args: Any) -> Any:
            spec = find(layer, *args)
            changes = {name: change(spec) for name, change in wrong.items()}
            return spec if layer.index % 2 else replace(spec, **changes)

        around(specs, "find_spec", faulty)

    return inject


def _other_style(spec: Any) -> Any:
    from dataclasses import replace

    return replace(spec.rotary, style="interleaved")


def _rows_of_q(spec: Any) -> Any:
    from dataclasses import replace

    return replace(spec.k, starts=tuple(start - spec.k.width for start in spec.k.starts))


def _other_rounding(spec: Any) -> Any:
    """What is rounded of cosines, sines and their products, the other way round."""
    from dataclasses import replace

    names = ("table", "cos_products", "sin_products")
    return replace(spec.rounding, **{name: not getattr(spec.rounding, name) for name in names})


def _reallocate(controller: Any, device_indices: Any) -> None:
    """Free the first page of a node and allocate it again, through the real allocator."""
    allocator, size = controller.mem_pool_device_allocator, controller.page_size
    page = device_indices[:size]
    # The scheduler collects what a step frees; this is freed at once.
    group, allocator.free_group = allocator.free_group, None
    allocator.free(page)
    others = []
    while (taken := allocator.alloc(size)).tolist() != page.tolist():
        others.append(taken)
    for taken in others:
        allocator.free(taken)
    allocator.free_group = group


def _wrap_write(before: bool) -> Callable[[], None]:
    def inject() -> None:
        from hcache_backend.sglang.controller import OwnPagesController

        def faulty(write: Any, self: Any, device_indices: Any, *args: Any, **kwargs: Any) -> Any:
            if before and _active():
                _reallocate(self, device_indices)
            result = write(self, device_indices, *args, **kwargs)
            if not before and _active():
                _reallocate(self, device_indices)
            return result

        around(OwnPagesController, "write", faulty)

    return inject


def _disk() -> None:
    """The trigger's text says what is wrong with the disk: slow, held or failing reads or writes,
    held look-ups."""
    from hcache_backend.store import FileOps, PageStore, page_store

    def wrap(owner: Any, name: str, what: str) -> None:
        def faulty(original: Any, *args: Any, **kwargs: Any) -> Any:
            if _says(f"slow {what}"):
                time.sleep(2)
            _wait_while(lambda: _says(f"held {what}"))
            if _says(f"failing {what}"):
                raise OSError(5, "Input/output error")
            return original(*args, **kwargs)

        around(owner, name, faulty)

    page_store.WRITE_SECONDS = 240.0  # the machine may be busy, too
    wrap(FileOps, "read", "reads")
    wrap(FileOps, "write", "writes")
    wrap(PageStore, "exists", "look-ups")


def _slow_prefill() -> None:
    """Every token takes another 2 ms to compute."""
    from sglang.srt.managers.scheduler import Scheduler

    def slow(run_batch: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if _active() and batch.forward_mode.is_extend():
            time.sleep(0.002 * sum(batch.extend_lens))
        return run_batch(self, batch, *args, **kwargs)

    around(Scheduler, "run_batch", slow)


def _late_turns() -> None:
    """A turn goes on for 0.3 s after the last replies: the next message is of the same state."""
    from sglang.srt.managers.scheduler import Scheduler

    def late(process: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        process(self, batch, *args, **kwargs)
        if _active() and all(req.finished() for req in batch.reqs):
            time.sleep(0.3)

    around(Scheduler, "process_batch_result", late)


def _report(tell: Callable[[], object]) -> Callable[[], None]:
    """No fault: whenever the trigger is there and empty, write what ``tell`` says into it."""

    def answer() -> None:
        trigger = Path(os.environ["HCACHE_TEST_TRIGGER"])
        while True:
            time.sleep(0.05)
            if trigger.exists() and not trigger.stat().st_size:
                report = trigger.with_suffix(".new")
                report.write_text(json.dumps(tell()))
                report.replace(trigger)

    return lambda: threading.Thread(target=answer, daemon=True).start()


def _module_hooks() -> int:
    """How many hooks modules of the model have before and around their forward pass."""
    from hcache_backend.sglang.runtime import current

    modules = list(current().runner.model.modules())
    return sum(len(module._forward_pre_hooks) + ("forward" in vars(module)) for module in modules)


def _hooks() -> list[str]:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from hcache_backend.sglang import hooks
    from hcache_backend.sglang.hook_registry import hooks_on

    registered = HookRegistry._hooks.items()
    ours = {t for t, found in registered if any(_is_ours(hook) for _, hook, _ in found)}
    lists = [found for found in vars(hooks).values() if isinstance(found, list)]
    targets = {hook.target for found in lists for hook in found}
    return sorted(ours | {t for t in targets if hooks_on(pkgutil.resolve_name(t))})


def _is_ours(hook: Any) -> bool:
    return bool(hook.__module__.startswith("hcache_backend"))


def _weights_late() -> None:
    """Weights arrive after ``load_model``, as with SGLang's overlapped loading, which needs CUDA.

    Names and order are SGLang's: ``load_model`` leaves sentinels, and the scheduler
    calls ``finalize_startup_weight_load`` once graphs are recorded.
    """
    import msgspec
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor import model_runner

    class Late:
        def __init__(self, model: Any) -> None:
            self._real = [(tensor, tensor.data.clone()) for tensor in model.parameters()]
            for tensor, _ in self._real:
                tensor.data.fill_(1e-3)

        def finalize(self) -> None:
            for tensor, real in self._real:
                tensor.data.copy_(real)

    def late(load: Any, **options: Any) -> Any:
        loaded = load(**options)
        return msgspec.structs.replace(loaded, startup_weight_load=Late(loaded.model))

    def then_weights(record: Any, self: Any) -> None:
        record(self)
        self.tp_worker.finalize_startup_weight_load()

    around(model_runner, "load_model_with_memory_saver", late)
    around(Scheduler, "init_all_cuda_graphs", then_weights)


def _hooks_raise() -> None:
    """Whatever our hooks do of their own raises."""
    from hcache_backend.sglang import radix_cache, scheduler, storage_threads

    def faulty(original: Any, *args: Any) -> Any:
        if _active():
            raise LookupError("a test's fault")
        return original(*args)

    seams = [(module, "gate_of") for module in (radix_cache, scheduler, storage_threads)]
    seams += [(radix_cache, "our_l3"), (radix_cache, "propose_turn"), (scheduler, "our_l3")]
    for owner, name in seams:
        around(owner, name, faulty)


def _rows_lost() -> None:
    from hcache_backend.arena import Arena, RowState

    def faulty(end_step: Any, self: Any, slots: Any, ticket: int, verdicts: Any) -> Any:
        if _active():
            verdicts[:] = RowState.VOID
        return end_step(self, slots, ticket, verdicts)

    around(Arena, "end_step", faulty)


_trees: list[Any] = []


def _report_holdings() -> None:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    def remembered(build: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        _trees.append(self)

    around(UnifiedRadixCache, "__init__", remembered)
    _report(_holdings)()


def _is_counted(descriptor: Path) -> bool:
    """Not those of a store's 256 folders of pages, which stay open once a page was there."""
    try:
        return descriptor.readlink().parent.name != "pages"
    except OSError:  # that of the list itself
        return False


def _holdings() -> dict[str, int]:
    """What this process holds; needs the radix tree's core in Python."""
    [tree] = _trees
    pool = tree.cache_controller.mem_pool_host
    nodes = [
        node.component_data[0]
        for node in tree.tree_core._collect_all_nodes()
        if node is not tree.tree_core.root_node
    ]
    pages_in_memory = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "store_threads": sum(
            thread.name.startswith(("hcache-read-", "hcache-write-"))
            for thread in threading.enumerate()
        ),
        "descriptors": sum(map(_is_counted, Path("/proc/self/fd").iterdir())),
        "host_tokens": pool.logical_size - pool.available_size(),
        "host_tokens_in_tree": sum(
            len(node.host_value) for node in nodes if node.host_value is not None
        ),
        "locked_nodes": sum(node.lock_ref > 0 or node.host_lock_ref > 0 for node in nodes),
        "memory_bytes": pages_in_memory * os.sysconf("SC_PAGE_SIZE"),
    }


def _no_store_on_rank_1() -> None:
    """The folders of the store cannot be used on the second tensor-parallel rank."""
    from hcache_backend.start import attach

    def faulty(whole: Any, config: Any, writer: bytes) -> Any:
        if _active() and _is_rank_1():
            raise PermissionError(13, "Permission denied", str(config.dirs[0]))
        return whole(config, writer)

    around(attach, "PageStore", faulty)


def _misses_on_rank_1() -> None:
    """Now and then the second tensor-parallel rank lacks something, wherever it can lack it."""
    import random

    from hcache_backend.capture.ledger import Ledger
    from hcache_backend.host.node_backups import CapturedBackups
    from hcache_backend.host.page_headers import PageHeaders
    from hcache_backend.tiers.storage import HCacheStorage

    dice = random.Random(7)

    def unlucky() -> bool:
        return _active() and _is_rank_1() and dice.random() < 0.2

    def wrap(owner: Any, name: str, spoil: Callable[[Any], Any]) -> None:
        def faulty(original: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            return spoil(result) if unlucky() else result

        around(owner, name, faulty)

    def lose_some(found: list[bool]) -> list[bool]:
        return [ok and dice.random() < 0.7 for ok in found]

    wrap(HCacheStorage, "_exists", lose_some)  # a shard is not on this rank's disk
    wrap(HCacheStorage, "_get", lose_some)  # or it cannot be read
    wrap(PageHeaders, "verified_pages", lambda count: max(0, count - 1))
    wrap(PageHeaders, "may_project", lambda may: False)
    wrap(CapturedBackups, "_problem", lambda problem: "rows not valid")
    name = "none_lost"  # if not, backups must not wait
    whole: Any = vars(Ledger)[name]
    setattr(Ledger, name, property(lambda ledger: whole.fget(ledger) and not unlucky()))


def _rows_do_not_fit() -> None:
    hcache_units.do_not_fit()
    hcache_rows.do_not_fit(one_in=67)


def _some_do_not_fit() -> None:
    hcache_units.do_not_fit(one_in=31)
    hcache_rows.do_not_fit(one_in=2039)


FAULTS: dict[str, Callable[[], None]] = {
    "wrong_rope": _wrong_rope,
    "wrong_copies": lambda: hcache_units.copy_wrongly(_active),
    "wrong_spec_rope": _wrong_spec(rotary=_other_style),
    "wrong_spec_rows": _wrong_spec(k=_rows_of_q),
    "wrong_spec_rounding": _wrong_spec(rounding=_other_rounding),
    "slot_reallocated_before_backup": _wrap_write(before=True),
    "slot_reallocated_after_backup": _wrap_write(before=False),
    "hooks_raise": _hooks_raise,
    "rows_lost": _rows_lost,
    "weights_late": _weights_late,
    "save_fails": lambda: hcache_rows.save_fails(_active),
    "wrong_save": lambda: hcache_rows.wrong_save(_active),
    "disk": _disk,
    "slow_prefill": _slow_prefill,
    "turns_end_late": _late_turns,
    "prefetches_held": lambda: hcache_restores.hold_prefetches(_active),
    "other_format": hcache_restores.other_format,
    "layer_held": lambda: hcache_restores.hold_a_layer(_active),
    "loads_late": lambda: hcache_restores.load_late(_active),
    "prefetches_paired": lambda: hcache_restores.pair_prefetches(_active),
    "lost_after_look_ups": lambda: hcache_restores.lose_what_was_looked_up(_active),
    "decisions_held": _hold_decisions,
    "batches_in_step": lambda: hcache_batches.keep_in_step(lambda: _active() and not _says("free")),
    "no_store_on_rank_1": _no_store_on_rank_1,
    "units_do_not_fit": hcache_units.do_not_fit,
    "third_pages_do_not_fit": lambda: hcache_units.do_not_fit(by_number=True),
    "attention_in_blocks": hcache_sums.attention_in_blocks,
    "products_by_width": hcache_sums.products_by_width,
    "recomputed_wrongly": lambda: hcache_sums.recomputed_wrongly(layer=1),
    "substitute": hcache_sums.substitute,
    "large_substitute": lambda: hcache_sums.substitute("large"),
    "substitute_without_memory": lambda: hcache_sums.substitute("no memory"),
    "encoded_wrongly": hcache_rows.encoded_wrongly,
    "rows_do_not_fit": _rows_do_not_fit,
    "some_do_not_fit": _some_do_not_fit,
    "misses_on_rank_1": _misses_on_rank_1,
    "report_hooks": _report(_hooks),
    "report_module_hooks": _report(_module_hooks),
    "report_holdings": _report_holdings,
}
