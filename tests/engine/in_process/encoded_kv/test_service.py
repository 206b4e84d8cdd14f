"""Encoded K and V in host memory: what comes back, and what becomes of units that do not fit."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hcache_backend.engine.kv_pages.segments import KVSegments
from hcache_backend.engine.service_check import KVChecks
from hcache_backend.page import RECOMPUTED, PageLayout
from hcache_backend.units import WHOLE, Share
from hcache_kernels.codecs import segments
from tests.engine.in_process.encoded_kv.host import (
    LAYERS,
    Host,
    bits,
    kv_pool,
    make_unfit,
    slots_of,
)

WRONG = "the self-check in service failed: K and V of layer {} in a page are not the pool's"


@pytest.mark.parametrize(
    ("page", "heads", "dim", "share", "groups"),
    [
        (16, 2, 16, WHOLE, 1),
        (16, 2, 16, WHOLE, 2),
        (64, 2, 16, Share(1, 4), 8),  # a quarter of the heads, in two groups
        (128, 2, 512, WHOLE, 1),  # two units
    ],
)
def test_encoded_segments_come_back_to_other_slots_bit_for_bit(
    page: int, heads: int, dim: int, share: Share, groups: int
) -> None:
    device = kv_pool(heads, dim, page)
    kv = KVSegments(device, (1,), page, share, groups, "exp4")
    stored = kv.stored_layer(1)
    plain = KVSegments(device, (1,), page, share, groups).stored_layer(1)
    assert stored.codec == "exp4.2"
    for encoded, segment in zip(stored.segments, plain.segments, strict=True):
        assert encoded.length <= 0.775 * segment.length
        assert encoded[1:] == segment[1:]
    layout = PageLayout(page, (RECOMPUTED, stored), share)
    memory = torch.zeros((5, layout.page_bytes), dtype=torch.uint8)
    pages, slots = torch.tensor([4, 2]), slots_of(3, 1, size=page)
    fits = kv.save(layout, memory, pages, slots)
    assert fits is not None and fits.tolist() == [[True, True]]
    assert not memory[[0, 1, 3]].any()
    assert kv.differs(layout, memory[2], kv.layers, kv.held(kv.layers, slots[page:]), {}) is None
    assert kv.differs(layout, memory[4], kv.layers, kv.held(kv.layers, slots[page:]), {}) == 1
    want = [buffer[slots].clone() for buffer in (device.k_buffer[1], device.v_buffer[1])]
    others = [device.k_buffer[0].clone(), device.k_buffer[1][: 4 * page].clone()]
    copy = kv.restored_layer(1).copy
    assert copy is not None
    target = slots_of(6, 5, size=page)
    copy(memory, pages, layout.segment_offsets[1], target)
    assert torch.equal(device.k_buffer[1][target], want[0])
    assert torch.equal(device.v_buffer[1][target], want[1])
    assert torch.equal(device.k_buffer[0], others[0])
    assert torch.equal(device.k_buffer[1][: 4 * page], others[1])


def test_layers_that_do_not_fit_come_back_bit_for_bit_beside_those_that_do() -> None:
    server = Host()
    make_unfit(server.device, 2, 0)
    make_unfit(server.device, 3, 1)
    want = bits(server.device, 1, 2, 3)
    host = server.backed_up(1, 2, 3)
    assert server.rows_in_use() == 2
    for page in (1, 2, 3):
        make_unfit(server.device, page, 0)
    assert torch.equal(server.load(host, 7, 5, 6), want)
    assert [int(page) in server.overflow.pages for page in server.pool.page_ids(host)] == [
        False,
        True,
        True,
    ]


def test_a_backup_has_ended_only_when_what_did_not_fit_is_kept() -> None:
    """Until then HiCache leaves its tokens on the device."""
    server = Host()
    make_unfit(server.device, 2, 0)
    _, ack = server.back_up(1, 2)
    assert not ack.finish_event.query()
    assert server.rows_in_use() == 0
    real = ack.finish_event._finish
    real.done = True
    assert ack.finish_event.query()
    assert server.rows_in_use() == 1
    assert ack.finish_event.query()  # asked again, nothing more happens
    ack.finish_event.synchronize()
    assert server.rows_in_use() == 1
    assert ack.start_event.elapsed_time(ack.finish_event) == 2.0


def test_a_freed_page_gives_its_rows_back_and_leaves_nothing_to_its_successor() -> None:
    server = Host(overflow=1)
    for page in range(12):
        make_unfit(server.device, 2, page % LAYERS)
        host = server.backed_up(2)
        assert server.overflow.pages.lost == set()
        server.pool.free(host)
        assert server.rows_in_use() == 0
    server.device.v_buffer[0][slots_of(2)] = 1.0
    server.device.v_buffer[1][slots_of(2)] = 1.0
    want = bits(server.device, 2)
    assert torch.equal(server.load(server.backed_up(2), 5), want)
    make_unfit(server.device, 2, 0)
    server.backed_up(2)
    server.pool.clear()
    assert server.rows_in_use() == 0


def test_without_room_in_the_overflow_a_page_is_lost_until_it_is_freed() -> None:
    server = Host(overflow=1)
    rows = len(server.overflow.pages._all)
    hosts = []
    for page in range(rows + 1):
        make_unfit(server.device, page, 0)
        hosts.append(server.backed_up(page))
    lost = {int(page) for page in server.pool.page_ids(hosts[-1])}
    assert server.overflow.pages.lost == lost
    assert all(page in server.overflow.pages for page in lost)
    want = bits(server.device, 0)
    assert torch.equal(server.load(hosts[0], 5), want)  # others are not
    server.pool.free(hosts[0])
    server.pool.free(hosts[-1])
    assert server.overflow.pages.lost == set()
    server.backed_up(0)
    assert server.overflow.pages.lost == set()


def test_the_first_page_that_is_lost_is_told(caplog: pytest.LogCaptureFixture) -> None:
    server = Host(overflow=1)
    server.overflow.pages._free.clear()
    make_unfit(server.device, 2, 0)
    make_unfit(server.device, 3, 0)
    with caplog.at_level("WARNING", "hcache"):
        server.backed_up(1)
        assert "hcache:" not in caplog.text
        server.backed_up(2)
        server.backed_up(3)
    assert caplog.text.count("have no room in host memory") == 1


def test_what_cannot_be_copied_to_the_overflow_is_lost_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Host()
    make_unfit(server.device, 2, 0)
    monkeypatch.setattr(server.kv, "save_plain", lambda *_: 1 / 0)
    host = server.backed_up(1, 2)
    assert server.overflow.pages.lost == {int(server.pool.page_ids(host)[1])}
    assert server.rows_in_use() == 0


def checked(server: Host) -> tuple[KVChecks, list[str]]:
    """Let every page be checked; the checks, and why trust was lost."""
    lost: list[str] = []
    runtime = SimpleNamespace(config=SimpleNamespace(check_every_pages=1), lose_trust=lost.append)
    checks = KVChecks(runtime, server.pool, server.kv, None)  # type: ignore[arg-type]
    server.pool.on_backed_up.append(checks.transferred)
    server.pool.on_loaded.append(checks.transferred)
    return checks, lost


def test_pages_with_overflow_pass_the_check_in_service_and_spoiled_ones_do_not() -> None:
    server = Host()
    checks, lost = checked(server)
    make_unfit(server.device, 2, 0)
    host = server.backed_up(2)
    server.load(host, 5)
    checks.run()
    assert lost == []
    server.load(host, 6)
    first = server.pool.page_layout.segment_offsets[1]
    server.pool.kv_buffer[int(server.pool.page_ids(host)[0]), first] += 1
    checks.run()
    assert lost == [WRONG.format(1)]


def test_an_encoder_that_loses_bits_fails_the_check_in_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Encoded once more, what comes back of it is the same page again."""
    server = Host()
    checks, lost = checked(server)
    encode = segments.encode_units

    def lossy(units: torch.Tensor) -> Any:
        return encode((units.view(torch.int16) & ~1).view(torch.bfloat16))

    monkeypatch.setattr(segments, "encode_units", lossy)
    server.backed_up(2)
    checks.run()
    assert lost == [WRONG.format(0)]


