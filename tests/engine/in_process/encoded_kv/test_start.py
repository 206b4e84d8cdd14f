"""What is decided and tried at the start where K and V are to be encoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hcache_backend import metrics
from hcache_backend.checks.round_trip import check_copies
from hcache_backend.config import HCacheConfig
from hcache_backend.format.page import PageLayout, hidden_layer
from hcache_backend.format.units import WHOLE
from hcache_backend.host.layout import Layout
from hcache_backend.host.segments import KVSegments
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.ranks import Refused
from hcache_backend.sglang.host_pool import HostPages
from hcache_backend.start.build import Start
from hcache_backend.start.capabilities import Server
from hcache_backend.start.page_plan import (
    choose_codec,
    encoded_share,
    kv_codec,
    plan_host_pages,
)
from hcache_kernels.codecs import SEGMENT_CODECS, exp4
from tests.engine.in_process.pools.host_pools import kv_cache_of_llama_3_8b
from tests.kit.host import LAYERS, PAGE, kv_pool, slots_of


def pool_for(codec: str) -> Any:
    """With pages that the codec takes."""
    return kv_pool(page=2 * PAGE if codec == "exp3" else PAGE)


def plan_of(device: Any, codec: str) -> Layout:
    methods = Restore(None, None, Partition(0, 0, device.layer_num), chunk_tokens=8192)
    kv = KVSegments(device, range(device.layer_num), device.page_size, WHOLE, 1, codec)
    return Layout(device, methods, WHOLE, kv)


def try_copies(plan: Any) -> None:
    for layout in plan.page.variants:
        check_copies(layout, plan.kv)


def bare_start() -> Any:
    """The start of a server of one rank, without a model."""
    start: Any = object.__new__(Start)
    start._config = HCacheConfig()
    start._params = SimpleNamespace(tp_cache_group=None, pp_cache_group=None)
    start._runner = start.server = None
    start.smallest_page = 0
    return start


def of_rows(codec: str, rows: torch.Tensor) -> str:
    """The codec of hidden states that a start chooses by those of its self-check."""
    observed: Any = SimpleNamespace(
        hidden=(torch.randn_like(rows), rows), layers=(0, 1), slots=None
    )
    observed.positions, observed.layer_problem = torch.arange(len(rows)), lambda *_: None
    return choose_codec(None, HCacheConfig(codec=codec), observed, None).name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("unfit", "used", "level"),
    [(0, "exp4", []), (1, "exp4", ["INFO"]), (9, "exp4", ["WARNING"]), (10, "none", ["WARNING"])],
)
@pytest.mark.parametrize("codec", ["auto", "exp4"])
def test_hidden_states_are_encoded_unless_no_token_of_the_self_check_fits(
    codec: str, unfit: int, used: str, level: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What pages hold goes by the type, not by which tokens a server tried."""
    rows = torch.randn(10, 64, dtype=torch.bfloat16)
    rows[:unfit] = 2.0 ** -torch.arange(64).to(torch.bfloat16)  # as many exponents as values
    with caplog.at_level("INFO", "hcache"):
        assert of_rows(codec, rows) == used
    assert [record.levelname for record in caplog.records] == level


def test_hidden_states_of_float32_are_stored_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    assert of_rows("exp4", torch.randn(10, 64)) == "none"
    assert "(codec 'none'): " in caplog.text and "bfloat16" in caplog.text


def test_pages_that_are_hardly_more_than_their_header_are_refused() -> None:
    start = bare_start()
    start.smallest_page = Start.smallest_page
    start._check_copies(plan_of(kv_pool(page=256), "none"))
    said = r"page of 1 tokens \(--page-size\) its header would take 4096"
    with pytest.raises(Refused, match=said):
        start._check_copies(plan_of(kv_pool(page=1), "none"))


@pytest.mark.parametrize(("size_gb", "ratio"), [(0, 2.0), (8, 0.0)])
def test_the_largest_memory_that_is_named_fits(size_gb: int, ratio: float) -> None:
    """SGLang would end the server: nothing asks for less by itself if a size is given."""
    device = kv_cache_of_llama_3_8b(64)
    layout = PageLayout(64, (hidden_layer(64, 2048, 1024, "none"),) * 32)
    there = 5.5e9

    def pages(size_gb: float, ratio: float) -> HostPages:
        return plan_host_pages(device, layout, size_gb, ratio, there, with_shadows=False)

    with pytest.raises(Refused, match=r"GB are there; --hicache-\w+ [\d.]+ is the most") as refused:
        pages(size_gb, ratio)
    words = str(refused.value).split("; ")[1].split()
    assert words[0] == ("--hicache-size" if size_gb else "--hicache-ratio")
    most = float(words[1])
    assert pages(most if size_gb else 0, 0.0 if size_gb else most).host >= 1
    with pytest.raises(Refused):
        pages(most + 1 if size_gb else 0, 0.0 if size_gb else most + 0.02)


