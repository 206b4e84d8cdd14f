"""Which layers share slots in the pages of each node, and backups that wait for it."""

import itertools
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from hcache_backend import metrics
from hcache_backend.config import KrulOption
from hcache_backend.krul import pairs as layer_pairs
from hcache_backend.krul import plugin as module
from hcache_backend.krul.pairs import CodedPair, PairSums
from hcache_backend.krul.plugin import Krul, NodePairs
from hcache_backend.sglang.controller import OwnPagesController
from hcache_backend.streams import CallerStream, Stream
from tests.engine.in_process.encoded_kv.test_pairs import LAYERS, plan_of
from tests.kit.host import PAGE, bare_controller, slots_of
from tests.kit.ranks import Ranks, together
from tests.kit.turns import Reduce, alone, answered, turn_of

START = ((4, 5, "int8"),)
"""The pairs of the start."""
MERGED, OTHER = ((1, 4, "merged"),), ((0, 2, "merged"),)


class Tree:
    """SGLang's, of nodes behind each other, each a prefix of the next one."""

    def __init__(self, *lengths: int) -> None:
        ends = np.cumsum((0, *lengths)).tolist()
        self.nodes = [range(a, b) for a, b in itertools.pairwise(ends)]
        self.empty_match_result = SimpleNamespace(last_device_node=-1)
        self.writing: int | None = None  # its host pages are not in the tree yet

    def build_storage_backup_spec(self, node: int, prefix: bool) -> Any:
        assert prefix
        if node == self.writing:
            return None
        return SimpleNamespace(
            token_ids=array("q", self.nodes[node]),
            hash_value=[f"page {node}"],
            prefix_keys=[f"page {before}" for before in range(node)],
        )

    def collect_full_device_indices(self, node: int, root: int) -> torch.Tensor:
        assert root == -1
        return torch.arange(self.nodes[node].stop) + PAGE


def far(distances: dict[tuple[int, int], float], rows: int = 10) -> PairSums:
    """Layers that differ much but for these."""
    squared = torch.full((LAYERS, LAYERS), 9.0, dtype=torch.float64)
    for (first, second), distance in distances.items():
        squared[first, second] = squared[second, first] = distance
    mass = torch.full((LAYERS,), 0.9 * rows, dtype=torch.float64)
    return PairSums(torch.vstack((torch.full_like(mass, rows), mass, squared)))


class Model:
    """Whose layers differ so in a sequence of some length, by default 1 and 4 least of 40 tokens.

    Attributes:
        asked: The last tokens, and how many there are.
        fails: In "attention_inputs" or "measure", the result of which one waits for; "": it does
        not. arrived: Whether answers have."""

    def __init__(self, sums: dict[int, PairSums] | None = None) -> None:
        self.sums = sums or {40: far({(1, 4): 0.1})}
        self.asked: list[tuple[list[int], int]] = []
        self.fails = ""
        self.arrived = True

    def stream(self) -> Stream:
        return Forwards(self)

    def attention_inputs(self, layers: int, ids: Any, keys: torch.Tensor) -> Callable[[], PairSums]:
        self.may_fail("attention_inputs")
        self.asked.append((ids.tolist(), len(keys)))

        def measure() -> PairSums:
            self.may_fail("measure")
            return self.sums[len(keys)]

        return measure

    def may_fail(self, at: str) -> None:
        if self.fails == at:
            raise RuntimeError("no memory")


class Forwards(CallerStream):
    """Events of which pass when the model says so."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def record(self, *, timed: bool = False) -> Any:
        return SimpleNamespace(query=lambda: self._model.arrived, synchronize=lambda: None)


def node_pairs(model: Any, group: Any = None, *, ranks: int = 1) -> NodePairs:
    plugin = Krul(KrulOption(error=2, ratio=0.34, gamma=0.5))
    plan, plugin.observer = plan_of(plugin), model
    layout = plugin.choose_pairs(plan.kv, plan.page, slots_of(1, 2, 3), None)
    pairs = plugin.backups(layout, group, ranks)
    assert pairs is not None
    return pairs


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the attention of a :class:`Model` is like is what it says."""
    monkeypatch.setattr(layer_pairs, "attention_sums", lambda asked: asked())


def ready(pairs: NodePairs) -> list[tuple[CodedPair, ...]]:
    return [layout.pairs for layout in iter(pairs.next_layout, None)]


def chosen(
    pairs: NodePairs, tree: Tree | None = None, node: int = 0, reduce: Reduce = alone
) -> list[tuple[CodedPair, ...]]:
    """The pairs of the nodes that wait no more once a node has been asked and has answered."""
    pairs.add_node(tree or Tree(40), [node])
    assert answered(pairs, reduce)
    return ready(pairs)