def test_the_check_in_service_waits_for_the_overflow_and_compares_it() -> None:
    server = Host()
    checks, lost = checked(server)
    make_unfit(server.device, 2, 1)
    _, ack = server.back_up(2)
    checks.run()
    assert lost == []
    ack.finish_event.synchronize()
    server.overflow._memory += 1
    checks.run()
    assert lost == [WRONG.format(1)]


def test_a_page_that_is_lost_is_not_checked() -> None:
    server = Host(overflow=1)
    server.overflow.pages._free.clear()
    checks, lost = checked(server)
    make_unfit(server.device, 2, 1)
    server.backed_up(2)
    assert server.overflow.pages.lost
    checks.run()
    assert lost == []


def test_every_bit_of_an_encoded_page_counts_for_its_digests() -> None:
    """Codes, window, starts and exceptions of a unit: all stand in it."""
    server = Host()
    host = server.backed_up(3)
    layout = server.pool.page_layout
    page = server.pool.kv_buffer[int(server.pool.page_ids(host)[0])].numpy()
    namespace, key = bytes(range(16)), bytes(32)
    layout.begin(page, namespace, bytes(8))
    layout.seal(page, key)
    assert layout.problem(page, namespace, key) is None
    first = layout.segment(1)
    for at, bit in itertools.product(range(first.start, first.stop), range(8)):
        page[at] ^= np.uint8(1 << bit)
        assert layout.problem(page, namespace, key) == "checksum"
        page[at] ^= np.uint8(1 << bit)
    assert layout.problem(page, namespace, key) is None
