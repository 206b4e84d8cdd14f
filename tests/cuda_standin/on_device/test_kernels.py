"""Operations whose arguments are on a GPU launch their kernel, which does what torch does."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hcache_kernels.codecs import Cut, make_codec, make_segment_codec
from hcache_kernels.launch import gpu_microseconds
from hcache_kernels.pages import gather_pages, gather_planes, scatter_pages
from hcache_kernels.project_kv import (
    KeyNorm,
    KVPool,
    KVProjection,
    ProjectionCall,
    Way,
    project_kv,
    ways,
)
from hcache_kernels.project_kv.spec import kind_of
from hcache_kernels.project_kv.ways import (
    device_table,
    fused_configs,
    measure_choice,
    ways_in_use,
)
from hcache_kernels.staging import (
    NOWHERE,
    StagedRows,
    StepTargets,
    begin_rows,
    judge_rows,
    save_rows,
    stage_rows,
)
from tests.cuda_standin import device
from tests.cuda_standin.device import CUDA
from tests.cuda_standin.memory import Memory

PAGES, PAGE_BYTES, ROW = 9, 4096 + 64, 64


def on_both(*tensors: torch.Tensor) -> Any:
    """The tensors, then copies on the device."""
    return (tensors, tuple(tensor.clone().to(CUDA) for tensor in tensors))


def launched() -> int:
    count = len(device.launches)
    device.launches.clear()
    return count


def pages_of_host() -> torch.Tensor:
    return torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8).pin_memory()


@pytest.mark.parametrize(("name", "dtype"), [("exp4", torch.bfloat16), ("int8", torch.float16)])
def test_a_codec_takes_one_launch_each_way(name: str, dtype: torch.dtype) -> None:
    codec, rows = make_codec(name, 256, dtype), torch.randn(7, 256).to(dtype)
    (here,), (there,) = on_both(rows)
    want, fits = codec.encode(here)
    room = torch.full((9, codec.row_bytes), 0xEE, dtype=torch.uint8, device=CUDA)
    with Memory() as memory:
        got, fit = codec.encode(there, room)
    assert got.is_cuda and launched() == 1
    assert sum(memory.made) <= len(rows) * (codec.flags + 1), "but for flags"
    assert torch.equal(got.cpu(), want) and torch.equal(fit.cpu(), fits)
    assert (room[7:] == 0xEE).all().item()
    room = torch.full((9, 256), torch.nan, dtype=dtype).to(CUDA)
    with Memory() as memory:
        back = codec.decode(got, room)
    assert launched() == 1 and not memory.made
    assert torch.equal(back.cpu().view(torch.uint8), codec.decode(want).view(torch.uint8))
    assert room[7:].isnan().all()


@pytest.mark.parametrize("name", ["exp4", "int8"])
def test_a_segment_codec_takes_one_launch_each_way(name: str) -> None:
    cut, dim, dtype = Cut(128, 4, groups=2, pieces=2), 64, torch.bfloat16
    codec = make_segment_codec(name, cut, dim, dtype)
    shape = (3 * cut.tokens * cut.pieces, cut.groups * cut.width // dim, dim)
    planes = [torch.randn(shape).to(dtype) for _ in "kv"]
    items = torch.tensor([2, 0])
    here, there = on_both(*planes, items, torch.tensor([4, 1]))
    memory = [torch.zeros(6, 64 + codec.segment_bytes, dtype=torch.uint8) for _ in range(2)]
    reached = memory[1].pin_memory()
    fits = codec.encode_pages(here[:2], here[2], memory[0], here[3], 64)
    fit = codec.encode_pages(there[:2], there[2], reached, there[3], 64)
    assert launched() >= 1
    assert torch.equal(fit.cpu(), fits) and fits.all()
    assert torch.equal(reached, memory[0])  # the answer was waited for
    encoded = memory[0][[4, 1], 64:].contiguous()
    back = [torch.zeros(shape, dtype=dtype) for _ in "kv"]
    on_device = [plane.to(CUDA) for plane in back]
    codec.decode_pages(encoded, back, items)
    codec.decode_pages(encoded.to(CUDA), on_device, there[2])
    for one, other in zip(back, on_device, strict=True):
        assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8))


def test_pages_are_gathered_by_one_launch() -> None:
    pages, ids = pages_of_host(), torch.tensor([8, 0, 3, 3])
    want = gather_pages(pages, ids, 64, 1024)
    assert torch.equal(gather_pages(pages, ids.to(CUDA), 64, 1024).cpu(), want)
    assert launched() == 1
    with pytest.raises(ValueError, match="out"):  # ids and rows are on one device
        gather_pages(pages, ids, 64, 1024, torch.empty(4, 1024, dtype=torch.uint8, device=CUDA))


def test_planes_and_rows_go_where_the_reference_puts_them() -> None:
    pages, ids, places = pages_of_host(), torch.tensor([8, 0, 5]), torch.tensor([1, 4, 0])
    planes = [torch.full((6, 4, 2, 32), 0x5A, dtype=torch.uint8) for _ in "kv"]
    here, there = on_both(*planes, ids, places)
    gather_planes(pages, here[2], 64, here[:2], here[3])
    gather_planes(pages, there[2], 64, there[:2], there[3])
    assert launched() == 1
    for one, other in zip(here[:2], there[:2], strict=True):
        assert torch.equal(one, other.cpu())
    rows = torch.randint(0, 256, (3, ROW), dtype=torch.uint8)
    want, got = pages.clone(), pages.clone().pin_memory()
    here, there = on_both(rows, ids)
    scatter_pages(here[0], want, here[1], 64)
    scatter_pages(there[0], got, there[1], 64)
    assert launched() == 1
    assert torch.equal(got, pages)  # late
    torch.cuda.synchronize()
    assert torch.equal(got, want)


def test_a_step_is_staged_saved_and_judged_as_in_torch() -> None:
    n, layers, capacity = 5, 2, 9
    tokens = torch.arange(n), torch.arange(n) + 7, torch.arange(n) + 100
    segments = torch.tensor([16, 16 + 4 * ROW])
    shadows = torch.randperm(PAGES)
    rows = torch.randn(n, ROW // 2).to(torch.bfloat16)
    found = []
    for where in ("cpu", CUDA):
        pinned = where != "cpu"
        now = StepTargets(*(torch.zeros(k, dtype=torch.int64, device=where) for k in (capacity, 1)))
        staged = StagedRows(
            torch.zeros((layers, capacity, ROW), dtype=torch.uint8, device=where),
            torch.zeros((layers, capacity), dtype=torch.int64, device=where),
        )
        copied = torch.zeros(3 * n, dtype=torch.int64, pin_memory=pinned)
        verdicts = torch.zeros(n, dtype=torch.uint8, pin_memory=pinned)
        arena = torch.zeros((PAGES, PAGE_BYTES), dtype=torch.uint8, pin_memory=pinned)
        at = torch.zeros((3, n), dtype=torch.int64, device=where)
        on = [tensor.to(where) for tensor in (*tokens, rows, segments, shadows)]
        begin_rows(tuple(on[:3]), at, copied, now, 41, range(2, 2 + n))
        for layer in range(layers - 1):  # the last one is not written
            stage_rows(on[3], now.targets[:n], now.number, staged, layer)
        save_rows(staged.rows[:, 2 : 2 + n], on[0], on[5], arena, on[4], 4, range(4))
        judge_rows(staged.marks[:, 2 : 2 + n], 41, verdicts)
        assert launched() == (4 if pinned else 0)
        torch.cuda.synchronize()
        found.append((at.cpu(), copied, now.targets.cpu(), staged.marks.cpu(), arena, verdicts))
    for want, got in zip(*found, strict=True):
        assert torch.equal(want, got)
    assert not found[0][-1].any()
    assert (found[0][2][n:] == NOWHERE).all()


def projection_call(rows: int = 20) -> ProjectionCall:
    heads, dim, hidden = 2, 16, 64
    weight = torch.randn(2 * heads * dim, hidden).to(torch.bfloat16) / 8
    pool = [torch.zeros(32, heads, dim, dtype=torch.bfloat16, device=CUDA) for _ in "kv"]
    return ProjectionCall(
        torch.randn(rows, hidden).to(torch.bfloat16).to(CUDA),
        torch.arange(rows, device=CUDA),
        torch.randperm(32, device=CUDA)[:rows],
        KVProjection(weight.to(CUDA), None, heads, dim),
        KVPool(*pool),
    )


def on_cpu(call: ProjectionCall) -> ProjectionCall:
    projection = replace(call.projection, weight=call.projection.weight.cpu())
    pool = KVPool(torch.zeros_like(call.pool.k.cpu()), torch.zeros_like(call.pool.v.cpu()))
    return ProjectionCall(
        call.hidden.cpu(), call.positions.cpu(), call.slots.cpu(), projection, pool
    )


def test_the_way_that_was_measured_to_be_fastest_projects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "ROWS", (16,))
    device_table.cache_clear()
    call = projection_call()
    times = iter((3.0, 2.0, *range(10, 99)))
    monkeypatch.setattr(ways, "gpu_microseconds", lambda work: (work(), next(times))[1])
    measure_choice(call.projection, torch.bfloat16)
    (way,) = ways_in_use(call.projection, torch.bfloat16)
    assert way is not None and way.config is not None  # the second one, which is fused
    times = iter(())
    measure_choice(call.projection, torch.bfloat16)  # nothing is measured twice
    launched()
    project_kv(call)
    (launch,) = device.launches
    assert launch.arguments["TILE"] == way.config
    want = on_cpu(call)
    project_kv(want)
    for got, true in ((call.pool.k, want.pool.k), (call.pool.v, want.pool.v)):
        torch.testing.assert_close(got.cpu(), true, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("over_all", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_projection_takes_no_memory_if_it_is_given_some(
    fused: bool, over_all: bool, biased: bool
) -> None:
    """In service there may be none left, and a load cannot fail."""
    call, rows = projection_call(), 20
    ones, zeros = (torch.full((32,), x, dtype=torch.bfloat16, device=CUDA) for x in (1.0, 0.0))
    norm = KeyNorm("rms", "all", ones, None, 1e-6) if over_all else None
    bias = torch.cat((ones, zeros)) if biased else None
    projection = replace(call.projection, norm=norm, bias=bias)
    call = replace(call, projection=projection)
    way = Way(fused_configs(kind_of(projection), (9, 0))[0] if fused else None)
    product = torch.full((rows * 64 + 5,), torch.nan, dtype=torch.bfloat16, device=CUDA)
    with Memory() as memory:
        project_kv(call, way, product)
    assert not memory.made
    got, new = call.pool, KVPool(*(torch.zeros_like(part) for part in (call.pool.k, call.pool.v)))
    project_kv(replace(call, pool=new), way)
    assert torch.equal(got.k.cpu(), new.k.cpu()) and torch.equal(got.v.cpu(), new.v.cpu())
    assert new.k.any().item() and product[rows * 64 :].isnan().all().item()


def test_a_device_that_no_kernel_is_for_projects_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    call = projection_call()
    assert ways_in_use(call.projection, torch.bfloat16) == [None]
    measure_choice(call.projection, torch.bfloat16)
    want = on_cpu(call)
    project_kv(want)
    launched()
    project_kv(call)
    assert not launched()
    torch.testing.assert_close(call.pool.k.cpu(), want.pool.k)


def test_the_time_of_work_is_its_median_with_a_cold_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the device goes on by what runs: 3 microseconds at each call, 90 at one."""
    monkeypatch.setattr("hcache_kernels.launch.FLUSH_BYTES", 64)
    seconds, calls = [0.0], []

    def work() -> None:
        calls.append(len(calls))
        spent = 90e-6 if len(calls) == 9 else 3e-6
        torch.cuda.current_stream().put(lambda: seconds.__setitem__(0, seconds[0] + spent))

    monkeypatch.setattr(device, "clock", lambda: seconds[0])
    assert gpu_microseconds(work) == pytest.approx(3.0)
    assert len(calls) == 23
