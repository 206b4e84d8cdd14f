"""Which layers codec ``krul`` may merge on this server, from what merging changes at the start."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from hcache_backend.engine.recompute.batch import make_recomputer
from hcache_backend.engine.startup.agreement import Refused
from hcache_backend.engine.startup.page_plan import PagePlan
from hcache_backend.engine.startup.self_check import probe_tokens, said_behind
from hcache_backend.krul.choice import PairChoice
from hcache_backend.krul.pair_forms import MergedPair
from hcache_backend.krul.paired_layout import PairedLayout
from hcache_backend.krul.selection import Pair, Strategy
from hcache_backend.krul.statistics import PROBE_TOKENS, PairSums, attention_sums
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
    choice = PairChoice(layers, len(layout.pairs), mergeable, option.ratio, option.gamma)
    layout = _use(plan, choice, option)
    logger.debug(
        "hcache: %d of %d pairs of layers may be merged; in each page until others are chosen: %s",
        len(mergeable),
        len(every),
        ", ".join(f"{first} and {second} {code}" for first, second, code in layout.pairs),
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
    recomputer = make_recomputer(runner, kvcache, plan.methods.chunk_tokens)
    ids = np.array(probe_tokens(runner.model_config.vocab_size, len(slots)))[-PROBE_TOKENS:]
    problems: list[Exception] = []
    found: list[PairSums] = []

    def run() -> None:
        try:
            asked = recomputer.probe(recomputer.layers, ids, slots)
            with torch.inference_mode():
                found.append(attention_sums(asked))
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
    """Let the plan merge only what hardly changes what the model says next.

    All tensor-parallel ranks (``group``) must call it; the pool gets back what it held. Tried are
    the closest pairs by ``sums`` of this rank, whatever they attend to, and those that are furthest
    from each other, or those of the option. If only the closest ones change little, no others are
    merged; if these change much, none are.

    Args:
        slots: Where the model has written K and V of the self-check's tokens, int64 ``[p *
            page_size]``.
    """
    layout, choice = plan.layout, plan.choice
    assert isinstance(layout, PairedLayout) and choice is not None
    layouts = [layout]
    if sums is not None:
        whole = PairSums.unpacked(sum_of_all_ranks(group, sums.packed().cpu()), choice.layers)
        layouts = list(dict.fromkeys(map(layout.with_pairs, choice.extremes(whole))))
    tried = [_merged(each) for each in layouts]
    if not tried[0]:
        return
    changes = _changes(runner, plan.kv, slots, layouts, group)
    fine = on_all_ranks(group, *(change <= option.kl for change in changes))
    for pairs, change in zip(tried, changes, strict=True):
        logger.debug(
            "hcache: merging layers %s changes the output by %.1e nats per token", pairs, change
        )
    if all(fine):
        return
    metrics.PROBLEMS.count("merged_layers")
    told = (
        "hcache: merging layers %s changes the model's output by %.1e nats per token (limit %.1e)"
    )
    if fine[0]:
        logger.warning(f"{told}: only %s are merged", tried[1], changes[1], option.kl, tried[0])
        _use(plan, replace(choice, mergeable=frozenset(tried[0])), option)
        return
    logger.warning(f"{told}: all pairs hold fp8", tried[0], changes[0], option.kl)
    plan.probe = None
    _use(plan, replace(choice, mergeable=frozenset()), option)


def _use(plan: PagePlan, choice: PairChoice, option: KrulOption) -> PairedLayout:
    """Pages of the plan have the pairs of the option, in what is returned, until others are chosen
    so."""
    layout = plan.layout
    assert isinstance(layout, PairedLayout)
    plan.choice = choice
    plan.layout = layout = layout.with_pairs(choice.coded(option.pairs or ()))
    return layout


def _merged(layout: PairedLayout) -> list[Pair]:
    return [(first, second) for first, second, code in layout.pairs if code == MergedPair.name]


def _changes(
    runner: Any, kv: KVSegments, slots: torch.Tensor, layouts: Sequence[PairedLayout], group: Any
) -> list[float]:
    """How much K and V that come back from pages of each layout change what the model says, in
    nats; infinity: it is not known."""
    held: list[list[torch.Tensor]] = []
    back: list[list[list[torch.Tensor]]] = []
    with _reported():
        held = [[plane[slots] for plane in kv.planes(layer)] for layer in kv.layers]
        for layout in layouts:
            planes, _ = kv.through_codec(layout, held)
            back.append([[part.to(slots.device) for part in parts] for parts in planes])
    # The model's own collectives follow: no rank may be missing there.
    (ready,) = on_all_ranks(group, len(back) == len(layouts))
    changes = [math.inf] * len(layouts)
    if not ready:
        return changes
    with _reported():
        exact = said_behind(runner, slots)
        for number, merged in enumerate(back):
            with _pool_holds(kv, slots, merged, held):
                changed = said_behind(runner, slots)
            changes[number] = float((exact.exp() * (exact - changed)).sum(-1).mean())
    return changes


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("hcache: the effect of merging layers could not be measured")


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
            plane[slots] = part


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
