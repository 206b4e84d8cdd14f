"""Encoded backups on modelled streams, up to SGLang's flush: no wrong order (see tests/order)."""

from hcache_backend import streams
from tests.kit.host import PAGE, Host, make_unfit, slots_of
from tests.order.checker import Checker
from tests.order.scenario_restore import GPU
from tests.order.scenarios import run


def flush(checker: Checker, *, waits: bool = True) -> None:
    """Host memory is flushed while a backup is on its way, and L3 is read to the same pages."""
    server = Host()
    make_unfit(server.device, 2, 1)
    for plane in (*server.device.k_buffer, *server.device.v_buffer):
        checker.on_device(plane)
    checker.pinned(server.pool.kv_buffer, "arena")
    schedule, save = checker.stream("schedule"), checker.stream("device to host")
    checker.begin()
    with checker.on(schedule):
        slots = streams.to_device(slots_of(2).numpy(), GPU)
        host = server.pool.alloc(PAGE)
        assert host is not None
    save.wait_stream(schedule)
    with checker.on(save):
        slots.record_stream(save)
        server.pool.backup_from_device_all_layer(server.device, host, slots, "kernel")
        arrived = save.record_event()
    if not waits:
        server.pool._backed_up = None
    with checker.on(schedule):
        server.pool.clear()
        pages, size = server.pool.page_ids(host), server.pool.page_layout.stride
        checker.touch_pages(pages, size, size, "write")
        arrived.synchronize()
        server.pool.mark_arrived()
    assert server.unfit(host) == [False]
    checker.host_joins()


def test_a_flush_waits_for_the_backup_that_it_forgets() -> None:
    checker = Checker()
    run(flush, checker)
    assert not checker.findings, checker.report()


def test_without_that_wait_it_is_reported() -> None:
    checker = Checker()
    run(lambda checked: flush(checked, waits=False), checker)
    assert "host writes what device to host writes" in {f.what for f in checker.findings}