def broken_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = exp4.encode_units

    def never_fits(units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        encoded, fits = encode(units)
        return encoded, torch.zeros_like(fits)

    monkeypatch.setattr(exp4, "encode_units", never_fits)


def test_an_encoder_that_never_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    monkeypatch.setattr(metrics.TOKENS, "count", lambda event, _=1: counted.append(event))
    broken_encoder(monkeypatch)
    device = kv_pool()
    with pytest.raises(Refused, match="codec 'exp4' does not hold normally distributed K and V"):
        try_copies(plan_of(device, "exp4"))
    assert counted == []


def tried(device: Any, codec: str) -> str:
    """The codec of K and V that a start ends with; the model has written three pages and a part of
    one."""
    written = slots_of(1, 2, 3, 4)[:-3]
    layouts = plan_of(device, codec), plan_of(device, "none")
    return bare_start()._checked_layout(*layouts, lambda: written).kv.codec


def test_own_pages_without_a_codec_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_encoder(monkeypatch)
    assert tried(kv_pool(), "exp4") == "none"
    monkeypatch.undo()
    assert [tried(pool_for(codec), codec) for codec in SEGMENT_CODECS] == [*SEGMENT_CODECS]
    monkeypatch.setattr(KVSegments, "save", lambda *_: None)
    with pytest.raises(Refused, match="K or V of layer 0 come back"):
        tried(kv_pool(), "exp4")


@pytest.mark.parametrize("codec", SEGMENT_CODECS)
@pytest.mark.parametrize("broken", ["its bytes", "what it says of them"])
def test_a_codec_of_wrong_bytes_is_refused(
    broken: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any bits at all are in the second page: it does not fit, and is not to be said to."""
    plan = plan_of(pool_for(codec), codec)
    save = plan.kv._save_layer

    def wrong(layer: int, held: Any, memory: Any, pages: torch.Tensor, offset: int) -> Any:
        fits = save(layer, held, memory, pages, offset)
        assert fits.tolist() == [True, False]
        if broken == "its bytes":
            memory[pages, offset] ^= 1
            return fits
        return torch.ones_like(fits)

    monkeypatch.setattr(plan.kv, "_save_layer", wrong)
    with pytest.raises(Refused, match="K or V of layer 0 come back"):
        try_copies(plan)


@pytest.mark.parametrize(("codec", "used"), [("int8", "none"), ("exp4", "exp4")])
def test_a_change_that_is_too_large(
    codec: str, used: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One token stands out: int8 rounds away what the others have in its channels."""
    device = kv_pool()
    device.k_buffer[1][2 * PAGE + 3] *= 100
    with caplog.at_level("WARNING", "hcache"):
        assert tried(device, codec) == used
    said = "codec 'int8' is not used, K and V are stored as they are (codec 'none'): it changes K "
    assert (said + "of layer 1 by" in caplog.text) == (used == "none")
    assert bool(caplog.text) == (used == "none")


def test_a_codec_that_cannot_hold_it_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    device = kv_pool()
    device.k_buffer[LAYERS - 1][2 * PAGE + 3, 1, 2] = float("inf")
    with caplog.at_level("WARNING", "hcache"):
        assert tried(device, "int8") == "none"
    assert "(codec 'none'): it cannot hold K and V of layer 1" in caplog.text


SHARES = {"none": 1.0, "exp4": 0.766, "exp3": 0.725, "int8": 0.5625}
"""Of the bytes of K and V: about what each codec leaves; the partition is chosen by them."""


@pytest.mark.parametrize(
    ("codec", "change", "stages", "used", "why"),
    [
        ("auto", {}, 1, "exp4", ""),  # a unit has 16 tokens
        ("exp3", {}, 1, "exp4", ""),
        ("auto", {"page": 32}, 1, "exp3", ""),
        ("auto", {"page": 64, "v_dim": 8}, 1, "none", ""),
        ("exp3", {"page": 64}, 1, "exp3", ""),
        ("auto", {"dtype": torch.float16}, 1, "none", ""),
        ("auto", {"dtype": torch.float8_e4m3fn}, 1, "none", ""),
        ("auto", {"dtype": torch.uint8}, 1, "none", ""),  # how SGLang keeps fp8
        ("none", {}, 1, "none", ""),
        ("int8", {}, 1, "int8", ""),
        ("int8", {"dtype": torch.float16}, 1, "int8", ""),
        ("exp4", {}, 2, "none", "codec 'exp4' takes no K and V of pipeline stages"),
        ("int8", {}, 2, "none", "codec 'int8' takes no K and V of pipeline stages"),
        ("exp4", {"dtype": torch.float32}, 1, "none", "K and V in bfloat16, not torch.float32"),
        ("int8", {"dtype": torch.float32}, 1, "none", "bfloat16 or float16, not torch.float32"),
        ("exp4", {"v_dim": 8}, 1, "none", "K and V of one shape, not (2, 8), (2, 16)"),
        ("exp4", {"heads": 1, "dim": 3}, 1, "none", "even number of values per token and group"),
        ("exp4", {"heads": 1, "dim": 2, "page": 4}, 1, "none", "multiple of 16"),
    ],
)
def test_form_alone_decides_on_the_codec_of_k_and_v(
    codec: str,
    change: dict[str, Any],
    stages: int,
    used: str,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(None, HCacheConfig(codec=codec), kv_pool(**change))
    with caplog.at_level("WARNING", "hcache"):
        assert kv_codec(server, WHOLE, 1, stages) == used
    assert why in caplog.text
    assert bool(caplog.text) == bool(why)
    assert encoded_share(server, stages) == pytest.approx(SHARES[used], abs=0.01)
