"""The cost model: what a layer and a restore take, and what is searched."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hcache_backend.plan.profile import Rate
from hcache_backend.plan.restore import (
    LayerCosts,
    Partition,
    Restore,
    recompute_layers,
    search,
    simulate,
)
from tests.unit.partition.pipelines import (
    all_partitions,
    any_costs,
    machine_of,
    makespan,
    partitions,
    public_model,
)


@given(any_costs(), st.integers(1, 6), st.integers(1, 12), st.sampled_from(["kv", "hidden kv", ""]))
@settings(max_examples=200)
def test_the_search_finds_the_best_of_all(
    costs: LayerCosts, layers: int, ring: int, methods: str
) -> None:
    """Of those as fast the one that recomputes least, then the one with most hidden states."""

    def objective(costs: LayerCosts, partition: Partition) -> float:
        asked.append(partition)
        return simulate(costs, partition, ring)

    def first_of_the_fastest(partitions: list[Partition], found: Partition) -> None:
        times = [simulate(costs, each, ring) for each in partitions]
        equal = [
            p for p, each in zip(partitions, times, strict=True) if each < 1.00001 * min(times)
        ]
        assert found in equal
        if len(equal) == times.count(min(times)):
            assert found == equal[0]

    asked: list[Partition] = []
    usable = set(methods.split()) or {"recompute", "hidden", "kv"}
    every = sorted(all_partitions(layers), key=lambda each: (each.recompute, -each.hidden))
    found = search(costs, layers, objective, usable)  # type: ignore[arg-type]
    first_of_the_fastest([each for each in every if each.methods <= usable], found)
    for stored in every:
        asked.clear()
        first = recompute_layers(costs, stored, objective)
        assert len(set(asked)) == len(asked)  # a request waits for it
        choices = [stored.recomputing(n) for n in range(stored.recompute, layers + 1)]
        first_of_the_fastest(choices, stored.recomputing(first))


@given(any_costs(), partitions(), st.integers(1, 4))
def test_a_restore_with_room_for_all_segments_takes_as_long_as_the_closed_form(
    costs: LayerCosts, partition: Partition, chunks: int
) -> None:
    """Parts of layers are as many thinner layers."""
    fields = ("io_h", "io_kv", "c_h", "l3_h", "l3_kv")
    thin = costs._replace(**{field: getattr(costs, field) / chunks for field in fields})
    layers = Partition(partition.recompute, partition.hidden * chunks, partition.kv * chunks)
    parts = makespan(thin, layers)
    assert simulate(costs, partition, chunks=chunks) == pytest.approx(parts)
    pieces = simulate(costs, partition, pieces=4)
    assert costs.least(partition) * 0.999999 <= pieces <= simulate(costs, partition) * 1.000001


MACHINE = machine_of(Rate(per_second=1e9), *[Rate(seconds=1e-4, per_second=1e12)] * 5)


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3"])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_share_what_a_layer_costs(ranks: int, gathers: bool, name: str) -> None:
    model, tokens, prefix = public_model(name), 1000, 5000
    profile = MACHINE.model_copy(update={"gathers": gathers})
    restore = Restore(profile, model, Partition(0, 0, model.layers), ranks)
    costs = restore.costs(tokens, prefix)
    heads = 1 if model.latent else ranks  # whole latents are projected, and copied or gathered
    row = ranks if gathers else 1

    def time(amount: float) -> Any:
        return pytest.approx(1e-4 + tokens * amount / 1e12)

    assert costs.io_h == time(model.hidden_bytes / row)
    assert costs.io_kv == time(model.kv_bytes / (row if model.latent else heads))
    assert costs.c_h == time(model.projection_flops / heads)
    attention = (prefix + tokens / 2) * model.attention_flops
    assert costs.c_tok - 1e-4 == time((model.dense_flops + attention) / ranks)
    assert costs.c_tok_last == time(model.query_flops / ranks + model.projection_flops / heads)
    assert restore.prefill(tokens, prefix) == pytest.approx(costs.c_tok * model.layers)
    read = [pytest.approx(tokens * size / 1e9) for size in (model.hidden_bytes, model.kv_bytes)]
    first = restore.costs(tokens, prefix, "first")
    assert [first.l3_h, first.l3_kv] == read and first[:4] == costs[:4]
    beside = restore.costs(tokens, prefix, "overlapped")  # L3 is slower than the bus
    assert [beside.io_h, beside.io_kv] == read
    assert restore.read(tokens, 0) == pytest.approx(tokens * model.layers * model.kv_bytes / 1e9)


def test_the_first_layers_are_recomputed_whatever_is_stored_for_them() -> None:
    partition = Partition(1, 3, 2)
    assert [partition.method(layer) for layer in range(6)] == (
        ["recompute"] + 3 * ["hidden"] + 2 * ["kv"]
    )
    assert partition.recomputing(1) == partition
    assert partition.recomputing(3) == Partition(3, 1, 2)
    assert partition.recomputing(5) == Partition(5, 0, 1)
    assert partition.recomputing(6) == Partition(6, 0, 0)


def test_a_short_ring_holds_segments_up() -> None:
    costs = LayerCosts(io_h=1.0, io_kv=2.0, c_h=0.1, c_tok=1.0)
    mix = Partition(10, 22, 0)
    assert simulate(costs, mix, ring=3) > 1.1 * simulate(costs, mix)
