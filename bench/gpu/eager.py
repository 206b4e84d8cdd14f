"""Restores from a folder of pages while they are being read. Needs only torch and triton.

    python bench/gpu/eager.py [--dir FOLDER] [--tokens 4096] [--rates 0 8 4 2] [--layers N]

Pages of Llama-2-7B's shape, 64 tokens each, stand in files; they are read with O_DIRECT into pinned
memory by eight threads, and go through the restore pipeline that the server uses:

- layer-wise: hidden states; all pages are read, then all are restored
- eager: hidden states; in the server's read batches, each restored while the next one is read
- kv: K and V; all pages are read, then copied

``--rates`` in GB/s slow the reading down; 0 is the disk as it is. One more rate is measured: where
reading and restoring hidden states take equally long. K and V are compared with the projection's
after every restore. Times are medians of five, from the first read to the last layer.

Prints a table and whether the goals are met, and writes ``bench/results/DEVICE/eager.json`` and
``eager.png``. ``--dry-run`` runs it on tiny shapes on the CPU: its times mean nothing, and it
writes nothing unless ``--results`` names a folder.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE, BLOCK, READERS, REPEATS = 64, 4096, 8, 5
METHODS = {"layer-wise": "hidden", "eager": "hidden", "kv": "kv"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="where pages are written; a temporary folder")
    parser.add_argument("--tokens", type=int, default=4096, help="of the history")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--rates", type=float, nargs="*", default=(0.0, 8.0, 4.0, 2.0))
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--results", type=Path, help="folder for the device's results")
    options = parser.parse_args()
    sys.path.append(str(ROOT))
    from kernels import find_package

    find_package()

    import torch
    from devices import Device, print_goals

    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry-run does without")
    if options.dry_run:
        options.tokens, options.rates = 20 * PAGE, [0.0]
    if options.tokens % PAGE:
        parser.error(f"--tokens {options.tokens}: must be a multiple of {PAGE}")
    device = Device(options.dry_run)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="hcache-bench-") as folder:
        rows = measure(device, Path(folder), options)
    found = goals(rows, dry_run=options.dry_run)
    show(rows)
    print_goals(found)
    where = device.write("eager", {"goals": found, "rows": rows}, options.results)
    if where is not None:
        draw(device.name, rows, where / "eager.png")
    return 0 if all(row["right"] for row in rows) else 1


def measure(device: Any, folder: Path, options: Any) -> list[dict[str, Any]]:
    """One row a rate and method."""
    from dataclasses import replace

    import torch
    from restore_models import SHAPES

    shape = SHAPES[0].tiny() if device.dry_run else SHAPES[0]
    if options.layers:
        shape = replace(shape, layers=options.layers)
    with torch.inference_mode():
        scenes = {kind: Scene(device, shape, options.tokens, kind, folder / kind) for kind in KINDS}
        hidden = scenes["hidden"]
        alone = statistics.median(hidden.timed(hidden.restore_all) for _ in range(REPEATS))
        balanced = hidden.bytes / alone / 1e9
        rows = []
        for rate in sorted({*options.rates, balanced}, key=lambda rate: rate or float("inf")):
            for method, kind in METHODS.items():
                scene = scenes[kind]
                scene.rate = rate * 1e9
                restore = scene.eager if method == "eager" else scene.layerwise
                times, right = [], True
                for _ in range(1 if device.dry_run else REPEATS):
                    scene.poison()
                    times.append(1e3 * scene.timed(restore))
                    right = right and scene.is_right()
                read = statistics.median(scene.timed(scene.read) for _ in range(3))
                rows.append(
                    {
                        "model": shape.name,
                        "layers": shape.layers,
                        "tokens": options.tokens,
                        "gb_s": rate or None,
                        "balanced": rate == balanced,
                        "method": method,
                        "ms": statistics.median(times),
                        "read_ms": 1e3 * read,
                        "restore_ms": 1e3 * alone if kind == "hidden" else None,
                        "bytes": scene.bytes,
                        "right": right,
                    }
                )
            print(f"{rate or 'no limit of'} GB/s: measured", flush=True)
        for scene in scenes.values():
            scene.close()
    device.release()
    return rows


KINDS = ("hidden", "kv")


class Scene:
    """Pages of one kind in files, memory for them, and the pool that they are restored to.

    Args:
        device: The GPU, or the CPU.
        shape: Of the model.
        tokens: Of the history.
        kind: ``hidden`` or ``kv``.
        folder: For the files.

    Attributes:
        rate: Bytes a second that reading may reach; 0: what the disk does.
        bytes: Of all pages.
    """

    def __init__(self, device: Any, shape: Any, tokens: int, kind: str, folder: Path) -> None:
        import numpy as np
        import torch
        from restore_models import build

        from hcache_backend.page import PageLayout
        from hcache_backend.restore.pipeline import RestoredLayer, RestorePipeline
        from hcache_kernels.project_kv import KVPool, project_kv

        torch.manual_seed(0)
        self.device, self.kind, self.rate = device, kind, 0.0
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
            project_kv(hidden, positions, self.slots, layer.projection, target)
            rows = hidden.view(pages, -1)
            if kind == "kv":
                both = (target.k, target.v)
                kv = torch.stack([part[self.slots].view(pages, PAGE, -1) for part in both], 1)
                rows = kv.reshape(pages, -1)
            self.memory[:, self.layout.segment(index)] = rows.view(torch.uint8).cpu()
        self.norms = [float(part.float().norm()) for part in self.parts]
        self.checks = [part[self.slots[::97]].float() for part in self.parts]

        def fill(index: int) -> Callable[..., None]:
            def project(segments: Any, positions: Any, slots: Any) -> None:
                rows = segments.view(device.dtype).view(-1, shape.hidden)
                project_kv(rows, positions, slots, layers[index].projection, pools[index])

            def store(segments: Any, positions: Any, slots: Any) -> None:
                k, v = segments.view(device.dtype).view(-1, 2, PAGE, *rows_of_heads[1:]).unbind(1)
                pools[index].k[slots], pools[index].v[slots] = k.flatten(0, 1), v.flatten(0, 1)

            return project if kind == "hidden" else store

        method: Any = kind
        restored = [RestoredLayer(method, fill(index)) for index in range(shape.layers)]
        self.pipeline = RestorePipeline(self.memory, self.layout, restored, tokens, device.kind)
        self._write(folder)
        self._threads = ThreadPoolExecutor(READERS)

    # ---- files ----

    def _write(self, folder: Path) -> None:
        folder.mkdir()
        self._files = []
        for page in range(len(self.memory)):
            path = folder / f"{page}.page"
            with path.open("wb") as file:
                file.write(self.memory[page].numpy().data)
                os.fsync(file.fileno())
            try:
                self._files.append(os.open(path, os.O_RDONLY | os.O_DIRECT))
            except OSError:  # a file system without direct I/O
                self._files.append(os.open(path, os.O_RDONLY))

    def _read_page(self, page: int) -> None:
        row, done = memoryview(self.memory[page].numpy()), 0
        while done < len(row):
            count = os.preadv(self._files[page], [row[done:]], done)
            if count == 0:
                raise OSError(f"page {page} ends after {done} bytes")
            done += count

    def _batches(self) -> Iterator[range]:
        """Read batch after batch, no faster than the rate; each one when it is there."""
        from hcache_backend.restore.eager import batch_pages

        pages, begin = len(self.memory), time.perf_counter()
        step = batch_pages(pages)
        for start in range(0, pages, step):
            batch = range(start, min(start + step, pages))
            list(self._threads.map(self._read_page, batch))
            if self.rate:
                due = begin + batch.stop * self.layout.page_bytes / self.rate
                time.sleep(max(0.0, due - time.perf_counter()))
            yield batch

    def read(self) -> None:
        """Read all pages."""
        for _ in self._batches():
            pass

    # ---- restores ----

    def restore_all(self) -> None:
        """Restore what is in memory."""
        self.pipeline.start(self.pages, self.slots).wait()

    def layerwise(self) -> None:
        """Read, then restore."""
        self.read()
        self.restore_all()

    def eager(self) -> None:
        """Restore each batch while the next one is read."""
        arrived: queue.SimpleQueue[range | None] = queue.SimpleQueue()

        def read() -> None:
            try:
                for batch in self._batches():
                    arrived.put(batch)
            finally:
                arrived.put(None)

        reader = threading.Thread(target=read)
        reader.start()
        restores = []
        while (batch := arrived.get()) is not None:
            pages = self.pages[batch.start : batch.stop]
            slots = self.slots[batch.start * PAGE : batch.stop * PAGE]
            restores.append(self.pipeline.start(pages, slots))
        for restore in restores:
            restore.wait()
        reader.join()

    def timed(self, work: Callable[[], None]) -> float:
        """Seconds of ``work``, everything that it launched included."""
        import torch

        start = time.perf_counter()
        work()
        if not self.device.dry_run:
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        self.pipeline.finished()
        return took

    # ---- checking ----

    def poison(self) -> None:
        """What is not read, or not restored, shows."""
        self.memory[:, self.layout.header_bytes :].fill_(0xFF)
        for part in self.parts:
            part.fill_(float("nan"))

    def is_right(self) -> bool:
        """Whether the pool holds the K and V that the projection had written."""
        for part, norm, rows in zip(self.parts, self.norms, self.checks, strict=True):
            found = part[self.slots[::97]].float()
            if not float((found - rows).norm() / rows.norm()) < 1e-2:
                return False
            if not abs(float(part.float().norm()) / norm - 1) < 1e-2:
                return False
        return True

    def close(self) -> None:
        """Close the files."""
        self._threads.shutdown()
        for file in self._files:
            os.close(file)


def goals(rows: list[dict[str, Any]], *, dry_run: bool) -> list[dict[str, Any]]:
    """What the restores are measured against."""
    from devices import at_least

    def ms(method: str, rate: float | None) -> float:
        return next(r["ms"] for r in rows if r["method"] == method and r["gb_s"] == rate)

    told = [] if dry_run else rows
    eager = [row for row in told if row["method"] == "eager"]
    balanced = [row for row in eager if row["balanced"]]
    compared: list[tuple[str, float, Sequence[tuple[float, str]]]] = [
        (
            "at the balanced rate at most 0.65 of layer-wise",
            1 / 0.65,
            [(ms("layer-wise", r["gb_s"]) / r["ms"], "balanced") for r in balanced],
        ),
        (
            "at the balanced rate at most 1.2 of the larger part",
            1 / 1.2,
            [(max(r["read_ms"], r["restore_ms"]) / r["ms"], "balanced") for r in balanced],
        ),
        (
            "at the balanced rate 1.6 times faster than KV",
            1.6,
            [(ms("kv", r["gb_s"]) / r["ms"], "balanced") for r in balanced],
        ),
        (
            "never more than 5% slower than layer-wise",
            1 / 1.05,
            [(ms("layer-wise", r["gb_s"]) / r["ms"], f"{r['gb_s']} GB/s") for r in eager],
        ),
    ]
    right = [(float(row["right"]), row["method"]) for row in rows]
    return [
        *(at_least(goal, bound, list(values)) for goal, bound, values in compared),
        at_least("K and V are right", 1.0, right),
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """One line a row."""
    print(f"\n{'GB/s':>9} {'method':>11} {'ms':>9} {'read, ms':>9} {'restore, ms':>12}")
    for row in rows:
        rate = f"{row['gb_s']:.1f}{' =' if row['balanced'] else ''}" if row["gb_s"] else "no limit"
        restore = f"{row['restore_ms']:.1f}" if row["restore_ms"] else ""
        print(
            f"{rate:>9} {row['method']:>11} {row['ms']:9.1f} {row['read_ms']:9.1f} {restore:>12}"
            + ("" if row["right"] else "  WRONG")
        )


def draw(name: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Time by the rate of reading."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = list(dict.fromkeys(row["gb_s"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for method in METHODS:
        times = [row["ms"] for row in rows if row["method"] == method]
        axes.plot(range(len(rates)), times, marker="o", label=method)
    axes.set_xticks(range(len(rates)), [f"{rate:.1f}" if rate else "no limit" for rate in rates])
    axes.set_xlabel("reading, GB/s")
    axes.set_ylabel("first read to last layer, ms")
    axes.set_yscale("log")
    axes.set_title(f"Restores of {rows[0]['tokens']} tokens from a folder, {name}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
