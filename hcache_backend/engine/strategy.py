"""Our stack strategy: HiCache asks it for host pool and controller of a plain KV pool."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    StackBuildResult,
    StackStrategy,
    _PlainKvStrategy,
    register_stack_strategy,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes
from sglang.srt.mem_cache.pool_host.common import get_allocator_type
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_memory

from hcache_backend.capture.mirror import HiddenMirror
from hcache_backend.engine import metrics
from hcache_backend.engine.capture import HiddenCapture
from hcache_backend.engine.codec_choice import agree_on_codec
from hcache_backend.engine.controller import HiddenStateController
from hcache_backend.engine.host_pool import HiddenStatePool
from hcache_backend.engine.projection import LayerProjections, PagedPool
from hcache_backend.engine.ranks import on_all_ranks
from hcache_backend.engine.refusal import refusal
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.self_check import Probe, SelfCheckFailed, compare, observe
from hcache_backend.page import PageLayout
from hcache_backend.projection.generic import GenericProjector, ProjectionBatch
from hcache_backend.projection.projector import Projector
from hcache_backend.restore.layerwise import LayerwiseRestore
from hcache_kernels.codecs import Codec

logger = logging.getLogger("hcache")


def register(runtime: Runtime, reason: str | None) -> None:
    """Put our strategy before SGLang's own.

    Args:
        runtime: State of this process.
        reason: Why hidden mode is already out of the question, or None.
    """
    register_stack_strategy(HiddenStateStrategy(runtime, reason))


class HiddenStateStrategy(StackStrategy):
    """Hidden mode for a plain MHA/GQA pool, if everything it needs is there; else KV mode."""

    def __init__(self, runtime: Runtime, reason: str | None) -> None:
        self._runtime = runtime
        self._reason = reason

    def matches(self, kvcache: Any, components: Any) -> bool:
        if type(kvcache) is MHATokenToKVPool and components == {ComponentType.FULL}:
            return True
        names = ", ".join(sorted(component.name for component in components))
        self._runtime.use_kv_mode(
            self._reason or f"the KV pool is a {type(kvcache).__name__} ({names})"
        )
        return False

    def build(self, *, kvcache: Any, params: Any, server_args: Any, **kwargs: Any) -> Any:
        assert self._runtime.config is not None
        reason = self._reason or refusal(self._runtime, kvcache, server_args)
        # Every rank gets to each agreement, whatever it found: one rank's refusal is everyone's,
        # and none may enter the probe's forward pass alone.
        (start,) = on_all_ranks(params.tp_cache_group, reason is None)
        probe = codec = projections = None
        generic = GenericProjector(ProjectionBatch(ForwardMode.EXTEND))
        projector = Projector(generic, PagedPool(kvcache), kvcache.layer_num)
        if start:
            try:
                probe = observe(self._runtime.runner, kvcache)
                compare(probe, projector, kvcache)
            except Exception as error:
                reason = _reason(error)
        codec = agree_on_codec(
            params.tp_cache_group,
            self._runtime.config.codec,
            probe if reason is None else None,
            projector,
            kvcache,
        )
        if probe is not None and codec is not None:
            try:
                self._require_memory(probe, codec, kvcache)
                projections = LayerProjections(
                    self._runtime, probe, projector, kvcache, params.tp_cache_group
                )
                projections.find()
                projections.check_writing()
            except Exception as error:
                reason = _reason(error)
        (agreed,) = on_all_ranks(params.tp_cache_group, reason is None)
        if not agreed and reason is None:
            reason = "another tensor-parallel rank refused"
        if reason is not None or probe is None or codec is None or projections is None:
            self._runtime.use_kv_mode(reason or "no probe")
            return _PlainKvStrategy().build(
                kvcache=kvcache, params=params, server_args=server_args, **kwargs
            )
        projections.settle()
        projections.follow_weights()
        return self._build_hidden(kvcache, params, probe, codec, projector, **kwargs)

    def _require_memory(self, probe: Probe, codec: Codec, kvcache: Any) -> None:
        config, memory = self._runtime.config, get_memory()
        assert config is not None
        layout = self._page_layout(probe, codec, kvcache)
        kv_bytes = sum(
            kvcache.k_buffer[i][0].nbytes + kvcache.v_buffer[i][0].nbytes
            for i in range(kvcache.layer_num)
        )
        hidden_bytes = sum(layout.segment_bytes) // layout.page_size
        if config.mode == "auto" and hidden_bytes >= kv_bytes:
            raise SelfCheckFailed(
                f"hidden states take {hidden_bytes} bytes a token and KV {kv_bytes}: KV pays more "
                "(option 'mode': 'hidden' insists)"
            )
        mirror = self._mirror_bytes(probe, codec, kvcache)
        if memory.hicache_size > 0 and memory.hicache_size * 1e9 <= mirror:
            raise SelfCheckFailed(
                f"--hicache-size {memory.hicache_size} GB leaves nothing beside the "
                f"{mirror / 1e9:.2f} GB that hold the hidden states of the tokens on the device"
            )
        if memory.hicache_size > 0:
            wanted = memory.hicache_size * 1e9
        else:
            tokens = kvcache.size * memory.hicache_ratio + layout.page_size
            wanted = mirror + tokens * layout.page_bytes / layout.page_size
        budget = host_memory_budget_bytes()
        if wanted > budget:
            raise SelfCheckFailed(
                f"it needs {wanted / 1e9:.2f} GB of host memory ({mirror / 1e9:.2f} GB of it for "
                f"the tokens on the device) and {budget / 1e9:.2f} GB are there"
            )

    @staticmethod
    def _page_layout(probe: Probe, codec: Codec, kvcache: Any) -> PageLayout:
        segment = kvcache.page_size * codec.row_bytes
        return PageLayout(kvcache.page_size, (segment,) * len(probe.layers))

    @staticmethod
    def _mirror_bytes(probe: Probe, codec: Codec, kvcache: Any) -> int:
        return int(kvcache.k_buffer[0].shape[0]) * codec.row_bytes * len(probe.layers)

    def _build_hidden(
        self,
        kvcache: Any,
        params: Any,
        probe: Probe,
        codec: Codec,
        projector: Projector,
        **kwargs: Any,
    ) -> Any:
        runtime, memory = self._runtime, get_memory()
        assert runtime.config is not None
        layers = probe.layers
        runtime.mode = "hidden"
        metrics.codec().labels(asked=runtime.config.codec, used=codec.name).set(1)
        runtime.page_fields = {
            "kind": "hidden",
            "partition": ["hidden"] * len(layers),
            "codec": codec.name,
            "first_layer": kvcache.start_layer,
        }
        mirror = HiddenMirror(kvcache.k_buffer[0].shape[0], len(layers), codec)
        invalidate_on_allocation(params.token_to_kv_pool_allocator, mirror)
        runtime.runner.hcache_capture = HiddenCapture(layers, mirror)
        runtime.on_weights_changed.append(mirror.clear)
        # The mirror is paid for from what the user gave to HiCache: pages take half of KV's bytes.
        host_size = max(0.0, memory.hicache_size - self._mirror_bytes(probe, codec, kvcache) / 1e9)
        pool = HiddenStatePool(
            kvcache,
            memory.hicache_ratio,
            host_size if memory.hicache_size > 0 else 0,
            params.page_size,
            memory.hicache_mem_layout,
            page_layout=self._page_layout(probe, codec, kvcache),
            mirror=mirror,
            namespace=runtime.page_namespace,
            writer=runtime.writer,
            pin_memory=kvcache.device != "cpu",
            allocator_type=get_allocator_type(),
        )
        pool.use_restore(
            LayerwiseRestore(
                pool.kv_buffer,
                pool.page_layout,
                layers,
                projector,
                mirror,
                runtime.config.restore_chunk_tokens,
            )
        )
        anchor = PoolEntry(PoolName.KV, pool, kvcache, lambda layer: layer, True)
        group = HostPoolGroup([anchor])
        logger.info(
            "hcache: hidden mode: %d layers, %d bytes a %d-token page, codec %s",
            len(layers),
            pool.page_layout.page_bytes,
            params.page_size,
            codec.name,
        )
        controller = HiddenStateController(
            params.token_to_kv_pool_allocator,
            group,
            params.page_size,
            params.tp_cache_group,
            load_cache_event=kwargs["load_cache_event"],
            attn_cp_group=params.attn_cp_cache_group,
            attn_tp_group=params.attn_tp_cache_group,
            pp_group=params.pp_cache_group,
            write_policy=memory.hicache_write_policy,
            io_backend=memory.hicache_io_backend,
            storage_backend=kwargs["storage_backend"],
            prefetch_threshold=kwargs["prefetch_threshold"],
            model_name=kwargs["model_name"],
            storage_backend_extra_config=kwargs["storage_backend_extra_config"],
            enable_storage_metrics=kwargs["enable_storage_metrics"],
        )
        controller.use_hidden_states(runtime, pool, mirror, layers, projector)
        return StackBuildResult(
            host_pool_group=group,
            cache_controller=controller,
            component_host_pools={ComponentType.FULL: pool},
            pools_desc="hidden states",
        )


def _reason(error: Exception) -> str:
    """What ``error`` has against hidden mode; one that we did not mean goes to the log."""
    if isinstance(error, SelfCheckFailed):
        return str(error)
    logger.error("hcache: the self-check broke", exc_info=error)
    return f"the self-check broke: {type(error).__name__}: {error}"


def invalidate_on_allocation(allocator: Any, mirror: HiddenMirror) -> None:
    """A slot that is allocated anew has no valid row until something fills it."""

    def wrap(name: str) -> None:
        original = getattr(allocator, name)

        def allocate(*args: Any, **kwargs: Any) -> Any:
            slots = original(*args, **kwargs)
            if isinstance(slots, torch.Tensor):
                mirror.invalidate(slots)
            return slots

        setattr(allocator, name, allocate)

    for name in ("alloc", "alloc_extend", "alloc_decode"):
        if hasattr(allocator, name):
            wrap(name)
