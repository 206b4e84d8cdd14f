"""The codec ``krul`` as the start of a server loads it (``start/page_plan.py:page_plugin``), and
which layers share slots in the pages of each node, by how its last tokens attend. A node is what
HiCache backs up at once: tokens of a sequence behind those of other nodes. Its last tokens run
through the model again before its backup. The sums of the nodes before it are added."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from hcache_backend import metrics
from hcache_backend.config import KrulOption
from hcache_backend.format.page import PageLayout
from hcache_backend.host.segments import KVSegments
from hcache_backend.krul import pairs as layer_pairs
from hcache_backend.krul.pairs import OBSERVED_TOKENS, CodedPair, PairChoice, PairSums
from hcache_backend.krul.segments import PairedLayout, PairedSegments, paired
from hcache_backend.metrics import logger
from hcache_backend.ranks import Group, Proposal, Refused, Turn, smallest, sum_of_all_ranks
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.streams import Event, StreamFailed, current_stream, host_tensor

_KNOWN = 256  # nodes whose sums are kept: 2 MB with 32 layers, 13 MB with 80


class _Tokens(NamedTuple):
    ids: np.ndarray  # the node's last tokens, int64 [t]
    keys: torch.Tensor  # slots of all tokens up to its end, int64 [n], on the device
    ends: str | None  # hash of its last page; None without an L3
    before: str | None  # hash of the last page of the node before it, likewise


@dataclass
class _Node:  # it waits for its backup
    pairs: Sequence[CodedPair] | None  # of its pages; None: they depend on its ``sums``
    tokens: _Tokens | None = None
    sums: torch.Tensor | None = None  # a table of PairSums, on the CPU behind ``event``
    event: Event | None = None


@dataclass(eq=False)
class NodePairs:
    """Chooses the pairs of nodes. Scheduler thread only; all ranks get to a step at one point."""

    _recomputer: Recomputer | None  # None after a failure to observe attention, _problem
    _choice: PairChoice
    _layout: PairedLayout  # of pages whose pairs no attention has chosen
    _group: Group  # the tensor-parallel ranks
    _ranks: int
    _problem: Exception | None = None
    _proposal: Proposal | None = None
    _nodes: deque[_Node] = field(default_factory=deque)
    _sums: OrderedDict[str, torch.Tensor] = field(default_factory=OrderedDict)

    def add_node(self, tree: Any, node_ids: Sequence[int]) -> None:
        """Append the node of SGLang's ``tree`` with these ids and observe its attention. Without a
        tree (None) its pages get the pairs that were chosen at the start. With several ranks it
        raises the model's exception: other ranks may wait in the model's own collectives."""
        node, tokens = _Node(self._layout.pairs), None
        self._nodes.append(node)
        if self._recomputer is None or tree is None:
            return
        with metrics.catching("probe", "pairs of layers are chosen without the attention"):
            tokens = _read_tokens(tree, node_ids[0])
        [known] = smallest(self._group, tokens is not None)  # on all ranks
        if known:
            node.pairs, node.tokens = None, tokens
            self._observe_next()

    @property
    def nodes(self) -> int:
        return len(self._nodes)

    def next_layout(self) -> PairedLayout | None:
        """Remove the first node and return its pages' layout; None if its pairs are not chosen."""
        pairs = self._nodes[0].pairs if self._nodes else None
        if pairs is None:
            return None
        self._nodes.popleft()
        for *_, code in pairs:
            metrics.PAIRS.count(code)
        return self._layout.with_pairs(pairs)

    def propose_answer(self, turn: Turn) -> None:
        """Propose to choose pairs for the first node without them, if its sums have arrived."""
        self._proposal = None
        if (node := self._undecided) is not None:
            self._proposal = turn.propose(node.event is None or node.event.query())

    def apply_answer(self) -> bool:
        """Choose pairs for the first node without them if its sums have arrived on all ranks, and
        observe the next one. True if that was the node to back up next. Raises as add_node."""
        node = self._undecided
        if node is None or self._proposal is None or not self._proposal.least[0]:
            return False
        node.pairs = self._choose_pairs(node)
        self._observe_next()
        return node is self._nodes[0]

    def drop_nodes(self) -> None:
        """Backups that wait were dropped, and the tree is empty."""
        self._nodes.clear()
        self._sums.clear()

    @property
    def _undecided(self) -> _Node | None:
        """The first node without pairs; no node behind it is observed before it has got them."""
        return next((node for node in self._nodes if node.pairs is None), None)

    def _observe_next(self) -> None:
        """Launch a pass of the model over the last tokens of the first node without pairs. Its sums
        of attention are in ``node.sums`` behind ``node.event``. They stay 0 if something fails."""
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
        node.sums, failures = sums, list[Exception]()

        def run() -> None:  # an exception here would end the stream of forward passes
            inputs = None
            try:
                inputs = recomputer.attention_inputs(layers, ids, keys)
                with torch.inference_mode():
                    table = layer_pairs.attention_sums(inputs).table
                sums.copy_(table, non_blocking=True)
            except Exception as error:
                self._problem = error
                if inputs is None:  # behind the model's pass no rank waits for this one
                    failures.append(error)

        forwards.run(run)
        node.event = forwards.record()
        if failures and self._ranks > 1:
            raise failures[0]

    def _choose_pairs(self, node: _Node) -> Sequence[CodedPair]:
        """Pairs by the sums of all ranks; those of the start once a rank failed (sums of 0)."""
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
            self._recomputer = None
            for other in self._nodes:
                other.pairs = other.pairs or self._layout.pairs
            metrics.PROBLEMS.count("probe")
            what = "attention could not be observed; pairs of layers stay those of the start"
            logger.error("hcache: %s: %r", what, self._problem)
            return self._layout.pairs
        sums = PairSums(self._add_sums(table, node.tokens))
        pairs, distances = self._choice.by_distance(sums), sums.distances
        for first, second, code in pairs:
            metrics.PAIR_DISTANCES.observe(code, float(distances[first, second]))
        return pairs

    def _add_sums(self, table: torch.Tensor, tokens: _Tokens) -> torch.Tensor:
        """``table`` of a node plus that of the nodes before it, if known; kept for nodes behind."""
        if tokens.before is not None and (before := self._sums.get(tokens.before)) is not None:
            self._sums.move_to_end(tokens.before)
            table = before + table
        if tokens.ends is not None:
            self._sums[tokens.ends] = table
            if len(self._sums) > _KNOWN:
                self._sums.popitem(last=False)
        return table


