"""Timelines, the paper's closed forms, and how often a decision simulates.

That the search is right whatever it may use, and what a restore takes: test_one_model.py.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.paper import closed_form
from hcache_backend.plan.profile import preset_profile
from hcache_backend.plan.restore import (
    LayerCosts,
    LayerMethod,
    Partition,
    Task,
    recompute_layers,
    search,
    simulate,
)
from tests.unit.partition.pipelines import any_costs, layer_costs, partitions, public_model, seconds


@st.composite
def mha_costs(draw: st.DrawFn) -> LayerCosts:
    """Costs as the paper has them: KV twice the bytes, recomputation six times the work or more."""
    io_h, c_h = draw(seconds), draw(seconds)
    return LayerCosts(io_h, 2 * io_h, c_h, c_h * draw(st.floats(6, 40)))


@given(mha_costs(), st.integers(1, 80))
@settings(max_examples=60)
def test_the_closed_form_is_the_search_rounded_up(costs: LayerCosts, layers: int) -> None:
    """The paper rounds the number of hidden layers up; the search takes the better neighbour.

    It searches the two methods of the closed form: one layer of the third may balance a remainder.
    """
    closed = closed_form(costs, layers)
    assert closed is not None
    assert closed.layers == layers
    other: LayerMethod = "kv" if costs.c_h > costs.io_h else "recompute"
    found = search(costs, layers, LayerCosts.least, ("hidden", other))
    assert closed.hidden - 1 <= found.hidden <= closed.hidden
    best = search(costs, layers, LayerCosts.least)
    assert costs.least(best) <= costs.least(found)
    assert costs.least(found) <= costs.least(closed)


@pytest.mark.parametrize(
    "costs",
    [
        LayerCosts(io_h=2.0, io_kv=1.0, c_h=1.0, c_tok=6.0),
        LayerCosts(io_h=1.0, io_kv=2.0, c_h=6.0, c_tok=6.0),
        LayerCosts(io_h=1.0, io_kv=2.0, c_h=1.0, c_tok=6.0, l3_h=1.0, l3_kv=2.0),
        LayerCosts(io_h=1.0, io_kv=2.0, c_h=1.0, c_tok=6.0, c_tok_last=1.5),
    ],
    ids=["GQA", "projection as slow as recomputation", "L3 first", "recomputation ends early"],
)
def test_the_closed_form_says_where_it_does_not_apply(costs: LayerCosts) -> None:
    assert closed_form(costs, 32) is None


def test_a_decision_simulates_each_number_of_layers_once_at_most() -> None:
    """A request waits for it: with 80 layers that is far below a millisecond of a core."""
    model, profile = public_model("llama-2-13b"), preset_profile("a100-40g", ssds=1)
    costs = layer_costs(profile, model, 1024, early_stop=True)
    asked: list[int] = []

    def objective(costs: LayerCosts, partition: Partition) -> float:
        asked.append(partition.recompute)
        return simulate(costs, partition, ring=3)

    recompute_layers(costs, Partition(0, 80, 0), objective)
    assert asked
    assert len(set(asked)) == len(asked)


def test_the_first_layers_are_recomputed_whatever_is_stored_for_them() -> None:
    partition = Partition(1, 3, 2)
    assert [partition.method(layer) for layer in range(6)] == (
        ["recompute"] + 3 * ["hidden"] + 2 * ["kv"]
    )
    assert partition.recomputing(1) == partition
    assert partition.recomputing(3) == Partition(3, 1, 2)
    assert partition.recomputing(5) == Partition(5, 0, 1)
    assert partition.recomputing(6) == Partition(6, 0, 0)


def timeline(costs: LayerCosts, partition: Partition) -> list[Task]:
    tasks: list[Task] = []
    simulate(costs, partition, note=lambda *task: tasks.append(Task(*task)))
    return tasks


@given(any_costs(), partitions())
def test_a_timeline_is_a_pipeline(costs: LayerCosts, partition: Partition) -> None:
    tasks = timeline(costs, partition)
    for stream in ("l3", "transfer", "compute"):
        mine = [task for task in tasks if task.stream == stream]
        assert all(a.end <= b.start for a, b in itertools.pairwise(mine))
    arrived = {task.layer: task.end for task in tasks if task.stream == "transfer"}
    computed = {task.layer: task for task in tasks if task.stream == "compute"}
    for layer in range(partition.layers):
        method = partition.method(layer)
        assert (layer in arrived) == (method != "recompute")
        assert (layer in computed) == (method != "kv")
        if method == "hidden":
            assert computed[layer].start >= arrived[layer]
    assert max((task.end for task in tasks), default=0.0) == simulate(costs, partition)


def test_a_short_ring_holds_segments_up() -> None:
    costs = LayerCosts(io_h=1.0, io_kv=2.0, c_h=0.1, c_tok=1.0)
    mix = Partition(10, 22, 0)
    assert simulate(costs, mix, ring=3) > 1.1 * simulate(costs, mix)
