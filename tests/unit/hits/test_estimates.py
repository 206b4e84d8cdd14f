"""How long operations take, by a model and by what was measured."""

from dataclasses import replace

import pytest

from hcache_backend.plan.profile import preset_profile
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.prefetch.estimates import Estimate, Estimates, L3Progress
from hcache_backend.prefetch.hit import Hit
from hcache_backend.prefetch.times import HitTimes
from tests.unit.partition.pipelines import public_model

LLAMA_7B = public_model("llama-2-7b")
MACHINE = Restore(preset_profile("h100", 1), LLAMA_7B, Partition(0, 0, 32))


class Free:
    """A machine on which nothing takes time."""

    profile = None

    def load(self, tokens: int, prefix: float) -> float:
        return 0.0

    prefill = load


def saved(costs: Estimates, hit: Hit) -> float | None:
    return HitTimes(L3Progress(costs)).seconds_saved(hit)


def a_thousand_a_second(tokens: int, prefix: float) -> float:
    return tokens / 1000


AS_EXPECTED, SLOW = [(1000, 1.0)], [(1000, 10.0)]


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        pytest.param([], {500: 0.5}, id="nothing: the model counts"),
        pytest.param([(1000, 3.0)], {1000: 3.0, 2000: 6.0}, id="the first outweighs the model"),
        pytest.param(3 * AS_EXPECTED + SLOW, {1000: 1.0}, id="one disturbed does not count"),
        pytest.param(30 * AS_EXPECTED + 2 * SLOW, {1000: 10.0}, id="two in a row are believed"),
        pytest.param(30 * AS_EXPECTED + 2 * SLOW + 2 * AS_EXPECTED, {1000: 1.0}, id="two again"),
        pytest.param(
            [(64, 0.64), (8192, 8.192)],
            {128: 1.28, 4096: 4.096},
            id="near a size counts more: small ones have a fixed part",
        ),
    ],
)
def test_an_estimate_follows_what_was_measured(
    measured: list[tuple[int, float]], seconds: dict[int, float]
) -> None:
    known = Estimate(a_thousand_a_second, in_seconds=True)
    for tokens, taken in measured:
        known.add_time(tokens, 0, taken)
    for tokens, expected in seconds.items():
        assert known.seconds(tokens) == pytest.approx(expected)
        assert known.slowdown(tokens) == pytest.approx(expected / tokens * 1000)


def test_a_curve_that_is_in_no_seconds_gives_none_and_no_slowdown() -> None:
    unknown = Estimate(a_thousand_a_second, in_seconds=False)
    assert (unknown.seconds(0), unknown.seconds(500)) == (0.0, None)
    unknown.add_time(1000, 0, 3.0)
    assert unknown.slowdown(1000) == 1.0


def test_an_operation_that_costs_nothing_by_its_curve_can_be_measured() -> None:
    free = Estimate(lambda tokens, prefix: 0.0, in_seconds=True)
    free.add_time(1000, 0, 0.1)
    assert free.seconds(1000) == 0.0
    costs = Estimates(Free())  # type: ignore[arg-type]
    costs.add_restore(1000, 0.1)
    assert costs.seconds_to_load(1000) == 0.0 and costs.restored.seconds(1000) == pytest.approx(0.1)


def test_without_a_machine_only_growth_is_known() -> None:
    costs = Estimates(None)
    hit = Hit(tokens=1000, prefix=0, rest=100)
    assert saved(costs, hit) is None
    assert costs.seconds_to_load(1000) == 0
    for _ in range(2):
        costs.load.add_time(1000, 0, 9.0)
    assert costs.seconds_to_load(1000) == 9.0
    costs.add_restore(0, 0.1)  # a load of pages that were all restored
    costs.add_restore(1000, 0.5)  # the batches were slow for another reason
    assert costs.seconds_to_load(1000) == 0.5
    costs.prefill.add_time(500, 0, 1.0)
    assert saved(costs, hit) == pytest.approx(2.0)


def test_a_hit_saves_what_is_not_computed_and_not_attended_from() -> None:
    costs = Estimates(MACHINE)
    near = saved(costs, Hit(tokens=4096, prefix=0, rest=64))
    far = saved(costs, Hit(tokens=4096, prefix=16384, rest=64))
    assert near is not None and far is not None
    assert near == pytest.approx(MACHINE.prefill(4096, 0), rel=0.05)
    assert far > 1.5 * near  # attention to what is before is not computed either


def test_a_profile_gives_all_rates() -> None:
    costs = Estimates(MACHINE)
    assert costs.read.seconds(4096) == pytest.approx(4096 * 32 * LLAMA_7B.kv_bytes / 6.9e9)
    other_l3 = replace(MACHINE, profile=preset_profile("h100"))
    assert Estimates(other_l3).read.seconds(4096) is None


def test_short_prefills_say_nothing_of_long_ones() -> None:
    """They take as long as the machine needs for any."""
    costs = Estimates(MACHINE)
    hit = Hit(tokens=4096, prefix=0, rest=1)
    before = saved(costs, hit)
    for _ in range(10):
        costs.prefill.add_time(32, 4096, 0.012)
    assert saved(costs, hit) == pytest.approx(before, rel=0.05)
