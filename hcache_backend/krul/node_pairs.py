"""Which layers share slots in the pages of each node, by how its last tokens attend.

A node is what HiCache backs up at once: tokens of a sequence behind those of other nodes. Its last
tokens are asked again, on the stream of forward passes, one node after the other; until that has
been answered its backup is put off. What was found out of the nodes before it is added, as Krul
adds a prompt's and a reply's. Scheduler thread only; all tensor-parallel ranks must get to each
step at one point.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hcache_backend import metrics
from hcache_backend.krul.choice import PairChoice
from hcache_backend.krul.paired_layout import CodedPair, PairedLayout
from hcache_backend.krul.statistics import PROBE_TOKENS, PairSums, attention_sums
from hcache_backend.ranks import on_all_ranks, sum_of_all_ranks
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.streams import Event, StreamFailed, current_stream, host_tensor
from hcache_backend.turn import Said, Turn

logger = logging.getLogger("hcache")


_KNOWN = 256
"""Sums of so many nodes are kept: 2 MB with 32 layers, 13 MB with 80."""


class _Tokens(NamedTuple):
    """Where a node is.

    Attributes:
        ids: Its last tokens, int64 ``[t]``.
        keys: Slots of all tokens up to its end, int64 ``[n]``, on the device.
        ends: Hash of its last page; None: it has none, as without an L3.
        behind: That of the node before it, likewise.
    """

    ids: np.ndarray
    keys: torch.Tensor
    ends: str | None
    behind: str | None


@dataclass
class _Node:
    """A node that waits for its backup.

    Attributes:
        pairs: Those of its pages; None: not known yet, and its ``tokens`` are to be asked.
        sums: As of :meth:`PairSums.packed`, on the CPU behind ``event``; None: they were not asked.
    """

    pairs: Sequence[CodedPair] | None
    tokens: _Tokens | None = None
    sums: torch.Tensor | None = None
    event: Event | None = None


class NodePairs:
    """Chooses the pairs of nodes.

    Args:
        recomputer: Runs the model.
        choice: Chooses by what was found out.
        layout: The layout of pages of which nothing can be found out.
        group: The tensor-parallel ranks...
        ranks: ...and how many they are.
    """

    def __init__(
        self,
        recomputer: Recomputer,
        choice: PairChoice,
        layout: PairedLayout,
        group: Any,
        ranks: int,
    ) -> None:
        self._recomputer: Recomputer | None = recomputer
        self._problem: Exception | None = None
        self._ranks = ranks
        self._choice = choice
        self._layout = layout
        self._group = group
        self._nodes: deque[_Node] = deque()
        self._said: Said | None = None
        self._sums: OrderedDict[str, PairSums] = OrderedDict()

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
        tokens: _Tokens | None = None
        with metrics.harmless("probe", "pairs of layers are chosen without the attention"):
            tokens = _tokens(tree, node_ids[0])
        (known,) = on_all_ranks(self._group, tokens is not None)
        if known:
            node.pairs, node.tokens = None, tokens
            self._ask_next()

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

    def look(self, turn: Turn) -> None:
        """Say whether an answer has arrived."""
        node, self._said = self._undecided, None
        if node is not None:
            self._said = turn.say(node.event is None or node.event.query())

    def answered(self) -> bool:
        """The ranks have agreed: see to an answer that has arrived on all, and ask the next node;
        whether the first node waits no more.

        Raises:
            Exception: As :meth:`ask` does.
        """
        node = self._undecided
        if node is None or self._said is None or not self._said.least[0]:
            return False
        node.pairs = self._chosen(node)
        if self._recomputer is None:
            for other in self._nodes:
                if other.pairs is None:
                    other.pairs = self._layout.pairs
        self._ask_next()
        return node is self._nodes[0]

    def forget(self) -> None:
        """Backups that wait were dropped, and the tree is empty."""
        self._nodes.clear()
        self._sums.clear()

    @property
    def _undecided(self) -> _Node | None:
        """The first node that waits for an answer; none behind it is asked before that arrives."""
        return next((node for node in self._nodes if node.pairs is None), None)

    def _ask_next(self) -> None:
        node, recomputer = self._undecided, self._recomputer
        if node is None or node.sums is not None or recomputer is None:
            return
        assert node.tokens is not None
        layers, keys, ids = self._choice.layers, node.tokens.keys, node.tokens.ids
        size = (PairSums.packed_size(layers),)
        node.sums, forwards = torch.zeros(size, dtype=torch.float64), None
        try:
            sums = host_tensor(size, torch.float64, keys.device).zero_()
            forwards = recomputer.stream()
            forwards.wait(current_stream(keys.device).record())
            forwards.keep(keys)
        except Exception as error:
            self._problem = error
        (ready,) = on_all_ranks(self._group, forwards is not None)
        if not ready or forwards is None:
            return
        node.sums, broken = sums, list[Exception]()

        def run() -> None:  # what it raised would end the stream of forward passes
            try:
                asked = recomputer.probe(layers, ids, keys)
            except Exception as error:
                self._problem = error
                broken.append(error)
                return
            try:  # no rank waits for this one any more
                with torch.inference_mode():
                    found = attention_sums(asked).packed()
                sums.copy_(found, non_blocking=True)
            except Exception as error:
                self._problem = error

        forwards.run(run)
        node.event = forwards.record()
        if broken and self._ranks > 1:
            raise broken[0]

    def _chosen(self, node: _Node) -> Sequence[CodedPair]:
        assert node.sums is not None and node.tokens is not None
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
                    "hcache: attention could not be observed; pairs of layers stay those of the "
                    "start: %r",
                    self._problem,
                )
            return self._layout.pairs
        found = self._added(PairSums.unpacked(sums, self._choice.layers), node.tokens)
        pairs, distances = self._choice.by_distance(found), found.distances
        for first, second, code in pairs:
            metrics.PAIR_DISTANCES.observe(code, float(distances[first, second]))
        return pairs

    def _added(self, found: PairSums, tokens: _Tokens) -> PairSums:
        """What was found of a node and of those before it."""
        if tokens.behind is not None and (before := self._sums.get(tokens.behind)) is not None:
            self._sums.move_to_end(tokens.behind)
            found = before + found
        if tokens.ends is not None:
            self._sums[tokens.ends] = found
            if len(self._sums) > _KNOWN:
                self._sums.popitem(last=False)
        return found


def _tokens(tree: Any, node_id: int) -> _Tokens:
    spec = tree.build_storage_backup_spec(node_id, True)
    root = tree.empty_match_result.last_device_node
    ids = np.array(spec.token_ids[-PROBE_TOKENS:], dtype=np.int64)
    ends, behind = ((hashes or [None])[-1] for hashes in (spec.hash_value, spec.prefix_keys))
    return _Tokens(ids, tree.collect_full_device_indices(node_id, root), ends, behind)
