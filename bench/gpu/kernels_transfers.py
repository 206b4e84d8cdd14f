"""Codecs, and layer segments of pages in pinned memory, on the shapes of a 7B model.

- codecs: GB/s of hidden states (not of encoded bytes), encoding and decoding, against a copy within
  device memory of the same hidden states
- gather: segments of pages into one buffer, against one plain copy of as many bytes from pinned
  memory; scatter: rows to their places in pages, against one plain copy to pinned memory
- restore: all layers of some pages, gather on one stream and decoding and the projection's product
  on another, each a layer behind; exp4 against exact. Beside it stand the gathering of a layer and
  its product alone: overlapped, the restore takes as long as the longer one, and not as their sum
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from bench.gpu.kernels_projection import cpu_microseconds
from bench.gpu.program import Results, Row
from hcache_kernels.codecs import Codec, make_codec
from hcache_kernels.launch import gpu_microseconds
from hcache_kernels.pages import gather_launch, gather_pages, scatter_launch, scatter_rows

PAGE_TOKENS = 64
HEADER_BYTES = 4096
CHECKED_ROWS = 256


@dataclass(frozen=True)
class Shapes:
    """What is measured: widths and token counts of codecs, pages of transfers and of restores."""

    device: str
    widths: tuple[int, ...]
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    layers: int
    microseconds: Callable[[Callable[[], object]], float]

    @property
    def scaled_dtype(self) -> torch.dtype:
        # Triton's interpreter truncates where it should round to bfloat16.
        return torch.float16 if self.device == "cpu" else torch.bfloat16


def measure(dry_run: bool, rows: Sequence[int] | None, results: Results) -> None:
    """Times in microseconds, speeds in GB/s, and whether the results were right.

    Args:
        dry_run: On the CPU, interpreted, with tiny shapes; the times mean nothing.
        rows: Only these numbers of tokens; None: the usual ones.
        results: Where rows go.
    """
    if dry_run:
        shapes = Shapes("cpu", (256,), (3,), (2,), 2, cpu_microseconds)
    else:
        shapes = Shapes(
            "cuda",
            (4096, 5120, 8192),
            (256, 1024, 4096, 16384),
            (1, 4, 16, 64, 256),
            8,
            gpu_microseconds,
        )
    if rows:
        pages = tuple(max(1, n // PAGE_TOKENS) for n in rows)
        shapes = replace(shapes, tokens=tuple(rows), pages=pages)
    for part in (restore_rows, transfer_rows, codec_rows):
        for row in part(shapes):
            results.add(row, f"{row['kind']}: {row['what']}", "transfers")


def hidden_states(n: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normal values, with a row of another scale and a dimension that stands out."""
    rows = torch.randn(n, width, device=device)
    rows[0] *= 2.0**-20
    rows[:, width // 2] *= 30
    return rows.to(dtype)


def codec_rows(shapes: Shapes) -> Iterator[Row]:
    for name in ("exp4", "int8", "fp8"):
        dtype = torch.bfloat16 if name == "exp4" else shapes.scaled_dtype
        for width in shapes.widths:
            for n in shapes.tokens:
                codec = make_codec(name, width, dtype)
                yield {
                    "kind": "codec",
                    "what": f"{name}, {n} tokens of {width}",
                    "codec": name,
                    "width": width,
                    "tokens": n,
                    **codec_speeds(codec, hidden_states(n, width, dtype, shapes.device), shapes),
                }


def codec_speeds(codec: Codec, hidden: torch.Tensor, shapes: Shapes) -> Row:
    n = len(hidden)
    encoded = torch.empty((n, codec.row_bytes), dtype=torch.uint8, device=hidden.device)
    ok = torch.empty(n, dtype=torch.bool, device=hidden.device)
    decoded = torch.empty_like(hidden)
    encode, decode = codec.encode_launch(hidden, encoded, ok), codec.decode_launch(encoded, decoded)
    encode.run()
    decode.run()
    some = slice(0, CHECKED_ROWS)
    want, want_ok = codec.encode_reference(hidden[some].cpu())
    right = (
        torch.equal(encoded[some].cpu(), want)
        and torch.equal(ok[some].cpu(), want_ok)
        and torch.equal(decoded[some].cpu(), codec.decode_reference(want))
        and (not codec.lossless or torch.equal(decoded, hidden))
    )
    times = {
        "encode": shapes.microseconds(encode.run),
        "decode": shapes.microseconds(decode.run),
        "copy": shapes.microseconds(partial(decoded.copy_, hidden)),
    }
    return {
        **{f"{name}_us": us for name, us in times.items()},
        **{f"{name}_gbs": 1e-3 * hidden.nbytes / us for name, us in times.items()},
        "share_of_bytes": codec.row_bytes / (hidden.shape[1] * hidden.itemsize),
        "right": right,
    }


def transfer_rows(shapes: Shapes) -> Iterator[Row]:
    width = shapes.widths[0]
    for name in ("none", "exp4"):
        row_bytes = make_codec(name, width, torch.bfloat16).row_bytes
        for count in shapes.pages:
            pool = host_pages(2 * count, 2, row_bytes, shapes.device)
            ids = torch.randperm(len(pool), device=shapes.device)[:count]
            for kind, speeds in (("gather", gather_speeds), ("scatter", scatter_speeds)):
                yield {
                    "kind": kind,
                    "what": f"{count} pages of {PAGE_TOKENS} rows of {row_bytes} bytes",
                    "codec": name,
                    "pages": count,
                    **speeds(pool, ids, row_bytes, shapes),
                }


def host_pages(count: int, layers: int, row_bytes: int, device: str) -> torch.Tensor:
    """Pages of random bytes in pinned memory."""
    page_bytes = HEADER_BYTES + layers * PAGE_TOKENS * row_bytes
    pages = torch.empty((count, page_bytes), dtype=torch.uint8, pin_memory=device != "cpu")
    return pages.random_(0, 256)


def gather_speeds(pool: torch.Tensor, ids: torch.Tensor, row_bytes: int, shapes: Shapes) -> Row:
    offset, length = HEADER_BYTES + PAGE_TOKENS * row_bytes, PAGE_TOKENS * row_bytes
    out = torch.empty((len(ids), length), dtype=torch.uint8, device=ids.device)
    launch = gather_launch(pool, ids, offset, out)
    launch.run()
    right = torch.equal(out.cpu(), gather_pages(pool, ids.cpu(), offset, length))
    plain = torch.empty_like(out, device="cpu", pin_memory=shapes.device != "cpu")
    copy = partial(out.copy_, plain, non_blocking=True)
    return against_copy(shapes.microseconds(launch.run), shapes.microseconds(copy), out, right)


def scatter_speeds(pool: torch.Tensor, ids: torch.Tensor, row_bytes: int, shapes: Shapes) -> Row:
    n, device = len(ids) * PAGE_TOKENS, ids.device
    order = torch.randperm(n, device=device)
    page_ids = ids.repeat_interleave(PAGE_TOKENS)[order]
    row_ids = torch.arange(PAGE_TOKENS, device=device).repeat(len(ids))[order]
    rows = torch.randint(0, 256, (n, row_bytes), dtype=torch.uint8, device=device)
    want = pool.clone()
    scatter_rows(rows.cpu(), want, page_ids.cpu(), row_ids.cpu(), HEADER_BYTES)
    launch = scatter_launch(rows, pool, page_ids, row_ids, HEADER_BYTES)
    launch.run()
    plain = torch.empty_like(rows, device="cpu", pin_memory=shapes.device != "cpu")
    times = [
        shapes.microseconds(launch.run),
        shapes.microseconds(partial(plain.copy_, rows, non_blocking=True)),
    ]
    return against_copy(times[0], times[1], rows, torch.equal(pool, want))


def against_copy(us: float, copy_us: float, moved: torch.Tensor, right: bool) -> Row:
    return {
        "us": us,
        "copy_us": copy_us,
        "gbs": 1e-3 * moved.nbytes / us,
        "copy_gbs": 1e-3 * moved.nbytes / copy_us,
        "share_of_copy": copy_us / us,
        "right": right,
    }


def restore_rows(shapes: Shapes) -> Iterator[Row]:
    width = shapes.widths[0]
    weights = [torch.randn(2 * width, width, device=shapes.device) for _ in range(shapes.layers)]
    weights = [(weight * width**-0.5).bfloat16() for weight in weights]
    for count in shapes.pages:
        hidden = hidden_states(count * PAGE_TOKENS, width, torch.bfloat16, shapes.device)
        restores = {
            name: Restore(make_codec(name, width, torch.bfloat16), hidden, weights)
            for name in ("none", "exp4")
        }
        for restore in restores.values():
            restore.run()
        right = torch.equal(restores["none"].out, restores["exp4"].out)
        times = {name: shapes.microseconds(of.run) for name, of in restores.items()}
        gather_us = shapes.microseconds(partial(restores["none"].gather, 0))
        product_us = shapes.microseconds(partial(restores["none"].project, 0))
        yield {
            "kind": "restore",
            "what": f"{shapes.layers} layers of {count * PAGE_TOKENS} tokens",
            "tokens": count * PAGE_TOKENS,
            "exact_us": times["none"] / shapes.layers,
            "exp4_us": times["exp4"] / shapes.layers,
            "times_exact": times["none"] / times["exp4"],
            "gather_us": gather_us,
            "product_us": product_us,
            "right": right,
        }


class Restore:
    """Every layer of the same tokens, from pages to K and V (without norm, RoPE and scatter).

    Two buffers: a layer is gathered into one while the other is decoded and projected.
    """

    def __init__(self, codec: Codec, hidden: torch.Tensor, weights: list[torch.Tensor]) -> None:
        n = len(hidden)
        self._codec = codec
        self._weights = weights
        self._length = PAGE_TOKENS * codec.row_bytes
        device = str(hidden.device)
        self._pages = host_pages(n // PAGE_TOKENS, len(weights), codec.row_bytes, device)
        encoded, ok = codec.encode(hidden)
        assert ok.all()
        self._pages[:, HEADER_BYTES:] = encoded.cpu().view(-1, self._length).repeat(1, len(weights))
        self._ids = torch.arange(n // PAGE_TOKENS, device=hidden.device)
        self._buffers = [
            torch.empty((len(self._ids), self._length), dtype=torch.uint8, device=hidden.device)
            for _ in range(2)
        ]
        self._rows = torch.empty_like(hidden)
        self.out = torch.empty(n, len(weights[0]), dtype=hidden.dtype, device=hidden.device)
        if hidden.is_cuda:
            self._streams = [torch.cuda.Stream() for _ in range(2)]

    def gather(self, layer: int) -> None:
        offset = HEADER_BYTES + layer * self._length
        gather_launch(self._pages, self._ids, offset, self._buffers[layer % 2]).run()

    def project(self, layer: int) -> None:
        encoded = self._buffers[layer % 2].view(-1, self._codec.row_bytes)
        rows = self._rows
        if self._codec.is_view:
            rows = encoded.view(rows.dtype)
        else:
            self._codec.decode_launch(encoded, rows).run()
        torch.mm(rows, self._weights[layer].t(), out=self.out)

    def run(self) -> None:
        """All layers, in order of the current stream."""
        if not self.out.is_cuda:
            for layer in range(len(self._weights)):
                self.gather(layer)
                self.project(layer)
            return
        current = torch.cuda.current_stream()
        copying, computing = self._streams
        copying.wait_stream(current)
        computing.wait_stream(current)
        free: list[torch.cuda.Event] = []
        for layer in range(len(self._weights)):
            with torch.cuda.stream(copying):
                if layer >= 2:
                    copying.wait_event(free[layer - 2])
                self.gather(layer)
                there = copying.record_event()
            with torch.cuda.stream(computing):
                computing.wait_event(there)
                self.project(layer)
                free.append(computing.record_event())
        current.wait_stream(computing)
