"""Bytes that moved between two looks at a server's metrics."""

from __future__ import annotations

from hcache_backend.cli.metrics_page import MetricsPage, NoMetrics, moved, parse

MODE = 'hcache_mode_info{mode="hidden",pages="own"} 1.0\n'


def page(read: int, restored: int, dropped: int = 0) -> MetricsPage:
    return parse(
        MODE
        + f"hcache_store_read_bytes_total {read}\n"
        + f'hcache_store_pages_total{{event="dropped_full"}} {dropped}\n'
        + f'hcache_device_bytes_total{{transfer="restored_hidden"}} {restored}\n'
        + 'hcache_device_bytes_total{transfer="restored_kv"} 5\n'
        + 'hcache_device_bytes_total{transfer="captured"} 1000\n'
    )


def test_bytes_are_those_of_the_run() -> None:
    found = moved(page(10, 100), page(30, 400, dropped=2))
    assert (found["bytes_read"], found["bytes_restored"]) == (20, 300)
    assert (found["bytes_written"], found["pages_dropped"]) == (0, 2)


def test_bytes_are_missing_with_a_reason() -> None:
    assert moved(NoMetrics("start it with --enable-metrics"), page(0, 0)) == {
        "missing": "start it with --enable-metrics"
    }
    assert "anew" in moved(page(10, 0), page(0, 0))["missing"]
