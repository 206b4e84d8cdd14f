"""The bootstrap hook's work: register everything else only if this server wants us."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from hcache_backend.config import (
    CLASS_NAME,
    CONFIG_VARIABLE,
    ENABLE_VARIABLE,
    MODULE_PATH,
    HCacheConfig,
    is_enabled,
    start_config,
)
from hcache_backend.sglang import hooks
from hcache_backend.sglang.arguments import (
    check_tp_lcm_size,
    decodes_for_others,
    resolved,
    sends_to_others,
    serves_adapters,
    storage_extra_config,
)
from hcache_backend.sglang.compat import unsupported_reason
from hcache_backend.sglang.groups import attention_ranks
from hcache_backend.sglang.runtime import current, remember
from hcache_backend.start.agreement import or_stop
from hcache_backend.start.attach import (
    check_preemption,
    open_store,
    warn_of_single_tokens,
)
from hcache_backend.start.restore_trace import install_if_asked

logger = logging.getLogger("hcache")


def bootstrap(runner: Any) -> None:
    """Called when a process has loaded its model. A wrong configuration stops the server, as does a
    RuntimeError for a trace that cannot be made."""
    _join(runner)
    install_if_asked()  # for any server, so that other L3 backends are timed like ours


def note_draft(runner: Any) -> None:
    """Called when a process has loaded a draft model, after its target model."""
    if current().config is not None:
        current().read_draft(runner)


def _join(runner: Any) -> None:
    runtime = remember(runner)
    args = resolved(runner.server_args)
    extra = _our_extra_config(args)
    if extra is None and ENABLE_VARIABLE not in os.environ:
        if CONFIG_VARIABLE in os.environ:
            logger.warning("hcache: HCACHE_CONFIG is ignored; set HCACHE_ENABLE=1, too")
        return
    if not or_stop(is_enabled) and extra is None:
        return
    config = or_stop(lambda: start_config(extra))
    offloads = args.disaggregation_decode_enable_offload_kvcache
    if not (args.enable_hierarchical_cache or offloads):
        logger.warning("hcache: configured, but inactive: add --enable-hierarchical-cache")
        return
    runtime.config = config
    or_stop(lambda: _check_groups(runner, args, config))
    if extra is not None:
        or_stop(lambda: check_preemption(args))
    warn_of_single_tokens(runtime)
    if config.shared is not None and extra is None and args.hicache_storage_backend is not None:
        logger.warning(
            "hcache: option 'shared' is ignored: it needs the page store of this package, and "
            "--hicache-storage-backend is %s",
            args.hicache_storage_backend,
        )
    if extra is not None:
        runtime.store = or_stop(lambda: open_store(config, runtime.writer))
    # With --startup-weight-load-mode overlap the weights are not there yet.
    late = getattr(runner, "startup_weight_load", None) is not None
    unseen = hooks.install(hooks.LATE_WEIGHTS) if late else None
    if not late or unseen is not None:
        runtime.read_weights()
    if unseen is not None:
        runtime.lose_trust(f"--startup-weight-load-mode overlap: {unseen}")
    unnoticed = hooks.install(hooks.WEIGHTS)
    if unnoticed is not None:
        runtime.lose_trust(f"weight updates would go unnoticed: {unnoticed}")
    mixed = hooks.install(hooks.ADAPTERS) if serves_adapters(args) else None
    if mixed is not None:
        runtime.lose_trust(f"pages of adapters would not be kept apart: {mixed}")
    if decodes_for_others(runner.server_args):
        untold = hooks.install(hooks.DECODE_SERVER)
        if untold is not None:
            runtime.lose_trust(f"K and V of other weights would go unnoticed: {untold}")
    if not args.enable_hierarchical_cache:
        runtime.use_plain_pages(
            "decode offload makes a host pool and a controller of its own, and does not tell where "
            "in its sequence a page is; it only writes L3"
        )
        return
    hooks.notice_uses()
    plain = unnoticed or unsupported_reason()
    if sends_to_others(runner.server_args):
        plain = hooks.install(hooks.PREFILL_SERVER) or plain
    if plain is None and config.mode == "plain":
        plain = "option 'mode' is 'plain'"
    try:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import register_stack_strategy

        from hcache_backend.start.graphs import graph_hooks
        from hcache_backend.start.strategy import OwnPagesStrategy
    except ImportError as error:
        runtime.use_plain_pages(plain or f"this SGLang lacks a seam: {error}")
        return
    if plain is None:
        plain = hooks.install(hooks.OWN_PAGES)
    no_hidden = "option 'mode' is 'kv'" if config.mode == "kv" else None
    if config.codec == "krul":
        no_hidden = "option 'codec' is 'krul', which stores K and V"
    if plain is None and no_hidden is None:
        no_hidden = hooks.install(hooks.HIDDEN)
    if plain is None and no_hidden is None:
        no_graphs = hooks.install(graph_hooks())
        if no_graphs is not None:
            logger.debug("hcache: %s", no_graphs)  # hidden mode reports it if graphs are recorded
    register_stack_strategy(OwnPagesStrategy(runtime, plain, no_hidden))  # before SGLang's own


def _our_extra_config(args: Any) -> Mapping[str, Any] | None:
    """The extra config of a server that is started with our L3, otherwise None."""
    if args.hicache_storage_backend != "dynamic":
        return None
    extra = storage_extra_config(args)
    ours = (extra.get("module_path"), extra.get("class_name")) == (MODULE_PATH, CLASS_NAME)
    return extra if ours else None


def _check_groups(runner: Any, args: Any, config: HCacheConfig) -> None:
    """Raise ConfigError if K and V do not divide by ``tp_lcm_size``; SGLang only asserts it."""
    asked = storage_extra_config(args).get("tp_lcm_size")
    if asked is None:
        return
    group = attention_ranks()
    heads = runner.model_config.get_num_kv_heads(group.world_size)
    own_pages = config.mode != "plain" and not runner.use_mla_backend
    check_tp_lcm_size(asked, group.world_size, heads, own_pages=own_pages)
