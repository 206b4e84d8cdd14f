"""Joining a server, at its start or at a run-time attach: options, store, hooks, agreement of
ranks. At an attach every rank reports before any of them raises: a rank that failed alone would
leave the others waiting in HiCache's next collective."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from hcache_backend import config as options
from hcache_backend.config import ConfigError, HCacheConfig, SharedOption
from hcache_backend.contract import check as contract
from hcache_backend.metrics import logger
from hcache_backend.plan.record import save_record
from hcache_backend.server_report import write_report
from hcache_backend.sglang import hooks
from hcache_backend.sglang.arguments import (
    attention_groups,
    check_tp_lcm_size,
    kv_fields,
    may_be,
    page_size,
    resolved,
    serves_adapters,
    storage_extra_config,
)
from hcache_backend.sglang.compat import SUPPORTED, is_first, sglang_version, untested
from hcache_backend.sglang.groups import attention_ranks, from_all_ranks, or_stop
from hcache_backend.sglang.runtime import Runtime, current, remember
from hcache_backend.start.capabilities import records_whole_prefills
from hcache_backend.start.machine import judge_hits
from hcache_backend.store import PageStore

STARTED_WITHOUT_US = "the server was started without HCACHE_ENABLE=1"


def bootstrap(runner: Any) -> None:
    """Set up a process that has loaded its model: options, store, weights and hooks; the last step
    registers :class:`.OwnPagesStrategy`. ``runner``: SGLang's. Wrong options stop the server."""
    args = resolved(runner.server_args)
    config, our_l3 = _start_options(args)
    runtime = remember(runner, config)
    if config is None:
        return
    or_stop(lambda: _check_groups(runner, args, config))
    warn_of_single_tokens(page_size(runner.server_args))
    if our_l3:
        or_stop(lambda: check_server(runtime))
        runtime.store = or_stop(lambda: open_store(config, runtime.writer))
    elif config.shared is not None and (other := args.hicache_storage_backend) is not None:
        why = f"it needs the page store of this package, and --hicache-storage-backend is {other}"
        logger.warning("hcache: option 'shared' is ignored: %s", why)
    unnoticed = _watch_weights(runtime)
    if not args.enable_hierarchical_cache:
        why = (
            "decode offload makes a host pool and a controller of its own, and does not tell where "
            "in its sequence a page is; it only writes L3"
        )
        runtime.pages.use_plain_pages(why, expected=True)
        return
    hooks.notice_uses()
    _wait_for_loads(runtime)
    plain = unnoticed or _missing_seams(config)
    if may_be("prefill", runner.server_args):
        plain = hooks.install(hooks.PREFILL_SERVER) or plain
    if plain is None and config.mode == "plain":
        plain = "option 'mode' is 'plain'"
    try:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import register_stack_strategy

        from hcache_backend.start.build import GRAPH_HOOKS, OwnPagesStrategy
    except ImportError as error:
        runtime.pages.use_plain_pages(plain or f"this SGLang lacks a seam: {error}")
        return
    plain = plain or hooks.install(hooks.OWN_PAGES)
    no_hidden = "option 'mode' is 'kv'" if config.mode == "kv" else None
    if config.codec == "krul":
        no_hidden = "option 'codec' is 'krul', which stores K and V"
    if plain is None:
        no_hidden = no_hidden or hooks.install(hooks.HIDDEN)
        if no_hidden is None and (no_graphs := hooks.install(GRAPH_HOOKS)) is not None:
            logger.debug("hcache: %s", no_graphs)  # hidden mode reports it if graphs are recorded
    register_stack_strategy(OwnPagesStrategy(runtime, plain, no_hidden))  # before SGLang's own


def _start_options(args: Any) -> tuple[HCacheConfig | None, bool]:
    """The options if a server with SGLang's ``args`` is to use us, or None; True if L3 is ours."""
    extra = storage_extra_config(args) if args.hicache_storage_backend == "dynamic" else {}
    our_l3 = options.OUR_BACKEND.items() <= extra.items()
    if not our_l3 and not os.environ.get(options.ENABLE_VARIABLE):
        if os.environ.get(options.CONFIG_VARIABLE):
            logger.warning("hcache: HCACHE_CONFIG is ignored; set HCACHE_ENABLE=1, too")
    elif or_stop(options.is_enabled) or our_l3:
        config = or_stop(lambda: options.start_config(extra if our_l3 else None))
        if args.enable_hierarchical_cache or args.disaggregation_decode_enable_offload_kvcache:
            return config, our_l3
        logger.warning("hcache: configured, but inactive: add --enable-hierarchical-cache")
    return None, our_l3


