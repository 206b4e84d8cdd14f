"""How often a backup, a load and an eager hit launch, which costs the scheduler: no layer alone."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hcache_backend.format.units import WHOLE, Shard
from hcache_backend.host import segments
from hcache_backend.host.segments import KVSegments
from hcache_backend.krul.segments import PairedSegments
from hcache_backend.prefetch.reservations import EagerRestores, launch_pages
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.report import RunningRestore
from hcache_backend.streams import host_tensor
from hcache_kernels.codecs.exp4 import Exp4
from hcache_kernels.launch import COPY_PROGRAMS, Launch
from tests.cuda_standin import device
from tests.cuda_standin.device import CUDA
from tests.cuda_standin.memory import Memory

LAYERS, HEADS, DIM, PAGE = 5, 2, 8, 16  # layers: more than a load may launch, and few to interpret
PAGES, HIT = 24, 16
COPIES = ("_copied", "_to_device", "_moved")
"""Of the stand-in: they put copies of memory into a stream, which no kernel makes."""


class Server:
    """K and V in a pool on the device, and pages in host memory."""

    def __init__(self, codec: str) -> None:
        slots = 2 * PAGES * PAGE
        self.pool = SimpleNamespace(
            **{
                name: [torch.randn(slots, HEADS, DIM).bfloat16().to(CUDA) for _ in range(LAYERS)]
                for name in ("k_buffer", "v_buffer")
            }
        )
        if codec == "krul":
            self.kv: KVSegments = PairedSegments(self.pool, range(LAYERS), PAGE, 1, pairs=1)
        else:
            self.kv = KVSegments(self.pool, range(LAYERS), PAGE, WHOLE, 1, codec)
        stored = [self.kv.stored_layer(layer) for layer in range(LAYERS)]
        self.layout = self.kv.layout(stored, WHOLE)
        self.memory = host_tensor((PAGES, self.layout.stride), torch.uint8, CUDA)
        self.memory.zero_()
        restored = [self.kv.restored_layer(layer) for layer in range(LAYERS)]
        self.pipeline = RestorePipeline(self.memory, self.layout, restored, 4096, CUDA)

    def slots(self, first: int, pages: int) -> torch.Tensor:
        return torch.arange(first * PAGE, (first + pages) * PAGE).to(CUDA)

    def values(self, slots: torch.Tensor) -> list[torch.Tensor]:
        planes = [*self.pool.k_buffer, *self.pool.v_buffer]
        return [plane[slots].cpu() for plane in planes]


@contextmanager
def launches() -> Iterator[list[str]]:
    """What is put into streams within the block, but for events and copies of memory."""
    seen: list[str] = []
    put = device.Stream.put

    def counted(stream: Any, work: Any) -> None:
        name = work.__qualname__
        if not any(part in name for part in ("Event.", "wait_event", *COPIES)):
            seen.append(name)
        put(stream, work)

    device.Stream.put = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        device.Stream.put = put  # type: ignore[method-assign]


@pytest.mark.parametrize("codec", ["none", "exp4", "int8"])
def test_a_backup_and_a_load_launch_four_times_at_most(codec: str) -> None:
    server, pages = Server(codec), np.arange(2)
    slots, others = server.slots(2, 2), server.slots(PAGES + 5, 2)
    host_pages = torch.from_numpy(pages).to(CUDA)
    for _ in range(2):  # the first time a table is made
        with launches() as saving:
            fits = server.kv.save(server.layout, server.memory, host_pages, slots)
        with launches() as loading:
            restore = server.pipeline.start(pages, others)
    assert 1 <= len(saving) <= 4, saving
    assert 1 <= len(loading) <= 4, loading
    restore.synchronize()
    assert fits is None or fits.all().item()
    back, want = server.values(others), server.values(slots)
    if server.kv.lossless:
        assert all(map(torch.equal, back, want))
    else:
        assert all(torch.allclose(a, b, atol=0.02) for a, b in zip(back, want, strict=True))
    # A forward pass waits for groups of layers, not for all of them.
    assert len(set(map(id, restore.layers))) == (4 if codec == "none" else 2)


@pytest.mark.parametrize("codec", ["none", "exp4", "krul"])
def test_only_copies_of_few_programs_write_to_host_memory(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoders write a byte or two a thread: they write to the device."""
    server, host_pages = Server(codec), torch.arange(2)
    start, end = server.memory.data_ptr(), server.memory.data_ptr() + server.memory.nbytes
    grids: list[tuple[int, ...]] = []
    run = Launch.run

    def noted(launch: Launch) -> None:
        given = launch.arguments.values()
        reached = [one for one in given if isinstance(one, torch.Tensor) and not one.is_cuda]
        if any(start <= one.data_ptr() < end for one in reached):
            assert launch.arguments.get("SAVE"), launch
            grids.append(launch.grid)
        run(launch)

    monkeypatch.setattr(Launch, "run", noted)
    pages = host_pages if server.kv.by_header else host_pages.to(CUDA)
    server.layout.divide(server.memory.numpy())
    fits = server.kv.save(server.layout, server.memory, pages, server.slots(2, 2))
    assert fits is None or fits.all().item()
    assert grids and all(math.prod(grid) <= COPY_PROGRAMS for grid in grids)


