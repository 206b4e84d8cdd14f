"""The checker itself: each rule on a few lines of work, with the edge and without it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.order import rules
from tests.order.checker import Checker
from tests.order.clocks import Frame
from tests.order.edges import PARTS

GPU = torch.device("cpu")
"""A variable: on a machine with a GPU it would name that."""


@pytest.fixture
def checker() -> Checker:
    return Checker()


def findings(checker: Checker) -> list[str]:
    return [finding.what for finding in checker.findings]


@pytest.mark.parametrize("waits", [True, False])
def test_a_read_on_another_stream_has_to_wait_for_the_write(checker: Checker, waits: bool) -> None:
    writer, reader = checker.stream("writer"), checker.stream("reader")
    values = checker.on_device(torch.zeros(8), "values")
    with checker.watching():
        checker.begin()
        with checker.on(writer):
            values.add_(1)
        if waits:
            reader.wait_event(writer.record_event())
        with checker.on(reader):
            values.sum()
    assert findings(checker) == ([] if waits else ["reader reads what writer writes"])
    for finding in checker.findings:
        assert finding.missing == "reader does not wait for writer"
        assert "values, device, 32 bytes" in finding.memory
        first, then = finding.first[0], finding.then[0]
        assert str(first).startswith("tests/order/test_checker.py:")
        assert then.line == first.line + 4


@pytest.mark.parametrize(("file", "waits"), [("fused_moe_native", False), ("layer", True)])
def test_the_host_learns_nothing_where_torch_stands_for_a_kernel(
    checker: Checker, file: str, waits: bool
) -> None:
    """SGLang's experts in torch ask the device how many tokens each one has."""
    module: dict[str, Callable[[torch.Tensor], object]] = {}
    source = "def count(values):\n    return values.sum().cpu()"
    exec(compile(source, f"/sglang/srt/layers/moe/{file}.py", "exec"), module)
    with checker.watching():
        checker.begin()
        with checker.on(checker.stream("writer")):
            values = torch.ones(8, device=GPU)
            module["count"](values)
        with checker.on(checker.stream("reader")):
            values.sum()
    assert ("reader reads what writer writes" in findings(checker)) is not waits


Access = Callable[[torch.Tensor], object]


def encoded(arena: torch.Tensor) -> None:
    """The last rows of encoded segments are written."""
    pages, last = (torch.tensor(x, device=GPU) for x in ([0, 1], [15, 15]))
    arena[:, :6272].unflatten(1, (16, 392))[pages, last] = 1


def filled(*rows: int) -> Access:
    return lambda pool: pool.index_fill_(0, torch.tensor(rows, device=GPU), 1.0)


def selected(*rows: int, into: torch.Tensor | None = None) -> Access:
    return lambda pool: torch.index_select(pool, 0, torch.tensor(rows, device=GPU), out=into)


ROWS, TWO_ROWS, PLANE = torch.zeros(8, 16), torch.zeros(2, 16), torch.zeros(4, 6)
SEGMENTS = torch.zeros(64, 6272 + 64, dtype=torch.uint8)
"""Rows end where a cell ends, beside what stands behind them."""


@pytest.mark.parametrize(
    ("memory", "first", "then", "wrong"),
    [
        pytest.param(*case, id=name)
        for name, case in {
            "other rows": (ROWS, filled(0, 1, 2, 3), selected(4, 5), False),
            "a row": (ROWS, filled(0, 1, 2, 3), selected(3, 4), True),
            "other rows, out": (ROWS, filled(0, 1, 2, 3), selected(4, 5, into=TWO_ROWS), False),
            "a row, out": (ROWS, filled(0, 1, 2, 3), selected(3, 4, into=TWO_ROWS), True),
            "behind segments": (SEGMENTS, encoded, lambda a: a[:, 6272:].fill_(2), False),
            "a byte of a segment": (SEGMENTS, encoded, lambda a: a[:, 6271:].fill_(2), True),
            "other columns": (
                PLANE,
                lambda p: p[:, :3].fill_(1),
                lambda p: p[:, 3:].fill_(2),
                False,
            ),
            "a cell": (PLANE, lambda p: p[:, :3].fill_(1), lambda p: p[2, 2].fill_(3), True),
        }.items()
    ],
)
def test_bytes_of_one_storage_are_told_apart(
    checker: Checker, memory: torch.Tensor, first: Access, then: Access, wrong: bool
) -> None:
    pool = checker.on_device(memory.clone())
    with checker.watching():
        checker.begin()
        with checker.on(checker.stream("one")):
            first(pool)
        with checker.on(checker.stream("other")):
            then(pool)
    assert bool(findings(checker)) is wrong