def test_each_node_has_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(metrics.PAIRS, "count", lambda code: counted.append(("pair", code)))
    observe: Callable[..., None] = lambda code, far: counted.append(("far", code, round(far, 3)))  # noqa: E731
    monkeypatch.setattr(metrics.PAIR_DISTANCES, "observe", observe)
    model = Model({40: far({(1, 4): 0.1}), 60: far({(0, 2): 0.1})})
    pairs = node_pairs(model)
    pairs.add_node(Tree(40), [0])
    assert pairs.next_layout() is None  # not before the answer was looked at
    assert answered(pairs)
    pairs.drop_nodes()  # the tree is emptied
    pairs.add_node(Tree(60), [0])
    assert answered(pairs)
    pairs.add_node(None, [1])
    assert ready(pairs) == [OTHER, START]
    # The last tokens of the node, which see all tokens before them.
    assert model.asked == [([*range(8, 40)], 40), ([*range(28, 60)], 60)]
    assert counted == [
        *(("far", "merged", 0.1), ("far", "merged", 0.1)),
        *(("pair", "merged"), ("pair", "int8")),
    ]


def test_one_node_is_asked_after_the_other() -> None:
    """However many are to be backed up at once."""
    model = Model({end: far({(1, 4): 0.1}) for end in (40, 80, 120)})
    pairs, tree = node_pairs(model), Tree(40, 40, 40)
    model.arrived = False
    for node in range(3):
        pairs.add_node(tree, [node])
    assert not answered(pairs) and not answered(pairs)
    assert [length for _, length in model.asked] == [40]
    model.arrived = True
    assert answered(pairs)
    assert [length for _, length in model.asked] == [40, 80]
    assert not answered(pairs)  # the first node waits no more since before
    assert [length for _, length in model.asked] == [40, 80, 120]
    assert len(ready(pairs)) == 2
    assert answered(pairs) and len(ready(pairs)) == 1


def test_what_was_found_of_a_prompt_is_added_to_what_is_found_of_its_reply() -> None:
    """The prompt's layers 1 and 4 are close; in the reply 0 and 2 are, by little."""
    prompt, reply = far({(1, 4): 0.1, (0, 2): 5.0}), far({(1, 4): 1.1, (0, 2): 1.0})
    pairs, tree = node_pairs(Model({40: prompt, 100: reply})), Tree(40, 60)
    assert [chosen(pairs, tree, node) for node in (0, 1)] == [[MERGED], [MERGED]]
    # What is before the reply came back from L3, say.
    assert chosen(node_pairs(Model({100: reply})), tree, 1) == [OTHER]
    pairs.drop_nodes()
    assert chosen(pairs, tree, 1) == [OTHER]


def test_few_sums_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KNOWN", 2)
    pairs, tree = node_pairs(Model({40 * n: far({}) for n in (1, 2, 3)})), Tree(40, 40, 40)
    for node in range(3):
        assert len(chosen(pairs, tree, node)) == 1
    assert [*pairs._sums] == ["page 1", "page 2"]
    assert (pairs._sums["page 2"][0] == 30).all()


