"""Which pairs of layers a server may merge, by what that changes at its start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hcache_backend.checks.round_trip import check_lossy
from hcache_backend.config import KrulOption
from hcache_backend.krul.paired_layout import CodedPair, PairedLayout
from hcache_backend.ranks import Refused
from hcache_backend.start import strategy
from hcache_backend.start.page_plan import PagePlan
from hcache_backend.start.pair_choice import find_mergeable
from tests.engine.in_process.encoded_kv.test_pairs import plan_of
from tests.engine.in_process.encoded_kv.test_start import bare_start
from tests.kit.host import slots_of


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


def test_a_model_that_keeps_something_of_each_batch_is_not_asked_in_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What SGLang prepares for LoRA adapters, say, would be of a batch with other tokens."""
    served = bare_start()
    plan, asked = plan_of(), []

    def find_probe(runner: Any, plan: PagePlan, slots: torch.Tensor) -> None:
        asked.append(slots)
        plan.probe = SimpleNamespace()  # type: ignore[assignment]

    def refused(reason: str | None) -> None:
        if reason is not None:
            raise Refused(reason)

    monkeypatch.setattr(strategy, "find_probe", find_probe)
    for reason, times in (("LoRA adapters", 0), (None, 1)):
        monkeypatch.setattr(strategy, "refuse", lambda *_, reason=reason: refused(reason))
        served._look_at_attention(plan, slots_of(1))
        assert (len(asked), plan.probe is not None) == (times, times == 1)
    assert "pairs of layers are the same in all pages: LoRA adapters" in caplog.text
