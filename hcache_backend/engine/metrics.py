"""Counters of one server process; with ``--enable-metrics`` they stand beside SGLang's."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Gauge


@cache
def tokens() -> Counter:
    """Tokens by what happened to them: captured, backed_up, restored, checked, ..."""
    return Counter("hcache_tokens", "Tokens by what happened to them", ["event"])


@cache
def pages() -> Counter:
    """Pages by what happened to them between the host pool and L3."""
    return Counter("hcache_pages", "Pages by what happened to them", ["event"])


@cache
def problems() -> Counter:
    """Problems by kind; each is a cache miss, never an error of a request."""
    return Counter("hcache_problems", "Problems by kind, each a cache miss", ["kind"])


@cache
def codec() -> Gauge:
    """1 for the codec in which hidden states are stored, by the one that was asked for."""
    return Gauge(
        "hcache_codec",
        "1 for the codec that is used, by the one that was asked for",
        ["asked", "used"],
        multiprocess_mode="max",
    )


def count_tokens(event: str, number: int) -> None:
    tokens().labels(event=event).inc(number)


def count_pages(event: str, number: int = 1) -> None:
    pages().labels(event=event).inc(number)


def count_problem(kind: str) -> None:
    problems().labels(kind=kind).inc()
