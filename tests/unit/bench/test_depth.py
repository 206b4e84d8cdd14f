"""How deep pages are recomputed: against a simulation of every depth, and what it is worth."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.depth import DRAWN, LENGTHS, MODELS, compute, draw
from bench.staircase import Depth, DepthCosts, depth_costs
from hcache_backend.partition.costs import LayerCosts, Partition, layer_costs
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.profile import Profile, Rate
from tests.unit.partition.pipelines import machine_of, models, public_model

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results" / "depth.json"
PAGE = 16

rates = st.builds(
    lambda seconds, per_second: Rate(seconds=seconds, per_second=per_second),
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.floats(1e8, 1e11),
)
compute_rates = st.builds(
    lambda seconds, per_second: Rate(seconds=seconds, per_second=per_second),
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.floats(1e11, 1e14),
)


@dataclass(frozen=True)
class Hit:
    """A hit of ``pages`` pages, of which L3 has ``stored``."""

    profile: Profile
    model: ModelShape
    stored: Partition
    pages: int
    prefix: int
    tp: int

    def costs(self) -> DepthCosts:
        return depth_costs(
            self.profile,
            self.model,
            self.stored,
            self.pages,
            PAGE,
            prefix=self.prefix,
            tp=self.tp,
        )

    def layer(self, pages: int, before: int) -> LayerCosts:
        """One layer of ``pages`` pages behind ``before`` pages of the hit; nothing of no pages."""
        if not pages:
            return LayerCosts(0.0, 0.0, 0.0, 0.0)
        return layer_costs(
            self.profile,
            self.model,
            pages * PAGE,
            prefix=self.prefix + before * PAGE,
            tp=self.tp,
            l3="first",
            early_stop=True,
        )

    def simulated(self, depth: Depth, batches: int) -> float:
        """Seconds of a restore, batch by batch and layer by layer."""
        layers, rest = self.stored.layers, self.stored.recomputing(depth.layers)
        front = self.layer(depth.pages, 0)
        behind = self.layer(self.pages - depth.pages, depth.pages)
        recompute = front.recomputation(layers) + behind.recomputation(depth.layers)
        read = copied = now = 0.0
        for _ in range(batches):
            read += behind.reading(rest) / batches
            copied = max(copied, read)
            for _ in range(rest.hidden):
                copied += behind.io_h / batches
                meanwhile = min(recompute, max(0.0, copied - now))
                recompute -= meanwhile
                now = max(now + meanwhile, copied) + behind.c_h / batches
            copied += rest.kv * behind.io_kv / batches
        return max(copied, now + recompute)

    def every_depth(self) -> list[Depth]:
        behind = range(self.stored.recompute, self.stored.layers + 1)
        return [Depth(pages, layers) for pages in range(self.pages + 1) for layers in behind]


@st.composite
def hits(draw: st.DrawFn) -> Hit:
    model = draw(models())
    bus_rates, processor_rates = ([draw(kind) for _ in range(3)] for kind in (rates, compute_rates))
    profile = machine_of(draw(st.none() | rates), *bus_rates[:2], *processor_rates)
    recompute = draw(st.integers(0, model.layers))
    hidden = draw(st.integers(0, model.layers - recompute))
    stored = Partition(recompute, hidden, model.layers - recompute - hidden)
    prefix = draw(st.sampled_from([0, PAGE, 1000]))
    gathers = profile.model_copy(update={"gathers": draw(st.booleans())})
    return Hit(
        gathers, model, stored, draw(st.integers(1, 6)), prefix, draw(st.sampled_from([1, 4]))
    )


batch_counts = st.integers(1, 9)


@given(hits(), batch_counts)
@settings(max_examples=60)
def test_every_depth_takes_what_its_simulation_takes(hit: Hit, batches: int) -> None:
    costs = hit.costs()
    seconds = costs.seconds(batches)
    for depth in hit.every_depth():
        column = depth.layers - costs.least
        if column < seconds.shape[1]:
            found = float(seconds[depth.pages, column])
            assert found == pytest.approx(hit.simulated(depth, batches))


@given(hits(), batch_counts)
@settings(max_examples=60)
def test_the_best_depth_equals_brute_force_over_all_depths(hit: Hit, batches: int) -> None:
    depth, seconds = hit.costs().best(batches)
    assert seconds == pytest.approx(hit.simulated(depth, batches))
    everything = [hit.simulated(each, batches) for each in hit.every_depth()]
    assert seconds == pytest.approx(min(everything))


@given(hits(), batch_counts)
@settings(max_examples=60)
def test_a_restore_is_never_slower_than_reading_all_or_computing_all(
    hit: Hit, batches: int
) -> None:
    costs = hit.costs()
    _, seconds = costs.best(batches)
    reading = hit.simulated(Depth(0, hit.stored.recompute), batches)
    computing = hit.layer(hit.pages, 0).c_tok * hit.stored.layers
    assert seconds <= min(reading, computing) * (1 + 1e-9)


@given(hits(), batch_counts)
@settings(max_examples=60)
def test_no_resource_works_longer_than_the_restore_takes(hit: Hit, batches: int) -> None:
    costs = hit.costs()
    assert (costs.busy() <= costs.seconds(batches) * (1 + 1e-9)).all()


def test_of_equally_fast_depths_the_one_that_recomputes_least_is_taken() -> None:
    """K and V of one layer come as fast as they are recomputed: any of the depths takes as long."""
    model = public_model("llama-3-8b").model_copy(update={"layers": 1})
    flops = Rate(per_second=1e3 * (model.query_flops + model.projection_flops))
    bus = Rate(per_second=1e3 * model.kv_bytes)
    profile = machine_of(None, bus, bus, flops, flops, flops)
    costs = depth_costs(profile, model, Partition(0, 0, 1), 1, PAGE)
    assert (costs.seconds(1) == costs.seconds(1)[0, 0]).all()
    assert costs.best(1)[0] == (0, 0)


# ---- the computed table ----


def rounded(content: Any) -> Any:
    """Four digits are what another machine's arithmetic agrees on, and more than is printed."""
    return json.loads(json.dumps(content), parse_float=lambda text: float(f"{float(text):.4g}"))


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return compute()


