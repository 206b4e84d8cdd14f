"""The search against brute force, a simulation of its own, and the paper's closed forms."""

from __future__ import annotations

import heapq
import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hcache_backend.partition.costs import L3Path, LayerCosts, layer_costs
from hcache_backend.partition.layers import METHODS, Method, Partition
from hcache_backend.partition.model_config import read_model
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.presets import preset_profile
from hcache_backend.partition.profile import Profile, Rate
from hcache_backend.partition.solver import (
    closed_form,
    makespan,
    objective_with,
    recompute_layers,
    search,
    solve,
    steady_makespan,
)
from hcache_backend.partition.timeline import finish, simulate

seconds = st.floats(0.01, 10)
layer_counts = st.integers(1, 12)
rings = st.none() | st.integers(1, 8)


@st.composite
def any_costs(draw: st.DrawFn) -> LayerCosts:
    l3 = st.just(0.0) | seconds
    costs = LayerCosts(*(draw(seconds) for _ in range(4)), draw(l3), draw(l3))
    return costs._replace(c_tok_last=draw(st.none() | st.floats(0.01, costs.c_tok)))


@st.composite
def mha_costs(draw: st.DrawFn) -> LayerCosts:
    """Costs as the paper has them: KV twice the bytes, recomputation six times the work or more."""
    io_h, c_h = draw(seconds), draw(seconds)
    return LayerCosts(io_h, 2 * io_h, c_h, c_h * draw(st.floats(6, 40)))


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    return Partition(*(draw(st.integers(0, 8)) for _ in range(3)))


def all_partitions(layers: int) -> list[Partition]:
    return [
        Partition(recompute, hidden, kv)
        for recompute, hidden, kv in itertools.product(range(layers + 1), repeat=3)
        if recompute + hidden + kv == layers
    ]


def event_simulation(costs: LayerCosts, partition: Partition) -> float:
    """Two workers and an event queue; knows nothing of the formulas."""
    work: dict[str, list[tuple[str, int, float]]] = {"transfer": [], "compute": []}
    for layer in range(partition.layers):
        method = partition.method(layer)
        if method == "recompute":
            last = layer == partition.recompute - 1 and costs.c_tok_last is not None
            work["compute"].append((method, layer, costs.c_tok_last if last else costs.c_tok))
        elif method == "hidden":
            work["transfer"].append((method, layer, costs.io_h))
            work["compute"].append(("project", layer, costs.c_h))
        else:
            work["transfer"].append((method, layer, costs.io_kv))
    start = costs.l3_h * partition.hidden + costs.l3_kv * partition.kv
    arrived: set[int] = set()
    events: list[tuple[float, str]] = [(start, "transfer"), (start, "compute")]
    running: dict[str, int | None] = {"transfer": None, "compute": None}
    idle: set[str] = set()
    now = start
    while events:
        now, worker = heapq.heappop(events)
        if worker == "transfer" and running[worker] is not None:
            arrived.add(running[worker])
            if "compute" in idle:
                idle.discard("compute")
                heapq.heappush(events, (now, "compute"))
        running[worker] = None
        if not work[worker]:
            continue
        kind, layer, duration = work[worker][0]
        if kind == "project" and layer not in arrived:
            idle.add(worker)
            continue
        work[worker].pop(0)
        running[worker] = layer
        heapq.heappush(events, (now + duration, worker))
    return now


# ---- the model ----


@given(any_costs(), partitions())
def test_the_makespan_is_that_of_a_simulation(costs: LayerCosts, partition: Partition) -> None:
    predicted = makespan(costs, partition)
    assert predicted == pytest.approx(event_simulation(costs, partition))
    assert finish(costs, partition) == pytest.approx(predicted)


@given(any_costs(), partitions(), rings)
def test_a_restore_finishes_with_its_last_task(
    costs: LayerCosts, partition: Partition, ring: int | None
) -> None:
    tasks = simulate(costs, partition, ring)
    assert max((task.end for task in tasks), default=0.0) == finish(costs, partition, ring)


@given(any_costs(), partitions())
def test_the_paper_leaves_out_no_more_than_filling_the_pipeline(
    costs: LayerCosts, partition: Partition
) -> None:
    steady = steady_makespan(costs, partition)
    fill = max(costs.io_h, costs.c_h) if partition.hidden else 0.0
    assert steady <= makespan(costs, partition) <= steady + fill + 1e-9


