"""A history in files, and every way to get its K and V back into the pool."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bench.gpu.eager_files import DeviceReader, HostReader, Reader, StandIn, open_with_kvikio
from bench.gpu.program import Device
from bench.gpu.restore_methods import History
from bench.gpu.shapes import PAGE
from hcache_backend.format.page import PageLayout, StoredLayer
from hcache_backend.format.units import Segment
from hcache_backend.kvikio_state import kvikio_state
from hcache_backend.restore.eager import batch_pages
from hcache_backend.restore.pipeline import Gather, RestorePipeline, gather_segments

BLOCK = 4096


class Scene:
    """Pages of one kind in files, and memory for them.

    Args:
        device: The GPU, or the CPU.
        history: What is stored, and the pool that it is restored to.
        kind: ``hidden`` or ``kv``.
        folder: For the files.

    Attributes:
        bytes: Size of all pages.
    """

    def __init__(
        self, device: Device, history: History, kind: Literal["hidden", "kv"], folder: Path
    ) -> None:
        self.device, self.history = device, history
        stored, self._layers = history.stored(kind)
        whole = StoredLayer((Segment(stored[0].shape[1]),))
        self.layout = PageLayout(PAGE, (whole,) * len(stored))
        pages = len(history.pages)
        size = pages * self.layout.page_bytes
        raw = device.pinned(size + BLOCK)
        start = -raw.data_ptr() % BLOCK  # where direct I/O may write
        self.memory = raw[start : start + size].view(pages, self.layout.page_bytes)
        self.bytes = self.memory.nbytes
        self.pages = np.arange(pages, dtype=np.int64)
        positions = history.positions.cpu().view(pages, PAGE).numpy()
        self.layout.positions(self.memory.numpy())[:] = positions
        for layer, segments in enumerate(stored):
            self.memory[:, self.layout.segment(layer)] = segments
        self.paths = self._write(folder)

    def _write(self, folder: Path) -> list[Path]:
        folder.mkdir()
        paths = [folder / f"{page}.page" for page in range(len(self.memory))]
        for path, page in zip(paths, self.memory, strict=True):
            with path.open("wb") as file:
                file.write(page.numpy().data)
                os.fsync(file.fileno())
        return paths

    def pipeline(self, gather: Gather | None = None) -> RestorePipeline:
        """The server's pipeline for these pages."""
        return RestorePipeline(
            self.memory, self.layout, self._layers, self.history.tokens, self.device.kind, gather
        )

    def through_host(self) -> Restores:
        """Files are read to host memory."""
        reader = HostReader(self.paths, self.memory, self.layout.header_bytes)
        return Restores(self, reader, self.pipeline())

    def through_device(self, open_file: Callable[[Path], Any]) -> Restores:
        """Files are read straight to device memory; ``open_file`` as ``kvikio.CuFile``."""
        header, kind = self.layout.header_bytes, self.device.kind
        reader = DeviceReader(self.paths, self.memory, header, kind, open_file)

        def gather(memory: Any, pages: torch.Tensor, offset: int, out: torch.Tensor) -> None:
            gather_segments(reader.memory, pages, offset, out)

        return Restores(self, reader, self.pipeline(gather))


class Restores:
    """One way from the files to the pool.

    Attributes:
        scene: What is restored.
        rate: Bytes a second that reading may reach; 0: what the disk does.
    """

    def __init__(self, scene: Scene, reader: Reader, pipeline: RestorePipeline) -> None:
        self.scene, self.rate = scene, 0.0
        self._reader, self._pipeline = reader, pipeline

    def _batches(self) -> Iterator[range]:
        """Read batch after batch, no faster than the rate; each one when it is there."""
        pages, begin = len(self.scene.pages), time.perf_counter()
        step = batch_pages(pages)
        for start in range(0, pages, step):
            batch = range(start, min(start + step, pages))
            self._reader.read(batch)
            if self.rate:
                due = begin + batch.stop * self.scene.layout.page_bytes / self.rate
                time.sleep(max(0.0, due - time.perf_counter()))
            yield batch

    def read(self) -> None:
        """Read all pages."""
        for _ in self._batches():
            pass

    def restore_all(self) -> None:
        """Restore what is in memory."""
        self._pipeline.start(self.scene.pages, self.scene.history.slots).wait()

    def layerwise(self) -> None:
        """Read, then restore."""
        self.read()
        self.restore_all()

    def eager(self) -> None:
        """Restore each batch while the next one is read."""
        arrived: queue.SimpleQueue[range | Exception | None] = queue.SimpleQueue()

        def read() -> None:
            try:
                for batch in self._batches():
                    arrived.put(batch)
                arrived.put(None)
            except Exception as error:
                arrived.put(error)

        reader = threading.Thread(target=read)
        reader.start()
        restores = []
        while isinstance(batch := arrived.get(), range):
            pages = self.scene.pages[batch.start : batch.stop]
            slots = self.scene.history.slots[batch.start * PAGE : batch.stop * PAGE]
            restores.append(self._pipeline.start(pages, slots))
        for restore in restores:
            restore.wait()
        reader.join()
        if batch is not None:
            raise batch

    def timed(self, work: Callable[[], None]) -> float:
        """Seconds of ``work``, everything that it launched included."""
        start = time.perf_counter()
        work()
        self._synchronize()
        took = time.perf_counter() - start
        self._pipeline.finished()
        return took

    def poison(self) -> None:
        """What is not read, or not restored, shows."""
        self._reader.poison()
        self.scene.history.poison()
        self._synchronize()  # reading to the device does not wait for it

    def _synchronize(self) -> None:
        if not self.scene.device.dry_run:
            torch.cuda.synchronize()

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


def with_gds(scene: Scene) -> tuple[Restores | None, str]:
    """Reading straight to the device and how that is done, or None and why it cannot be."""
    if scene.device.dry_run:
        return scene.through_device(StandIn), "dry run: a stand-in for KvikIO"
    mode, why = kvikio_state()
    if mode == "nothing":
        return None, f"kvikio: {why}"
    try:
        restores = scene.through_device(open_with_kvikio)
        restores.read()
    except (RuntimeError, OSError) as error:
        return None, f"kvikio: {error}"
    return restores, f"{mode}: {why}"
