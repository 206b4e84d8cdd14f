"""Encoded K and V in host memory: what comes back, and what becomes of units that do not fit."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from hcache_backend.format.page import RECOMPUTED, PageLayout
from hcache_backend.format.units import UNIT_VALUES, WHOLE, Shard
from hcache_backend.host.segments import KVSegments
from hcache_backend.streams import WorkerStream
from hcache_kernels.codecs import CODECS, exp4
from tests.kit.host import (
    HOST_PAGES,
    LAYERS,
    PAGE,
    WRONG,
    Host,
    bits,
    checked,
    compare_all,
    kv_pool,
    make_unfit,
    slots_of,
)
from tests.kit.turns import turn_of_checks


@pytest.mark.parametrize(
    ("codec", "page", "heads", "dim", "shard", "groups"),
    [
        ("none", 16, 1, 8, WHOLE, 1),
        ("none, fp8", 16, 4, 8, WHOLE, 1),
        ("exp4", 16, 2, 16, WHOLE, 1),
        ("exp4", 16, 2, 16, WHOLE, 2),
        ("exp4", 64, 2, 16, Shard(1, 4), 8),  # a quarter of the heads, in two groups
        ("exp4", 128, 2, 512, WHOLE, 1),  # two units
        ("exp3", 64, 2, 16, WHOLE, 2),
    ],
)
def test_segments_come_back_to_other_slots_bit_for_bit(
    codec: str, page: int, heads: int, dim: int, shard: Shard, groups: int
) -> None:
    codec, _, fp8 = codec.partition(", ")
    device = kv_pool(heads, dim, page, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    kv = KVSegments(device, (1,), page, shard, groups, codec)
    stored = kv.stored_layer(1)
    plain = KVSegments(device, (1,), page, shard, groups).stored_layer(1)
    for encoded, segment in zip(stored.segments, plain.segments, strict=True):
        assert encoded.length <= (1 if codec == "none" else 0.775) * segment.length
        assert encoded[1:] == segment[1:]
    layout = PageLayout(page, (RECOMPUTED, stored), shard)
    memory = torch.zeros((5, layout.stride), dtype=torch.uint8)
    pages, slots = torch.tensor([4, 2]), slots_of(3, 1, size=page)
    fits = kv.save(layout, memory, pages, slots)
    assert fits is None if codec == "none" else fits is not None and fits.all()
    assert not memory[[0, 1, 3]].any()
    held, segment = kv.read_plain(kv.layers, slots[page:]), layout.segment(1)
    for part in range(kv.parts):
        assert kv.holds(memory[2, segment], held, part, layout, 1)
        assert not kv.holds(memory[4, segment], held, part, layout, 1)
    want = [buffer[slots].clone() for buffer in (device.k_buffer[1], device.v_buffer[1])]
    others = [device.k_buffer[0].clone(), device.k_buffer[1][: 4 * page].clone()]
    copy = kv.restored_layer(1).copy
    assert copy is not None
    target = slots_of(6, 5, size=page)
    copy([1], memory, pages, layout.segment_offsets[1:2], target)
    assert torch.equal(device.k_buffer[1][target], want[0])
    assert torch.equal(device.v_buffer[1][target], want[1])
    assert torch.equal(device.k_buffer[0], others[0])
    assert torch.equal(device.k_buffer[1][: 4 * page], others[1])


def by_reference(server: Host, *pages: int) -> torch.Tensor:
    """K and V of pages as the codec's reference brings them back, as :func:`bits` has them."""
    buffers = zip(server.device.k_buffer, server.device.v_buffer, strict=True)
    held = [[plane[slots_of(*pages)] for plane in kv] for kv in buffers]
    back, _ = server.kv.through_codec(server.pool.page_layout, held)
    return torch.stack([kv[part].view(torch.int16) for part in (0, 1) for kv in back])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pages_come_back_as_the_reference_decodes_them(dtype: torch.dtype) -> None:
    server = Host(codec="int8", dtype=dtype)
    for planes in (server.device.k_buffer, server.device.v_buffer):
        for plane in planes:
            plane.mul_(torch.randn(plane.shape[1:]).exp())
            plane.mul_(torch.randn(len(plane), 1, 1).exp())
    checks, lost = checked(server)
    want = by_reference(server, 1, 3)
    assert not torch.equal(want, bits(server.device, 1, 3))
    host = server.backed_up(1, 3)
    compare_all(checks)
    assert torch.equal(server.load(host, 7, 5), want)
    compare_all(checks)
    assert not checks._waiting
    assert lost == [] and server.unfit(host) == [False, False]


def saved(server: Host, *pages: int) -> torch.Tensor:
    """Save device pages that were recomputed, as eager restores do; where to."""
    host = server.pool.alloc(PAGE * len(pages))
    assert host is not None
    server.pool.arena.expect(server.pool.page_ids(host))
    server.pool.save_recomputed(server.pool.page_ids(host), slots_of(*pages), None)
    return host


either_way = pytest.mark.parametrize("put", [Host.back_up, saved], ids=["backup", "recomputed"])


