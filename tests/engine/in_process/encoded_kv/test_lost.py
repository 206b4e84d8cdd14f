"""Pages of which nobody has the layers: loads recompute them, and ranks agree which these are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hcache_backend import metrics
from hcache_backend.host.loads import QueuedLoad
from hcache_backend.sglang import controller as controllers
from hcache_backend.sglang.controller import OwnPagesController
from hcache_backend.streams import Stream, WorkerStream, current_stream
from tests.engine.in_process.encoded_kv.test_rows import Rows
from tests.kit.host import LAYERS, PAGE, Host, bare_controller, bits, make_unfit, slots_of
from tests.kit.ranks import Ranks, together


class Model:
    """Recomputes pages of a server: K and V are what its first pages held when it was made."""

    def __init__(self, device: Any) -> None:
        self.layers = len(device.k_buffer)
        self._planes = (*device.k_buffer, *device.v_buffer)
        self._values = [plane.clone() for plane in self._planes]
        self.tokens: list[int] = []

    def stream(self) -> Stream:
        return current_stream("cpu")

    def run(self, layers: int, positions: torch.Tensor, slots: torch.Tensor, spans: Any) -> None:
        """All before a token is there, or comes now; a token's id is the slot that it had."""
        assert layers == LAYERS
        self.tokens += [token for span in spans for token in span.token_ids.tolist()]
        for plane, values in zip(self._planes, self._values, strict=True):
            plane[slots] = values[PAGE + positions]
        for span in spans:
            seen = torch.cat((span.prefix, slots[: len(span.token_ids)]))
            for plane, values in zip(self._planes, self._values, strict=True):
                before = torch.arange(PAGE, PAGE + len(span.prefix))
                same = plane[seen[: len(span.prefix)]] == values[before]
                assert same.logical_or(values[before].isnan()).all()


def controller(server: Host, request: range | None) -> OwnPagesController:
    """It loads from the start of a ``request``."""
    made: OwnPagesController = bare_controller(
        server.pool,
        server.loads,
        loading=(lambda: torch.empty(0, dtype=torch.int64), lambda: request),
    )
    return made


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts: dict[str, int] = {}
    monkeypatch.setattr(
        metrics.TOKENS,
        "count",
        lambda event, tokens: counts.update({event: counts.get(event, 0) + tokens}),
    )
    return counts


def load(server: Host, planned: QueuedLoad, *pages: int) -> torch.Tensor:
    host, slots = torch.cat([slots_of(page) for page in planned.host_pages]), slots_of(*pages)
    server.loads.add(planned, slots)
    for layer in range(LAYERS):
        server.pool.load_to_device_per_layer(server.device, host, slots, layer, "kernel")
    return bits(server.device, *pages)


def test_what_does_not_fit_is_recomputed_behind_what_is_before_it(counted: dict[str, int]) -> None:
    """Of four pages the second and the fourth do not."""
    server = Host()
    make_unfit(server.device, 2, 1)
    make_unfit(server.device, 4, 0)
    wanted, model = bits(server.device, 1, 2, 3, 4), Model(server.device)
    server.loads._recomputer = model  # type: ignore[assignment]
    host = server.pool.page_ids(server.back_up(1, 2, 3, 4))
    for buffer in (*server.device.k_buffer, *server.device.v_buffer):
        buffer.zero_()
    made, ids = controller(server, range(4 * PAGE)), [*range(4 * PAGE)]
    for _ in range(2):
        planned = made._planned(host)
        assert planned is not None
        assert torch.equal(load(server, planned, 8, 7, 6, 5), wanted)
    recomputed = ids[PAGE : 2 * PAGE] + ids[3 * PAGE :]
    assert model.tokens == 2 * recomputed
    assert counted["recomputed_at_load"] == 2 * len(recomputed)
    assert counted["not_encodable"] == 2 * PAGE
    assert not any(event.startswith("not_restored") for event in counted)
    assert not made._never_loaded


def test_what_cannot_be_recomputed_is_evicted_so_that_it_hides_nothing(
    counted: dict[str, int],
) -> None:
    """A request with a picture, say."""
    server = Host()
    make_unfit(server.device, 2, 1)
    server.loads._recomputer = Model(server.device)  # type: ignore[assignment]
    host = server.pool.page_ids(server.backed_up(1, 2))
    made = controller(server, None)
    assert made._planned(host[:1]) is not None and not made._never_loaded
    assert made._planned(host) is None and made._never_loaded
    assert counted["not_restored_layers_not_recomputable"] == 2 * PAGE