@given(any_costs(), partitions(), rings)
def test_a_timeline_is_a_pipeline(
    costs: LayerCosts, partition: Partition, ring: int | None
) -> None:
    tasks = simulate(costs, partition, ring)
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
    if ring is not None:  # segments that have begun to arrive and have not been used
        for moment in (task.start for task in tasks):
            held = [
                task
                for task in tasks
                if task.stream == "transfer"
                if task.start <= moment < computed.get(task.layer, task).end
            ]
            assert len(held) <= ring


@given(any_costs(), partitions(), st.integers(1, 8))
def test_more_room_on_the_device_is_never_slower(
    costs: LayerCosts, partition: Partition, ring: int
) -> None:
    ends = [finish(costs, partition, room) for room in (ring, ring + 1, partition.layers + 1, None)]
    assert ends[0] >= ends[1] >= ends[2] == ends[3]


@given(any_costs(), partitions(), rings, st.integers(1, 4))
def test_layers_in_parts_are_never_slower_in_the_same_memory(
    costs: LayerCosts, partition: Partition, ring: int | None, chunks: int
) -> None:
    whole = finish(costs, partition, ring)
    parts = finish(costs, partition, None if ring is None else ring * chunks, chunks)
    assert parts <= whole * (1 + 1e-9)
    # Projections and transfers cannot end before their sum, nor begin before L3 is read.
    assert parts >= steady_makespan(costs, partition) * (1 - 1e-9)


@given(any_costs(), partitions(), st.integers(1, 6))
def test_a_first_layer_in_pieces_is_projected_piece_by_piece(
    costs: LayerCosts, partition: Partition, pieces: int
) -> None:
    in_pieces = finish(costs, partition, pieces=pieces)
    assert in_pieces <= finish(costs, partition) * (1 + 1e-9)
    if partition.recompute:
        assert in_pieces == finish(costs, partition)
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
    assert finish(costs, Partition(0, 2, 0), 3, chunks=2) == 1 + 4 * 2
    assert finish(costs, Partition(0, 2, 0), 1, chunks=2) == 4 * (1 + 2)
    assert finish(costs, Partition(1, 2, 0), 3, chunks=2) == 10 + 4 * 2
    assert finish(costs, Partition(0, 1, 1), 2, chunks=2) == 1 + 2 + 2 + 2


def test_kv_waits_for_room_behind_hidden_states() -> None:
    """With room for all it would be there after 7 s, when the projections are done."""
    costs = LayerCosts(io_h=1.0, io_kv=2.0, c_h=2.0, c_tok=10.0)
    partition = Partition(0, 3, 2)
    assert [finish(costs, partition, ring) for ring in (1, 2, 3, None)] == [13.0, 9.0, 7.0, 7.0]


# ---- the search ----


@given(any_costs(), layer_counts)
def test_the_search_equals_brute_force(costs: LayerCosts, layers: int) -> None:
    found = search(costs, layers)
    assert found.layers == layers
    best = min(event_simulation(costs, partition) for partition in all_partitions(layers))
    assert makespan(costs, found) == pytest.approx(best)


@given(any_costs(), layer_counts, st.integers(1, 8))
@settings(max_examples=50)
def test_the_search_knows_how_much_room_there_is(costs: LayerCosts, layers: int, ring: int) -> None:
    found = search(costs, layers, objective_with(ring))
    best = min(finish(costs, partition, ring) for partition in all_partitions(layers))
    assert finish(costs, found, ring) == pytest.approx(best)
    assert best >= makespan(costs, search(costs, layers)) - 1e-9


@given(any_costs(), layer_counts)
def test_the_mix_is_never_worse_than_one_or_two_methods(costs: LayerCosts, layers: int) -> None:
    best = makespan(costs, search(costs, layers))
    for first in range(layers + 1):
        for pair in (
            Partition(first, layers - first, 0),
            Partition(first, 0, layers - first),
            Partition(0, first, layers - first),
        ):
            assert best <= makespan(costs, pair)


@given(any_costs(), layer_counts, st.sets(st.sampled_from(METHODS), min_size=1), rings)
def test_the_search_uses_the_methods_that_it_may(
    costs: LayerCosts, layers: int, methods: set[Method], ring: int | None
) -> None:
    """The naive hybrid and hidden states alone among them: never better than all three."""
    objective = objective_with(ring)
    found = search(costs, layers, objective, methods)
    assert found.methods <= methods
    allowed = [each for each in all_partitions(layers) if each.methods <= methods]
    seconds = objective(costs, found)
    assert seconds == pytest.approx(min(objective(costs, each) for each in allowed))
    assert objective(costs, search(costs, layers, objective)) <= seconds * (1 + 1e-9)