@either_way
def test_a_page_that_does_not_fit_is_marked(put: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = Host()
    make_unfit(server.device, 2, 0)
    make_unfit(server.device, 3, 1)
    want = bits(server.device, 1, 4)
    host = put(server, 1, 2, 3, 4)
    assert not server.settled(host)  # nobody knows yet
    server.device.k_buffer[0][slots_of(2)] = 0  # by now another's
    server.pool.mark_arrived()
    assert server.unfit(host) == [False, True, True, False]
    others = torch.cat((host[:PAGE], host[3 * PAGE :]))
    assert torch.equal(server.load(others, 7, 5), want)
    assert caplog.text.count("they are misses") == 1, "one log line for all"


def test_it_is_known_behind_the_transfer_which_pages_are_unfit() -> None:
    server, stream = Host(), WorkerStream("device to host")
    make_unfit(server.device, 2, 0)
    arrive = threading.Event()
    with stream.as_current():
        stream.run(arrive.wait)
        host = server.back_up(1, 2)
    [first, second] = server.pool.page_ids(host).tolist()
    server.backed_up(3)  # on another stream
    assert server.pool.arena.usable(np.array([first])) is None
    assert server.pool.arena.usable(np.array([second])) is None
    arrive.set()
    stream.record().synchronize()
    server.pool.mark_arrived()
    assert server.unfit(host) == [False, True]


@either_way
def test_a_page_that_was_freed_before_its_backup_arrived_belongs_to_the_next(put: Any) -> None:
    server = Host()
    make_unfit(server.device, 2, 0)
    assert server.pool.alloc(PAGE * (HOST_PAGES - 1)) is not None
    host = put(server, 2)
    server.pool.free(host)
    again = server.back_up(3)
    assert torch.equal(again, host)
    assert not server.settled(again)
    server.pool.mark_arrived()
    assert server.unfit(again) == [False]
    want = bits(server.device, 3)
    assert torch.equal(server.load(again, 5), want)


def test_a_host_page_that_was_unfit_is_as_good_as_any_when_it_is_used_again() -> None:
    server = Host(host_pages=1)
    for again in (server.pool.free, lambda _: server.pool.clear()):
        make_unfit(server.device, 2, 0)
        host = server.backed_up(2)
        assert server.unfit(host) == [True]
        again(host)
        host = server.backed_up(3)
        assert server.unfit(host) == [False]
        server.pool.free(host)


@pytest.mark.parametrize(
    ("codec", "at"),
    [("exp4", 0), *((codec, at) for codec in ("none", "int8") for at in (0, -1))],
)
def test_spoiled_pages_fail_the_check_in_service(codec: str, at: int) -> None:
    """Of a lossy codec these are a code of K and a scale of V."""
    server = Host(codec=codec)
    checks, lost = checked(server)
    host = server.backed_up(2)
    server.load(host, 5)
    server.device.k_buffer[0].zero_()  # whoever has the slots now
    compare_all(checks)
    assert lost == []
    server.load(host, 6)
    segment = server.pool.page_layout.segment(1)
    page = server.pool.kv_buffer[int(server.pool.page_ids(host)[0])]
    page[range(segment.start, segment.stop)[at]] ^= 0x10
    compare_all(checks)
    assert lost == [WRONG.format(1)]


def test_a_page_that_was_freed_is_somebody_elses() -> None:
    server = Host(codec="none")
    checks, lost = checked(server)
    host = server.backed_up(3)
    server.pool.free(host)
    server.pool.kv_buffer[int(host[0]) // PAGE, -1] += 1
    compare_all(checks)
    assert not lost


@pytest.mark.parametrize(("every", "found"), [(0, []), (1, [0, 2, 4]), (3, [0, 3]), (5, [0, 5])])
def test_one_page_in_so_many_is_looked_at(every: int, found: list[int]) -> None:
    """At most one in a transfer; here there are three, of two pages each."""
    server = Host(codec="none")
    checks, _ = checked(server, every)
    hosts = [server.backed_up(page, page + 1) for page in (0, 2, 4)]
    pages = [int(index) // PAGE for host in hosts for index in host[::PAGE]]
    assert [pages.index(copied.host_page) for copied in checks._waiting] == found


@pytest.mark.parametrize(
    ("codec", "encoder", "kept"), [("exp4", exp4, ~1), ("int8", CODECS["int8"], ~0x7F)]
)
def test_an_encoder_that_loses_more_than_it_says_fails_the_check_in_service(
    codec: str, encoder: Any, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it encodes the pool, or what comes back of it, to the same page again."""
    server = Host(codec=codec)
    checks, lost = checked(server)
    encode = encoder.encode_units

    def coarse(*args: Any) -> Any:
        *self, units = args
        return encode(*self, (units.view(torch.int16) & kept).view(torch.bfloat16))

    monkeypatch.setattr(encoder, "encode_units", coarse)
    server.backed_up(2)
    compare_all(checks)
    assert lost == [WRONG.format(0)]


@pytest.mark.parametrize("codec", ["exp4", "int8"])
def test_a_turn_compares_one_unit_of_each(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pages wait, and however large they are: the scheduler's thread does it."""
    server = Host(codec=codec, heads=512)
    assert server.kv.parts == 2
    checks, lost = checked(server)
    values: list[int] = []
    decode = CODECS[codec].decode_units

    def noted(self: Any, encoded: torch.Tensor) -> torch.Tensor:
        found = decode(self, encoded)
        values.append(found.numel())
        return found

    server.backed_up(1)
    server.backed_up(3)
    monkeypatch.setattr(CODECS[codec], "decode_units", noted)
    turns = 0
    while checks._waiting:
        turn_of_checks(checks)
        turns += 1
        assert values == [2 * UNIT_VALUES] * turns
    assert turns == 2 * LAYERS * 2
    assert lost == []


def test_a_page_that_is_unfit_is_not_checked_nor_one_that_is_not_known_yet() -> None:
    server = Host()
    checks, lost = checked(server)
    make_unfit(server.device, 2, 1)
    host = server.back_up(2)
    settle, server.pool.mark_arrived = server.pool.mark_arrived, lambda: None  # type: ignore[method-assign]
    turn_of_checks(checks)
    assert len(checks._waiting) == 1
    server.pool.mark_arrived = settle  # type: ignore[method-assign]
    compare_all(checks)
    assert server.unfit(host) == [True] and lost == []
