"""Copies beside products: the measurement on a GPU whose speeds are known, and what is chosen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hcache_backend.plan import contention
from hcache_backend.plan.contention import (
    PROGRAMS,
    Contention,
    CopySpeed,
    Repeated,
    engine_works,
    fastest_first,
    in_turn,
    shares,
)
from hcache_backend.streams import Stream
from hcache_kernels.copy_engine import NoCopyEngine
from hcache_kernels.pages import gather_pages

ROW_BYTES, TOKENS = 64, 128
BYTES = ROW_BYTES * TOKENS


class Way(NamedTuple):
    """How copies of one way go: seconds alone, and what copies and products keep together."""

    alone: float
    copies: float
    products: float


class Gpu:
    """A GPU with a clock of its own: copies and products slow each other down as it is told."""

    def __init__(self, ways: dict[int | None, Way], product: float) -> None:
        self.ways, self.product = ways, product
        self.wrong: set[int | None] = set()
        self.copied: int | None = None
        self.loops: dict[str, list[int | None]] = {}
        self.streams: list[str] = []

    def new_stream(self, _device: torch.device, name: str) -> FakeStream:
        self.streams.append(name)
        return FakeStream(self, name)

    def copy(self, programs: int | None, *arguments: Any) -> None:
        pages, ids, offset, out = arguments
        if programs not in self.ways:
            raise RuntimeError("no such way")
        gather_pages(pages, ids, offset, out.shape[1], out)
        if programs in self.wrong:
            out[-1, -1] ^= 1
        self.copied = programs

    def seconds(self, name: str) -> float:
        copies = self.loops.get("copy", [])
        way = self.ways[copies[0]] if copies else Way(0.0, 1.0, 1.0)
        products = len(self.loops.get("compute", [])) * self.product
        alone = {"copy": len(copies) * way.alone, "compute": products}
        if not all(alone.values()):
            return alone[name]
        kept = {"copy": way.copies, "compute": way.products}
        both = min(alone[stream] / kept[stream] for stream in alone)
        return both + alone[name] - both * kept[name]


class FakeEvent:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1e3 * self.gpu.seconds(later.name)


class FakeStream(Stream):
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def run(self, work: Callable[[], object]) -> None:
        work()
        self.gpu.loops[self.name].append(self.gpu.copied)

    def wait(self, event: Any) -> None:
        self.gpu.loops[self.name] = []

    def record(self, *, timed: bool = False) -> Any:
        if self.name == "current":
            self.gpu.loops = {}
        return FakeEvent(self.gpu, self.name)


def measured(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> tuple[CopySpeed, ...]:
    fakes: dict[str, Any] = {
        "new_stream": gpu.new_stream,
        "current_stream": lambda device: FakeStream(gpu, "current"),
        "gather_launch": lambda pages, ids, offset, out, programs: SimpleNamespace(
            run=lambda: gpu.copy(programs, pages, ids, offset, out)
        ),
        "gather_pages": lambda pages, ids, offset, length, out: gpu.copy(
            None, pages, ids, offset, out
        ),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(contention, name, fake)
    monkeypatch.setattr(contention, "PRODUCT_TOKENS", TOKENS)
    return Contention(torch.device("cpu"), ROW_BYTES, lambda: None, 1.0, TOKENS).measure()


WAYS = {
    2: Way(9e-3, 0.9, 0.99),
    4: Way(5e-3, 0.9, 0.97),
    8: Way(2.2e-3, 0.95, 0.95),
    16: Way(2.0e-3, 1.0, 0.9),
    32: Way(2.0e-3, 1.0, 0.7),
    None: Way(2.1e-3, 0.8, 1.0),
}


def test_what_each_way_keeps_beside_products_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(WAYS, 1.5e-3)
    found = measured(gpu, monkeypatch)
    # torch hands out 32 streams in turn: with one for each way the last ones would be SGLang's.
    assert gpu.streams == ["compute", "copy"]
    assert found[0].programs == 16  # copies take longer than products
    assert {speed.programs for speed in found} == set(WAYS) == {*PROGRAMS, None}
    for speed in found:
        way = WAYS[speed.programs]
        assert speed.alone == pytest.approx(BYTES / way.alone)
        assert speed.beside == pytest.approx(BYTES / way.alone * way.copies)
        assert speed.products == pytest.approx(way.products)


def test_where_products_take_longer_the_copy_engine_leaves_them_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert measured(Gpu(WAYS, 3e-3), monkeypatch)[0].programs is None


@pytest.mark.parametrize(
    ("ways", "order"),
    [
        # Equally fast: the one that leaves most to products.
        ([(8, 0.97e9, 0.9), (32, 1e9, 0.6)], [8, 32]),
        ([(8, 0.9e9, 0.9), (32, 1e9, 0.6)], [32, 8]),
        ([(8, 1e9, 1.0), (2, 1e9, 1.0), (4, 1e9, 1.0)], [2, 4, 8]),
        # K and V are copied by a kernel even where the copy engine is taken.
        ([(None, 1e9, 1.0), (32, 0.99e9, 0.6), (8, 0.98e9, 0.9)], [None, 8, 32]),
        ([], []),
    ],
)
def test_ways_are_in_order_of_speed(
    ways: list[tuple[int | None, float, float]], order: list[int | None]
) -> None:
    speeds = [CopySpeed(programs, 1e9, beside, products) for programs, beside, products in ways]
    assert [way.programs for way in fastest_first(speeds, 1e6, 1e-5)] == order


def test_a_way_that_fails_or_brings_other_bytes_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu({n: way for n, way in WAYS.items() if n is not None}, 1.5e-3)
    gpu.wrong = {16}
    assert {speed.programs for speed in measured(gpu, monkeypatch)} == {2, 4, 8, 32}
    # A stream on which something failed is not used again.
    assert gpu.streams == ["compute", "copy", "copy", "copy"]


@given(
    st.floats(0.01, 1),
    st.floats(0.01, 1),
    st.integers(4, 1000),
    st.integers(4, 1000),
    st.floats(1e-5, 1e-2),
)
def test_shares_do_not_depend_on_which_loop_ends_first(
    copies: float, products: float, copied: int, multiplied: int, alone: float
) -> None:
    gpu = Gpu({None: Way(alone, copies, products)}, 1e-3)
    gpu.loops = {"copy": [None] * copied, "compute": [None] * multiplied}
    one = Repeated(copied, alone, gpu.seconds("copy"))
    other = Repeated(multiplied, 1e-3, gpu.seconds("compute"))
    found, both = shares(one, other), min(one.took, other.took)
    for work, share, true in ((one, found[0], copies), (other, found[1], products)):
        if both * true >= work.alone:  # else less than one of them was done meanwhile
            assert share == pytest.approx(true, rel=1e-6)
        assert 0 < share <= 1


def test_loops_get_on_together() -> None:
    a: Any = "a", "copy", 2
    b: Any = "b", "product", 4
    assert "".join(stream for stream, _ in in_turn([a, b])) in ("babbab", "bbabba", "babbba")


def test_a_copy_engine_that_fails_or_brings_other_bytes_does_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: object) -> None:
        raise NoCopyEngine("no")

    monkeypatch.setattr(contention, "gather_pages", failing)
    assert not engine_works(torch.device("cpu"))
    monkeypatch.setattr(contention, "gather_pages", lambda *arguments: arguments[-1].fill_(7))
    assert not engine_works(torch.device("cpu"))


def test_on_a_cpu_only_the_copy_of_torch_works() -> None:
    assert engine_works(torch.device("cpu"))
    product = torch.ones(64, 64)
    found = Contention(
        torch.device("cpu"), ROW_BYTES, lambda: torch.mm(product, product), 0.01, TOKENS
    ).measure()
    assert [speed.programs for speed in found] == [None]
    assert found[0].alone >= found[0].beside > 0