def test_a_backup_that_has_not_arrived_is_loaded_later(counted: dict[str, int]) -> None:
    server, stream = Host(), WorkerStream("device to host")
    arrive = threading.Event()
    with stream.as_current():
        stream.run(arrive.wait)
        host = server.back_up(1)
    made = controller(server, None)
    assert made._planned(server.pool.page_ids(host)) is None and not made._never_loaded
    assert counted == {"not_restored_unsettled": PAGE}
    arrive.set()
    stream.record().synchronize()
    assert made._planned(server.pool.page_ids(host)) is not None


class Planned:
    """Loads whose plan is the depths of their pages."""

    stored_from = 0

    def plan(self, host_pages: Any, depths: Any, *_: Any) -> Any:
        return SimpleNamespace(depths=depths.tolist())


def asked_on_all_ranks(made: Sequence[Any], pages: int) -> list[list[int] | None]:
    """From which layer on each of the first host pages is there, as each rank says it."""

    def ask(one: Any) -> list[int] | None:
        found = one._planned(np.arange(pages))
        return None if found is None else found.depths

    return together(ask, made)


def test_what_does_not_fit_on_one_rank_is_lost_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is loaded as long as one of them does not know yet."""
    monkeypatch.setattr(controllers, "smallest", Ranks(2).smallest)
    servers, made = [Host(), Host()], []
    for rank, server in enumerate(servers):
        make_unfit(server.device, 1 + rank, rank)
        made.append(bare_controller(server.pool, Planned(), tp_group=rank))
        server.back_up(1, 2, 3)
    settle = servers[1].pool.settle
    servers[1].pool.settle = lambda: None  # type: ignore[method-assign]
    assert asked_on_all_ranks(made, 3) == [None, None]
    servers[1].pool.settle = settle  # type: ignore[method-assign]
    assert asked_on_all_ranks(made, 3) == 2 * [[LAYERS, LAYERS, 0]]


def test_ranks_agree_how_much_of_a_recomputed_page_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of the second page do not fit on one rank; a page that is prepared is there anyway."""
    servers = [Rows(), Rows()]
    monkeypatch.setattr(controllers, "smallest", Ranks(2).smallest)
    made: list[Any] = []
    prepared = np.array([False, False, False])
    for rank, server in enumerate(servers):
        pages, tokens = np.arange(3), np.arange(3 * PAGE)
        server.pool.arena.recomputed(pages, tokens, tokens)
        server.pool.arena.arrived(pages, np.array([True, rank == 1, True]))
        restores = SimpleNamespace(prepared=lambda pages: prepared, failed=lambda pages: False)
        eager = SimpleNamespace(restores=restores)
        one = bare_controller(server.pool, Planned(), tp_group=rank, eager=eager)
        made.append(one)
    assert asked_on_all_ranks(made, 3) == 2 * [[0, LAYERS, 0]]
    prepared[1] = True
    assert asked_on_all_ranks(made, 3) == 2 * [[0, 0, 0]]


def test_a_recomputed_page_that_fails_in_rows_and_in_units_counts_once(
    counted: dict[str, int],
) -> None:
    server, host_pages = Host(), np.array([0, 1])
    make_unfit(server.device, 1, 0)
    fits = torch.tensor([False, True])
    rows: Any = SimpleNamespace(save=lambda pages: fits)
    server.pool.save_recomputed(host_pages, slots_of(1, 2), rows)
    server.pool.settle()
    assert counted["not_encodable"] == PAGE


def test_rows_that_do_not_fit_are_recomputed_whole_behind_what_is_before_them(
    counted: dict[str, int],
) -> None:
    """Each time to other slots, and what was on the device is gone."""
    server = Rows()
    wanted = server.forward(1, 2, 3, unfit=[2])
    model = Model(server.device)
    server.loads._recomputer = model  # type: ignore[assignment]
    for source, target in (((1, 2, 3), (6, 5, 4)), ((6, 5, 4), (3, 2, 1))):
        host = server.back_up(*source)
        host_pages = server.pool.page_ids(host)
        assert (server.pool.arena.depth(host_pages) > 0).tolist() == [False, True, False]
        for buffer in (*server.device.k_buffer, *server.device.v_buffer):
            buffer.zero_()
        assert torch.equal(server.load(host, *target), wanted)
        server.pool.free(host)  # as write_back does: the tokens are on the device only
    assert model.tokens == 2 * [*range(PAGE, 2 * PAGE)]
    assert counted["recomputed_at_load"] == 2 * PAGE