@pytest.mark.parametrize("by", ["keeping it", "waiting for the user", None])
def test_memory_lives_until_the_streams_that_use_it_are_done(
    checker: Checker, by: str | None
) -> None:
    owner, user = checker.stream("owner"), checker.stream("user")
    with checker.watching():
        checker.begin()
        with checker.on(owner):
            values = torch.ones(8, device=GPU)
        user.wait_stream(owner)
        with checker.on(user):
            values.add_(1)
        if by == "keeping it":
            values.record_stream(user)
        elif by == "waiting for the user":
            owner.wait_stream(user)
        del values
    assert findings(checker) == (
        [] if by else ["device memory of owner dies while user may use it"]
    )


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_orders_the_host_if_it_waits(checker: Checker, waits: bool) -> None:
    with checker.watching():
        checker.begin()
        torch.ones(8, device=GPU).to("cpu", non_blocking=not waits).numpy()
    assert findings(checker) == ([] if waits else ["host reads what default writes"])
    assert [wait.how for wait in checker.clocks.host_waits] == ["to(host)"] * waits


@pytest.mark.parametrize("polls", [1, 4])
def test_lazy_queries_say_no_for_a_while(checker: Checker, polls: int) -> None:
    stream = checker.stream("copy")
    with checker.watching():
        checker.begin()
        with checker.on(stream):
            here = torch.ones(8, device=GPU).to("cpu", non_blocking=True)
        event = stream.record_event()
        answers = [event.query() for _ in range(polls)]
        here.numpy()
    assert answers == [False, False, False, True][:polls]
    assert bool(findings(checker)) is (polls == 1)


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: int(x[0]),
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
    ],
    ids=["nonzero", "unique", "mask", "masked_select", "int", "bool", "tolist"],
)
def test_what_the_host_must_know_makes_it_wait(checker: Checker, asks: Access) -> None:
    with checker.watching():
        checker.begin()
        asks(torch.ones(8, device=GPU))
    assert checker.clocks.host_waits


def test_the_engine_s_path_reaches_streams_by_one_door() -> None:
    package = Path(__file__).parents[2] / "hcache_backend"
    beside = [
        str(path.relative_to(package))
        for part in (*PARTS, "projection")
        for path in (package / part).rglob("*.py")
        if "torch.cuda" in path.read_text()
    ]
    assert not beside, "torch.cuda is streams.py's"


SLOTS, ATTENTION = "/swa_memory_pool.py", "/hcache_cpu_engine/attention.py"


@pytest.mark.parametrize(
    ("memory", "how", "files", "silent"),
    [
        ("req_to_token", "read", [ATTENTION], True),
        ("full_to_swa", "read", [SLOTS, ATTENTION], True),
        ("full_to_swa", "read", [SLOTS, "/hcache_backend/host/loads.py"], False),
        ("full_to_swa", "write", [SLOTS, ATTENTION], False),
        ("K", "read", [ATTENTION], False),
    ],
)
def test_page_tables_are_not_read_in_each_layer_of_a_gpu(
    memory: str, how: str, files: list[str], silent: bool
) -> None:
    where = [Frame(compile("0", file, "eval"), 1) for file in files]
    assert rules.is_silent(memory, how, where) is silent