def test_the_committed_results_are_those_of_this_code(results: list[dict[str, Any]]) -> None:
    assert rounded(json.loads(RESULTS.read_text())) == rounded(results)


def test_the_models_are_the_public_ones() -> None:
    for name in ("Llama-3-8B", "Qwen3-8B", "Llama-2-7B"):
        assert MODELS[name][0] == public_model(name.lower())


def test_every_point_is_at_least_as_fast_as_its_pure_methods_and_not_below_its_floor(
    results: list[dict[str, Any]],
) -> None:
    for row in results:
        pure = min(row["kv_ms"], row["read_ms"], row["recompute_ms"])
        assert row["depth_floor_ms"] <= row["depth_ms"] <= pure
        assert row["codec_floor_ms"] <= row["codec_ms"] <= row["depth_ms"]


def test_two_pointers_need_no_split_to_be_as_fast(results: list[dict[str, Any]]) -> None:
    for row in results:
        assert row["depth_floor_ms"] <= row["pointers_ms"] <= 1.25 * row["depth_floor_ms"]
        assert row["pointers_ms"] <= 1.0001 * min(row["read_ms"], row["recompute_ms"])


def test_slower_l3_means_more_recomputation(results: list[dict[str, Any]]) -> None:
    for tokens in LENGTHS:
        for model in MODELS:
            rows = {r["l3"]: r for r in results if (r["model"], r["tokens"]) == (model, tokens)}
            found = []
            for l3 in ("1 SSD", "100 Gb/s", "4 SSDs", "400 Gb/s RDMA"):
                front, behind = rows[l3]["depth_tokens"], rows[l3]["depth_layers"]
                found.append(front * MODELS[model][0].layers + (tokens - front) * behind)
            assert found == sorted(found, reverse=True)


def test_the_picture_can_be_drawn(results: list[dict[str, Any]]) -> None:
    pytest.importorskip("matplotlib")
    assert len(draw(results).axes) == len(DRAWN)
