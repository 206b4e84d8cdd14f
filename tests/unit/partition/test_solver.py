"""The search against brute force, and the paper's closed forms."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.paper import closed_form
from hcache_backend.plan.costs import (
    LAYER_METHODS,
    L3Path,
    LayerCosts,
    LayerMethod,
    Partition,
)
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.pipeline import (
    Objective,
    recompute_layers,
    search,
    simulate,
)
from hcache_backend.plan.presets import preset_profile
from tests.unit.partition.pipelines import (
    all_partitions,
    any_costs,
    layer_costs,
    machine,
    makespan,
    models,
    public_model,
    rings,
    seconds,
)

layer_counts = st.integers(1, 12)


@st.composite
def mha_costs(draw: st.DrawFn) -> LayerCosts:
    """Costs as the paper has them: KV twice the bytes, recomputation six times the work or more."""
    io_h, c_h = draw(seconds), draw(seconds)
    return LayerCosts(io_h, 2 * io_h, c_h, c_h * draw(st.floats(6, 40)))


# ---- the search ----


objectives = st.just(makespan) | rings.map(lambda ring: partial(simulate, ring=ring))


@given(any_costs(), layer_counts, st.sets(st.sampled_from(LAYER_METHODS), min_size=1), objectives)
def test_the_search_equals_brute_force_whichever_methods_it_may_use(
    costs: LayerCosts, layers: int, methods: set[LayerMethod], objective: Objective
) -> None:
    """The naive hybrid and hidden states alone among them: never better than all three."""
    best = []
    for usable in (methods, set(LAYER_METHODS)):
        found = search(costs, layers, objective, usable)
        assert found.layers == layers
        assert found.methods <= usable
        allowed = (each for each in all_partitions(layers) if each.methods <= usable)
        best.append(min(objective(costs, each) for each in allowed))
        assert objective(costs, found) == pytest.approx(best[-1])
    assert best[1] <= best[0]


@given(any_costs(), layer_counts, st.lists(st.floats(0.1, 1), min_size=6, max_size=6))
def test_a_faster_machine_is_never_slower(
    costs: LayerCosts, layers: int, factors: list[float]
) -> None:
    scaled = (cost * factor for cost, factor in zip(costs[:6], factors, strict=True))
    last = costs.c_tok_last and costs.c_tok_last * factors[3]
    faster = LayerCosts(*scaled, c_tok_last=last, slowdown=costs.slowdown)
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
    other: LayerMethod = "kv" if costs.c_h > costs.io_h else "recompute"
    found = search(costs, layers, LayerCosts.least, ("hidden", other))
    assert closed.hidden - 1 <= found.hidden <= closed.hidden
    best = search(costs, layers, LayerCosts.least)
    assert costs.least(best) <= costs.least(found)
    assert costs.least(found) <= costs.least(closed)


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
    slow, fast = (
        search(layer_costs(profile, model, tokens, early_stop=early_stop), model.layers)
        for profile in (machine(io, compute), machine(io * factor, compute))
    )
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
    profile = machine(io, compute)
    stored = round(share * model.layers)
    partition = Partition(model.layers - stored, stored // 2, stored - stored // 2)
    costs = layer_costs(profile, model, tokens, early_stop=early_stop)
    first = recompute_layers(costs, partition, partial(simulate, ring=ring))
    assert first >= partition.recompute
    times = {
        number: simulate(costs, partition.recomputing(number), ring)
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
    profile, everything = machine(io, compute), Partition(0, model.layers, 0)
    short, long = sorted(tokens)

    def recomputed(tokens: int, prefix: int = 0) -> int:
        costs = layer_costs(profile, model, tokens, prefix=prefix, early_stop=early_stop)
        return recompute_layers(costs, everything)

    alone = recomputed(short)
    assert recomputed(long) <= alone
    assert recomputed(short, prefix=long) <= alone


@given(models(), rates, rates, lengths, rings)
@settings(max_examples=60)
def test_ending_early_never_recomputes_less(
    model: ModelShape, io: float, compute: float, tokens: int, ring: int | None
) -> None:
    profile, everything = machine(io, compute), Partition(0, model.layers, 0)
    both = (layer_costs(profile, model, tokens, early_stop=stop) for stop in (False, True))
    whole, early = (
        recompute_layers(costs, everything, partial(simulate, ring=ring)) for costs in both
    )
    assert early >= whole


def test_little_room_means_little_recomputation() -> None:
    """While layers are recomputed, a device without room lets the bus wait."""
    model = public_model("llama-2-13b")
    profile, everything = preset_profile("a100-40g", ssds=1), Partition(0, model.layers, 0)
    costs = layer_costs(profile, model, 1024)
    found = [
        recompute_layers(costs, everything, partial(simulate, ring=ring))
        for ring in (3, 12, 24, None)
    ]
    assert found == [1, 6, 10, 10]
    halves = recompute_layers(costs, everything, partial(simulate, ring=24, chunks=2))
    assert found[1] <= halves < found[2]
    short, half, whole, split = (
        search(costs, model.layers, partial(simulate, **room))
        for room in ({"ring": 3}, {"ring": 24}, {}, {"ring": 24, "chunks": 2})
    )
    assert short == Partition(1, 39, 0)
    assert half == whole
    assert split.recompute == halves


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


def test_a_short_ring_does_not_hold_up_what_can_be_parked() -> None:
    costs = LayerCosts(io_h=1.0, io_kv=2.0, c_h=0.1, c_tok=1.0)
    mix, none = Partition(10, 22, 0), Partition(0, 32, 0)
    short, parked = partial(simulate, ring=3), partial(simulate, ring=3, parks=True)
    assert parked(costs, mix) == pytest.approx(makespan(costs, mix))
    assert short(costs, mix) > 1.1 * parked(costs, mix)
    assert short(costs, none) == parked(costs, none)
