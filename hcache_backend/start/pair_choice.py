"""The layers that codec ``krul`` may merge on this server, by the changes that merging makes."""

from __future__ import annotations

import logging
from itertools import combinations
from typing import Any

import numpy as np
import torch

from hcache_backend.checks.probe import probe_tokens
from hcache_backend.config import KrulOption
from hcache_backend.krul.choice import PairChoice
from hcache_backend.krul.paired_layout import PairedLayout
from hcache_backend.krul.segments import PairedSegments
from hcache_backend.krul.selection import Strategy
from hcache_backend.krul.statistics import PROBE_TOKENS, attention_sums
from hcache_backend.ranks import Refused, on_all_ranks
from hcache_backend.sglang.hooks import hidden_mode_hooks, install
from hcache_backend.sglang.recompute_batch import make_recomputer
from hcache_backend.start.page_plan import PagePlan
from hcache_backend.streams import current_stream

logger = logging.getLogger("hcache")


def find_mergeable(plan: PagePlan, option: KrulOption, slots: torch.Tensor, group: Any) -> None:
    """Give the plan the pairs that may be merged on all ranks of ``group``, and default pairs.

    All ranks call it. The model has written K and V to ``slots``, int64 ``[p * page_size]``. Raises
    Refused on every rank if the option's pairs do not fit the model or merging fails.
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


def find_probe(runner: Any, plan: PagePlan, slots: torch.Tensor) -> None:
    """Let the plan choose pairs for each node by a look at attention; raises Refused if that fails.
    K and V of the self-check's tokens are in ``slots`` (int64 ``[n]``)."""
    kvcache = plan.kvcache
    missing = install(hidden_mode_hooks())
    if missing is not None:
        raise Refused(missing)
    recomputer = make_recomputer(runner, kvcache, plan.methods.chunk_tokens)
    ids = np.array(probe_tokens(runner.model_config.vocab_size, len(slots)))[-PROBE_TOKENS:]
    problems: list[Exception] = []

    def run() -> None:
        try:
            asked = recomputer.probe(recomputer.layers, ids, slots)
            with torch.inference_mode():
                attention_sums(asked)
        except Exception as error:  # a model's own code, with an unusual batch
            problems.append(error)

    # On the stream of service; nothing is served yet, so the host may wait.
    forwards = recomputer.stream()
    current_stream(slots.device).record().synchronize()
    forwards.run(run)
    forwards.record().synchronize()
    if problems:
        raise Refused(f"{type(problems[0]).__name__}: {problems[0]}")
    plan.probe = recomputer


def _use(plan: PagePlan, choice: PairChoice, option: KrulOption) -> PairedLayout:
    """Install ``choice``. Returns the layout with the default pairs (option ``krul.pairs``), used
    until a node has pairs of its own."""
    layout = plan.layout
    assert isinstance(layout, PairedLayout)
    plan.choice = choice
    plan.layout = layout = layout.with_pairs(choice.coded(option.pairs or ()))
    return layout


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