def _watch_weights(runtime: Runtime) -> str | None:
    """Fingerprint the weights, and notice from now on what changes K and V; L3 is off if something
    could go unnoticed. Returns why updates of weights would go unnoticed, or None."""
    # With --startup-weight-load-mode overlap the weights are not there yet.
    late = getattr(runtime.runner, "startup_weight_load", None) is not None
    unseen = hooks.install(hooks.LATE_WEIGHTS) if late else None
    if not late or unseen is not None:
        runtime.weights.read_model()
    doubts = {"--startup-weight-load-mode overlap": unseen}
    doubts["weight updates would go unnoticed"] = unnoticed = hooks.install(hooks.WEIGHTS)
    if serves_adapters(resolved(runtime.runner.server_args)):
        doubts["pages of adapters would not be kept apart"] = hooks.install(hooks.ADAPTERS)
    if may_be("decode", runtime.runner.server_args):
        doubts["K and V of other weights would go unnoticed"] = hooks.install(hooks.DECODE_SERVER)
    for doubt, missing in doubts.items():
        if missing is not None:
            runtime.weights.begin_quarantine(f"{doubt}: {missing}")
    return unnoticed


def _missing_seams(config: HCacheConfig) -> str | None:
    """Why pages must be plain with this version of SGLang: it is not a tested one, and a seam is
    not as in these, or option ``sglang`` forbids it. None: own pages may be tried."""
    if (other := untested()) is None:
        return None
    if config.sglang == "tested":
        return f"{other}, and option 'sglang' is 'tested'"
    try:
        contract_check = contract.check_installed()
    except Exception as error:
        return f"{other}, and its sources could not be read: {error!r}"
    if contract_check.problems:
        return f"{other}, and {contract_check.describe()}"
    logger.warning("hcache: %s; %s", other, contract_check.describe())
    return None


def note_draft(runner: Any) -> None:
    """Called when a process has loaded a draft model, after its target model."""
    if current().options.config is not None:
        current().weights.read_draft(runner)


def _check_groups(runner: Any, args: Any, config: HCacheConfig) -> None:
    """Raise ConfigError if K and V do not divide by ``tp_lcm_size``; SGLang only asserts it."""
    if (tp_lcm_size := storage_extra_config(args).get("tp_lcm_size")) is not None:
        ranks = attention_ranks().world_size
        heads = runner.model_config.get_num_kv_heads(ranks)
        own_pages = config.mode != "plain" and not runner.use_mla_backend
        check_tp_lcm_size(tp_lcm_size, ranks, heads, own_pages=own_pages)


class Closeable(Protocol):
    def close(self) -> None: ...


_Shared = TypeVar("_Shared", bound=Closeable)
_MakeShared = Callable[[SharedOption, HiCacheStorageConfig], _Shared]


class Joined(NamedTuple, Generic[_Shared]):
    """What a backend instance is made of; ``kv_fields``: inputs of K and V besides the weights."""

    runtime: Runtime
    config: HCacheConfig
    kv_fields: dict[str, object]
    store: PageStore
    shared: _Shared | None


def join(
    storage_config: HiCacheStorageConfig, make_shared: _MakeShared[_Shared]
) -> Joined[_Shared]:
    """Open the page store for the running server, and the L3 that machines share, if option
    ``shared`` names one (made by ``make_shared``). All ranks call this at the same point. Raises
    ConfigError on every rank if an option is wrong or cannot change now, or a folder is no use."""
    joined: Joined[_Shared] | None = None
    error: Exception | None = None
    with ExitStack() as opened:
        try:
            joined = _join_here(storage_config, make_shared, opened)
        except Exception as caught:
            error = caught
        _agree(storage_config, joined, error)
        assert joined is not None
        if joined.runtime.options.config is None:
            joined.runtime.pages.use_plain_pages(STARTED_WITHOUT_US, expected=True)
        judge_hits(joined.runtime, joined.config)
        opened.pop_all()
    return joined


