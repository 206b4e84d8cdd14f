"""Which layers share slots in the pages of each node, by how its last tokens attend.

A node is what HiCache backs up at once: tokens of a sequence behind those of other nodes. Its last
tokens are asked again, on the stream of forward passes, one node after the other. The node's backup
waits for the answer. The sums of the nodes before it are added, as Krul adds a prompt's and a
reply's. Scheduler thread only; all tensor-parallel ranks must get to each step at one point.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from hcache_backend import metrics
from hcache_backend.krul.paired_layout import PairedLayout
from hcache_backend.krul.pairs import (
    PROBE_TOKENS,
    CodedPair,
    PairChoice,
    PairSums,
    attention_sums,
)
from hcache_backend.ranks import Said, Turn, smallest, sum_of_all_ranks
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.streams import Event, StreamFailed, current_stream, host_tensor

logger = logging.getLogger("hcache")

_KNOWN = 256  # nodes whose sums are kept: 2 MB with 32 layers, 13 MB with 80


class _Tokens(NamedTuple):
    ids: np.ndarray  # the node's last tokens, int64 [t]
    keys: torch.Tensor  # slots of all tokens up to its end, int64 [n], on the device
    ends: str | None  # hash of its last page; None without an L3
    before: str | None  # hash of the last page of the node before it, likewise


@dataclass
class _Node:
    """A node that waits for its backup."""

    pairs: Sequence[CodedPair] | None  # of its pages; None: they depend on the answer
    tokens: _Tokens | None = None
    sums: torch.Tensor | None = None  # a table of PairSums, on the CPU behind ``event``
    event: Event | None = None


@dataclass(eq=False)
class NodePairs:
    """Chooses the pairs of nodes."""

    _recomputer: Recomputer | None  # None after a failure to observe attention, _problem
    _choice: PairChoice
    _layout: PairedLayout  # of pages whose pairs no attention has chosen
    _group: Any  # the tensor-parallel ranks
    _ranks: int
    _problem: Exception | None = None
    _said: Said | None = None
    _nodes: deque[_Node] = field(default_factory=deque)
    _sums: OrderedDict[str, torch.Tensor] = field(default_factory=OrderedDict)

    def ask(self, tree: Any, node_ids: Sequence[int]) -> None:
        """Append the node of SGLang's ``tree`` with these ids; without a tree its pairs are those
        of the start.

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
        [known] = smallest(self._group, tokens is not None)
        if known:
            node.pairs, node.tokens = None, tokens
            self._ask_next()

    @property
    def asked(self) -> int:
        return len(self._nodes)

    def next(self) -> PairedLayout | None:
        """Remove the first node and return the layout of its pages; None if it has to wait."""
        pairs = self._nodes[0].pairs if self._nodes else None
        if pairs is None:
            return None
        self._nodes.popleft()
        for *_, code in pairs:
            metrics.PAIRS.count(code)
        return self._layout.with_pairs(pairs)

    def look(self, turn: Turn) -> None:
        """Say whether an answer has arrived."""
        node, self._said = self._undecided, None
        if node is not None:
            self._said = turn.say(node.event is None or node.event.query())

    def answered(self) -> bool:
        """Choose by an answer that has arrived on all ranks, and ask the next node. True if the
        first node has its pairs since now. Raises as :meth:`ask`."""
        node = self._undecided
        if node is None or self._said is None or not self._said.least[0]:
            return False
        node.pairs = self._chosen(node)
        if self._recomputer is None:
            for other in self._nodes:
                other.pairs = other.pairs or self._layout.pairs
        self._ask_next()
        return node is self._nodes[0]

    def forget(self) -> None:
        """Backups that wait were dropped, and the tree is empty."""
        self._nodes.clear()
        self._sums.clear()

    @property
    def _undecided(self) -> _Node | None:
        """The first node without pairs; none behind it is asked before its answer arrives."""
        return next((node for node in self._nodes if node.pairs is None), None)

    def _ask_next(self) -> None:
        node, recomputer = self._undecided, self._recomputer
        if node is None or node.sums is not None or recomputer is None:
            return
        assert node.tokens is not None
        layers, keys, ids = self._choice.layers, node.tokens.keys, node.tokens.ids
        shape, forwards = (layers + 2, layers), None
        node.sums = torch.zeros(shape, dtype=torch.float64)
        try:
            sums = host_tensor(shape, torch.float64, keys.device).zero_()
            forwards = recomputer.stream()
            forwards.wait(current_stream(keys.device).record())
            forwards.keep(keys)
        except Exception as error:
            self._problem = error
        [ready] = smallest(self._group, forwards is not None)
        if not ready or forwards is None:
            return
        node.sums, broken = sums, list[Exception]()

        def run() -> None:  # an exception here would end the stream of forward passes
            try:
                asked = recomputer.probe(layers, ids, keys)
            except Exception as error:
                self._problem = error
                broken.append(error)
                return
            try:  # no rank waits for this one any more
                with torch.inference_mode():
                    found = attention_sums(asked).table
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
        [fine] = smallest(self._group, bool(node.sums[0, 0] > 0))
        table = sum_of_all_ranks(self._group, node.sums)
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
        found = PairSums(self._added(table, node.tokens))
        pairs, distances = self._choice.by_distance(found), found.distances
        for first, second, code in pairs:
            metrics.PAIR_DISTANCES.observe(code, float(distances[first, second]))
        return pairs

    def _added(self, table: torch.Tensor, tokens: _Tokens) -> torch.Tensor:
        """The sums of a node and of those before it."""
        if tokens.before is not None and (before := self._sums.get(tokens.before)) is not None:
            self._sums.move_to_end(tokens.before)
            table = before + table
        if tokens.ends is not None:
            self._sums[tokens.ends] = table
            if len(self._sums) > _KNOWN:
                self._sums.popitem(last=False)
        return table


def _tokens(tree: Any, node_id: int) -> _Tokens:
    spec = tree.build_storage_backup_spec(node_id, True)
    root = tree.empty_match_result.last_device_node
    ids = np.array(spec.token_ids[-PROBE_TOKENS:], dtype=np.int64)
    ends, before = ((hashes or [None])[-1] for hashes in (spec.hash_value, spec.prefix_keys))
    return _Tokens(ids, tree.collect_full_device_indices(node_id, root), ends, before)
