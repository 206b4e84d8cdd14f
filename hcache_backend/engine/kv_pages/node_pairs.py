"""Which layers share slots in the pages of each node, by how its last tokens attend.

A node is what HiCache backs up at once: tokens of a sequence behind those of other nodes. Its last
tokens are asked again, on the stream of forward passes; until that has been answered its backup is
put off. Scheduler thread only; all tensor-parallel ranks must get to each step at one point.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hcache_backend.engine import metrics
from hcache_backend.engine.ranks import on_all_ranks, sum_of_all_ranks
from hcache_backend.krul.choice import PairChoice
from hcache_backend.krul.paired_layout import CodedPair, PairedLayout
from hcache_backend.krul.statistics import PROBE_TOKENS, Measure, PairSums
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.streams import Event, StreamFailed, current_stream, host_tensor

logger = logging.getLogger("hcache")


@dataclass
class _Node:
    """A node that waits for its backup.

    Attributes:
        pairs: Those of its pages; None: not known yet.
        sums: As of :meth:`PairSums.packed`, on the CPU behind ``event``.
    """

    pairs: Sequence[CodedPair] | None
    sums: torch.Tensor | None = None
    event: Event | None = None


class NodePairs:
    """Chooses the pairs of nodes.

    Args:
        recomputer: Runs the model...
        measure: ...and looks at it so.
        choice: Chooses by what was found out.
        layout: The layout of pages of which nothing can be found out.
        group: The tensor-parallel ranks...
        ranks: ...and how many they are.
    """

    def __init__(
        self,
        recomputer: Recomputer,
        measure: Measure,
        choice: PairChoice,
        layout: PairedLayout,
        group: Any,
        ranks: int,
    ) -> None:
        self._recomputer: Recomputer | None = recomputer
        self._problem: Exception | None = None
        self._ranks = ranks
        self._measure = measure
        self._choice = choice
        self._layout = layout
        self._group = group
        self._nodes: deque[_Node] = deque()

    def ask(self, tree: Any, node_ids: Sequence[int]) -> None:
        """The node of SGLang's ``tree`` with these ids comes behind those that were asked; without
        a tree nothing can be found out.

        Raises:
            Exception: The model could not be run, and there are other ranks: they may wait for this
                one in the model's own collectives, so the server cannot go on.
        """
        node = _Node(self._layout.pairs)
        self._nodes.append(node)
        if self._recomputer is None or tree is None:
            return
        tokens: tuple[np.ndarray, torch.Tensor] | None = None
        with metrics.harmless("probe", "pairs of layers are chosen without the attention"):
            tokens = _tokens(tree, node_ids[0])
        (known,) = on_all_ranks(self._group, tokens is not None)
        if known and tokens is not None:
            self._probe(self._recomputer, node, *tokens)
            if self._problem is not None and self._ranks > 1:
                raise self._problem

    @property
    def asked(self) -> int:
        """Nodes that wait."""
        return len(self._nodes)

    def next(self) -> PairedLayout | None:
        """The layout of the first node's pages, which waits no more; None: it does."""
        if not self._nodes or self._nodes[0].pairs is None:
            return None
        pairs = self._nodes.popleft().pairs
        assert pairs is not None
        for *_, code in pairs:
            metrics.PAIRS.count(code)
        return self._layout.with_pairs(pairs)

    def answered(self) -> bool:
        """Look whether answers have arrived; whether the first node waits no more."""
        before = self._nodes[0].pairs if self._nodes else None
        for node in self._nodes:
            if node.pairs is not None:
                continue
            (arrived,) = on_all_ranks(self._group, node.event is None or node.event.query())
            if not arrived:
                break
            node.pairs = self._chosen(node)
        return before is None and bool(self._nodes) and self._nodes[0].pairs is not None

    def forget(self) -> None:
        """Backups that wait were dropped."""
        self._nodes.clear()

    def _probe(
        self, recomputer: Recomputer, node: _Node, token_ids: np.ndarray, keys: torch.Tensor
    ) -> None:
        layers = self._choice.layers
        size = (PairSums.packed_size(layers),)
        node.pairs, node.sums = None, torch.zeros(size, dtype=torch.float64)

        def run() -> None:
            try:
                found = recomputer.probe(layers, token_ids, keys, self._measure)
                sums.copy_(found.packed(), non_blocking=True)
            except Exception as error:  # raised, it would end the stream of forward passes
                self._problem = error

        try:
            sums = node.sums = host_tensor(size, torch.float64, keys.device).zero_()
            forwards = recomputer.stream()
            forwards.wait(current_stream(keys.device).record())
            forwards.keep(keys)
            forwards.run(run)
            node.event = forwards.record()
        except Exception as error:
            self._problem = error

    def _chosen(self, node: _Node) -> Sequence[CodedPair]:
        assert node.sums is not None
        try:
            if node.event is not None:
                node.event.synchronize()
        except StreamFailed as error:
            self._problem = error
            node.sums.zero_()
        (fine,) = on_all_ranks(self._group, bool(node.sums[0] > 0))
        sums = sum_of_all_ranks(self._group, node.sums)
        if not fine:
            if self._recomputer is not None:
                self._recomputer = None
                metrics.PROBLEMS.count("probe")
                logger.error(
                    "hcache: attention cannot be looked at, and pairs of layers are those of the "
                    "start from now on: %r",
                    self._problem,
                )
            return self._layout.pairs
        found = PairSums.unpacked(sums, self._choice.layers)
        pairs, distances = self._choice.by_distance(found), found.distances
        for first, second, code in pairs:
            if (distance := float(distances[first, second])) < math.inf:
                metrics.PAIR_DISTANCES.observe(code, distance)
        return pairs


def _tokens(tree: Any, node_id: int) -> tuple[np.ndarray, torch.Tensor]:
    """The last tokens of a node, int64 ``[t]``, and the slots of all tokens up to its end, int64
    ``[n]``, on the device."""
    token_ids = tree.build_storage_backup_spec(node_id, False).token_ids[-PROBE_TOKENS:]
    root = tree.empty_match_result.last_device_node
    return np.array(token_ids, dtype=np.int64), tree.collect_full_device_indices(node_id, root)
