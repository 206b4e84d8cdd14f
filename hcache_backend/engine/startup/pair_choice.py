"""Which layers codec ``krul`` merges on this server, from what merging changes at the start."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hcache_backend.config import KrulOption
from hcache_backend.engine.ranks import on_all_ranks
from hcache_backend.engine.startup.agreement import Refused
from hcache_backend.engine.startup.codec_choice import changes
from hcache_backend.engine.startup.page_plan import PagePlan
from hcache_backend.krul.pair_forms import Fp8Pair, MergedPair
from hcache_backend.krul.paired_layout import CodedPair, PairedLayout
from hcache_backend.krul.selection import Pair, Strategy

logger = logging.getLogger("hcache")


def choose_pairs(plan: PagePlan, option: KrulOption, slots: torch.Tensor, group: Any) -> None:
    """Give the plan the pairs of this server. All tensor-parallel ranks (``group``) must call it.

    The model has written K and V to ``slots`` (int64 ``[n]``). A pair that a merge would change too
    much on one rank is not merged on any.

    Raises:
        Refused: On every rank: option ``krul`` names no pairs of the model's layers, or too many.
    """
    layout = plan.layout
    assert isinstance(layout, PairedLayout)
    pairs = _wanted(option, len(layout.layers), len(layout.pairs))
    merged = layout.with_pairs([(*pair, MergedPair.name) for pair in pairs])
    found: list[tuple[float, float] | None] = [None] * len(layout.layers)
    problem: Exception | None = None
    try:
        found = changes(plan.kv, merged, slots)
    except Exception as error:  # for want of memory, say
        problem = error

    def may_be_merged(pair: Pair) -> bool:
        both = [found[layer] for layer in pair]
        return all(change is not None and max(change) <= option.error for change in both)

    *may, fine = on_all_ranks(group, *map(may_be_merged, pairs), problem is None)
    if problem is not None or not fine:
        raise problem or Refused("another tensor-parallel rank could not merge layers")
    coded: list[CodedPair] = [
        (*pair, MergedPair.name if allowed else Fp8Pair.name)
        for pair, allowed in zip(pairs, may, strict=True)
    ]
    plan.layout = layout.with_pairs(coded)
    logger.info(
        "hcache: pairs of layers in each page: %s",
        ", ".join(f"{first} and {second} {code}" for first, second, code in plan.layout.pairs),
    )


def _wanted(option: KrulOption, layers: int, number: int) -> list[Pair]:
    """Those of the option, and neighbours among the other layers, from the last on."""
    pairs = [*(option.pairs or ())]
    try:
        paired = {layer for pair in Strategy(layers, tuple(pairs)).pairs for layer in pair}
    except ValueError as error:
        raise Refused(f"option 'krul': {error}") from None
    if len(pairs) > number:
        raise Refused(
            f"option 'krul' names {len(pairs)} pairs, and by its 'ratio' {option.ratio} pages of "
            f"{layers} layers have {number}"
        )
    left = [layer for layer in range(layers) if layer not in paired]
    while len(pairs) < number:
        second = left.pop()
        pairs.append((left.pop(), second))
    return pairs
