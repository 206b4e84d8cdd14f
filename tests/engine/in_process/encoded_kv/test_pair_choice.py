"""Which pairs of layers a server may merge, by what that changes at its start."""

from types import SimpleNamespace
from typing import Any

import pytest

from hcache_backend.checks.round_trip import check_lossy
from hcache_backend.config import HCacheConfig, KrulOption
from hcache_backend.krul.pairs import CodedPair
from hcache_backend.ranks import Refused
from hcache_backend.start import build, capabilities
from hcache_backend.start.page_plan import PagePlan, page_plugin
from tests.engine.in_process.encoded_kv.test_pairs import plan_of
from tests.engine.in_process.encoded_kv.test_start import bare_start
from tests.kit.host import slots_of

PAIR, TWO = ((1, 4),), ((1, 4), (0, 3))
EVERY = 15


def alike(plan: PagePlan, first: int, second: int) -> None:
    for planes in (plan.kvcache.k_buffer, plan.kvcache.v_buffer):
        planes[second].copy_(planes[first] * 1.5)


@pytest.mark.parametrize(
    ("option", "mergeable", "pairs"),
    [
        ({"pairs": TWO}, 1, ((0, 3, "fp8"), (1, 4, "merged"))),  # the other changes too much
        ({"pairs": TWO, "error": 2}, EVERY, ((0, 3, "merged"), (1, 4, "merged"))),
        ({}, 1, ((2, 3, "fp8"), (4, 5, "fp8"))),  # what is not named
        ({"pairs": PAIR, "error": 2}, EVERY, ((1, 4, "merged"), (3, 5, "fp8"))),
    ],
    ids=["too much", "anything", "none named", "one named"],
)
def test_pairs_that_are_named_and_change_little_are_merged(
    option: dict[str, Any], mergeable: int, pairs: tuple[CodedPair, ...]
) -> None:
    plan = plan_of(KrulOption(**{"ratio": 0.7, **option}))
    alike(plan, 1, 4)
    plugin: Any = plan.plugin
    layout = plugin.settle(plan.kv, plan.layout, slots_of(1, 2, 3), None)
    check_lossy(plan.kv, layout, slots_of(1, 2, 3), plugin.allowed_change)
    assert layout.pairs == pairs
    assert len(plugin.choice.mergeable) == mergeable


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        (((0, 6),), "two of the layers 0 to 5"),
        (((0, 1), (1, 2)), "each in one pair"),
        (((0, 1), (2, 3), (4, 5)), "names 3 pairs, and by its 'ratio' 0.7 pages of 6 layers"),
    ],
)
def test_impossible_pairs_are_refused(pairs: tuple[tuple[int, int], ...], why: str) -> None:
    plan = plan_of(KrulOption(ratio=0.7, pairs=pairs))
    plugin: Any = plan.plugin
    with pytest.raises(Refused, match=why):
        plugin.settle(plan.kv, plan.layout, slots_of(1), None)


def test_only_its_codec_loads_the_plugin() -> None:
    assert page_plugin(HCacheConfig(codec="krul", mode="kv")) is not None
    assert page_plugin(HCacheConfig(codec="fp8")) is None


def test_a_model_that_keeps_something_of_each_batch_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What SGLang prepares for LoRA adapters, say, would be of a batch with other tokens."""
    served = bare_start()
    served._runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))
    recomputer = SimpleNamespace()
    monkeypatch.setattr(build, "install", lambda hooks: None)
    monkeypatch.setattr(build, "make_recomputer", lambda *_: recomputer)
    problem: list[str] = []

    def try_model(*_: Any) -> None:
        if problem:
            raise Refused(problem[0])

    for refused, broken in (("LoRA adapters", None), (None, "no memory"), (None, None)):
        plan = plan_of()
        problem[:] = [broken] if broken else []
        monkeypatch.setattr(plan.plugin, "try_model", try_model)
        monkeypatch.setattr(capabilities, "refusal", lambda *_, refused=refused: refused)
        served._look_at_model(plan, slots_of(1))
        assert plan.observer is (None if refused or broken else recomputer)
    for why in ("LoRA adapters", "no memory"):
        assert f"all pages have one layout: {why}" in caplog.text
