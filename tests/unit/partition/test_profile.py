"""Profiles: files, fits, measuring with shapes that take no time."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hcache_backend.config import ConfigError, HCacheConfig
from hcache_backend.plan.measure import (
    Bench,
    Point,
    Prepare,
    Work,
    fit,
    measure,
    read_rate,
)
from hcache_backend.plan.model_shape import Latent, ModelShape
from hcache_backend.plan.profile import (
    OPERATIONS,
    PRESETS,
    Profile,
    Rate,
    load_profile,
    preset_profile,
    processor_name,
)
from hcache_backend.plan.restore import search
from hcache_backend.store import FileOps
from tests.unit.partition.pipelines import layer_costs

TINY = ModelShape(
    family="llama",
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=4,
    head_dim=16,
    value_dim=16,
    mlp_width=96,
    element_bytes=4,
)
SHAPES = {
    "MHA": TINY,
    "GQA": TINY.model_copy(update={"kv_heads": 2, "gated": False}),
    "MLA": TINY.model_copy(update={"value_dim": 12, "latent": Latent(rank=20, rope_dim=4)}),
    "MLA, query latent": TINY.model_copy(
        update={"value_dim": 12, "latent": Latent(rank=20, rope_dim=4, query_rank=24)}
    ),
}


# ---- files ----


@pytest.mark.parametrize("name", PRESETS)
def test_a_profile_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    profile = preset_profile(name, ssds=2).model_copy(
        update={
            "model": SHAPES["MLA"],
            "points": {"dense": ((64, 0.5), (128, 1.5))},
        }
    )
    profile.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("dense"), ("dense", "required")),
        (lambda t: t.update(fast=True), ("fast", "not permitted")),
        (lambda t: t.update(format=2), ("format", "2", "should be 1")),
        (lambda t: t["hidden_copy"].update(per_second=0), ("hidden_copy.per_second", "0", "great")),
        (lambda t: t["l3"].update(per_second="fast"), ("l3.per_second", "fast", "number")),
        (lambda t: t.update(points={"dense": [[1]]}), ("points.dense.0", "required")),
        (lambda t: t.update(copies=[]), ("copies", "not permitted")),  # as once
    ],
)
def test_wrong_fields_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], said: Sequence[str]
) -> None:
    path = tmp_path / "profile.json"
    preset_profile("h100", ssds=1).save(path)
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    for words in (str(path), "hcache profile", *said):
        assert words in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_files_that_are_no_profile(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"profile\.json"):
        load_profile(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_profile(tmp_path / "absent.json")


# ---- fits ----


@given(
    st.floats(1e-7, 1e-2) | st.just(0.0),
    st.floats(1e6, 1e15),
    st.lists(st.integers(1, 10**6), min_size=2, max_size=8, unique=True),
)
def test_a_fit_finds_the_rate(seconds: float, per_second: float, sizes: list[int]) -> None:
    true = Rate(seconds=seconds, per_second=per_second)
    amounts = [size * per_second * 1e-3 for size in sizes]  # so that the rate shows in the times
    points = [Point(1, amount, true.time(amount)) for amount in amounts]
    found = fit(points)
    for point in points:
        assert found.time(point.amount) == pytest.approx(point.seconds, rel=1e-3)


@pytest.mark.parametrize(
    "times", [(1.0, 1.0, 1.0), (3.0, 2.0, 1.0), (0.1, 1.0, 10.0), (1e-9, 1.0, 1.0)]
)
def test_times_that_are_no_line_give_a_usable_rate(times: tuple[float, ...]) -> None:
    points = [Point(0, 10.0 * 2**number, time) for number, time in enumerate(times)]
    found = fit(points)
    assert found.seconds >= 0
    assert found.per_second > 0
    low, high = min(times), max(times)
    assert low / 4 <= found.time(points[-1].amount) <= 4 * high


def test_a_disturbed_measurement_does_not_count() -> None:
    undisturbed = [Point(0, 10.0 * 2**number, 1.0 * 2**number) for number in range(4)]
    disturbed = [undisturbed[0], Point(0, 20.0, 500.0), *undisturbed[2:]]
    assert fit(disturbed).time(80.0) == pytest.approx(8.0, rel=0.3)
    assert fit([Point(64, 100.0, 2.0)]) == Rate(per_second=50.0)


# ---- measuring ----


CPU = torch.device("cpu")


def bench(shape: ModelShape, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Bench:
    return Bench(shape, torch.device(device), dtype, seconds=0.02)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_measured_for_every_attention(shape: ModelShape, operation: str) -> None:
    points = bench(shape).points(operation)
    assert [point.tokens for point in points][:2] == [64, 128]
    assert all(point.seconds > 0 for point in points)
    per_token = {
        "hidden_copy": shape.hidden_bytes,
        "kv_load": shape.kv_bytes,
        "projection": shape.projection_flops,
        "dense": shape.dense_flops,
        "attention": 32 * shape.attention_flops,  # 64 tokens have 32 keys each on average
    }
    assert points[0].amount == 64 * per_token[operation]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_measured_layer_computes_what_is_counted(shape: ModelShape) -> None:
    """FLOPs as PyTorch counts them while the measured calls run."""
    for operation in ("projection", "dense", "attention"):
        amount, work = getattr(bench(shape), f"_{operation}")()(128)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            work()
        counted = counter.get_total_flops()
        if operation == "attention":
            counted /= 2  # the counter does not know of the causal half
        assert counted == amount, operation


def test_measuring_leaves_random_numbers_as_they_were() -> None:
    """Only one rank measures: all ranks must sample the same tokens."""
    before = torch.get_rng_state()
    measure(bench(TINY), None, [])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_measured_profile_plans(tmp_path: Path) -> None:
    begun: list[str] = []
    l3 = Rate(per_second=1e9)
    measured = measure(bench(TINY), l3, [Path("/pages")], begin=begun.append)
    assert begun == [*OPERATIONS]
    assert (measured.device, measured.dtype) == (processor_name(), "float32")
    assert (measured.l3, measured.dirs, measured.model) == (l3, ("/pages",), TINY)
    assert set(measured.points) == set(OPERATIONS)
    measured.save(tmp_path / "profile.json")
    loaded = load_profile(tmp_path / "profile.json")
    assert loaded == measured
    costs = [layer_costs(profile, TINY, 1024) for profile in (loaded, measured)]
    assert search(costs[0], TINY.layers) == search(costs[1], TINY.layers)


class Crowded(Bench):
    """A device that has no room for more than 256 tokens."""

    def _projection(self) -> Prepare:
        prepare = super()._projection()

        def crowded(tokens: int) -> tuple[float, Work]:
            if tokens > 256:
                raise torch.OutOfMemoryError("no room")
            return prepare(tokens)

        return crowded


def test_a_device_without_much_room_is_measured_with_less() -> None:
    crowded = Crowded(TINY, CPU, torch.float32, seconds=0.5)
    assert [point.tokens for point in crowded.points("projection")] == [64, 128, 256]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_measuring_on_a_gpu(shape: ModelShape) -> None:
    narrow = shape.model_copy(update={"element_bytes": 2})
    measured = measure(bench(narrow, "cuda", torch.bfloat16), None, [])
    assert isinstance(measured, Profile)
    found = search(layer_costs(measured, narrow, 1024), narrow.layers)
    assert found.layers == narrow.layers


# ---- L3 ----


class Reads(FileOps):
    """Counts what is read, as the store would read it."""

    bytes = flags = 0

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        self.flags |= flags if name == "pages" else 0
        return super().open(name, flags, dir_fd)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = super().read(fd, buffers, offset)
        self.bytes += got
        return got


def folders(*dirs: Path, **options: Any) -> HCacheConfig:
    return HCacheConfig(dirs=dirs, io_threads=2, **{"min_free_bytes": 0, **options})


def test_l3_folders_are_read_and_left_clean(tmp_path: Path) -> None:
    store, absent = tmp_path / "store", tmp_path / "not" / "there"
    store.mkdir()
    ops = Reads()
    unaligned = TINY.model_copy(update={"hidden_row_bytes": 39})
    found, direct = read_rate(folders(store, absent), unaligned, 0.05, ops)
    assert found.per_second > 0
    assert ops.bytes >= 2 * 3 * 4096
    assert direct == bool(ops.flags & os.O_DIRECT)
    assert list(tmp_path.rglob("*")) == [store]


def test_a_full_file_system_is_not_filled_further(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"min_free_bytes.*measuring needs"):
        read_rate(folders(tmp_path, min_free_bytes=1 << 60), TINY, 0.05)
    assert list(tmp_path.iterdir()) == []


class Broken(FileOps):
    """Reads the beginning of a file and then not, or nothing more."""

    def __init__(self, error: OSError | None) -> None:
        self.error = error

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not offset:
            return super().read(fd, buffers, offset)
        if self.error:
            raise self.error
        return 0


@pytest.mark.parametrize(("error", "said"), [(OSError("gone"), "gone"), (None, "cut")])
def test_a_disk_that_fails_is_no_rate(tmp_path: Path, error: OSError | None, said: str) -> None:
    with pytest.raises(OSError, match=said):
        read_rate(folders(tmp_path), TINY, 0.05, Broken(error))
    assert list(tmp_path.iterdir()) == []
