"""Which pairs of layers a server may merge, by what that changes at its start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hcache_backend.config import HCacheConfig, KrulOption
from hcache_backend.engine import metrics
from hcache_backend.engine.startup import pair_choice, strategy
from hcache_backend.engine.startup.agreement import Refused
from hcache_backend.engine.startup.codec_choice import check_lossy
from hcache_backend.engine.startup.page_plan import PagePlan
from hcache_backend.engine.startup.pair_choice import check_output, find_mergeable
from hcache_backend.krul.paired_layout import CodedPair, PairedLayout
from hcache_backend.krul.statistics import PairSums
from tests.engine.in_process.encoded_kv.host import DEVICE_PAGES, bits, slots_of
from tests.engine.in_process.encoded_kv.test_node_pairs import ranks, together
from tests.engine.in_process.encoded_kv.test_pairs import LAYERS, plan_of


def alike(plan: PagePlan, first: int, second: int) -> None:
    for planes in (plan.kvcache.k_buffer, plan.kvcache.v_buffer):
        planes[second].copy_(planes[first] * 1.5)


def tried(plan: PagePlan, option: KrulOption) -> tuple[CodedPair, ...]:
    find_mergeable(plan, option, slots_of(1, 2, 3), None)
    check_lossy(plan.kv, plan.layout, slots_of(1, 2, 3), option.error)
    assert isinstance(plan.layout, PairedLayout)
    return plan.layout.pairs


def test_pairs_that_a_merge_would_change_too_much_are_in_fp8() -> None:
    plan = plan_of()
    alike(plan, 1, 4)
    option = KrulOption(pairs=((1, 4), (0, 3)))
    assert tried(plan, option) == ((0, 3, "fp8"), (1, 4, "merged"))
    assert plan.choice is not None
    assert plan.choice.mergeable == {(1, 4)}
    anything = KrulOption(pairs=((1, 4), (0, 3)), error=2)
    assert tried(plan, anything) == ((0, 3, "merged"), (1, 4, "merged"))
    assert len(plan.choice.mergeable) == 15


def test_what_is_not_named_is_in_fp8() -> None:
    plan = plan_of()
    assert tried(plan, KrulOption()) == ((2, 3, "fp8"), (4, 5, "fp8"))
    option = KrulOption(pairs=((1, 4),), error=2)
    assert tried(plan, option) == ((1, 4, "merged"), (3, 5, "fp8"))


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        (((0, 6),), "two of the layers 0 to 5"),
        (((0, 1), (1, 2)), "each in one pair"),
        (((0, 1), (2, 3), (4, 5)), "names 3 pairs, and by its 'ratio' 0.5 pages of 6 layers"),
    ],
)
def test_pairs_that_cannot_be_made_are_refused(
    pairs: tuple[tuple[int, int], ...], why: str
) -> None:
    with pytest.raises(Refused, match=why):
        find_mergeable(plan_of(), KrulOption(pairs=pairs), slots_of(1), None)


def saying(plan: PagePlan) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """A model whose words are K of its last layer."""

    def said(runner: Any, slots: torch.Tensor) -> torch.Tensor:
        return plan.kvcache.k_buffer[LAYERS - 1][slots].float().flatten(1).log_softmax(-1)

    return said


@pytest.mark.parametrize(("kl", "merged"), [(10.0, True), (0.0, False)])
def test_nothing_is_merged_if_the_model_would_say_something_else(
    kl: float, merged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan, slots = plan_of(), slots_of(1, 2, 3)
    option = KrulOption(pairs=((0, 5), (2, 3)), error=2, kl=kl)
    assert tried(plan, option) == ((0, 5, "merged"), (2, 3, "merged"))
    before = bits(plan.kvcache, *range(DEVICE_PAGES))
    problems: list[str] = []
    monkeypatch.setattr(metrics.PROBLEMS, "count", problems.append)
    monkeypatch.setattr(pair_choice, "said_behind", saying(plan))
    with caplog.at_level("WARNING", "hcache"):
        check_output(None, plan, slots, None, option, None)
    assert torch.equal(bits(plan.kvcache, *range(DEVICE_PAGES)), before)
    assert isinstance(plan.layout, PairedLayout) and plan.choice is not None
    code = "merged" if merged else "fp8"
    warned = [record for record in caplog.records if record.levelname != "DEBUG"]
    assert plan.layout.pairs == ((0, 5, code), (2, 3, code))
    assert (problems == []) == merged == bool(plan.choice.mergeable) == (not warned)


def test_nothing_is_merged_if_the_model_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, slots = plan_of(), slots_of(1, 2, 3)
    option = KrulOption(pairs=((0, 5),), error=2)
    tried(plan, option)
    plan.probe = SimpleNamespace()  # type: ignore[assignment]
    before, asked = bits(plan.kvcache, *range(DEVICE_PAGES)), []

    def said(runner: Any, slots: torch.Tensor) -> torch.Tensor:
        asked.append(1)
        if len(asked) == 2:  # while the pool holds merged pages
            raise RuntimeError("no memory")
        return saying(plan)(runner, slots)

    monkeypatch.setattr(pair_choice, "said_behind", said)
    check_output(None, plan, slots, None, option, None)
    assert torch.equal(bits(plan.kvcache, *range(DEVICE_PAGES)), before)
    assert plan.choice is not None and not plan.choice.mergeable and plan.probe is None
    assert isinstance(plan.layout, PairedLayout) and {c for *_, c in plan.layout.pairs} == {"fp8"}


def test_the_closest_pairs_are_tried_whatever_they_attend_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan, slots = plan_of(), slots_of(1, 2, 3)
    option = KrulOption(error=2, kl=10.0)
    tried(plan, option)
    monkeypatch.setattr(pair_choice, "said_behind", saying(plan))
    with caplog.at_level("DEBUG", "hcache"):
        check_output(None, plan, slots, differing({(1, 4): 0.1}), option, None)
    assert "merging layers [(0, 2), (1, 4)] changes the output by" in caplog.text


def differing(pairs: dict[tuple[int, int], float]) -> PairSums:
    """No I-R layers, which differ so, all others alike."""
    mass = torch.zeros(LAYERS, dtype=torch.float64)
    squared = torch.full((LAYERS, LAYERS), 1.0, dtype=torch.float64)
    for (first, second), far in pairs.items():
        squared[first, second] = squared[second, first] = far
    return PairSums(1, mass, squared)


def test_layers_that_are_furthest_from_each_other_are_tried_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In service others of the pairs that may be merged will be the closest ones."""
    plan, slots = plan_of(pairs=1), slots_of(1, 2, 3)
    option = KrulOption(error=2, kl=1e-6, ratio=0.34)
    tried(plan, option)
    monkeypatch.setattr(pair_choice, "said_behind", saying(plan))  # by the last layer
    with caplog.at_level("DEBUG", "hcache"):
        check_output(None, plan, slots, differing({(1, 4): 0.1, (2, 5): 9.0}), option, None)
    assert "merging layers [(1, 4)] changes the output by 0.0e+00" in caplog.text
    assert "merging layers [(2, 5)] changes the model's output by" in caplog.text
    assert "only [(1, 4)] are merged" in caplog.text
    assert plan.choice is not None and plan.choice.mergeable == {(1, 4)}
    assert isinstance(plan.layout, PairedLayout) and plan.layout.pairs == ((4, 5, "fp8"),)