def leave_report(joined: Joined[Any], storage_config: HiCacheStorageConfig) -> None:
    """Write the server's report, partition and profile to the store folders; raises OSError."""
    if storage_config.tp_rank != 0:
        return
    runtime, folders, started = joined.runtime, joined.config.dirs, joined.runtime.options
    if started.kept_partition is not None:  # each stage has its own
        save_record(folders[0], *started.kept_partition)
    if storage_config.pp_rank == 0:
        shared = joined.config.shared
        backend = {"shared": shared.backend} if shared is not None else None
        report = runtime.report().model_copy(update=backend)
        for folder in folders:
            write_report(folder, report)
        if started.kept_profile is not None:  # for the next start
            name, profile = started.kept_profile
            if profile.l3 is not None and not (folders[0] / name).exists():
                profile.save(folders[0] / name)


def publishes_events() -> bool:
    """True if L3's KV events are to be published on this rank; logs why option ``events`` fails."""
    from sglang.srt.disaggregation.kv_events import is_kv_publisher_rank
    from sglang.srt.runtime_context import get_observability

    wanted = get_observability().kv_events_config
    missing = hooks.install(hooks.EVENTS) if wanted else "it needs --kv-events-config"
    if missing is not None:
        logger.warning("hcache: option 'events' is not used: %s", missing)
    return missing is None and is_kv_publisher_rank(wanted)


def check_server(runtime: Runtime) -> None:
    """Raise ConfigError for arguments, or a model, with which no server may have an L3."""
    check_arguments(resolved(runtime.runner.server_args))
    check_model(runtime.runner.model_config.hf_config.architectures[0])


def check_arguments(args: Any) -> None:
    """Raise ConfigError for arguments with which no server may have an L3. SGLang asks some of them
    at its start only, when an L3 may not have been named yet."""
    if getattr(args, "enable_kv_cache_sharding", False):
        raise ConfigError(
            "hcache: --enable-kv-cache-sharding: each rank's pool has a part of every page, and an "
            "L3 reads and writes whole pages; start the server without it"
        )
    fp4 = args.kv_cache_dtype in ("nvfp4", "fp4_mx_block16")
    if fp4 and (version := sglang_version()).startswith(SUPPORTED[:2]):  # later ones do not start
        raise ConfigError(
            f"hcache: --kv-cache-dtype {args.kv_cache_dtype}: SGLang {version} keeps no scales in "
            "host memory, so replies behind a hit would be wrong; use fp8_e4m3"
        )
    preempts = args.enable_priority_scheduling and not args.disable_priority_preemption
    if preempts and is_first():
        raise ConfigError(
            f"hcache: --enable-priority-scheduling with an L3: SGLang {SUPPORTED[0]} forgets "
            "requests that were preempted for one whose prefetch still runs, and never answers "
            "them; add --disable-priority-preemption, or use SGLang 0.5.22 or later"
        )


def check_model(architecture: str) -> None:
    """Raise ConfigError for a model of which SGLang's host pools lack a part."""
    if is_first() and architecture.startswith("Qwen4"):
        raise ConfigError(
            f"hcache: {architecture}: SGLang {SUPPORTED[0]} keeps no index of QSA and no PLE "
            "states in host memory, so replies behind a hit would be wrong; use 0.5.22 or later"
        )


def warn_of_single_tokens(tokens: int) -> None:
    """Warn if a page has one token: ``--page-size`` was forgotten. ``tokens``: of a page."""
    if tokens == 1:
        logger.warning(
            "hcache: the page size is 1: every token becomes a file, and pages of hidden states "
            "are larger than they need be; start the server with --page-size 64"
        )


def open_store(config: HCacheConfig, writer: bytes) -> PageStore:
    """The page store of option ``dirs``; raises ConfigError if a folder cannot be used."""
    try:
        return PageStore(config, writer)
    except OSError as error:
        hint = "; every folder must be one that this user can create and write"
        hint *= error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        folders = [str(path) for path in config.dirs]
        raise ConfigError(f"hcache: option 'dirs' is {folders}: {error}{hint}") from None