@given(any_costs(), layer_counts, st.lists(st.floats(0.1, 1), min_size=6, max_size=6))
def test_a_faster_machine_is_never_slower(
    costs: LayerCosts, layers: int, factors: list[float]
) -> None:
    scaled = (cost * factor for cost, factor in zip(costs[:6], factors, strict=True))
    last = costs.c_tok_last and costs.c_tok_last * factors[3]
    faster = LayerCosts(*scaled, c_tok_last=last)
    assert makespan(faster, search(faster, layers)) <= makespan(costs, search(costs, layers))


def test_equally_fast_partitions_recompute_least() -> None:
    costs = LayerCosts(io_h=1.0, io_kv=1.0, c_h=0.0, c_tok=1.0)
    assert search(costs, 1) == Partition(0, 1, 0)


# ---- the paper's closed forms ----


@given(mha_costs(), st.integers(1, 80))
@settings(max_examples=60)
def test_the_closed_form_is_the_search_rounded_up(costs: LayerCosts, layers: int) -> None:
    """The paper rounds the number of hidden layers up; the search takes the better neighbour.

    It searches the two methods of the closed form: one layer of the third may balance a remainder.
    """
    closed = closed_form(costs, layers)
    assert closed is not None
    assert closed.layers == layers
    other: Method = "kv" if costs.c_h > costs.io_h else "recompute"
    found = search(costs, layers, steady_makespan, ("hidden", other))
    assert closed.hidden - 1 <= found.hidden <= closed.hidden
    best = search(costs, layers, steady_makespan)
    assert steady_makespan(costs, best) <= steady_makespan(costs, found)
    assert steady_makespan(costs, found) <= steady_makespan(costs, closed)


@given(mha_costs(), st.integers(1, 80))
@settings(max_examples=60)
def test_filling_the_pipeline_moves_the_closed_form_by_two_layers_at_most(
    costs: LayerCosts, layers: int
) -> None:
    closed = closed_form(costs, layers)
    assert closed is not None
    assert -2 <= search(costs, layers).hidden - closed.hidden <= 0


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


# ---- profiles and models ----


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    heads = draw(st.sampled_from([8, 16, 32]))
    hidden = 128 * heads
    return ModelShape(
        family="any",
        layers=draw(st.integers(1, 24)),
        hidden=hidden,
        heads=heads,
        kv_heads=draw(st.sampled_from([1, 2, 8, heads])),
        head_dim=128,
        value_dim=128,
        mlp_width=draw(st.integers(3, 6)) * hidden,
    )


def machine(io: float, compute: float, l3: float | None) -> Profile:
    """A machine that moves ``io`` GB/s and computes ``compute`` TFLOP/s."""
    bus, flops = Rate(per_second=io * 1e9), Rate(per_second=compute * 1e12)
    return Profile(
        device="any",
        source="test",
        dtype="bfloat16",
        l3=None if l3 is None else Rate(per_second=l3 * 1e9),
        hidden_copy=bus,
        kv_load=bus,
        projection=flops,
        dense=flops,
        attention=flops,
    )


rates = st.floats(0.5, 1000)
lengths = st.sampled_from([64, 1024, 16384])


@given(models(), rates, rates, st.floats(1, 20), lengths, st.booleans())
@settings(max_examples=60)
def test_faster_io_never_adds_recomputed_layers(
    model: ModelShape, io: float, compute: float, factor: float, tokens: int, early_stop: bool
) -> None:
    """Where recomputation ends early, a first layer may be added: it is only a little slower than
    its projection, so that it stands in for hidden states where computing is the slower part.
    """
    slow = solve(machine(io, compute, None), model, tokens, early_stop=early_stop)
    fast = solve(machine(io * factor, compute, None), model, tokens, early_stop=early_stop)
    assert fast.recompute <= max(slow.recompute, early_stop)


@pytest.mark.parametrize("l3", ["overlapped", "first"])
@given(model=models(), tokens=lengths)
@settings(max_examples=20)
def test_more_ssds_are_never_slower(model: ModelShape, tokens: int, l3: L3Path) -> None:
    times = []
    for ssds in (1, 2, 4, 8, 16, 0):  # 0 is DRAM
        costs = layer_costs(preset_profile("a100-40g", ssds), model, tokens, l3=l3)
        times.append(makespan(costs, search(costs, model.layers)))
    assert all(slower >= faster for slower, faster in itertools.pairwise(times))


# ---- restores of other lengths ----