def _read_tokens(tree: Any, node_id: int) -> _Tokens:
    """The last tokens of a node of SGLang's tree, and the KV slots of all tokens up to its end."""
    spec = tree.build_storage_backup_spec(node_id, True)
    root = tree.empty_match_result.last_device_node
    ids = np.array(spec.token_ids[-OBSERVED_TOKENS:], dtype=np.int64)
    ends, before = ((hashes or [None])[-1] for hashes in (spec.hash_value, spec.prefix_keys))
    return _Tokens(ids, tree.collect_full_device_indices(node_id, root), ends, before)


class Krul:
    """Pages of K and V, each a rank's own, whose headers say how layers share them. Methods raise
    Refused on every rank if such pages cannot be used."""

    choice: PairChoice  # from choose_pairs
    observer: Recomputer | None = None  # computes attention; None: all nodes have one layout

    def __init__(self, option: KrulOption) -> None:
        self._option = option
        self.allowed_change = option.error  # of K and V by codes of its own, relative RMS
        self.wants_model = option.pairs is None  # to choose a layout for each node by a look at it

    def segments(
        self, kvcache: Any, layers: Sequence[int], page_size: int, groups: int
    ) -> PairedSegments:
        pairs = max(1, int(self._option.ratio * kvcache.layer_num / 2))
        return PairedSegments(kvcache, layers, page_size, groups, pairs)

    def choose_pairs(
        self, kv: KVSegments, layout: PageLayout, slots: torch.Tensor, group: Group
    ) -> PairedLayout:
        """Find the pairs of layers that may be merged: K and V change by at most option ``error``
        on all ranks of ``group``, which all call this. Returns the layout with the pairs of option
        ``pairs``, for nodes without a choice of their own. Changes are measured on K and V in
        ``slots``, int64 ``[p * page_size]``."""
        layout, option = paired(layout), self._option
        layers, number = len(layout.layers), len(layout.pairs)
        assert isinstance(kv, PairedSegments)
        pairs, option_pairs = [*combinations(range(layers), 2)], option.pairs or ()
        try:  # alike on all ranks
            layer_pairs.check_pairs(layers, option_pairs)
        except ValueError as error:
            raise Refused(str(error)) from None
        if len(option_pairs) > number:
            raise Refused(
                f"it names {len(option_pairs)} pairs, and by its 'ratio' {option.ratio} pages of "
                f"{layers} layers have {number}"
            )
        problem, small = "another tensor-parallel rank cannot merge layers", [False] * len(pairs)
        try:
            may_merge = (kv.merge_changes(slots) <= option.error).cpu()
            small, fine = [bool(may_merge[pair]) for pair in pairs], True
        except Exception as error:  # for want of memory, say
            problem, fine = f"layers cannot be merged: {type(error).__name__}: {error}", False
        *agreed, all_fine = smallest(group, *small, fine)
        if not all_fine:
            raise Refused(problem)
        mergeable = frozenset(pair for pair, fits in zip(pairs, agreed, strict=True) if fits)
        self.choice = PairChoice(layers, number, mergeable, option.ratio, option.gamma)
        chosen = layout.with_pairs(self.choice.coded(option_pairs))
        named = ", ".join(f"{first} and {second} {code}" for first, second, code in chosen.pairs)
        text = "hcache: %d of %d pairs of layers may be merged; until others are chosen: %s"
        logger.debug(text, len(mergeable), len(pairs), named)
        return chosen

    def try_model(
        self, recomputer: Recomputer, token_ids: Sequence[int], slots: torch.Tensor
    ) -> None:
        """Compare the attention of all layers once, as nodes do it in service; raises Refused if
        that fails. K and V of ``token_ids`` are in ``slots``, int64 ``[n]``."""
        ids = np.array(token_ids)[-OBSERVED_TOKENS:]
        problems: list[Exception] = []

        def run() -> None:
            try:
                inputs = recomputer.attention_inputs(recomputer.layers, ids, slots)
                with torch.inference_mode():
                    layer_pairs.attention_sums(inputs)
            except Exception as error:  # a model's own code, with an unusual batch
                problems.append(error)

        # On the stream of service; nothing is served yet, so the host may wait.
        forwards = recomputer.stream()
        current_stream(slots.device).record().synchronize()
        forwards.run(run)
        forwards.record().synchronize()
        if problems:
            raise Refused(f"{type(problems[0]).__name__}: {problems[0]}")

    def backups(self, layout: PageLayout, group: Group, ranks: int) -> NodePairs | None:
        if self.observer is None:
            return None
        return NodePairs(self.observer, self.choice, paired(layout), group, ranks)
