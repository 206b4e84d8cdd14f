"""Pages as servers make them, of given values: their bytes in host memory, in files and indexes.

Prints a paragraph for each layout. The values are integers over powers of two, so that no function
of a processor's vector library has a part in them. Imports SGLang: ``test_bytes.py`` runs it.

This is the adapter: what it calls may get other names; what it prints may not change.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from hcache_backend.capture.staging import stored_rows
from hcache_backend.config import KrulOption, parse_config
from hcache_backend.fingerprint import Weights
from hcache_backend.host.layout import Layout
from hcache_backend.host.segments import KVSegments, head_groups, shard_of_heads
from hcache_backend.krul.plugin import Krul
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.sglang.weights import LoadedWeights
from hcache_backend.start import page_plan
from hcache_backend.store import PageStore
from hcache_kernels.codecs import make_codec
from hcache_kernels.staging import save_rows

HEADS, DIM, HIDDEN = 2, 16, 64
WRITER = b"writer-1"
KEY = hashlib.sha256(b"the tokens up to here").digest()
SECOND_PAGE = 1


class Kind(NamedTuple):
    """A layout and codec."""

    partition: tuple[int, int, int]  # layers that are recomputed, hidden states, K and V
    dtype: torch.dtype = torch.bfloat16
    codec: str = "none"  # of K and V
    hidden: str = "none"  # codec of hidden states
    ranks: int = 1  # tensor-parallel ones that divide the page
    pairs: tuple[tuple[int, int, str], ...] = ()  # layers that share a slot, and how
    page: int = 16


KINDS = {
    "hidden": Kind((0, 4, 0)),
    "hidden, float32": Kind((0, 4, 0), torch.float32),
    "K and V": Kind((0, 0, 4)),
    "mixed": Kind((1, 2, 1)),
    "hidden, exp4": Kind((0, 4, 0), hidden="exp4"),
    "K and V, exp4": Kind((0, 0, 4), codec="exp4"),
    "K and V, exp3": Kind((0, 0, 4), codec="exp3", page=64),
    "K and V, two ranks, exp3": Kind((0, 0, 4), codec="exp3", page=64, ranks=2),
    "mixed, exp4": Kind((1, 2, 1), codec="exp4", hidden="exp4"),
    "mixed, int8": Kind((1, 2, 1), codec="int8", hidden="int8"),
    "K and V, two ranks": Kind((0, 0, 4), ranks=2),
    "mixed, two ranks": Kind((1, 2, 1), ranks=2),
    "mixed, two ranks, exp4": Kind((1, 2, 1), codec="exp4", hidden="exp4", ranks=2),
    "krul": Kind((0, 0, 5), codec="krul", pairs=((0, 3, "int8"), (1, 4, "merged"))),
}


def values(seed: int, *shape: int) -> torch.Tensor:
    """Values between -4 and 4, of ten bits each: the same on every machine."""
    numbers = np.random.default_rng(seed).integers(-1024, 1024, shape)
    return torch.from_numpy(numbers.astype(np.float32) / 256)


def device_pool(kind: Kind, rank: int) -> Any:
    """SGLang's pool of one rank, which has K and V of its own heads."""
    layers, heads = sum(kind.partition), HEADS // kind.ranks
    own = slice(rank * heads, (rank + 1) * heads)

    def buffers(seed: int) -> list[torch.Tensor]:
        every = values(seed, layers, 4 * kind.page, HEADS, DIM)[:, :, own].contiguous()
        return list(every.to(kind.dtype))

    return SimpleNamespace(
        k_buffer=buffers(1),
        v_buffer=buffers(2),
        layer_num=layers,
        size=3 * kind.page,
        page_size=kind.page,
        store_dtype=kind.dtype,
        start_layer=0,
        end_layer=layers - 1,
        device="cpu",
    )


def runner_of(kind: Kind) -> Any:
    """A model runner of SGLang's."""
    config = SimpleNamespace(to_dict=lambda: {"hidden_size": HIDDEN, "_name_or_path": "a/b"})
    return SimpleNamespace(
        model=torch.nn.Module(),
        model_config=SimpleNamespace(hf_config=config),
        dtype=kind.dtype,
        kv_cache_dtype=kind.dtype,
        server_args=SimpleNamespace(page_size=kind.page, enable_lora=False, lora_paths=None),
    )


