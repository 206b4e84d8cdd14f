"""Counters of one server process; with ``--enable-metrics`` they stand beside SGLang's."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Gauge


@cache
def tokens() -> Counter:
    """Tokens by what happened to them: captured, backed_up, restored_hidden, checked, ..."""
    return Counter("hcache_tokens", "Tokens by what happened to them", ["event"])


@cache
def moved_bytes() -> Counter:
    """Bytes by what moved them: capture (device to host), restore (host to device)."""
    return Counter("hcache_bytes", "Bytes by what moved them", ["event"])


@cache
def seconds() -> Counter:
    """Time of the device's streams by stage; bubbles are the idle stages of a restore."""
    return Counter("hcache_seconds", "Time of the device's streams by stage", ["stage"])


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


def count_bytes(event: str, number: int) -> None:
    moved_bytes().labels(event=event).inc(number)


def count_milliseconds(stage: str, milliseconds: float) -> None:
    seconds().labels(stage=stage).inc(max(0.0, milliseconds) / 1e3)


def count_pages(event: str, number: int = 1) -> None:
    pages().labels(event=event).inc(number)


def count_problem(kind: str) -> None:
    problems().labels(kind=kind).inc()
