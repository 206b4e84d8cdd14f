"""Saving hidden states without staging: what the paper's two stages are compared with.

For ``hcache bench compare`` only. The paper's DirectIO (section 6.3.3) writes what every layer sees
to storage while the step waits, row by row, because the tokens of a decode step belong to different
sequences, and so to different chunks (section 4.2.2). :func:`plugin` makes a folder that, on
PYTHONPATH, has SGLang load :func:`activate`; it replaces the staged capture of our server. Nothing
that is written so is ever read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FILE_VARIABLE = "HCACHE_BENCH_DIRECT_FILE"
"""Names the file that rows are written to."""
_BLOCK = 4096
_ENTRY_POINT = f"[sglang.srt.plugins]\nhcache_direct_saving = {__name__}:activate\n"


class DirectFile:
    """Rows of hidden states in one file, each in blocks of its own, past the page cache.

    A chunk is a layer of a page, so rows that one step makes lie apart unless they are neighbours
    in their sequence.

    Args:
        path: Created where it is missing.
        layers: Layers that have rows.
        page_size: Slots of a page.
    """

    def __init__(self, path: Path, layers: int, page_size: int) -> None:
        self._layers, self._page_size = layers, page_size
        self._fd = _open(path)
        self._room = mmap.mmap(-1, _BLOCK)

    def place(self, layer: int, slot: int, row_bytes: int) -> int:
        """Where in the file the row of a layer in a slot begins."""
        page, row = divmod(slot, self._page_size)
        return ((page * self._layers + layer) * self._page_size + row) * _whole(row_bytes)

    def write(self, layer: int, slots: Sequence[int], hidden: torch.Tensor) -> None:
        """Write rows; returns when the device has them.

        Args:
            layer: Whose rows.
            slots: Of their tokens.
            hidden: ``[len(slots), hidden]``, contiguous rows, on any device.

        Raises:
            OSError: They could not be written.
        """
        import torch

        rows = hidden.detach().contiguous().cpu().view(torch.uint8).numpy()
        size = rows.shape[1]
        if len(self._room) < _whole(size):
            self._room = mmap.mmap(-1, _whole(size))
        for slot, row in zip(slots, rows, strict=True):
            self._room[:size] = row.tobytes()
            written = os.pwrite(
                self._fd, memoryview(self._room)[: _whole(size)], self.place(layer, slot, size)
            )
            if written != _whole(size):
                raise OSError(f"{written} of {_whole(size)} bytes of a row were written")


def _open(path: Path) -> int:
    """A file whose writes return when its device has them; past the page cache where possible."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:  # a file system in memory, or over a network
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DSYNC, 0o600)


def activate() -> None:
    """SGLang calls this in each of its processes: capture writes directly from now on."""
    from hcache_backend.capture.staging import StagedCapture

    path = Path(os.environ[FILE_VARIABLE])
    file: DirectFile | None = None
    slots: list[int] = []

    def begin(self: Any, step_slots: torch.Tensor, *_: torch.Tensor) -> None:
        """No step of the staged capture: its rows are void, and no page is backed up."""
        nonlocal file
        if file is None:
            file = DirectFile(path, len(self._segments), self.arena.layout.page_size)
        slots[:] = step_slots.tolist()
        self.ledger.allocated(step_slots)
        self.skip()

    def take(self: Any, layer: int, hidden: torch.Tensor) -> None:
        if file is not None and slots:
            file.write(layer, slots, hidden[: len(slots)])

    StagedCapture.begin = begin  # type: ignore[method-assign,assignment]
    StagedCapture.take = take  # type: ignore[method-assign]


def plugin(folder: Path) -> dict[str, str]:
    """Make the plugin; the variables of a server that is to save directly.

    Args:
        folder: For the plugin and the file that is written, on the disk of L3.
    """
    about = folder / "hcache_direct_saving-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hcache-direct-saving\n")
    (about / "entry_points.txt").write_text(_ENTRY_POINT)
    return {"PYTHONPATH": str(folder), FILE_VARIABLE: str(folder / "rows.bin")}


def _whole(size: int) -> int:
    """``size`` in whole blocks."""
    return -(-size // _BLOCK) * _BLOCK