@pytest.mark.parametrize(("codec", "most"), [("none", 2), ("exp4", 3)])
def test_index_keys_of_all_layers_come_by_one_launch(codec: str, most: int) -> None:
    """Of every second layer; a save, and each group of a restore, has one launch for them."""
    layers, pages, dim, of_page = 12, np.array([4, 1, 3]), 64, PAGE * 24
    rows = [torch.randn(2 * PAGES * PAGE, 1, dim).bfloat16().to(CUDA) for _ in range(layers)]
    keys = [
        torch.randint(256, (2 * PAGES * (layer % 2), of_page), dtype=torch.uint8).to(CUDA)
        for layer in range(layers)
    ]
    pool = SimpleNamespace(kv_buffer=rows, kv_lora_rank=dim, index_k_with_scale_buffer=keys)
    kv = KVSegments(pool, range(layers), PAGE, WHOLE, 1, codec)
    layout = kv.layout([kv.stored_layer(layer) for layer in kv.layers], WHOLE)
    memory = host_tensor((PAGES, layout.stride), torch.uint8, CUDA).zero_()
    slots, taken = torch.arange(PAGE, 4 * PAGE).to(CUDA), torch.arange(30 * PAGE, 33 * PAGE)
    restored = [kv.restored_layer(layer) for layer in kv.layers]
    pipeline = RestorePipeline(memory, layout, restored, 2 * PAGE, CUDA)
    for _ in range(2):  # the first time tables are made
        with launches() as seen:
            kv.save(layout, memory, torch.from_numpy(pages).to(CUDA), slots)
        assert sum("_launched" in one for one in seen) == most, seen
        torch.cuda.synchronize()
        with launches() as seen:
            restore = pipeline.start(pages, taken.to(CUDA))
        restore.synchronize()
        groups = len(set(map(id, restore.layers)))
        assert sum("_launched" in one for one in seen) == groups * most, (groups, seen)
        for row, of_layer in zip(rows, keys, strict=True):
            assert torch.equal(row[taken.to(CUDA)].cpu(), row[slots].cpu())
            row[taken.to(CUDA)] = 0
            if len(of_layer):
                assert torch.equal(of_layer[30:33].cpu(), of_layer[1:4].cpu())
                of_layer[30:33] = 0