def _join_here(
    storage_config: HiCacheStorageConfig, make_shared: _MakeShared[_Shared], opened: ExitStack
) -> Joined[_Shared]:
    """:func:`join` for this rank; ``opened`` closes store and shared L3 if another rank fails."""
    runtime = current()
    fields = kv_fields(runtime.runner)
    config, store = runtime.options.config, runtime.store
    runtime.store = None
    if config is None or store is None:  # not at start-up
        config = _attach_config(runtime, storage_config.extra_config or {})
        store = open_store(config, runtime.writer)
    opened.callback(store.close)
    shared = make_shared(config.shared, storage_config) if config.shared else None
    if shared is not None:
        opened.callback(shared.close)
    return Joined(runtime, config, fields, store, shared)


def _attach_config(runtime: Runtime, extra: Mapping[str, Any]) -> HCacheConfig:
    """The options for an attach: those of ``extra`` over the server's own. Raises ConfigError if an
    option is wrong, or has another value than the server's and cannot change now."""
    options.check_extra_config(extra)
    check_server(runtime)
    named_options = extra.get("hcache")
    start_config, pages = runtime.options.config, runtime.pages
    inherited = None if start_config is None else start_config.model_dump(exclude_unset=True)
    config = options.parse_config(named_options, "hcache", inherited)
    started = start_config or HCacheConfig(dirs=config.dirs)
    in_mode = f"runs in {pages.mode} mode"
    if pages.kind != "hidden":
        in_mode += f" ({pages.reason or STARTED_WITHOUT_US})"
    for name in sorted(options.FIXED_AT_START.intersection(named_options or ())):
        wanted, present = getattr(config, name), getattr(started, name)
        state = in_mode if start_config is None else f"was started with {present!r}"
        if name == "mode":  # the server's may differ from its option
            alike = wanted in ("auto", pages.kind or "plain")
            present, state = wanted if alike else pages.mode, in_mode
        if name == "codec" and present == "auto" and wanted != "auto":  # what this server uses
            present = pages.codec or "none"
        if wanted != present:
            wrong = f"hcache: option {name!r} is {wanted!r} but this server {state}"
            raise ConfigError(f"{wrong}; it can only change at a restart")
    if start_config is None:
        _check_late_start(runtime)
        warn_of_single_tokens(page_size(runtime.runner.server_args))
    return config


def _check_late_start(runtime: Runtime) -> None:
    """Raise ConfigError if pages of a server started without us would mix with others."""
    args = resolved(runtime.runner.server_args)
    flag = None
    if runtime.weights.present is None and attention_groups(args) > 1:
        flag = "--attn-dp-size"  # a data-parallel group attaches alone, without its weights
    elif serves_adapters(args):
        flag = "--enable-lora"  # pages in L1 and L2 have keys that other requests may have, too
    if flag is not None:
        raise ConfigError(f"hcache: {STARTED_WITHOUT_US}; with {flag} it has to be started with it")
    if missing := hooks.install(hooks.WEIGHTS):
        raise ConfigError(f"hcache: {missing}; weight updates could not be noticed")
    hooks.notice_uses()
    _wait_for_loads(runtime)


def _wait_for_loads(runtime: Runtime) -> None:
    """Let full prefill graphs wait for the K and V that they read; otherwise L3 is off."""
    whole = runtime.runner.device != "cpu" and records_whole_prefills()
    if whole and (missing := hooks.install(hooks.WHOLE_GRAPHS)) is not None:
        runtime.weights.cannot_restore(f"full prefill graphs do not wait for loads: {missing}")


def _agree(
    storage_config: HiCacheStorageConfig, joined: Joined[Any] | None, error: Exception | None
) -> None:
    """Raise ConfigError on all ranks if one has an ``error``; read weights if one has not yet."""
    rank = f"tensor-parallel rank {storage_config.tp_rank}"
    if storage_config.pp_size > 1:
        rank += f" of pipeline stage {storage_config.pp_rank}"
    problem, is_config_error = None, isinstance(error, ConfigError)
    if error is not None:
        problem = str(error) if is_config_error else f"hcache: {type(error).__name__}: {error}"
    knows_weights = joined is not None and joined.runtime.weights.present is not None
    gathered = from_all_ranks((rank, problem, knows_weights))
    if problem is not None:
        raise ConfigError(problem) from (None if is_config_error else error)
    for other, its_problem, _ in gathered:
        if its_problem is not None:
            raise ConfigError(f"{its_problem} (on {other})")
    if not all(knows for _, _, knows in gathered):
        assert joined is not None
        try:
            joined.runtime.weights.read_model()
        except RuntimeError as failed:
            raise ConfigError(str(failed)) from failed
