"""Restores from the page store while it is being read. Needs torch, triton and this package's own
dependencies.

The store reads pages of Llama-2-7B's shape, 64 tokens each, to pinned memory, and they go through
the restore pipeline that the server uses:

- layer-wise: hidden states; all pages are read, then all are restored
- eager: hidden states; in the server's read batches, each restored while the next one is read
- kv: K and V; all pages are read, then copied

``--rates`` in GB/s slow the reading down; 0 is the disk as it is. One more rate is measured: there
reading and restoring hidden states take equally long. K and V are compared with those of the
forward pass after every restore. Times are medians of five, from the first read to the last layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np

from bench.gpu.program import Device, GpuProgram, GpuRun, Row
from bench.gpu.restore_methods import History
from bench.gpu.restore_models import build
from bench.gpu.shapes import LLAMA_7B, PAGE
from bench.harness.program import Setting, at_least, scratch
from bench.harness.report import Column, Picture, Results, Series, Table
from hcache_backend.config import parse_config
from hcache_backend.format.page import PageLayout, StoredLayer
from hcache_backend.format.units import Segment
from hcache_backend.prefetch.eager import batch_pages
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.store import PageStore

REPEATS = 5
BLOCK = 4096
NAMESPACE, WRITER = b"bench-----------", b"bench---"


class Pages:
    """Pages of one kind in the store, and memory for all ``bytes`` of them.

    ``rate``: bytes a second that reading may reach; 0: the disk's.
    """

    def __init__(
        self, device: Device, history: History, kind: Literal["hidden", "kv"], store: PageStore
    ) -> None:
        self.history, self.rate = history, 0.0
        self._device, self._store = device, store
        stored, layers = history.stored(kind)
        layout = PageLayout(PAGE, (StoredLayer((Segment(stored[0].shape[1]),)),) * len(stored))
        pages = len(history.pages)
        raw = device.pinned(pages * layout.page_bytes + BLOCK)
        start = -raw.data_ptr() % BLOCK  # direct I/O may write there
        self._memory = raw[start:][: pages * layout.page_bytes].view(pages, layout.page_bytes)
        self.bytes = self._memory.nbytes
        positions = history.positions.cpu().view(pages, PAGE).numpy()
        layout.positions(self._memory.numpy())[:] = positions
        for layer, segments in enumerate(stored):
            self._memory[:, layout.segment(layer)] = segments
        self._header = layout.header_bytes
        self._views = [[memoryview(page.numpy()).cast("B")] for page in self._memory]
        self._keys = [f"{kind}-{page}".encode().ljust(32) for page in range(pages)]
        assert all(store.put(NAMESPACE, self._keys, self._views)) and store.flush()
        self._pages = np.arange(pages, dtype=np.int64)
        self._pipeline = RestorePipeline(self._memory, layout, layers, history.tokens, device.kind)

    def _batches(self) -> Iterator[range]:
        """Read batch after batch, no faster than the rate."""
        pages, begin = len(self._pages), time.perf_counter()
        step = batch_pages(pages)
        for start in range(0, pages, step):
            batch = range(start, min(start + step, pages))
            some = slice(batch.start, batch.stop)
            if not all(self._store.get(NAMESPACE, self._keys[some], self._views[some])):
                raise OSError("a page could not be read")
            if self.rate:
                due = begin + batch.stop * self.bytes / pages / self.rate
                time.sleep(max(0.0, due - time.perf_counter()))
            yield batch

    def read(self) -> None:
        for _ in self._batches():
            pass

    def restore(self) -> None:
        """Restore the pages in memory."""
        self._pipeline.start(self._pages, self.history.slots).wait()

    def layerwise(self) -> None:
        self.read()
        self.restore()

    def eager(self) -> None:
        """Restore each batch while the next one is read."""
        pages, batches, restores = len(self._pages), self._batches(), []
        with ThreadPoolExecutor(1) as reader:
            for read in [reader.submit(next, batches) for _ in range(0, pages, batch_pages(pages))]:
                batch = read.result()
                slots = self.history.slots[batch.start * PAGE : batch.stop * PAGE]
                restores.append(self._pipeline.start(self._pages[batch.start : batch.stop], slots))
        for restore in restores:
            restore.wait()

    def seconds(self, work: Callable[[], None]) -> float:
        start = time.perf_counter()
        work()
        self._device.synchronize()
        took = time.perf_counter() - start
        self._pipeline.finished()
        return took

    def poison(self) -> None:
        """A page that is not read, or a slot that is not restored, shows."""
        self._memory[:, : self._header].zero_()  # kernels can look position 0 up, not 0xFF
        self._memory[:, self._header :].fill_(0xFF)
        self.history.poison()
        self._device.synchronize()


def measure(run: GpuRun) -> None:
    given, device = run.given, run.device
    tokens, rates = (20 * PAGE, [0.0]) if device.dry_run else (given.tokens, given.rates)
    if tokens % PAGE:
        run.parser.error(f"--tokens {tokens}: must be a multiple of {PAGE}")
    shape = LLAMA_7B.tiny() if device.dry_run else LLAMA_7B
    history = History(device, shape, build(shape, device.kind, device.dtype), [tokens])
    with scratch(given.dir) as folder:
        options = {"dirs": [folder], "min_free_bytes": 0, "reader": given.reader}
        with closing(PageStore(parse_config(options, "bench"), WRITER)) as store:
            hidden, kv = (Pages(device, history, kind, store) for kind in ("hidden", "kv"))
            methods = {
                "layer-wise": (hidden, hidden.layerwise),
                "eager": (hidden, hidden.eager),
                "kv": (kv, kv.layerwise),
            }
            alone = statistics.median(hidden.seconds(hidden.restore) for _ in range(REPEATS))
            balanced = hidden.bytes / alone / 1e9
            for rate in sorted({*rates, balanced}, key=lambda rate: rate or float("inf")):
                for method, (pages, restore) in methods.items():
                    pages.rate = rate * 1e9
                    row = {
                        "model": shape.name,
                        "layers": shape.layers,
                        "tokens": tokens,
                        "gb_s": rate or None,
                        "balanced": rate == balanced,
                        "method": method,
                        "restore_ms": 1e3 * alone if pages is hidden else None,
                        "bytes": pages.bytes,
                        **timed(pages, restore, 1 if device.dry_run else REPEATS),
                    }
                    run.add(row, f"{rate or 'no limit of'} GB/s, {method}")
    device.release()


def timed(pages: Pages, restore: Callable[[], None], repeats: int) -> Row:
    """Medians of a restore and of reading alone, and whether all of them were right."""
    times, right = [], True
    for _ in range(repeats):
        pages.poison()
        times.append(pages.seconds(restore))
        right = right and pages.history.is_right()
    read = statistics.median(pages.seconds(pages.read) for _ in range(3))
    return {"ms": 1e3 * statistics.median(times), "read_ms": 1e3 * read, "right": right}


def rate_of(row: Row) -> str:
    return f"{row['gb_s']:.1f}{' =' if row['balanced'] else ''}" if row["gb_s"] else "no limit"


def panels(results: Results) -> dict[str, list[Row]]:
    found: dict[str, Row] = {}
    for row in results["rows"]:
        found.setdefault(rate_of(row), {"rate": rate_of(row)})[row["method"]] = row["ms"]
    return {f"{results['rows'][0]['tokens']} tokens": list(found.values())}


PROGRAM = GpuProgram(
    name="eager",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--dir", Path, None, "folder for the store; default: a temporary one"),
        Setting("--tokens", at_least(PAGE), 4096, "of the history"),
        Setting("--rates", float, (0.0, 8.0, 4.0, 2.0), "GB/s; 0: the disk", {"nargs": "*"}),
        Setting("--reader", str, "posix", "of the store", {"choices": ("posix", "kvikio")}),
    ),
    tables=Table(
        "rows",
        (
            Column("GB/s", rate_of),
            "method | ms | read, ms = read_ms | restore, ms = restore_ms | right",
        ),
    ),
    draw=Picture(
        title=lambda results: f"Restores from the page store, {results['device']}",
        panels=panels,
        x="rate",
        x_label="reading, GB/s",
        y_label="first read to last layer, ms",
        series=(
            Series("eager", "eager", "ours"),
            Series("layer-wise", "layer-wise", "ours, all read", ".--"),
            Series("K and V", "kv", "file", ".--"),
        ),
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
