"""One cost model: what it answers is what the formulas said that it replaced.

They stand here as they were, in numbers only: the start-up's, the gate's and the planner's.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from typing import Any, NamedTuple

from hcache_backend.plan.model_shape import ModelShape, PlannedCodec, encoded
from hcache_backend.plan.profile import CopyWay, Profile, Rate, preset_profile
from hcache_backend.plan.restore import (
    LAYER_METHODS,
    READ_BATCHES,
    L3Path,
    LayerMethod,
    Partition,
    Restore,
)
from tests.unit.partition.pipelines import all_partitions, machine_of, public_model

INPUTS = 10_000
MODELS = ("llama-2-7b", "llama-3-8b", "qwen3-8b", "gpt2", "opt-350m", "deepseek-v3", "falcon-7b")
CODECS: tuple[PlannedCodec, ...] = ("none", "exp3", "exp4", "int8", "fp8")
L3S: tuple[L3Path, ...] = ("overlapped", "first", "none")


class Case(NamedTuple):
    profile: Profile
    shape: ModelShape
    partition: Partition
    ranks: int
    chunk_tokens: int
    eager: bool
    tokens: int
    prefix: int
    l3: L3Path
    slowdown: float

    @property
    def restore(self) -> Restore:
        sizes = {"chunk_tokens": self.chunk_tokens, "eager": self.eager}
        return Restore(self.profile, self.shape, self.partition, self.ranks, **sizes)


@lru_cache
def stored_shape(name: str, codec: PlannedCodec, ranks: int) -> ModelShape:
    return encoded(public_model(name), codec, "bfloat16", tp=ranks)


def any_case(rng: random.Random) -> Case:
    """Up to 12 layers of a public model, on a machine of any rates."""

    def rate(least: float, most: float) -> Rate:
        fixed = rng.choice((0.0, 10 ** rng.uniform(-6, -3)))
        return Rate(seconds=fixed, per_second=10 ** rng.uniform(least, most))

    profile = preset_profile(rng.choice(("h100", "a30", "rtx4090")), rng.randrange(5))
    if rng.random() < 0.7:
        l3 = rate(8, 11) if rng.random() < 0.7 else None
        profile = machine_of(l3, rate(9, 11), rate(9, 11), *(rate(12, 15) for _ in range(3)))
    products, gathers = rng.uniform(0.5, 1), rng.random() < 0.5
    ways = (CopyWay(programs=8, alone=5e10, beside=4e10, products=products),) * rng.randrange(2)
    profile = profile.model_copy(update={"copies": ways, "gathers": gathers})
    ranks, layers = rng.choice((1, 1, 2, 4)), rng.randint(1, 12)
    shape = stored_shape(rng.choice(MODELS), rng.choice(CODECS), ranks)
    recompute = rng.choice((0, 0, rng.randint(0, layers)))
    hidden = rng.randint(0, layers - recompute)
    return Case(
        profile,
        shape.model_copy(update={"layers": layers}),
        Partition(recompute, hidden, layers - recompute - hidden),
        ranks,
        rng.choice((1024, 8192)),
        rng.random() < 0.5,
        rng.choice((1, 64, 1000, 4096, 30000, rng.randint(1, 40000))),
        rng.choice((0, rng.randint(0, 50000))),
        rng.choice(L3S),
        rng.choice((1.0, rng.uniform(1, 10), math.inf)),
    )


# ---- the old formulas ----


class Costs(NamedTuple):
    io_h: float
    io_kv: float
    c_h: float
    c_tok: float
    l3_h: float
    l3_kv: float
    last: float
    slowdown: float

    def reading(self, p: Partition) -> float:
        return self.l3_h * p.hidden + self.l3_kv * p.kv

    def recomputing(self, first: int, layers: int) -> float:
        times = self.slowdown if first < layers else 1.0
        return times * ((first - 1) * self.c_tok + self.last) if first else 0.0

    def steady(self, p: Partition) -> float:
        compute = self.recomputing(p.recompute, p.layers) + self.c_h * p.hidden
        return self.reading(p) + max(compute, self.io_h * p.hidden + self.io_kv * p.kv)


def layer_costs(case: Case, prefix: int, l3: L3Path, *, early: bool) -> Costs:
    profile, shape, tokens, ranks = case.profile, case.shape, case.tokens, case.ranks
    share = 1.0 if shape.latent else math.ceil(shape.kv_heads / ranks) / shape.kv_heads
    row = shape.hidden_bytes / (ranks if profile.gathers else 1)
    io_h = profile.hidden_copy.time(tokens * row)
    loaded = row / shape.hidden_bytes if shape.latent else share
    io_kv = profile.kv_load.time(tokens * shape.kv_bytes * loaded)
    projection = shape.projection_flops * share
    dense = profile.dense.time(tokens * shape.dense_flops / ranks)
    pairs = tokens * (prefix + tokens / 2)
    c_tok = dense + profile.attention.time(pairs * shape.attention_flops / ranks)
    last = min(c_tok, profile.projection.time(tokens * (shape.query_flops / ranks + projection)))
    slowdown = 1 / profile.copies[0].products if profile.copies else 1.0
    c_h = profile.projection.time(tokens * projection)
    costs = Costs(io_h, io_kv, c_h, c_tok, 0.0, 0.0, last if early else c_tok, slowdown)
    if profile.l3 is None or l3 == "none":
        return costs
    read = [profile.l3.time(tokens * size) for size in (shape.hidden_bytes, shape.kv_bytes)]
    if l3 == "overlapped":
        return costs._replace(io_h=max(io_h, read[0]), io_kv=max(io_kv, read[1]))
    return costs._replace(l3_h=read[0], l3_kv=read[1])


def makespan(costs: Costs, p: Partition) -> float:
    """The planner's and the gate's objective: a closed form."""
    if not p.hidden:
        return costs.steady(p)
    first, last = costs.io_h + costs.c_h * p.hidden, costs.io_h * p.hidden + costs.c_h
    return max(costs.steady(p), costs.reading(p) + max(first, last))


def finish(costs: Costs, p: Partition, case: Case) -> float:
    """The start-up's and the loads' objective: a pipeline with a ring."""
    ring = 3 * case.chunk_tokens // min(case.tokens, case.chunk_tokens)
    chunks = -(-case.tokens // case.chunk_tokens)
    pieces = max(1, min(4, case.tokens // 1024)) if case.ranks == 1 else 1
    if p.recompute:
        pieces = 1
    parts = -(-pieces // chunks)
    transfer = costs.reading(p)
    compute = transfer + costs.recomputing(p.recompute, p.layers)
    segments = p.hidden * chunks + p.kv * chunks
    used: list[float] = []
    for index in range(segments):
        if index >= ring:
            transfer = max(transfer, used[index - ring])
        if index >= p.hidden * chunks:
            transfer += costs.io_kv / chunks
            used.append(transfer)
            continue
        io, c_h = costs.io_h / chunks, costs.c_h / chunks
        transfer += io
        begin = max(compute, transfer - io * (1 - 1 / (1 if index else parts)))
        compute = max(begin + c_h, transfer + c_h / (1 if index else parts))
        used.append(compute)
    return max(compute, transfer)


def same_choice(found: Any, times: dict[Any, float]) -> None:
    """``found`` is the first of the fastest in the order of the search."""
    fastest = min(times.values())
    equal = [choice for choice, seconds in times.items() if seconds <= fastest * (1 + 1e-8)]
    assert found in equal
    clear = [choice for choice, seconds in times.items() if seconds <= fastest * (1 + 1e-12)]
    if clear == equal:
        assert found == equal[0]


def in_order(layers: int, methods: set[LayerMethod]) -> list[Partition]:
    """Those that recompute least first, of these those with most hidden states."""
    found = [each for each in all_partitions(layers) if each.methods <= methods]
    return sorted(found, key=lambda each: (each.recompute, -each.hidden))


def close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=1e-12)  # pytest.approx would take most of the time


def check_estimates(case: Case) -> None:
    restore, shape = case.restore, case.shape
    behind = layer_costs(case, case.prefix, "none", early=True)
    assert close(restore.layer(case.tokens, case.prefix), behind.c_tok)
    prefill = behind.c_tok * shape.layers
    assert close(restore.prefill(case.tokens, case.prefix), prefill)
    partition = case.partition
    size = partition.hidden * shape.hidden_bytes + partition.kv * shape.kv_bytes
    if case.profile.l3 is not None:
        read = case.profile.l3.time(case.tokens * size)
        assert close(restore.read(case.tokens, 0), read)
    load = makespan(layer_costs(case, 0, "none", early=True), partition)
    load /= READ_BATCHES if case.eager else 1
    assert close(restore.load(case.tokens, 0), load)


def check_seconds(case: Case) -> None:
    costs = layer_costs(case, case.prefix, case.l3, early=True)
    found = case.restore.costs(case.tokens, case.prefix, case.l3)
    seconds = case.restore.pipeline(case.tokens)(found, case.partition)
    assert close(seconds, finish(costs, case.partition, case))


def check_first_layers(case: Case) -> None:
    least, layers = case.partition.recompute, case.partition.layers
    first = case.restore.first_layers(case.tokens, case.prefix, case.slowdown)
    if case.ranks > 1 or case.slowdown == math.inf:
        assert first == least
        return
    costs = layer_costs(case, case.prefix, "none", early=True)
    slow = {"c_tok": costs.c_tok * case.slowdown, "last": costs.last * case.slowdown}
    costs = costs._replace(**slow)
    numbers = range(least, layers + 1)
    times = {n: finish(costs, case.partition.recomputing(n), case) for n in numbers}
    same_choice(first, times)


def check_choice(case: Case, rng: random.Random) -> None:
    """What the start-up stores, and what the planner says, of the layers that leave room."""
    stored: set[LayerMethod] = {"hidden", "kv"} if case.shape.hidden_is_smaller else {"kv"}
    costs = layer_costs(case, 0, case.l3, early=True)
    layers, most = case.shape.layers, rng.randint(0, case.shape.layers)
    room = [each for each in in_order(layers, stored) if each.hidden <= most]
    found = case.restore.fastest(case.tokens, case.l3, allowed=lambda each: each.hidden <= most)
    same_choice(found, {each: finish(costs, each, case) for each in room})
    planned = Restore(case.profile, case.shape, case.partition, case.ranks, paper=True)
    costs = layer_costs(case, 0, case.l3, early=False)
    for methods in (stored, set(LAYER_METHODS)):
        found = planned.fastest(case.tokens, case.l3, methods)
        same_choice(found, {each: makespan(costs, each) for each in in_order(layers, methods)})


def test_the_one_model_answers_as_the_formulas_that_it_replaced() -> None:
    rng = random.Random(48)
    for number in range(INPUTS):
        case = any_case(rng)
        check_estimates(case)
        check_seconds(case)
        check_first_layers(case)
        if number % 10 == 0:
            check_choice(case, rng)
