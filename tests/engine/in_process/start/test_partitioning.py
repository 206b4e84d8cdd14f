"""KV segments and the choice of a partition, against SGLang's own classes."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hcache_backend.cli.plan import sizing
from hcache_backend.config import ConfigError, parse_config
from hcache_backend.format.page import RECOMPUTED, PageLayout, hidden_layer
from hcache_backend.format.units import WHOLE
from hcache_backend.host.layout import Layout
from hcache_backend.host.segments import KVSegments
from hcache_backend.plan.model_config import shape_from_config
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.profile import Profile, Rate
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.sglang.host_pool import HostPages
from hcache_backend.sglang.passes import forward_stream
from hcache_backend.start.machine import fixed_partition
from hcache_backend.start.page_plan import host_tokens, kv_bytes_per_token, plan_host_pages
from hcache_backend.streams import WorkerStream
from hcache_kernels.codecs import make_codec
from tests.kit.host import PAGE, kv_pool

SIZE = PAGE
CONFIGS = Path(__file__).parents[3] / "unit" / "partition" / "configs"


def test_codes_that_encode_the_same_rows_otherwise_share_no_pages() -> None:
    """An earlier ``exp4`` had rows of the same length, which this one would decode to others."""
    methods = Restore(None, None, Partition(0, 1, 0), chunk_tokens=64)
    kvcache = kv_pool(1, 8, dtype=torch.float32, page=64)
    kv = KVSegments(kvcache, (), 64, WHOLE, 1)
    codec = make_codec("exp4", 256, torch.bfloat16)
    layout = Layout(kvcache, methods, WHOLE, kv, codec=codec, layers=()).page
    before = PageLayout(64, (hidden_layer(64, codec.row_bytes, 256, "exp4"),))
    assert layout.page_bytes == before.page_bytes
    assert layout.form != before.form


@pytest.mark.parametrize(("overlap", "stages"), [(True, 1), (False, 2), (False, 1)])
def test_recomputation_goes_where_sglang_runs_forward_passes(overlap: bool, stages: int) -> None:
    args = SimpleNamespace(disable_overlap_schedule=not overlap, pp_size=stages)
    runner = SimpleNamespace(server_args=args, device="cpu", forward_stream=object())
    scheduler = WorkerStream("scheduler")
    with scheduler.as_current():
        on_the_schedulers = forward_stream(runner) is scheduler
    assert on_the_schedulers == (not overlap and stages == 1)


SLOW, FAST = Rate(per_second=1.0), Rate(per_second=1e18)


def slow_bus(l3: Rate | None) -> Profile:
    """A machine where everything that is copied takes long, and nothing else does."""
    rates = {"hidden_copy": SLOW, "kv_load": SLOW, "projection": FAST, "dense": FAST}
    return Profile(device="none", source="a test", dtype="float32", l3=l3, attention=FAST, **rates)


def gpt2() -> ModelShape:
    return shape_from_config(json.loads((CONFIGS / "gpt2.json").read_text()), "a test")


FOUR_LAYERS = ModelShape(
    family="llama", layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64, value_dim=64,
    mlp_width=256,
)  # fmt: skip


@pytest.mark.parametrize("codec", ["auto", "none", "exp3", "exp4", "int8"])
def test_as_many_pages_fit_as_were_asked_for(codec: str) -> None:
    given = {"conversations": 400, "tokens": 128, "device_tokens": 640, "codec": codec}
    found = sizing(FOUR_LAYERS, "bfloat16", Partition(1, 2, 1), **given)
    # As in SGLang: one page more than the pool gives out.
    buffers = [torch.empty((640 + 64, 4, 64), dtype=torch.bfloat16) for _ in range(4)]
    kvcache = SimpleNamespace(k_buffer=buffers, v_buffer=buffers, size=640, layer_num=4)
    assert kv_bytes_per_token(kvcache) == 4 * 1024
    used = "exp3" if codec == "auto" else codec
    kv = KVSegments(kvcache, (3,), 64, WHOLE, 1, used)
    hidden = hidden_layer(64, make_codec(used, 256, torch.bfloat16).row_bytes, 256)
    layout = PageLayout(64, (RECOMPUTED, hidden, hidden, kv.stored_layer(3)))
    plan = partial(plan_host_pages, kvcache, layout, budget_bytes=1e12, with_shadows=True)
    wanted = HostPages(found.pages, found.shadows)
    assert plan(size_gb=(found.host_bytes + 1) / 1e9, ratio=0) == wanted
    assert found.ratio is not None
    assert plan(size_gb=0, ratio=found.ratio + 1e-9) == wanted


@pytest.mark.parametrize("page", [1, 4, 16, 64])
@pytest.mark.parametrize("hidden", [0, 2, 4])
def test_a_partition_leaves_the_room_that_a_server_has(page: int, hidden: int) -> None:
    """Headers of small pages take more than their tokens."""
    buffers = [torch.empty((4096 + page, 4, 64), dtype=torch.bfloat16) for _ in range(4)]
    kvcache = SimpleNamespace(
        k_buffer=buffers, v_buffer=buffers, size=4096, layer_num=4, page_size=page
    )
    kv = KVSegments(kvcache, tuple(range(hidden, 4)), page, WHOLE, 1, "none")
    rows = hidden_layer(page, 512, 256)
    layers = [rows] * hidden + [kv.stored_layer(n) for n in kv.layers]
    layout = PageLayout(page, tuple(layers))
    pages = plan_host_pages(kvcache, layout, 1.0, 0, 1e12, with_shadows=hidden > 0)
    found = host_tokens(kvcache, rows, WHOLE, 1.0, Partition(0, hidden, 4 - hidden), 1e9)
    assert found == pytest.approx(pages.host * page, abs=2 * page, rel=0.001)


class TestPartition:
    def test_kv_takes_the_place_of_recomputation_that_is_not_possible(self) -> None:
        parts = Restore(None, None, Partition(1, 2, 1), chunk_tokens=1024)
        assert parts.methods == ("recompute", "hidden", "hidden", "kv")
        without = parts.recomputing_first(0)
        assert without.methods == ("kv", "hidden", "hidden", "kv")
        assert without.layers("hidden") == parts.layers("hidden")  # what is captured stays
        assert without.first_layers(100, 0) == 0

    def test_layers_that_are_not_exact_enough_are_loaded(self) -> None:
        """However much the bus would gain by recomputing them."""
        profile, shape = slow_bus(l3=None), gpt2()
        stored = Restore(profile, shape, Partition(3, shape.layers - 3, 0), chunk_tokens=1024)
        assert stored.first_layers(100, 0) == shape.layers
        some = stored.recomputing_first(2)
        assert some.methods[:4] == ("recompute", "recompute", "kv", "hidden")
        assert some.first_layers(100, 0) == 2
        assert replace(some, ranks=2).first_layers(100, 0) == 2

    def test_ranks_recompute_what_they_must_and_no_more(self) -> None:
        """A bus so slow that one rank recomputes everything it may."""
        profile, shape = slow_bus(l3=None), gpt2()
        stored = Partition(1, shape.layers - 1, 0)
        alone = Restore(profile, shape, stored, chunk_tokens=1024)
        assert alone.first_layers(100, 0) == shape.layers
        assert replace(alone, ranks=2).first_layers(100, 0) == 1

    def test_fewer_layers_are_recomputed_the_longer_that_takes(self) -> None:
        """Of layers that need not be."""
        profile, shape = slow_bus(l3=SLOW), gpt2()
        parts = Restore(profile, shape, Partition(1, shape.layers - 1, 0), chunk_tokens=1024)
        slowdowns = (1.0, 1e3, 1e9, 1e18, math.inf)
        layers = [parts.first_layers(100, 0, slowdown) for slowdown in slowdowns]
        assert layers == sorted(layers, reverse=True)
        assert layers[0] == shape.layers and layers[-2:] == [1, 1]

    def test_options_decide_before_the_profile(self) -> None:
        hidden = parse_config({"mode": "hidden"}, "hcache")
        assert fixed_partition(hidden, 4) == Partition(0, 4, 0)
        assert fixed_partition(parse_config({}, "hcache"), 4) is None
        given = parse_config({"partition": {"recompute": 1, "kv": 3}}, "hcache")
        assert fixed_partition(given, 4) == Partition(1, 0, 3)
        with pytest.raises(ConfigError, match="that is 4 layers, and the model has 5"):
            fixed_partition(given, 5)
