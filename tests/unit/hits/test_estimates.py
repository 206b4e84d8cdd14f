"""How long operations take, by a model and by what was measured."""

from dataclasses import replace

import pytest

from hcache_backend.plan.profile import preset_profile
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.prefetch.estimates import Estimate, Estimates
from hcache_backend.prefetch.prefetch import Hit
from tests.unit.partition.pipelines import public_model

LLAMA_7B = public_model("llama-2-7b")


def by_tokens(tokens: int, prefix: float) -> float:
    return tokens / 1000


@pytest.fixture
def known() -> Estimate:
    return Estimate(by_tokens, known=True)


def test_without_a_measurement_the_model_counts(known: Estimate) -> None:
    assert known.seconds(500) == 0.5
    assert Estimate(by_tokens, known=False).seconds(500) is None


def test_it_tells_how_many_times_as_long_as_the_model_says_it_takes(known: Estimate) -> None:
    assert known.slowdown(500) == 1.0
    for _ in range(3):
        known.measured(1000, 0, 3.0)
    assert known.slowdown(1000) == pytest.approx(3.0)
    unknown = Estimate(by_tokens, known=False)
    unknown.measured(1000, 0, 3.0)
    assert unknown.slowdown(1000) == 1.0  # of what is in no seconds


def test_nothing_takes_no_time() -> None:
    assert Estimate(by_tokens, known=False).seconds(0) == 0


def test_the_first_measurement_outweighs_the_model(known: Estimate) -> None:
    known.measured(1000, 0, 3.0)
    assert known.seconds(1000) == pytest.approx(3.0)
    assert known.seconds(2000) == pytest.approx(6.0)


def test_a_disturbed_measurement_does_not_count(known: Estimate) -> None:
    for seconds in (1.0, 1.0, 1.0, 50.0):
        known.measured(1000, 0, seconds)
    assert known.seconds(1000) == pytest.approx(1.0)


def test_two_in_a_row_are_believed(known: Estimate) -> None:
    for _ in range(30):
        known.measured(1000, 0, 1.0)
    for _ in range(2):
        known.measured(1000, 0, 10.0)
    assert known.seconds(1000) == pytest.approx(10.0)
    for _ in range(2):
        known.measured(1000, 0, 1.0)
    assert known.seconds(1000) == pytest.approx(1.0)


def test_what_was_measured_near_a_size_counts_more(known: Estimate) -> None:
    known.measured(64, 0, 0.64)
    known.measured(8192, 0, 8.192)
    assert known.seconds(128) == pytest.approx(1.28)  # small ones have a fixed part
    assert known.seconds(4096) == pytest.approx(4.096)


def test_without_a_machine_only_growth_is_known() -> None:
    costs = Estimates(None)
    hit = Hit(tokens=1000, prefix=0, rest=100)
    assert costs.saved(hit) is None
    assert costs.loaded(1000) == 0
    costs.prefill.measured(500, 0, 1.0)
    assert costs.saved(hit) == pytest.approx(2.0)


def test_a_hit_saves_what_is_not_computed_and_not_attended_from() -> None:
    profile = preset_profile("h100", 1)
    machine = Restore(profile, LLAMA_7B, Partition(0, 32, 0))
    costs = Estimates(machine)
    near = costs.saved(Hit(tokens=4096, prefix=0, rest=64))
    far = costs.saved(Hit(tokens=4096, prefix=16384, rest=64))
    assert near is not None and far is not None
    assert near == pytest.approx(machine.prefill(4096, 0), rel=0.05)
    assert far > 1.5 * near  # attention to what is before is not computed either


def test_a_profile_gives_all_rates() -> None:
    machine = Restore(preset_profile("h100", 1), LLAMA_7B, Partition(0, 0, 32))
    costs = Estimates(machine)
    assert costs.read.seconds(4096) == pytest.approx(4096 * 32 * LLAMA_7B.kv_bytes / 6.9e9)
    assert costs.loaded(4096) > 0
    eager = Restore(preset_profile("h100", 1), LLAMA_7B, machine.partition, eager=True)
    assert 0 < Estimates(eager).loaded(4096) < costs.loaded(4096) / 2
    other_l3 = replace(machine, profile=preset_profile("h100"))
    assert Estimates(other_l3).read.seconds(4096) is None


def test_short_prefills_say_nothing_of_long_ones() -> None:
    """They take as long as the machine needs for any."""
    costs = Estimates(Restore(preset_profile("h100", 1), LLAMA_7B, Partition(0, 0, 32)))
    hit = Hit(tokens=4096, prefix=0, rest=1)
    before = costs.saved(hit)
    for _ in range(10):
        costs.prefill.measured(32, 4096, 0.012)
    assert costs.saved(hit) == pytest.approx(before, rel=0.05)
