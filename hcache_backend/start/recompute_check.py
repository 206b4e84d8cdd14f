"""Check at start-up: the first layers of a restore are recomputed, and compared."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from hcache_backend.plan.restore import Restore
from hcache_backend.projection.exactness import (
    Bound,
    KVExactness,
    kv_exactness,
    together,
    worst,
)
from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.ranks import smallest
from hcache_backend.restore.recompute import Recomputer, TokenSpan
from hcache_backend.sglang.arguments import resolved
from hcache_backend.sglang.groups import attention_ranks
from hcache_backend.sglang.hooks import RECOMPUTE, install
from hcache_backend.sglang.recompute_batch import NO_REQUEST, make_recomputer
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start.agreement import Refused, all_or_none
from hcache_backend.start.self_check import Probe, run_again
from hcache_backend.streams import current_stream

logger = logging.getLogger("hcache")


_WAITING = ("flashinfer", "torch_native", "flex_attention")  # they copy from the GPU and wait


def find_recomputer(
    runtime: Runtime, probe: Probe, kvcache: Any, methods: Restore, *, whole: bool
) -> Recomputer | None:
    """The recomputer of layers, the same on every tensor-parallel rank; None if there is none.

    All ranks call it; K and V of the probe must still be in the pool. ``runtime`` gets the
    exactness, or the reason for None. ``whole``: only all layers are of use.
    """
    assert runtime.config is not None
    if runtime.config.recompute == "never":
        runtime.recomputation = "none: option 'recompute'"
        return None
    runner, pool, group = runtime.runner, PagedPool(kvcache), attention_ranks().cpu_group
    recomputer = make_recomputer(runner, kvcache, methods.chunk_tokens)

    def prove() -> Recomputed:
        if runner.model_config.is_multimodal:
            raise Refused("the model's embeddings are not those of token ids alone")
        probe.refuse_dependence()
        refuse_attention(runner)
        missing = install(RECOMPUTE)
        if missing is not None:
            raise Refused(missing)
        return check_recompute(runner, probe, recomputer, pool, kvcache)

    try:
        found = all_or_none(prove, group)
        [recomputer.layers] = smallest(group, found.layers)
        if whole and recomputer.layers < kvcache.layer_num:
            raise Refused(found.problem or "a layer of another tensor-parallel rank is not exact")
    except Refused as refused:
        runtime.recomputation = f"none: {refused}"
        return None
    runtime.recomputation = found.exactness
    if recomputer.layers < kvcache.layer_num:
        reason = found.problem or "other tensor-parallel ranks"
        first = f"the first {recomputer.layers} layers only ({reason})"
        runtime.recomputation = f"{first}; {found.exactness}"
    logger.debug("hcache: exactness: recomputed layers: %s", runtime.recomputation)
    return recomputer


def refuse_attention(runner: Any) -> None:
    """Raise Refused if attention cannot be planned without disturbing other work."""
    backend = runner.attn_backend.prefill_attention_backend_str
    if backend in _WAITING and runner.device != "cpu":
        raise Refused(f"attention backend {backend!r} waits for the GPU before every prefill")
    if resolved(runner.server_args).enable_pdmux:
        raise Refused("--enable-pdmux interrupts prefills, whose plan would be lost")
    if NO_REQUEST in runner.req_to_token_pool.free_slots:
        raise Refused(f"SGLang gives row {NO_REQUEST} of its table to requests")


class Recomputed(NamedTuple):
    """Number of first layers that are exact enough, exactness in words (theirs, and the model's own
    at other batch sizes), and why the next layer is not (None: all are)."""

    layers: int
    exactness: str
    problem: str | None


def check_recompute(
    runner: Any, probe: Probe, recomputer: Recomputer, pool: PagedPool, kvcache: Any
) -> Recomputed:
    """Recompute the probe's tokens, and once more their second half after the first.

    Nothing may be allocated yet: other slots of the pool are overwritten too. There are more tokens
    than in the probe, so that leftovers of its batch would show. Raises Refused if it fails, or not
    even the first layer is exact enough.
    """
    slots, tokens, half = probe.slots, len(probe.slots), len(probe.slots) // 2
    dtype = probe.hidden[0].dtype

    def written(at: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pool.fetch(layer.kernel, at, dtype) for layer in probe.layers]

    def exactness(at: torch.Tensor, part: slice) -> list[KVExactness]:
        """Exactness, by layer, of a part of the probe's tokens that was written to ``at``."""
        pairs = zip(written(at[part]), wanted, strict=True)
        return [kv_exactness(got, (k[part], v[part]), pool.dtype) for got, (k, v) in pairs]

    wanted = written(slots)
    # Whole pages from the pool's last slots on; the probe's are its first.
    size = kvcache.page_size
    first = (kvcache.size - tokens) // size * size
    others = torch.arange(first, first + tokens, device=slots.device)
    if int(slots.max()) >= first:
        raise Refused("the KV pool is too small to try recomputation")
    buffers = [*kvcache.k_buffer, *kvcache.v_buffer]
    held = [buffer[slots] for buffer in buffers]
    ids, none = probe.token_ids.numpy(force=True), slots[:0]
    spans = [
        TokenSpan(ids, none),
        TokenSpan(ids[:half], none),
        TokenSpan(ids[half:], others[:half]),
    ]
    where, positions = torch.cat((slots, others)), probe.positions.repeat(2)
    problem = None
    try:
        # A shorter prompt, as in a chunk, a larger batch, and prompts as long as the spans; at last
        # one in two chunks, whose attention sums in another order.
        halves = slice(half), slice(half, tokens)
        # A server may have room for fewer requests at once: the last one is longer then.
        most = int(runner.req_to_token_pool.size) - 1
        runs = [
            exactness(at, part)
            for asked, before in (
                ([half], 0),
                ([tokens] * 2, 0),
                ([tokens, half, half], 0),
                ([tokens], half),
            )
            for lengths in [[*asked[:most], sum(asked[most:])] if asked[most:] else asked]
            for at in run_again(runner, lengths, before)
            for part in halves[: len(at) // half]
        ]
        own = [worst(layer) for layer in zip(*runs, strict=True)]
        for buffer in buffers:
            buffer[slots] = 0
        # On the stream of service; nothing is served yet, so the host may wait.
        forwards = recomputer.stream()
        current_stream(slots.device).record().synchronize()
        forwards.run(lambda: recomputer.run(len(probe.layers), positions, where, spans))
        forwards.record().synchronize()
        # Part by part: among many values the few that differ would not show.
        parts = [exactness(at, part) for at in (slots, others) for part in halves]
        recomputed = [worst(layer) for layer in zip(*parts, strict=True)]
    except Exception as error:  # a model's own code, with an unusual batch
        problem = f"{type(error).__name__}: {error}"
    finally:
        for buffer, rows in zip(buffers, held, strict=True):
            buffer[slots] = rows  # later checks compare with what the model itself wrote
    if problem is not None:
        raise Refused(problem)
    bound = Bound.of_pass(pool.dtype)
    pairs = zip(recomputed, own, strict=True)
    good = [ours.as_good_as(models, bound) for ours, models in pairs]
    layers = good.index(False) if False in good else len(good)
    if layers < len(good):
        problem = (
            f"{probe.layers[layers].name} recomputed: {recomputed[layers]}; the model at other "
            f"batch sizes: {own[layers]}"
        )
        if not layers:
            raise Refused(problem)
    told = f"{together(recomputed[:layers])}; the model at other batch sizes "
    return Recomputed(layers, told + str(together(own[:layers])), problem)