class Machine:
    """One rank: its plan, its namespace, and host memory of one page."""

    def __init__(self, kind: Kind, rank: int) -> None:
        self.kind, runner = kind, runner_of(kind)
        kvcache = device_pool(kind, rank)
        methods = Restore(None, None, Partition(*kind.partition), chunk_tokens=4 * kind.page)
        shard = shard_of_heads(rank, kind.ranks)
        groups = head_groups(None, shard, kind.ranks)
        of_layers, codec = (kvcache, methods.layers("kv"), kind.page), None
        if kind.pairs:
            krul = Krul(KrulOption(ratio=2 * len(kind.pairs) / sum(kind.partition)))
            kv: KVSegments = krul.segments(*of_layers, groups)
        else:
            kv = KVSegments(*of_layers, shard, groups, kind.codec)
        if kind.partition[1]:
            self.codec = codec = make_codec(kind.hidden, HIDDEN, kind.dtype)
        self.pages = Layout(kvcache, methods, shard, kv, codec=codec)
        layout = cast(Any, self.pages.page)
        self.layout = layout.with_pairs(kind.pairs) if kind.pairs else layout
        ranks = SimpleNamespace(rank_in_group=rank, world_size=kind.ranks)
        page_plan.attention_ranks = lambda: ranks
        weights = LoadedWeights(runner, Weights(b"w" * 16, any_ranks=b"v" * 16))
        self.fields = weights.page_fields = page_plan.namespace_fields(self.pages, runner)
        self.namespace = weights.page_namespace()
        self.memory = torch.zeros((1, self.layout.page_bytes), dtype=torch.uint8)
        self._fill()

    def _fill(self) -> None:
        """As a backup does: how the page divides, tokens, rows, K and V, then the header."""
        layout, page = self.layout, self.memory[0].numpy()
        layout.divide(page)
        layout.positions(page)[:] = np.arange(self.kind.page) + SECOND_PAGE * self.kind.page
        layout.token_ids(page)[:] = np.arange(self.kind.page) * 7 + 100
        hidden = self.pages.methods.layers("hidden")
        if hidden:
            rows = values(3, len(hidden), self.kind.page, HIDDEN).to(self.kind.dtype)
            marks = torch.zeros(rows.shape[:2], dtype=torch.int64)
            segments = torch.tensor([layout.segment_offsets[layer] for layer in hidden])
            slots, table = torch.arange(self.kind.page), torch.zeros(1, dtype=torch.int64)
            for part, _, stored in stored_rows(self.codec, rows.view(torch.uint8), marks):
                where = segments[part], self.kind.page, layout.kept
                save_rows(stored, slots, table, self.memory, *where)
            assert not marks.any()
        if self.pages.kv.layers:
            slots = torch.arange(self.kind.page) + SECOND_PAGE * self.kind.page
            first = torch.zeros(1, dtype=torch.int64)
            fits = self.pages.kv.save(layout, self.memory, first, slots)
            assert fits is None or fits.all()
        layout.seal(page, self.namespace, KEY, WRITER)

    def store(self, folder: Path) -> None:
        """As the storage class writes it to L3."""
        page = self.memory[0].numpy()
        options = {"dirs": [str(folder)], "min_free_bytes": 0, "reader": "posix"}
        config = parse_config(options, "a test")
        store = PageStore(config, WRITER, background=False)
        done = store.put(
            self.namespace,
            [KEY],
            [[page.data.cast("B")]],
            shard=self.layout.shard,
            table=self.layout.table,
            digests=[self.layout.unit_digests(page)],
        )
        assert done == [True]
        store.close()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def page_lines(machine: Machine) -> Iterator[str]:
    """The page in host memory: its header's fields, then where each layer is and its bytes."""
    layout, page = machine.layout, machine.memory[0].numpy().tobytes()
    yield f"page: {len(page)} bytes, {digest(page)}"
    header = page[: layout.header_bytes]
    version, layers, segments, blocks = np.frombuffer(header, "<u2", 4, 4).tolist()
    yield (
        f"  header {len(header)} bytes, {digest(header)}: {header[:4].decode()} version {version}, "
        f"{layers} layers, {segments} segments, {blocks} blocks, shard {header[88]} of {header[89]}"
    )
    for layer, stored in enumerate(layout.layers):
        where = layout.segment(layer)
        how = {0: "recompute", 1: "hidden", 2: "K and V"}[len(stored.segments)]
        together = ", with ".join(map(str, layout.sharing(layer))) or layer
        data = page[where]
        yield (
            f"  layer {together}: {how}, {stored.codec}, {len(data)} bytes at {where.start}, "
            f"{digest(data) if data else '-'}"
        )


def file_lines(folder: Path) -> Iterator[str]:
    """Files and indexes; the time of the last use in a record is 0."""
    for path in sorted(folder.glob("pages/??/*.page")):
        data = path.read_bytes()
        header = int.from_bytes(data[8:12], "little")
        yield f"file {path.relative_to(folder)}"
        yield (
            f"  {len(data)} bytes, {digest(data)}: {data[:4].decode()} version "
            f"{int.from_bytes(data[4:6], 'little')}, shard {data[6]} of {data[7]}, "
            f"header {header} bytes, {digest(data[:header])}"
        )
    [path] = folder.rglob("index.sqlite")
    with closing(sqlite3.connect(path)) as index:
        for page, files in index.execute("SELECT page, files FROM pages ORDER BY page"):
            records = [files[start : start + 32] for start in range(0, len(files), 32)]
            yield f"index {page.hex()}"
            yield from sorted(f"  {(record[:24] + bytes(8)).hex()}" for record in records)
        [(total,)] = index.execute("SELECT value FROM meta WHERE name = 'totals'")
        yield f"index totals {total.hex()}"


def lines(name: str) -> Iterator[str]:
    """The paragraph of a kind: ranks one after the other, then the folder that all wrote to."""
    kind = KINDS[name]
    yield f"[{name}]"
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(kind.ranks):
            machine = Machine(kind, rank)
            fields = json.dumps(machine.fields, sort_keys=True)
            yield f"rank {rank}: namespace {machine.namespace.hex()} of {fields}"
            yield from page_lines(machine)
            machine.store(Path(folder))
        yield from file_lines(Path(folder))
    yield ""


if __name__ == "__main__":
    for name in KINDS:
        for line in lines(name):
            print(line)
