"""The pipeline of a restore against a simulation of its own."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcache_backend.plan.costs import LayerCosts, Partition
from hcache_backend.plan.pipeline import Task, simulate
from tests.unit.partition.pipelines import any_costs, event_simulation, makespan, partitions, rings


def timeline(costs: LayerCosts, partition: Partition) -> list[Task]:
    tasks: list[Task] = []
    simulate(costs, partition, note=lambda *task: tasks.append(Task(*task)))
    return tasks


@given(any_costs(), partitions())
def test_the_makespan_is_that_of_a_simulation(costs: LayerCosts, partition: Partition) -> None:
    predicted = makespan(costs, partition)
    assert predicted == pytest.approx(event_simulation(costs, partition))
    assert simulate(costs, partition) == pytest.approx(predicted)


@given(any_costs(), partitions())
def test_a_restore_finishes_with_its_last_task(costs: LayerCosts, partition: Partition) -> None:
    tasks = timeline(costs, partition)
    assert max((task.end for task in tasks), default=0.0) == simulate(costs, partition)


@given(any_costs(), partitions())
def test_the_paper_leaves_out_no_more_than_filling_the_pipeline(
    costs: LayerCosts, partition: Partition
) -> None:
    steady = costs.least(partition)
    fill = max(costs.io_h, costs.c_h) if partition.hidden else 0.0
    assert steady <= makespan(costs, partition) <= steady + fill + 1e-9


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


@given(any_costs(), partitions(), st.integers(1, 8))
def test_more_room_on_the_device_is_never_slower(
    costs: LayerCosts, partition: Partition, ring: int
) -> None:
    ends = [
        simulate(costs, partition, room) for room in (ring, ring + 1, partition.layers + 1, None)
    ]
    assert ends[0] >= ends[1] >= ends[2] == ends[3]


@given(any_costs(), partitions(), rings, st.integers(1, 4))
def test_layers_in_parts_are_never_slower_in_the_same_memory(
    costs: LayerCosts, partition: Partition, ring: int | None, chunks: int
) -> None:
    whole = simulate(costs, partition, ring)
    parts = simulate(costs, partition, None if ring is None else ring * chunks, chunks)
    assert parts <= whole * (1 + 1e-9)
    # Projections and transfers cannot end before their sum, nor begin before L3 is read.
    assert parts >= costs.least(partition) * (1 - 1e-9)


@given(any_costs(), partitions(), st.integers(1, 6))
def test_a_first_layer_in_pieces_is_projected_piece_by_piece(
    costs: LayerCosts, partition: Partition, pieces: int
) -> None:
    in_pieces = simulate(costs, partition, pieces=pieces)
    assert in_pieces <= simulate(costs, partition) * (1 + 1e-9)
    if partition.recompute:
        assert in_pieces == simulate(costs, partition)
        return
    begin = costs.l3_h * partition.hidden + costs.l3_kv * partition.kv
    segments = [(costs.io_h, costs.c_h)] * partition.hidden + [(costs.io_kv, 0.0)] * partition.kv
    if partition.hidden:
        segments[:1] = [(costs.io_h / pieces, costs.c_h / pieces)] * pieces
    transfer = compute = begin
    for io, projection in segments:
        transfer += io
        if projection:
            compute = max(compute, transfer) + projection
    assert in_pieces == pytest.approx(max(transfer, compute))


def test_parts_of_layers_overlap() -> None:
    costs = LayerCosts(io_h=2.0, io_kv=4.0, c_h=4.0, c_tok=10.0)
    assert simulate(costs, Partition(0, 2, 0), 3, chunks=2) == 1 + 4 * 2
    assert simulate(costs, Partition(0, 2, 0), 1, chunks=2) == 4 * (1 + 2)
    assert simulate(costs, Partition(1, 2, 0), 3, chunks=2) == 10 + 4 * 2
    assert simulate(costs, Partition(0, 1, 1), 2, chunks=2) == 1 + 2 + 2 + 2


def test_kv_waits_for_room_behind_hidden_states() -> None:
    """With room for all it would be there after 7 s, when the projections are done."""
    costs = LayerCosts(io_h=1.0, io_kv=2.0, c_h=2.0, c_tok=10.0)
    partition = Partition(0, 3, 2)
    assert [simulate(costs, partition, ring) for ring in (1, 2, 3, None)] == [13.0, 9.0, 7.0, 7.0]
