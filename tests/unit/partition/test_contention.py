"""Copies beside products: the measurement on a GPU whose speeds are known, and what is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class Way:
    """How copies of one way go: seconds alone, and what copies and products keep together."""

    def __init__(self, alone: float, copies: float, products: float) -> None:
        self.alone, self.copies, self.products = alone, copies, products


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
        alone = {
            "copy": len(copies) * way.alone,
            "compute": len(self.loops.get("compute", [])) * self.product,
        }
        if not all(alone.values()):
            return alone[name]
        kept = {"copy": way.copies, "compute": way.products}
        both = min(alone[stream] / kept[stream] for stream in alone)
        return both + alone[name] - both * kept[name]


class FakeEvent:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def query(self) -> bool:
        return True

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

    def record(self, *, timed: bool = False) -> FakeEvent:
        if self.name == "current":
            self.gpu.loops = {}
        return FakeEvent(self.gpu, self.name)


class Launched:
    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run


def gpu_streams(ways: dict[int | None, Way], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    gpu = Gpu(ways, 1.5e-3)
    measured(gpu, monkeypatch)
    return gpu.streams


def measured(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> tuple[CopySpeed, ...]:
    fakes: dict[str, Any] = {
        "new_stream": gpu.new_stream,
        "current_stream": lambda device: FakeStream(gpu, "current"),
        "gather_launch": lambda pages, ids, offset, out, programs: Launched(
            lambda: gpu.copy(programs, pages, ids, offset, out)
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
    found = measured(Gpu(WAYS, 1.5e-3), monkeypatch)
    assert {speed.programs for speed in found} == set(WAYS) == {*PROGRAMS, None}
    for speed in found:
        way = WAYS[speed.programs]
        assert speed.alone == pytest.approx(BYTES / way.alone)
        assert speed.beside == pytest.approx(BYTES / way.alone * way.copies)
        assert speed.products == pytest.approx(way.products)


def test_the_fastest_pair_of_copy_and_product_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where copies take longer, 16 programs copy the fastest beside products.
    assert measured(Gpu(WAYS, 1.5e-3), monkeypatch)[0].programs == 16
    # Where products take longer, the copy engine leaves them all of the multiprocessors.
    assert measured(Gpu(WAYS, 3e-3), monkeypatch)[0].programs is None


def test_of_ways_as_fast_the_one_is_taken_that_leaves_most_to_products() -> None:
    ways = [CopySpeed(8, 1e9, 0.97e9, 0.9), CopySpeed(32, 1e9, 1e9, 0.6)]
    assert fastest_first(ways, 1e6, 1e-5)[0].programs == 8
    slow = [CopySpeed(8, 1e9, 0.9e9, 0.9), CopySpeed(32, 1e9, 1e9, 0.6)]
    assert [way.programs for way in fastest_first(slow, 1e6, 1e-5)] == [32, 8]
    equal = [CopySpeed(n, 1e9, 1e9, 1.0) for n in (8, 2, 4)]
    assert fastest_first(equal, 1e6, 1e-5)[0].programs == 2
    assert fastest_first([], 1e6, 1e-5) == ()


def test_kernels_are_chosen_by_the_same_rule_where_the_copy_engine_is_taken() -> None:
    """K and V are copied by a kernel even then."""
    ways = [
        CopySpeed(None, 1e9, 1e9, 1.0),
        CopySpeed(32, 1e9, 0.99e9, 0.6),
        CopySpeed(8, 1e9, 0.98e9, 0.9),
    ]
    assert [way.programs for way in fastest_first(ways, 1e6, 1e-5)] == [None, 8, 32]


def test_a_way_that_fails_or_brings_other_bytes_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu({n: way for n, way in WAYS.items() if n is not None}, 1.5e-3)
    gpu.wrong = {16}
    assert {speed.programs for speed in measured(gpu, monkeypatch)} == {2, 4, 8, 32}


def test_all_ways_that_work_are_measured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands out 32 streams in turn: with one for each way the last ones would be SGLang's."""
    assert gpu_streams(WAYS, monkeypatch) == ["compute", "copy"]
    failing = {n: way for n, way in WAYS.items() if n is not None}
    assert gpu_streams(failing, monkeypatch) == ["compute", "copy", "copy"]


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
