"""An arena, its capture, and a device that is a thread."""

import threading
from collections.abc import Callable

import numpy as np
import torch

from hcache_backend.arena import Arena, RowState
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.format.page import PageLayout, hidden_layer
from hcache_kernels.codecs import ExactCodec

LAYERS, WIDTH, SIZE, CAPACITY = 3, 8, 4, 12
HOST_PAGES, DEVICE_PAGES = 6, 10
LAYOUT = PageLayout(SIZE, (hidden_layer(SIZE, WIDTH * 4, WIDTH),) * LAYERS)


class PickyCodec(ExactCodec):
    """Rows as they are; it refuses those that begin with a NaN."""

    is_view = False

    def encode_units(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().encode_units(units)[0], ~units[:, 0, 0, 0, 0].isnan()


class Machine:
    def __init__(self, *, is_view: bool = True, capacity: int = CAPACITY) -> None:
        memory = torch.zeros((HOST_PAGES + DEVICE_PAGES, LAYOUT.stride), dtype=torch.uint8)
        self.arena = Arena(
            memory.numpy(),
            LAYOUT,
            HOST_PAGES,
            DEVICE_PAGES,
        )
        codec = (ExactCodec if is_view else PickyCodec).of_rows(WIDTH, torch.float32)
        self.staging = Staging(LAYERS, WIDTH, torch.float32, capacity, "cpu")
        self.capture = StagedCapture(self.arena, memory, self.staging, range(LAYERS), codec)
        self.rows: dict[int, torch.Tensor] = {}  # slot -> [layers, width]
        self.tokens: dict[int, tuple[int, int]] = {}

    def forward(
        self,
        slots: list[int],
        *,
        layers: int = LAYERS,
        replay: int = 0,
        rows: torch.Tensor | None = None,
        before: Callable[[int], object] = lambda layer: None,
    ) -> bool:
        """One step; with ``replay`` a recorded graph of that many rows runs instead of Python.
        ``before`` is called before each layer."""
        hidden = torch.randn(LAYERS, max(len(slots), replay), WIDTH) if rows is None else rows
        where = torch.tensor(slots)
        self.capture.ledger.pass_begins()
        step = self.capture.begin(where, where, where + 100)
        for layer in range(layers):
            before(layer)
            if replay:
                self.staging.stage(layer, hidden[layer], replay)
            else:
                self.capture.take(layer, hidden[layer])
        for i, slot in enumerate(slots):
            self.rows[slot] = hidden[:, i]
            self.tokens[slot] = (slot, slot + 100)
        return step is not None and self.capture.end(step, replayed=replay > 0)

    def hold_transfers(self) -> threading.Event:
        gate = threading.Event()
        self.capture._transfer.run(gate.wait)
        return gate

    def settle(self) -> None:
        self.capture.transfers().synchronize()
        self.capture.ledger.settle()
        assert self.capture.ledger.broken is None

    def stored(self, slot: int) -> torch.Tensor:
        page = self.arena.memory[self.arena.shadows[slot // SIZE]]
        parts = [page[LAYOUT.segment(layer)].reshape(SIZE, -1) for layer in range(LAYERS)]
        return torch.from_numpy(np.stack([part[slot % SIZE] for part in parts])).view(torch.float32)

    def assert_stored(self, slots: list[int]) -> None:
        for slot in slots:
            assert torch.equal(self.stored(slot), self.rows[slot]), slot
            assert self.arena._positions[slot] == self.tokens[slot][0]
            assert self.arena._token_ids[slot] == self.tokens[slot][1]

    def assert_captured(self, slots: list[int]) -> None:
        """All that is on its way arrives, and the rows of ``slots`` are stored and proven."""
        self.settle()
        self.assert_stored(slots)
        assert self.all_valid(slots)

    def overwrite(self) -> None:
        """Replay a recorded graph of four rows, of a step that is not captured."""
        for layer in range(LAYERS):
            self.staging.stage(layer, torch.full((4, WIDTH), 9.0), 4)

    def all_valid(self, slots: list[int]) -> bool:
        return bool((self.arena._rows[slots] == RowState.VALID).all())


def slots(*pages: int) -> list[int]:
    return [page * SIZE + i for page in pages for i in range(SIZE)]
