"""Whether the first layers of a restore can be recomputed on this server, found out by doing it."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group

from hcache_backend.engine.hooks import install, recompute_hooks
from hcache_backend.engine.layer_methods import LayerMethods
from hcache_backend.engine.recompute.batch import forward_stream, model_forward
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.startup.agreement import Refused, all_or_none
from hcache_backend.engine.startup.self_check import Probe, run_again
from hcache_backend.projection.check import first_problem
from hcache_backend.projection.exactness import KVExactness, kv_exactness, together, worst
from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.restore.recompute import Recomputer, TokenSpan
from hcache_backend.streams import current_stream

logger = logging.getLogger("hcache")


def find_recomputer(
    runtime: Runtime, probe: Probe, kvcache: Any, methods: LayerMethods
) -> Recomputer | None:
    """What recomputes layers, the same on every tensor-parallel rank; all must call it.

    The K and V that the model wrote during the probe must still be in the pool. ``runtime`` is told
    how exact the recomputed ones are, or why there are none.

    Returns:
        None where nothing is to be recomputed, or a rank cannot.
    """
    assert runtime.config is not None
    if runtime.config.recompute == "never":
        runtime.recomputation = "none: option 'recompute'"
        return None
    runner, pool = runtime.runner, PagedPool(kvcache)
    recomputer = Recomputer(
        model_forward(runner),
        pool,
        kvcache.start_layer,
        methods.chunk_tokens,
        partial(forward_stream, runner),
    )

    def prove() -> str:
        if runner.model_config.is_multimodal:
            raise Refused("the model's embeddings are not those of token ids alone")
        missing = install(recompute_hooks())
        if missing is not None:
            raise Refused(missing)
        return check_recompute(runner, probe, recomputer, pool, kvcache)

    try:
        runtime.recomputation = all_or_none(prove, get_tp_group().cpu_group)
    except Refused as refused:
        runtime.recomputation = f"none: {refused}"
        logger.warning("hcache: layers are not recomputed: %s", refused)
        return None
    logger.info("hcache: exactness: recomputed layers: %s", runtime.recomputation)
    return recomputer


def check_recompute(
    runner: Any, probe: Probe, recomputer: Recomputer, pool: PagedPool, kvcache: Any
) -> str:
    """Recompute the probe's tokens, and once more the second half of them behind the first.

    Nothing may be allocated yet: other slots of the pool are overwritten too. There are more tokens
    than the probe had, so what is left of its batch would show.

    Returns:
        How exact recomputed K and V are, and the model's own at other batch sizes, in words.

    Raises:
        Refused: It cannot be done, or K or V of a layer are less exact than those of the model's
            own pass at other batch sizes.
    """
    slots, tokens, half = probe.slots, len(probe.slots), len(probe.slots) // 2
    dtype = probe.hidden[0].dtype

    def written(at: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pool.fetch(layer.kernel, at, dtype) for layer in probe.layers]

    def exactness(at: torch.Tensor, part: slice) -> list[KVExactness]:
        """How exact a part of the probe's tokens is that was written to ``at``, layer by layer."""
        pairs = zip(written(at[part]), wanted, strict=True)
        return [kv_exactness(got, (k[part], v[part]), pool.dtype) for got, (k, v) in pairs]

    wanted = written(slots)
    # The pool's last slots; the probe's are its first.
    others = torch.arange(kvcache.size - tokens, kvcache.size, device=slots.device)
    if int(slots.max()) >= int(others[0]):
        raise Refused("the KV pool is too small to try recomputation")
    buffers = [*kvcache.k_buffer, *kvcache.v_buffer]
    held = [buffer[slots] for buffer in buffers]
    ids, none = probe.token_ids.numpy(force=True), slots[:0]
    spans = [TokenSpan(ids, none), TokenSpan(ids[:half], none), TokenSpan(ids[half:], slots[:half])]
    where, positions = torch.cat((slots, others)), probe.positions.repeat(2)
    try:
        # A shorter prompt, as in a chunk, a larger batch, and prompts as long as the spans.
        halves = slice(half), slice(half, tokens)
        # A server may have room for fewer requests at once: the last one is longer then.
        most = int(runner.req_to_token_pool.size) - 1
        runs = [
            exactness(at, part)
            for asked in ([half], [tokens] * 2, [tokens, half, half])
            for lengths in [[*asked[:most], sum(asked[most:])] if asked[most:] else asked]
            for at in run_again(runner, lengths)
            for part in halves[: len(at) // half]
        ]
        own = [worst(layer) for layer in zip(*runs, strict=True)]
        for buffer in buffers:
            buffer[slots] = 0
        # Where it will be run in service; nothing is served yet, so the host may wait.
        forwards = recomputer.stream()
        current_stream(slots.device).record().synchronize()
        forwards.run(lambda: recomputer.run(len(probe.layers), positions, where, spans))
        forwards.record().synchronize()
        # Part by part: of many values the few that differ are a small share.
        parts = [exactness(at, part) for at in (slots, others) for part in halves]
        recomputed = [worst(layer) for layer in zip(*parts, strict=True)]
        problem = first_problem(
            None
            if ours.as_good_as(models)
            else f"{layer.name} recomputed: {ours}; the model at other batch sizes: {models}"
            for layer, ours, models in zip(probe.layers, recomputed, own, strict=True)
        )
    except Exception as error:  # a model's own code, with a batch that it was not made for
        problem = f"{type(error).__name__}: {error}"
    finally:
        for buffer, rows in zip(buffers, held, strict=True):
            buffer[slots] = rows  # later checks compare with what the model itself wrote
    if problem is not None:
        raise Refused(problem)
    return f"{together(recomputed)}; the model at other batch sizes {together(own)}"
