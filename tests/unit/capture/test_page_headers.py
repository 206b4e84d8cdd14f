"""Which host pages are sealed for L3, believed when they come back, and projected. A page for which
one fact is wrong is not; the same page with right facts is."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hcache_backend import metrics
from hcache_backend.format.envelope import key_bytes
from hcache_backend.host.page_headers import PageHeaders
from tests.unit.capture.small_arena import LAYOUT, SIZE, arena, ids

PRESENT, OLD = b"n" * 16, b"o" * 16
KEYS = [f"{page:064x}" for page in range(3)]
PAGES = ids(1, 3, 4)
TOKENS = np.arange(100, 100 + 3 * SIZE, dtype=np.int32)
POSITIONS = 64  # of RoPE tables


class Host:
    """Three host pages with rows that this process captured, or (not ``captured``) the pool's."""

    def __init__(self, *, captured: bool) -> None:
        self.arena = arena(lambda: PRESENT)
        self.weights: Any = SimpleNamespace(
            present=SimpleNamespace(suspended=None),
            quarantine=None,
            page_namespace=lambda weights=None: PRESENT,
            page_namespaces=lambda: (PRESENT,),
        )
        self.fill(8)
        self.captured = captured

    def fill(self, first: int) -> None:
        """Let rows of positions from ``first`` on come to the pages."""
        positions = np.arange(first, first + 3 * SIZE)
        self.arena.settle(PAGES, self.arena.expect_recomputed(PAGES, positions, TOKENS))

    @property
    def headers(self) -> PageHeaders:
        return PageHeaders(self.weights, self.arena, LAYOUT, self.captured, POSITIONS, b"writer-1")

    def page(self, number: int) -> np.ndarray:
        return self.arena.pages(PAGES)[number]

    def seal(self, first: int | None = 8) -> int:
        return self.headers.seal(PAGES, KEYS, TOKENS, first)

    def verified(self, *, digests_checked: bool = False) -> int:
        headers = self.headers
        return headers.verified_pages(PAGES, KEYS, TOKENS, digests_checked=digests_checked)


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    counted: list[str] = []
    monkeypatch.setattr(metrics.PROBLEMS, "count", counted.append)
    return counted


def is_sealed(page: np.ndarray, number: int) -> bool:
    key, tokens = key_bytes(KEYS[number]), TOKENS[number * SIZE : (number + 1) * SIZE]
    return LAYOUT.problem(page, PRESENT, key, tokens) is None


def has_another_token(host: Host) -> None:
    LAYOUT.token_ids(host.page(1))[SIZE - 1] += 1


def is_suspended(host: Host) -> None:
    host.weights.present.suspended = "self_check"


def has_no_weights(host: Host) -> None:
    host.weights.present = None


def is_in_quarantine(host: Host) -> None:
    host.weights.quarantine = "self_check"


def is_of_old_weights(host: Host) -> None:
    host.arena._namespace[PAGES[1]] = np.void(OLD)


WRONG: list[tuple[bool, Callable[[Host], None], int, str]] = [
    # captured, what is wrong, pages that are sealed before it, the problem
    (True, lambda host: host.arena.mark_unfit(PAGES[1:2]), 1, "page_not_encodable"),
    (True, lambda host: host.arena.free(PAGES[1:2]), 1, "page_with_lost_rows"),
    (True, has_no_weights, 0, "page_of_other_weights"),
    (True, is_in_quarantine, 0, "page_in_quarantine"),
    (True, is_of_old_weights, 1, "host_page_of_other_namespace"),
    (True, has_another_token, 1, "host_page_of_other_tokens"),
    (False, has_no_weights, 0, "page_of_other_weights"),
    (False, is_suspended, 0, "page_of_other_weights"),
]