def test_without_an_answer_pairs_are_those_of_the_start(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    pairs = node_pairs(model)
    pairs.add_node(None, [0])
    pairs.add_node(Tree(), [3])  # a node that SGLang does not know
    model.fails = "attention_inputs"
    pairs.add_node(Tree(40), [0])
    pairs.add_node(Tree(40), [0])
    assert ready(pairs) == [START] * 2
    with caplog.at_level("ERROR", "hcache"):
        assert answered(pairs)
    assert "attention could not be observed" in caplog.text and "no memory" in caplog.text
    model.fails = ""
    pairs.add_node(Tree(40), [0])
    assert ready(pairs) == [START] * 3
    assert model.asked == []


def test_with_other_ranks_a_model_that_fails_ends_the_server() -> None:
    """They wait for it in collectives of the model, and would take part in others instead."""
    model = Model()
    pairs = node_pairs(model, ranks=2)
    model.fails = "attention_inputs"
    with pytest.raises(RuntimeError, match="no memory"):
        pairs.add_node(Tree(40), [0])


@pytest.mark.parametrize("lacks", ["a measurement", "memory"])
def test_with_other_ranks_an_answer_may_lack(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is behind its last collective when it is measured. Memory is asked for before the
    model runs on any rank."""
    model = Model()
    pairs = node_pairs(model, ranks=2)

    def none(*_: Any) -> torch.Tensor:
        raise RuntimeError("no memory")

    if lacks == "memory":
        monkeypatch.setattr(module, "host_tensor", none)
    else:
        model.fails = "measure"
    assert chosen(pairs) == [START]
    assert bool(model.asked) == (lacks == "a measurement")


def two_ranks(monkeypatch: pytest.MonkeyPatch, *models: Model) -> tuple[Ranks, list[NodePairs]]:
    """They agree on pairs of layers."""
    every, ranks = [node_pairs(model, rank, ranks=2) for rank, model in enumerate(models)], Ranks(2)
    for name in ("smallest", "sum_of_all_ranks"):
        monkeypatch.setattr(module, name, getattr(ranks, name))
    return ranks, every


def test_ranks_whose_heads_prefer_other_pairs_make_one_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = far({(1, 4): 0.1, (0, 2): 5.0, (3, 5): 2.0})
    second = far({(0, 2): 0.1, (1, 4): 6.0, (3, 5): 2.0})
    ranks, every = two_ranks(monkeypatch, Model({40: first}), Model({40: second}))
    found = together(lambda one: chosen(one, reduce=ranks.reduce(one._group)), every)
    assert found == 2 * [[((3, 5, "merged"),)]]


@pytest.mark.parametrize("lacks", ["a measurement", "an answer"])
def test_what_one_rank_lacks_no_rank_has(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Model(), Model()]
    ranks, every = two_ranks(monkeypatch, *models)
    models[1].fails = "measure" if lacks == "a measurement" else ""
    models[1].arrived = lacks == "a measurement"

    def choose(pairs: NodePairs) -> tuple[bool, list[tuple[CodedPair, ...]]]:
        pairs.add_node(Tree(40), [0])
        return answered(pairs, ranks.reduce(pairs._group)), ready(pairs)

    expected = (True, [START]) if lacks == "a measurement" else (False, [])
    assert together(choose, every) == 2 * [expected]


class Backups:
    """A controller of pages with pairs.

    Attributes:
        launched: By name, and the pairs of their pages.
    """

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[tuple[str, Sequence[CodedPair]]] = []
        divided: dict[Any, Sequence[CodedPair]] = {}
        pool = SimpleNamespace(
            page_ids=lambda indices: indices,
            divide=lambda pages, layout: divided.update({pages[0]: layout.pairs}),
            arena=SimpleNamespace(expect=lambda pages: None),
        )
        loads, layouts = SimpleNamespace(drop_queued=lambda: None), node_pairs(model)
        self.controller = bare_controller(pool, loads, layouts=layouts)
        self.tree = Tree(40, 40, 40)
        # HiCache's part: names of nodes stand for their indices.
        base = HybridCacheController

        def write(made: Any, name: Any, node: int, flush: bool) -> Any:
            assert not flush  # so does HiCache: the tree gets a node's pages behind this call
            made.write_queue.append(SimpleNamespace(host_indices=name, node_ids=[node]))
            return name

        def start(made: Any) -> None:
            names = [operation.host_indices[0] for operation in made.write_queue]
            self.launched += [(name, divided[name]) for name in names]
            made.write_queue.clear()

        monkeypatch.setattr(base, "write", write)
        monkeypatch.setattr(base, "start_writing", start)
        monkeypatch.setattr(base, "reset", lambda made: made.write_queue.clear())
        monkeypatch.setattr(OwnPagesController, "after_forwards", lambda *_: None)
        self.controller.l2_transfer_engine = SimpleNamespace(device_to_host_stream=None)

    def write(self, name: str, node: int) -> None:
        self.turn()
        tree = self.tree or Tree()
        tree.writing = node
        self.controller.write((name,), node, flush=False)
        tree.writing = None
        self.controller.start_writing()

    def turn(self) -> None:
        turn_of(self.controller, SimpleNamespace(tree_core=self.tree))


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def server(model: Model, monkeypatch: pytest.MonkeyPatch) -> Backups:
    return Backups(model, monkeypatch)


def test_backups_wait_and_are_launched_in_order(model: Model, server: Backups) -> None:
    model.arrived = False
    server.write("A", 0)
    server.tree = None
    server.write("B", 1)  # its pairs are those of the start
    server.tree = Tree(40, 40)
    server.turn()
    server.turn()
    assert server.launched == [] and len(server.controller.write_queue) == 2
    model.arrived = True
    server.turn()
    assert server.launched == [("A", MERGED), ("B", START)]
    assert server.controller.write_queue == []


def test_write_backs_do_not_wait(model: Model, server: Backups) -> None:
    server.controller.write_policy = "write_back"
    server.write("A", 0)
    assert server.launched == [("A", START)] and model.asked == []


def test_backups_that_were_dropped_are_forgotten(model: Model, server: Backups) -> None:
    model.arrived = False
    server.write("A", 0)
    server.controller.reset()
    server.write("B", 0)
    model.arrived = True
    server.turn()
    assert server.launched == [("B", MERGED)]
