"""Check at the start: the first layers of a restore are recomputed, and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hcache_backend.checks.probe import Probe
from hcache_backend.projection.exactness import Bound, KVExactness, kv_exactness, together, worst
from hcache_backend.projection.paged_pool import PagedPool, planes_of
from hcache_backend.ranks import Refused
from hcache_backend.restore.recompute import Recomputer, TokenSpan
from hcache_backend.streams import current_stream


class Recomputed(NamedTuple):
    """Number of first layers that are exact enough, exactness in words (theirs, and the model's own
    at other batch sizes), and why the next layer is not (None: all are)."""

    layers: int
    exactness: str
    problem: str | None


def check_recompute(
    run_again: Callable[[Sequence[int], int], Sequence[torch.Tensor]],
    most_requests: int,
    probe: Probe,
    recomputer: Recomputer,
    kvcache: Any,
) -> Recomputed:
    """Recompute the probe's tokens, and once more their second half after the first.

    Nothing may be allocated yet: other slots of the pool are overwritten too. There are more tokens
    than in the probe, so that leftovers of its batch would show. Raises Refused if it fails, or not
    even the first layer is exact enough.

    Args:
        run_again: Runs prompts of these lengths that begin as the probe does, the first tokens in a
            pass of their own; returns the slots of each. There is room for ``most_requests``.
    """
    slots, tokens, half = probe.slots, len(probe.slots), len(probe.slots) // 2
    dtype, pool, size = probe.hidden[0].dtype, PagedPool(kvcache), kvcache.page_size

    def written(at: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pool.fetch(layer.kernel, at, dtype) for layer in probe.layers]

    def exactness(at: torch.Tensor, part: slice) -> list[KVExactness]:
        """Exactness, by layer, of a part of the probe's tokens that was written to ``at``."""
        pairs = zip(written(at[part]), wanted, strict=True)
        return [kv_exactness(got, (k[part], v[part]), pool.dtype) for got, (k, v) in pairs]

    def by_layer(runs: Sequence[list[KVExactness]]) -> list[KVExactness]:
        return [worst(layer) for layer in zip(*runs, strict=True)]

    wanted = written(slots)
    # Whole pages from the pool's last slots on; the probe's are its first.
    first = (kvcache.size - tokens) // size * size
    others = torch.arange(first, first + tokens, device=slots.device)
    if int(slots.max()) >= first:
        raise Refused("the KV pool is too small to try recomputation")
    buffers = [plane for layer in range(kvcache.layer_num) for plane in planes_of(kvcache, layer)]
    held = [buffer[slots] for buffer in buffers]
    ids, none = probe.token_ids.numpy(force=True), slots[:0]
    before = others[:half]
    spans = [TokenSpan(ids, none), TokenSpan(ids[:half], none), TokenSpan(ids[half:], before)]
    where, positions = torch.cat((slots, others)), probe.positions.repeat(2)
    halves = slice(half), slice(half, tokens)
    # A shorter prompt, as in a chunk, a larger batch, and prompts as long as the spans; at last one
    # in two chunks, whose attention sums in another order.
    prompts = ([half], 0), ([tokens] * 2, 0), ([tokens, half, half], 0), ([tokens], half)
    most = most_requests - 1  # the last prompt is longer if there is no room for more
    try:
        own = by_layer([
            exactness(at, part)
            for asked, seen in prompts
            for at in run_again([*asked[:most], sum(asked[most:])] if asked[most:] else asked, seen)
            for part in halves[: len(at) // half]
        ])  # fmt: skip
        for buffer in buffers:
            buffer[slots] = 0
        # On the stream of service; nothing is served yet, so the host may wait.
        forwards = recomputer.stream()
        current_stream(slots.device).record().synchronize()
        forwards.run(lambda: recomputer.run(len(probe.layers), positions, where, spans))
        forwards.record().synchronize()
        # Part by part: among many values the few that differ would not show.
        recomputed = by_layer([exactness(at, part) for at in (slots, others) for part in halves])
    except Exception as error:  # a model's own code, with an unusual batch
        raise Refused(f"{type(error).__name__}: {error}") from None
    finally:
        for buffer, rows in zip(buffers, held, strict=True):
            buffer[slots] = rows  # later checks compare with what the model itself wrote
    bound = Bound.of_pass(pool.dtype)
    pairs = zip(recomputed, own, strict=True)
    good = [ours.as_good_as(models, bound) for ours, models in pairs]
    layers = good.index(False) if False in good else len(good)
    problem, beside = None, "; the model at other batch sizes"
    if layers < len(good):
        name = probe.layers[layers].name
        problem = f"{name} recomputed: {recomputed[layers]}{beside}: {own[layers]}"
    if not layers:
        raise Refused(str(problem))
    told = f"{together(recomputed[:layers])}{beside} {together(own[:layers])}"
    return Recomputed(layers, told, problem)
