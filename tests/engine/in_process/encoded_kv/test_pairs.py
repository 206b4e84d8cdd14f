"""K and V in pages where layers share slots, and which layers a start lets share them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hcache_backend.checks.round_trip import check_lossy
from hcache_backend.config import HCacheConfig, KrulOption
from hcache_backend.format.units import WHOLE
from hcache_backend.host.layout import Layout
from hcache_backend.krul.pair_forms import PAIR_FORMS
from hcache_backend.krul.pairs import CodedPair
from hcache_backend.krul.plugin import Krul
from hcache_backend.krul.segments import PairedLayout
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.ranks import Refused
from hcache_backend.start import build, capabilities
from hcache_backend.start.page_plan import page_plugin
from tests.engine.in_process.encoded_kv.test_service import by_reference
from tests.engine.in_process.encoded_kv.test_start import bare_start, try_copies
from tests.kit.host import DEVICE_PAGES, PAGE, Host, bits, checked, compare_all, kv_pool, slots_of

LAYERS = 6
FIRST: list[CodedPair] = [(0, 5, "merged"), (2, 3, "int8")]
OTHER: list[CodedPair] = [(1, 2, "merged"), (4, 5, "merged")]


def paired_host(dtype: torch.dtype = torch.bfloat16) -> Host:
    server = Host(codec="krul", dtype=dtype, layers=LAYERS, pairs=2)
    pair_layers(server, FIRST)
    return server


def pair_layers(server: Host, pairs: list[CodedPair]) -> None:
    layout = server.pool.page_layout
    assert isinstance(layout, PairedLayout)
    server.pool.page_layout = layout.with_pairs(pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pages_of_two_strategies_come_back_in_one_load(dtype: torch.dtype) -> None:
    server = paired_host(dtype)
    checks, lost = checked(server)
    exact = bits(server.device, 1, 2, 3)
    wanted = [by_reference(server, page) for page in (1, 2)]
    first = server.backed_up(1, 2)
    pair_layers(server, OTHER)
    wanted.append(by_reference(server, 3))
    other = server.backed_up(3)
    compare_all(checks)
    host = torch.cat((first[:PAGE], other, first[PAGE:]))
    found = server.load(host, 7, 5, 6)
    compare_all(checks)
    assert lost == []
    assert torch.equal(found, torch.cat((wanted[0], wanted[2], wanted[1]), dim=1))
    assert not torch.equal(found[:, :PAGE], exact[:, :PAGE])
    # Layers that are in no pair are exact: of K, 1 and 4 in the first page.
    for layer in (1, 4, LAYERS + 1, LAYERS + 4):
        assert torch.equal(found[layer, :PAGE], exact[layer, :PAGE])


def test_a_page_with_a_pair_that_does_not_fit_is_lost() -> None:
    server = paired_host()
    checks, lost = checked(server)
    server.device.k_buffer[5][slots_of(2)[3], 1, 4] = float("nan")
    assert server.unfit(server.backed_up(2, 3)) == [True, False]
    compare_all(checks)
    assert lost == []


@pytest.mark.parametrize("layer", [0, 2], ids=["merged", "int8"])
@pytest.mark.parametrize("at", [0, 0.5, 0.99])
def test_a_spoiled_slot_fails_the_check_in_service(layer: int, at: float) -> None:
    server = paired_host()
    server.kv.layers = (layer,)  # what is checked
    checks, lost = checked(server)
    server.kv.layers = tuple(range(LAYERS))
    host = server.backed_up(2)
    segment = server.pool.page_layout.segment(layer)
    page = server.pool.kv_buffer[int(server.pool.page_ids(host)[0])]
    page[segment.start + int(at * (segment.stop - segment.start))] ^= 0x10
    compare_all(checks)
    both = {0: "0 and 5", 2: "2 and 3"}[layer]
    assert lost == [
        f"the self-check in service failed: K and V of layer {both} in a page are not the pool's"
    ]


def plan_of(plugin: Krul | None = None) -> Layout:
    """Of six layers; by default two of the three pairs share slots."""
    device = kv_pool(layers=LAYERS)
    methods = Restore(None, None, Partition(0, 0, LAYERS), chunk_tokens=8192)
    plugin = plugin or Krul(KrulOption(ratio=0.7))
    kv = plugin.segments(device, range(LAYERS), device.page_size, 1)
    return Layout(device, methods, WHOLE, kv)


def test_copies_are_tried_in_every_form() -> None:
    plan = plan_of()
    before = bits(plan.kvcache, *range(DEVICE_PAGES))
    try_copies(plan)
    assert torch.equal(bits(plan.kvcache, *range(DEVICE_PAGES)), before)


@pytest.mark.parametrize("form", PAIR_FORMS)
def test_a_form_of_wrong_bytes_is_refused(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()
    save = plan.kv._save_pair  # type: ignore[attr-defined]

    def wrong(slot, held, memory, pages):  # type: ignore[no-untyped-def]
        fits = save(slot, held, memory, pages)
        if slot.code == form:
            memory[pages[0], slot.offset + 3] ^= 1
        return fits

    monkeypatch.setattr(plan.kv, "_save_pair", wrong)
    with pytest.raises(Refused, match=r"K or V of layer \d come back"):
        try_copies(plan)


PAIR, TWO = ((1, 4),), ((1, 4), (0, 3))
EVERY = 15


def alike(plan: Layout, first: int, second: int) -> None:
    for planes in (plan.kvcache.k_buffer, plan.kvcache.v_buffer):
        planes[second].copy_(planes[first] * 1.5)


@pytest.mark.parametrize(
    ("option", "mergeable", "pairs"),
    [
        ({"pairs": TWO}, 1, ((0, 3, "int8"), (1, 4, "merged"))),  # the other changes too much
        ({"pairs": TWO, "error": 2}, EVERY, ((0, 3, "merged"), (1, 4, "merged"))),
        ({}, 1, ((2, 3, "int8"), (4, 5, "int8"))),  # what is not named
        ({"pairs": PAIR, "error": 2}, EVERY, ((1, 4, "merged"), (3, 5, "int8"))),
    ],
    ids=["too much", "anything", "none named", "one named"],
)
def test_pairs_that_are_named_and_change_little_are_merged(
    option: dict[str, Any], mergeable: int, pairs: tuple[CodedPair, ...]
) -> None:
    plugin = Krul(KrulOption(**{"ratio": 0.7, **option}))
    plan = plan_of(plugin)
    alike(plan, 1, 4)
    layout = plugin.choose_pairs(plan.kv, plan.page, slots_of(1, 2, 3), None)
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
    plugin = Krul(KrulOption(ratio=0.7, pairs=pairs))
    plan = plan_of(plugin)
    with pytest.raises(Refused, match=why):
        plugin.choose_pairs(plan.kv, plan.page, slots_of(1), None)


def test_only_its_codec_loads_the_plugin() -> None:
    assert page_plugin(HCacheConfig(codec="krul", mode="kv")) is not None
    assert page_plugin(HCacheConfig(codec="int8")) is None


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
        plugin = Krul(KrulOption(ratio=0.7))
        problem[:] = [broken] if broken else []
        monkeypatch.setattr(plugin, "try_model", try_model)
        monkeypatch.setattr(capabilities, "refusal", lambda *_, refused=refused: refused)
        served._look_at_model(plan_of(plugin), plugin, slots_of(1))
        assert plugin.observer is (None if refused or broken else recomputer)
    for why in ("LoRA adapters", "no memory"):
        assert f"all pages have one layout: {why}" in caplog.text
