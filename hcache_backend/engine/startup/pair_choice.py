"""Which layers codec ``krul`` may merge on this server, from what merging changes at the start."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch

from hcache_backend.config import KrulOption
from hcache_backend.engine import metrics
from hcache_backend.engine.hooks import hidden_mode_hooks, install
from hcache_backend.engine.kv_pages.paired import PairedSegments
from hcache_backend.engine.kv_pages.segments import KVSegments
from hcache_backend.engine.ranks import on_all_ranks, sum_of_all_ranks
from hcache_backend.engine.recompute.batch import forward_stream, model_forward
from hcache_backend.engine.startup.agreement import Refused
from hcache_backend.engine.startup.page_plan import PagePlan
from hcache_backend.engine.startup.self_check import probe_tokens, said_behind
from hcache_backend.krul.choice import PairChoice
from hcache_backend.krul.pair_forms import MergedPair
from hcache_backend.krul.paired_layout import PairedLayout
from hcache_backend.krul.selection import Strategy
from hcache_backend.krul.statistics import PROBE_TOKENS, PairSums
from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.streams import current_stream

logger = logging.getLogger("hcache")


def find_mergeable(plan: PagePlan, option: KrulOption, slots: torch.Tensor, group: Any) -> None:
    """Give the plan what may be merged on all tensor-parallel ranks (``group``), which all call it,
    and the pairs of pages until others are chosen: those of the option.

    The model has written K and V to ``slots``, int64 ``[p * page_size]``.

    Raises:
        Refused: On every rank: the option names no pairs of the model's layers, or too many, or
            merging cannot be tried.
    """
    layout, kv = plan.layout, plan.kv
    assert isinstance(layout, PairedLayout) and isinstance(kv, PairedSegments)
    layers = len(layout.layers)
    every = [*combinations(range(layers), 2)]
    problem, small = _problem(option, layers, len(layout.pairs)), [False] * len(every)
    if problem is None:
        try:
            found = (kv.merge_changes(slots) <= option.error).cpu()
            small = [bool(found[pair]) for pair in every]
        except Exception as error:  # for want of memory, say
            problem = f"layers cannot be merged: {type(error).__name__}: {error}"
    *small, fine = on_all_ranks(group, *small, problem is None)
    if not fine:
        raise Refused(problem or "another tensor-parallel rank cannot merge layers")
    mergeable = frozenset(pair for pair, fits in zip(every, small, strict=True) if fits)
    plan.choice = PairChoice(layers, len(layout.pairs), mergeable, option.ratio, option.gamma)
    plan.layout = layout.with_pairs(plan.choice.coded(option.pairs or ()))
    if option.distance == "output":
        plan.measure = partial(kv.output_sums, mergeable)
    logger.info(
        "hcache: %d of %d pairs of layers may be merged; in each page until others are chosen: %s",
        len(mergeable),
        len(every),
        ", ".join(f"{first} and {second} {code}" for first, second, code in plan.layout.pairs),
    )


def find_probe(runner: Any, plan: PagePlan, slots: torch.Tensor) -> PairSums:
    """Let the plan choose pairs for each node, if attention can be looked at here; returns what is
    found of this rank's heads.

    The model has written K and V of the self-check's tokens to ``slots`` (int64 ``[n]``).

    Raises:
        Refused: It cannot be.
    """
    kvcache = plan.kvcache
    missing = install(hidden_mode_hooks())
    if missing is not None:
        raise Refused(missing)
    pool, layers = PagedPool(kvcache), len(plan.layout.layers)
    recomputer = Recomputer(
        model_forward(runner),
        pool,
        kvcache.start_layer,
        plan.methods.chunk_tokens,
        partial(forward_stream, runner),
    )
    ids = np.array(probe_tokens(runner.model_config.vocab_size, len(slots)))[-PROBE_TOKENS:]
    problems: list[Exception] = []
    found: list[PairSums] = []

    def run() -> None:
        try:
            found.append(recomputer.probe(layers, ids, slots, plan.measure))
        except Exception as error:  # a model's own code, with a batch that it was not made for
            problems.append(error)

    # Where it will be run in service; nothing is served yet, so the host may wait.
    forwards = recomputer.stream()
    current_stream(slots.device).record().synchronize()
    forwards.run(run)
    forwards.record().synchronize()
    if problems:
        raise Refused(f"{type(problems[0]).__name__}: {problems[0]}")
    plan.probe = recomputer
    return found[0]


@torch.no_grad()
def check_output(
    runner: Any,
    plan: PagePlan,
    slots: torch.Tensor,
    sums: PairSums | None,
    option: KrulOption,
    group: Any,
) -> None:
    """Let the plan merge nothing if that changes too much what the model says next.

    All tensor-parallel ranks (``group``) must call it; the pool gets back what it held. Tried are
    the closest pairs by ``sums`` of this rank, whatever they attend to, or those of the option.

    Args:
        slots: Where the model has written K and V of the self-check's tokens, int64 ``[p *
            page_size]``.
    """
    layout, kv, choice = plan.layout, plan.kv, plan.choice
    assert isinstance(layout, PairedLayout) and choice is not None
    if sums is not None:
        whole = PairSums.unpacked(sum_of_all_ranks(group, sums.packed().cpu()), choice.layers)
        layout = layout.with_pairs(replace(choice, gamma=0.0).by_distance(whole))
    tried = [pair for *pair, code in layout.pairs if code == MergedPair.name]
    if not tried:
        return
    held = [[plane[slots] for plane in kv.planes(layer)] for layer in kv.layers]
    kl = math.inf
    try:
        merged, _ = kv.through_codec(layout, held)
        exact = said_behind(runner, slots)
        with _pool_holds(kv, slots, merged, held):
            changed = said_behind(runner, slots)
        kl = float((exact.exp() * (exact - changed)).sum(-1).mean())
    except Exception:
        logger.exception("hcache: what merged layers change in what the model says is not known")
    (fine,) = on_all_ranks(group, kl <= option.kl)
    if fine:
        logger.info("hcache: merging layers %s changes what is said by %.1e nats", tried, kl)
        return
    metrics.PROBLEMS.count("merged_layers")
    logger.warning(
        "hcache: merging layers %s changes what the model says by %.1e nats a token (allowed %.1e):"
        " all pairs hold fp8",
        tried,
        kl,
        option.kl,
    )
    plan.choice, plan.probe = replace(choice, mergeable=frozenset()), None
    plan.layout = layout.with_pairs(plan.choice.coded(option.pairs or ()))


@contextmanager
def _pool_holds(
    kv: KVSegments,
    slots: torch.Tensor,
    planes: Sequence[Sequence[torch.Tensor]],
    before: Sequence[Sequence[torch.Tensor]],
) -> Iterator[None]:
    """K and V of every layer are others within the block."""
    try:
        _put(kv, slots, planes)
        yield
    finally:
        _put(kv, slots, before)


def _put(kv: KVSegments, slots: torch.Tensor, planes: Sequence[Sequence[torch.Tensor]]) -> None:
    for layer, parts in zip(kv.layers, planes, strict=True):
        for plane, part in zip(kv.planes(layer), parts, strict=True):
            plane[slots] = part.to(plane.device)


def _problem(option: KrulOption, layers: int, number: int) -> str | None:
    try:
        named = len(Strategy(layers, option.pairs or ()).pairs)
    except ValueError as error:
        return f"option 'krul': {error}"
    if named > number:
        return (
            f"option 'krul' names {named} pairs, and by its 'ratio' {option.ratio} pages of "
            f"{layers} layers have {number}"
        )
    return None