def test_where_one_rank_cannot_merge_all_ranks_have_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is in the model's collectives then."""
    plans, slots = [plan_of(), plan_of()], slots_of(1, 2, 3)
    option, asked = KrulOption(pairs=((0, 5),), error=2, kl=100.0), list[int]()
    for plan in plans:
        tried(plan, option)

    def none(*_: Any) -> Any:
        raise RuntimeError("no memory")

    def said(runner: Any, slots: torch.Tensor) -> torch.Tensor:
        asked.append(1)
        return saying(plans[0])(runner, slots)

    monkeypatch.setattr(plans[1].kv, "through_codec", none)
    monkeypatch.setattr(pair_choice, "said_behind", said)
    groups = ranks(monkeypatch, pair_choice)
    together(
        *(
            partial(check_output, None, plan, slots, None, option, group)
            for plan, group in zip(plans, groups, strict=True)
        )
    )
    assert asked == []
    for plan in plans:
        assert plan.choice is not None and not plan.choice.mergeable
        assert isinstance(plan.layout, PairedLayout)
        assert {code for *_, code in plan.layout.pairs} == {"fp8"}


def test_a_model_that_keeps_something_of_each_batch_is_not_asked_in_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What SGLang prepares for LoRA adapters, say, would be of a batch with other tokens."""
    served, alone = object.__new__(strategy.OwnPagesStrategy), SimpleNamespace()
    alone.tp_cache_group = alone.pp_cache_group = None
    served._runtime = SimpleNamespace(config=HCacheConfig(), runner=None)  # type: ignore[assignment]
    plan, asked = plan_of(), []

    def find_probe(runner: Any, plan: PagePlan, slots: torch.Tensor) -> None:
        asked.append(slots)
        plan.probe = SimpleNamespace()  # type: ignore[assignment]

    monkeypatch.setattr(strategy, "find_probe", find_probe)
    for reason, times in (("LoRA adapters", 0), (None, 1)):
        monkeypatch.setattr(strategy, "refusal", lambda *_, reason=reason: reason)
        served._look_at_attention(alone, plan, slots_of(1))
        assert (len(asked), plan.probe is not None) == (times, times == 1)
    assert "pairs of layers are the same in all pages: LoRA adapters" in caplog.text