@pytest.mark.parametrize(
    ("codec", "dtype", "keys"),
    [
        ("none", torch.bfloat16, False),
        ("none", torch.uint8, False),
        ("exp4", torch.bfloat16, False),
        ("none", torch.uint8, True),
        ("exp4", torch.bfloat16, True),
    ],
)
@pytest.mark.parametrize("layers", [20, 6])  # of six each comes alone
def test_latents_of_ranks_come_by_few_exchanges(
    codec: str, dtype: torch.dtype, keys: bool, layers: int
) -> None:
    """Each rank brings its share of several layers, and one launch decodes those of all ranks.
    Index keys, of all layers but the first, have launches of their own."""
    pages, dim, groups = np.array([4, 1, 3]), 64, min(8, layers)
    rows = [torch.randn(2 * PAGES * PAGE, 1, dim).bfloat16() for _ in range(layers)]
    pool = SimpleNamespace(kv_buffer=[row.view(dtype).to(CUDA) for row in rows], kv_lora_rank=dim)
    sizes = [(2 * PAGES * (layer > 0), PAGE * 24) for layer in range(layers)]
    index = [torch.randint(256, size, dtype=torch.uint8).to(CUDA) for size in sizes]
    if keys:
        pool.index_k_with_scale_buffer = index
    slots, taken = torch.arange(PAGE, 4 * PAGE).to(CUDA), torch.arange(30 * PAGE, 33 * PAGE)
    made = []
    for number in range(2):
        shard = Shard(number, 2)
        kv = KVSegments(pool, range(layers), PAGE, shard, 2, codec)
        layout = kv.layout([kv.stored_layer(layer) for layer in kv.layers], shard)
        memory = host_tensor((PAGES, layout.stride), torch.uint8, CUDA).zero_()
        fits = kv.save(layout, memory, torch.from_numpy(pages).to(CUDA), slots)
        assert fits is None or fits.all().item()
        restored = [kv.restored_layer(layer) for layer in kv.layers]
        exchange: Any = SimpleNamespace(number=number, shards=2, on_scheduler_thread=False)
        made.append(RestorePipeline(memory, layout, restored, 2 * PAGE, CUDA, exchange))
    part: list[Any] = []
    exchanges = 0

    def note(which: Any, out: torch.Tensor) -> None:
        part.append(which)
        bring(which, out)

    def gather(shards: torch.Tensor, fetch: Any) -> None:
        """The other rank's share of the same part comes from its pages."""
        nonlocal exchanges
        exchanges += 1
        fetch(shards[0])
        made[1]._bring_own(part[-1], shards[1])

    bring = made[0]._bring_own
    made[0]._bring_own = note  # type: ignore[method-assign]
    assert made[0].exchange is not None
    made[0].exchange.gather = gather  # type: ignore[method-assign]
    torch.cuda.synchronize()
    for _ in range(2):  # the first time tables are made
        exchanges = 0
        with launches() as seen:
            restore = made[0].start(pages, taken.to(CUDA))
        restore.synchronize()
        for plane in pool.kv_buffer:
            assert torch.equal(plane[taken.to(CUDA)].cpu(), plane[slots].cpu())
            plane[taken.to(CUDA)] = 0
        for of_layer in index[1:] if keys else ():
            assert torch.equal(of_layer[30:33].cpu(), of_layer[1:4].cpu())
            of_layer[30:33] = 0
    parts = groups * 2  # two pages at a time
    assert exchanges == parts
    most = 12 if keys else 5
    assert len(seen) <= most * parts + 8, seen  # of them one is that of the other rank
    assert len(set(map(id, restore.layers))) == groups


def test_pages_of_krul_come_back() -> None:
    server, pages = Server("krul"), np.arange(2)
    slots, others = server.slots(2, 2), server.slots(PAGES + 5, 2)
    server.layout.divide(server.memory.numpy()[: len(pages)])
    host_pages = torch.from_numpy(pages)
    fits = server.kv.save(server.layout, server.memory, host_pages, slots)
    torch.cuda.synchronize()
    assert fits is not None and fits.all().item()
    server.pipeline.start(pages, others).synchronize()
    back, want = server.values(others), server.values(slots)
    for plane, values in enumerate(zip(back, want, strict=True)):
        if plane % LAYERS > 1:  # in no pair
            assert torch.equal(*values)
        else:
            largest = values[1].abs().max().item()
            assert torch.allclose(*values, rtol=2**-8, atol=largest / 254)


def eager_hit(server: Server) -> tuple[torch.Tensor, EagerRestores, list[int]]:
    """A hit whose pages are to come: its slots, its restores, and the pages of each launch."""
    taken, launched = server.slots(PAGES, HIT), list[int]()
    free: Any = SimpleNamespace(
        count=lambda: HIT, make_room=lambda pages: None, take=lambda pages: taken
    )

    def launch(ids: np.ndarray, into: torch.Tensor) -> RunningRestore:
        launched.append(len(ids))
        return server.pipeline.start(ids, into, ahead=True)

    at_once = launch_pages(CUDA, server.layout.page_bytes)
    eager = EagerRestores(PAGE, free, launch, HIT, at_once)
    eager.reserve("prefetch", range(HIT), np.arange(HIT))
    return taken, eager, launched


