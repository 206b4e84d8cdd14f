"""A history in files, and every way to get its K and V back into the pool."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.devices import Device
from bench.gpu.eager_files import (
    DeviceReader,
    HostReader,
    Reader,
    StandIn,
    gds_state,
    open_with_kvikio,
)
from bench.gpu.restore_models import Shape, build
from hcache_backend.page import PageLayout
from hcache_backend.restore.eager import batch_pages
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.restore.pipeline import Gather, RestorePipeline, gather_segments
from hcache_kernels.project_kv import KVPool, ProjectionCall, project_kv

PAGE, BLOCK = 64, 4096


class Scene:
    """Pages of one kind in files, memory for them, and the pool that they are restored to.

    Args:
        device: The GPU, or the CPU.
        shape: The model's shape.
        tokens: Length of the history.
        kind: ``hidden`` or ``kv``.
        folder: For the files.

    Attributes:
        bytes: Size of all pages.
    """

    def __init__(self, device: Device, shape: Shape, tokens: int, kind: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.device, self.tokens = device, tokens
        pages = tokens // PAGE
        layers = build(shape, device.kind, device.dtype)
        values = shape.hidden if kind == "hidden" else 2 * shape.width
        segment = PAGE * values * device.dtype.itemsize
        self.layout = PageLayout(PAGE, (segment,) * shape.layers)
        size = pages * self.layout.page_bytes
        raw = device.pinned(size + BLOCK)
        start = -raw.data_ptr() % BLOCK  # where direct I/O may write
        self.memory = raw[start : start + size].view(pages, self.layout.page_bytes)
        self.bytes = self.memory.nbytes
        self.pages = np.arange(pages, dtype=np.int64)
        order = torch.from_numpy(np.random.default_rng(0).permutation(pages))
        self.slots = (order[:, None] * PAGE + torch.arange(PAGE)).reshape(-1).to(device.kind)
        positions = torch.arange(tokens, device=device.kind)
        rows_of_heads = (tokens, shape.heads, shape.head_dim)

        def pool() -> KVPool:
            kinds = {"device": device.kind, "dtype": device.dtype}
            return KVPool(*(torch.zeros(rows_of_heads, **kinds) for _ in "kv"))

        pools = [pool() for _ in layers]
        self.parts = [part for target in pools for part in (target.k, target.v)]
        self.layout.positions(self.memory.numpy())[:] = positions.cpu().view(pages, PAGE).numpy()
        for index, (layer, target) in enumerate(zip(layers, pools, strict=True)):
            hidden = torch.randn(tokens, shape.hidden, device=device.kind, dtype=device.dtype)
            project_kv(ProjectionCall(hidden, positions, self.slots, layer.projection, target))
            rows = hidden.view(pages, -1)
            if kind == "kv":
                both = (target.k, target.v)
                kv = torch.stack([part[self.slots].view(pages, PAGE, -1) for part in both], 1)
                rows = kv.reshape(pages, -1)
            self.memory[:, self.layout.segment(index)] = rows.view(torch.uint8).cpu()
        self._norms = [float(part.float().norm()) for part in self.parts]
        self._checks = [part[self.slots[::97]].float() for part in self.parts]

        def fill(index: int) -> Callable[..., None]:
            def project(segments: Any, positions: Any, slots: Any) -> None:
                rows = segments.view(device.dtype).view(-1, shape.hidden)
                projection = layers[index].projection
                project_kv(ProjectionCall(rows, positions, slots, projection, pools[index]))

            def store(segments: Any, positions: Any, slots: Any) -> None:
                k, v = segments.view(device.dtype).view(-1, 2, PAGE, *rows_of_heads[1:]).unbind(1)
                pools[index].k[slots], pools[index].v[slots] = k.flatten(0, 1), v.flatten(0, 1)

            return project if kind == "hidden" else store

        method: Any = kind
        self._layers = [RestoredLayer(method, fill(index)) for index in range(shape.layers)]
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
            self.memory, self.layout, self._layers, self.tokens, self.device.kind, gather
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

    def poison(self) -> None:
        """What is not restored shows."""
        for part in self.parts:
            part.fill_(float("nan"))

    def is_right(self) -> bool:
        """Whether the pool holds the K and V that the projection had written."""
        for part, norm, rows in zip(self.parts, self._norms, self._checks, strict=True):
            found = part[self.slots[::97]].float()
            if not float((found - rows).norm() / rows.norm()) < 1e-2:
                return False
            if not abs(float(part.float().norm()) / norm - 1) < 1e-2:
                return False
        return True


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
        self._pipeline.start(self.scene.pages, self.scene.slots).wait()

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
            slots = self.scene.slots[batch.start * PAGE : batch.stop * PAGE]
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
        self.scene.poison()
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
    usable, state = gds_state()
    if not usable:
        return None, state
    try:
        restores = scene.through_device(open_with_kvikio)
        restores.read()
    except (RuntimeError, OSError) as error:
        return None, f"kvikio: {error}"
    return restores, state