@given(
    models(),
    rates,
    rates,
    st.floats(0, 1),
    st.sampled_from([1, 64, 1024, 16384]),
    rings,
    st.booleans(),
)
@settings(max_examples=60)
def test_a_restore_recomputes_what_is_best_for_its_length(
    model: ModelShape,
    io: float,
    compute: float,
    share: float,
    tokens: int,
    ring: int | None,
    early_stop: bool,
) -> None:
    profile = machine(io, compute, None)
    stored = round(share * model.layers)
    partition = Partition(model.layers - stored, stored // 2, stored - stored // 2)
    first = recompute_layers(profile, model, partition, tokens, ring=ring, early_stop=early_stop)
    assert first >= partition.recompute
    costs = layer_costs(profile, model, tokens, early_stop=early_stop)
    times = {
        number: event_simulation(costs, partition.recomputing(number))
        if ring is None
        else max(task.end for task in simulate(costs, partition.recomputing(number), ring))
        for number in range(partition.recompute, model.layers + 1)
    }
    assert times[first] == pytest.approx(min(times.values()))


@given(
    models(), rates, rates, st.lists(st.integers(1, 10**5), min_size=2, max_size=2), st.booleans()
)
@settings(max_examples=60)
def test_long_restores_and_prefixes_recompute_no_more(
    model: ModelShape, io: float, compute: float, tokens: list[int], early_stop: bool
) -> None:
    profile, everything = machine(io, compute, None), Partition(0, model.layers, 0)
    short, long = sorted(tokens)

    def recomputed(tokens: int, prefix: int = 0) -> int:
        return recompute_layers(
            profile, model, everything, tokens, prefix=prefix, early_stop=early_stop
        )

    alone = recomputed(short)
    assert recomputed(long) <= alone
    assert recomputed(short, prefix=long) <= alone


@given(models(), rates, rates, lengths, rings)
@settings(max_examples=60)
def test_ending_early_never_recomputes_less(
    model: ModelShape, io: float, compute: float, tokens: int, ring: int | None
) -> None:
    profile, everything = machine(io, compute, None), Partition(0, model.layers, 0)
    whole, early = (
        recompute_layers(profile, model, everything, tokens, early_stop=early_stop, ring=ring)
        for early_stop in (False, True)
    )
    assert early >= whole


def test_little_room_means_little_recomputation() -> None:
    """While layers are recomputed, a device without room lets the bus wait."""
    model = read_model(Path(__file__).parent / "configs" / "llama-2-13b.json")
    profile, everything = preset_profile("a100-40g", ssds=1), Partition(0, model.layers, 0)
    found = [
        recompute_layers(profile, model, everything, 1024, ring=ring) for ring in (3, 12, 24, None)
    ]
    assert found == [1, 6, 10, 10]
    halves = recompute_layers(profile, model, everything, 1024, ring=24, chunks=2)
    assert found[1] <= halves < found[2]
    assert solve(profile, model, 1024, ring=3) == Partition(1, 39, 0)
    assert solve(profile, model, 1024, ring=24) == solve(profile, model, 1024)
    assert solve(profile, model, 1024, ring=24, chunks=2).recompute == halves


def test_a_decision_takes_no_time_that_a_request_would_notice() -> None:
    """80 layers and a short ring. Far below a millisecond; the bound is for busy machines."""
    model = read_model(Path(__file__).parent / "configs" / "llama-2-13b.json")
    model, profile = model.model_copy(update={"layers": 80}), preset_profile("a100-40g", ssds=1)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        recompute_layers(profile, model, Partition(0, 80, 0), 1024, ring=3, early_stop=True)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.01


def test_the_first_layers_are_recomputed_whatever_is_stored_for_them() -> None:
    partition = Partition(1, 3, 2)
    assert [partition.method(layer) for layer in range(6)] == (
        ["recompute"] + 3 * ["hidden"] + 2 * ["kv"]
    )
    assert partition.recomputing(1) == partition
    assert partition.recomputing(3) == Partition(3, 1, 2)
    assert partition.recomputing(5) == Partition(5, 0, 1)
    assert partition.recomputing(6) == Partition(6, 0, 0)


def test_a_short_ring_does_not_hold_up_what_can_be_parked() -> None:
    costs = LayerCosts(io_h=1.0, io_kv=2.0, c_h=0.1, c_tok=1.0)
    mix, none = Partition(10, 22, 0), Partition(0, 32, 0)
    short, parked = objective_with(3), objective_with(3, parks=True)
    assert parked(costs, mix) == pytest.approx(makespan(costs, mix))
    assert short(costs, mix) > 1.1 * parked(costs, mix)
    assert short(costs, none) == parked(costs, none)
