"""The codec ``krul`` as the start of a server loads it (``start/page_plan.py:page_plugin``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch

from hcache_backend.config import KrulOption
from hcache_backend.krul.node_pairs import NodePairs
from hcache_backend.krul.paired_layout import PairedLayout
from hcache_backend.krul.pairs import PROBE_TOKENS, PairChoice, attention_sums, check_pairs
from hcache_backend.krul.segments import PairedSegments
from hcache_backend.ranks import Refused, smallest
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.streams import current_stream

logger = logging.getLogger("hcache")


class Krul:
    """Pages of K and V, each a rank's own, whose headers say how layers share them. Methods raise
    Refused on every rank if such pages cannot be used.

    Attributes:
        allowed_change: Largest change of K and V that codes of its own may make, relative RMS.
        wants_model: It chooses a layout for each node by a look at the model.
    """

    choice: PairChoice  # from settle

    def __init__(self, option: KrulOption) -> None:
        self._option = option
        self.allowed_change, self.wants_model = option.error, option.pairs is None

    def segments(
        self, kvcache: Any, layers: Sequence[int], page_size: int, groups: int
    ) -> PairedSegments:
        pairs = max(1, int(self._option.ratio * kvcache.layer_num / 2))
        return PairedSegments(kvcache, layers, page_size, groups, pairs)

    def settle(self, kv: Any, layout: Any, slots: torch.Tensor, group: Any) -> PairedLayout:
        """The layout with default pairs, after a look for pairs that all ranks may merge, which all
        ranks of ``group`` call. The model has written K and V to ``slots``, int64
        ``[p * page_size]``."""
        option, layers, number = self._option, len(layout.layers), len(layout.pairs)
        every, wanted = [*combinations(range(layers), 2)], option.pairs or ()
        try:  # alike on all ranks
            check_pairs(layers, wanted)
        except ValueError as error:
            raise Refused(str(error)) from None
        if len(wanted) > number:
            raise Refused(
                f"it names {len(wanted)} pairs, and by its 'ratio' {option.ratio} pages of "
                f"{layers} layers have {number}"
            )
        problem, small = "another tensor-parallel rank cannot merge layers", [False] * len(every)
        try:
            found = (kv.merge_changes(slots) <= option.error).cpu()
            small, fine = [bool(found[pair]) for pair in every], True
        except Exception as error:  # for want of memory, say
            problem, fine = f"layers cannot be merged: {type(error).__name__}: {error}", False
        *agreed, all_fine = smallest(group, *small, fine)
        if not all_fine:
            raise Refused(problem)
        mergeable = frozenset(pair for pair, fits in zip(every, agreed, strict=True) if fits)
        self.choice = PairChoice(layers, number, mergeable, option.ratio, option.gamma)
        settled: PairedLayout = layout.with_pairs(self.choice.coded(wanted))
        logger.debug(
            "hcache: %d of %d pairs of layers may be merged; until others are chosen: %s",
            len(mergeable),
            len(every),
            ", ".join(f"{first} and {second} {code}" for first, second, code in settled.pairs),
        )
        return settled

    def try_model(
        self, recomputer: Recomputer, token_ids: Sequence[int], slots: torch.Tensor
    ) -> None:
        """Look at the model once. K and V of ``token_ids`` are in ``slots``, int64 ``[n]``."""
        ids = np.array(token_ids)[-PROBE_TOKENS:]
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

    def backups(self, recomputer: Recomputer, layout: Any, group: Any, ranks: int) -> NodePairs:
        return NodePairs(recomputer, self.choice, layout, group, ranks)