@pytest.mark.parametrize(("codec", "from_back"), [("none", False), ("none", True), ("exp4", False)])
def test_an_eager_hit_launches_eight_times_at_most(codec: str, from_back: bool) -> None:
    """Sixteen reports of one page each; a quarter of the hit is launched at a time."""
    server = Server(codec)
    slots = server.slots(1, HIT)
    fits = server.kv.save(server.layout, server.memory, torch.arange(HIT).to(CUDA), slots)
    assert fits is None or fits.all().item()
    torch.cuda.synchronize()
    taken, eager, _ = eager_hit(server)
    with launches() as seen:
        for page in range(1, HIT + 1):
            arrived = range(HIT - page, HIT) if from_back else range(page)
            eager.restore_arrived("prefetch", arrived)
    assert 1 <= len(seen) <= 8, seen
    handed = eager.hand_out(np.arange(HIT))
    assert handed is not None and handed.ready.all()
    for restore in handed.restores:
        restore.synchronize()
    assert all(map(torch.equal, server.values(taken), server.values(slots)))


@pytest.mark.parametrize("codec", ["none", "exp4", "int8"])
def test_backups_and_loads_take_device_memory_at_the_start_but_for_ids(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup or a load that had none in service would end the server, or the hit."""
    server = Server(codec)
    monkeypatch.setattr(segments, "_ENCODED_BYTES", 1)  # two pages at a time
    slots, taken, pages = server.slots(1, 5), server.slots(PAGES, 5), np.arange(5)
    host_pages, small = torch.arange(5).to(CUDA), torch.arange(2).to(CUDA)
    server.kv.save(server.layout, server.memory, small, slots[: 2 * PAGE])
    server.pipeline.start(small.cpu().numpy(), taken[: 2 * PAGE]).synchronize()
    with Memory() as memory:
        fits = server.kv.save(server.layout, server.memory, host_pages, slots)
        restore = server.pipeline.start(pages, taken)
    assert memory.made and max(memory.made) <= slots.nbytes
    restore.synchronize()
    assert fits is None or fits.all().item()
    if server.kv.lossless:
        assert all(map(torch.equal, server.values(taken), server.values(slots)))


def test_a_restore_that_raises_ends_behind_its_launches_and_the_next_one_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler goes on with a failed one."""
    server, host_pages = Server("exp4"), np.arange(2)
    slots, taken = server.slots(1, 2), server.slots(PAGES, 2)
    fits = server.kv.save(server.layout, server.memory, torch.arange(2).to(CUDA), slots)
    assert fits is not None and fits.all().item()

    def fails(*_: Any) -> Any:
        raise RuntimeError("no launch")

    with monkeypatch.context() as patched:
        patched.setattr(Exp4, "decode_launch", fails)
        with pytest.raises(RuntimeError, match="no launch"):
            server.pipeline.start(host_pages, taken, ahead=True)
    restore = server.pipeline.failed_restore(len(taken))
    assert restore.failed is not None and not restore.copied.query()
    restore.synchronize()
    assert restore.copied.query()
    server.pipeline.start(host_pages, taken, ahead=True).synchronize()
    assert all(map(torch.equal, server.values(taken), server.values(slots)))


def test_pages_before_a_front_do_not_wait_for_others() -> None:
    """The front and the back have met: no further page comes."""
    _, eager, launched = eager_hit(Server("none"))
    for start, met in ((13, False), (12, False), (11, False), (10, True)):
        eager.restore_arrived("prefetch", range(start, HIT), last=met)
    assert launched == [4, 2]


def test_a_large_hit_is_launched_by_what_the_bus_copies_in_two_milliseconds() -> None:
    assert [launch_pages(CUDA, 8 << 20)(pages) for pages in (1, 16, 32, 1000)] == [1, 4, 8, 8]
    assert launch_pages(CUDA, 1 << 30)(1000) == 1
    assert launch_pages("cpu", 64)(1000) == 1