@pytest.mark.parametrize(("captured", "spoil", "sealed", "problem"), WRONG)
def test_a_page_of_which_one_fact_is_wrong_is_not_sealed(
    captured: bool,
    spoil: Callable[[Host], None],
    sealed: int,
    problem: str,
    problems: list[str],
) -> None:
    host = Host(captured=captured)
    spoil(host)
    assert host.seal() == sealed and problems == [problem]
    assert [is_sealed(host.page(i), i) for i in range(3)] == [i < sealed for i in range(3)]


def test_a_page_whose_layers_share_slots_in_an_unknown_way_is_not_sealed(
    problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(LAYOUT), "of_page", lambda self, page: None)
    assert Host(captured=True).seal() == 0 and problems == ["page_of_another_form"]


@pytest.mark.parametrize("captured", [True, False])
def test_right_pages_are_sealed_and_believed(captured: bool, problems: list[str]) -> None:
    """Captured rows have their positions; the pool's get them, from the node's first one on."""
    host = Host(captured=captured)
    assert host.seal(8 if captured else 20) == 3
    assert host.verified() == host.verified(digests_checked=True) == 3
    positions = [LAYOUT.positions(host.page(i)).tolist() for i in range(3)]
    first = 8 if captured else 20
    assert np.concatenate(positions).tolist() == list(range(first, first + 3 * SIZE))
    assert problems == []


def test_captured_rows_of_suspended_weights_are_sealed(problems: list[str]) -> None:
    """Their namespace says which weights made them; of K and V nothing does."""
    host = Host(captured=True)
    is_suspended(host)
    assert host.seal() == 3


def test_pages_of_the_pool_with_no_position_are_not_sealed(problems: list[str]) -> None:
    assert Host(captured=False).seal(None) == 0 and problems == ["page_without_position"]


def test_captured_pages_need_no_position(problems: list[str]) -> None:
    assert Host(captured=True).seal(None) == 3


@pytest.mark.parametrize("digests_checked", [False, True])
def test_damage_ends_what_is_believed(digests_checked: bool, problems: list[str]) -> None:
    """The header is always compared; units only if L3 has not."""
    host = Host(captured=True)
    host.seal()
    host.page(1)[LAYOUT.segment(0).start] ^= 1
    assert host.verified(digests_checked=digests_checked) == (3 if digests_checked else 1)
    host.seal()
    LAYOUT.token_ids(host.page(2))[0] += 1
    assert host.verified(digests_checked=digests_checked) == 2
    assert problems[-1] == "page_checksum"


@pytest.mark.parametrize(("first", "fine"), [(0, True), (52, True), (53, False), (-1, False)])
def test_rope_tables_have_a_row_for_every_position(
    first: int, fine: bool, problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels read beyond the table otherwise. 64 positions, 12 tokens."""
    refused: list[tuple[str, float]] = []
    monkeypatch.setattr(metrics.L3_TOKENS, "count", lambda *event: refused.append(event))
    host = Host(captured=True)
    host.fill(first)
    assert host.headers.may_project(PAGES) == fine
    host.seal()
    pages = host.verified()
    assert pages == (3 if fine else 0 if first < 0 else 2)
    assert problems == ([] if fine else ["page_positions"])
    assert refused == ([] if fine else [("refused_positions", (3 - pages) * SIZE)])


def test_only_pages_of_the_present_weights_are_projected() -> None:
    host = Host(captured=True)
    assert host.headers.may_project(PAGES)
    is_of_old_weights(host)
    assert not host.headers.may_project(PAGES) and host.headers.may_project(PAGES[:1])
    host.weights.page_namespaces = lambda: (PRESENT, OLD)
    assert host.headers.may_project(PAGES)
    is_in_quarantine(host)
    assert not host.headers.may_project(PAGES[:1])


def test_pages_of_the_pool_are_copied_whatever_their_headers_say() -> None:
    host = Host(captured=False)
    is_of_old_weights(host)
    is_in_quarantine(host)
    assert host.headers.may_project(PAGES)
