"""Codecs, of hidden states and of layer segments of pages, on the shapes of a 7B model.

- codecs: GB/s of hidden states (not of encoded bytes), encoding and decoding, against a copy within
  device memory of the same hidden states
- segments: K and V of a layer, GB/s of them: encoding and decoding in device memory, against a copy
  there; all pages in one launch each. ``questions`` has the way to host memory and back.

Rows name the goals that they miss. Goals are for a device like an H100, and for as many pages as a
restore has: a single page is bound by its launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product

import torch

from bench.gpu.program import Device, GpuRun, Row
from bench.gpu.shapes import PAGE
from hcache_kernels.codecs import SEGMENT_CODECS, Codec, Cut, make_codec, make_segment_codec

Work = dict[str, Callable[[], object]]

HEAD_DIM = 128
CHECKED_ROWS = 256
CHECKED_PAGES = 4
GOALS_GBS = {"encode": 300, "decode": 1000}  # in device memory


def measure(run: GpuRun, rows: Sequence[int] | None) -> None:
    """Times in microseconds, speeds in GB/s, and whether the results were right; ``rows``: only
    these numbers of tokens."""
    device = run.device
    widths, tokens, pages = [4096, 5120, 8192], [256, 1024, 4096, 16384], [1, 4, 16, 64, 256]
    # Of Llama-3-8B in one group and in eight; of a model with multi-head attention.
    cuts = [Cut(1024, PAGE), Cut(128, PAGE, groups=8), Cut(512, PAGE, groups=8)]
    if device.dry_run:
        widths, tokens, pages, cuts = [256], [3], [1], [Cut(64, PAGE, groups=2)]
    if rows:
        tokens, pages = list(rows), [max(1, n // PAGE) for n in rows]
    for row in chain(codec_rows(device, widths, tokens), segment_rows(device, cuts, pages)):
        run.add(row, f"{row['kind']}: {row['what']}", "transfers")


def hidden_states(n: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normal values, with a row of another scale and a dimension that stands out."""
    rows = torch.randn(n, width, device=device)
    rows[0] *= 2.0**-20
    rows[:, width // 2] *= 30
    return rows.to(dtype)


def codec_rows(device: Device, widths: Sequence[int], tokens: Sequence[int]) -> Iterator[Row]:
    for name, width, n in product(("exp4", "int8"), widths, tokens):
        dtype = torch.bfloat16 if name == "exp4" else device.scaled_dtype
        hidden = hidden_states(n, width, dtype, device.kind)
        yield {
            "kind": "codec",
            "what": f"{name}, {n} tokens of {width}",
            "codec": name,
            "width": width,
            "tokens": n,
            **codec_speeds(make_codec(name, width, dtype), hidden, device),
        }


def codec_speeds(codec: Codec, hidden: torch.Tensor, device: Device) -> Row:
    n = len(hidden)
    encoded = torch.empty((n, codec.row_bytes), dtype=torch.uint8, device=hidden.device)
    ok = torch.empty(n, dtype=torch.bool, device=hidden.device)
    decoded = torch.empty_like(hidden)
    encode = codec.encode_launch((hidden,), None, encoded, None, 0, ok)
    decode = codec.decode_launch(encoded, (decoded,), None)
    encode.run()
    decode.run()
    some = slice(0, CHECKED_ROWS)
    want, want_ok = codec.encode(hidden[some].cpu())
    right = (
        torch.equal(encoded[some].cpu(), want)
        and torch.equal(ok[some].cpu(), want_ok)
        and torch.equal(decoded[some].cpu(), codec.decode(want))
        and (not codec.lossless or torch.equal(decoded, hidden))
    )
    work: Work = {"encode": encode.run, "decode": decode.run}
    work["copy"] = partial(decoded.copy_, hidden)
    times = {name: device.microseconds(one) for name, one in work.items()}
    return {
        **speeds(times, hidden.nbytes),
        "share_of_bytes": codec.row_bytes / (hidden.shape[1] * hidden.itemsize),
        "right": right,
    }


def speeds(times_us: Mapping[str, float], size: int) -> Row:
    """Microseconds, GB/s of ``size`` bytes, and which goals they miss."""
    gbs = {name: 1e-3 * size / us for name, us in times_us.items()}
    return {
        **{f"{name}_us": us for name, us in times_us.items()},
        **{f"{name}_gbs": speed for name, speed in gbs.items()},
        "missed": [name for name, least in GOALS_GBS.items() if gbs[name] < least],
    }


def segment_rows(device: Device, cuts: Sequence[Cut], pages: Sequence[int]) -> Iterator[Row]:
    for name, cut, count in product(SEGMENT_CODECS, cuts, pages):
        dtype = torch.bfloat16 if name in ("exp3", "exp4") else device.scaled_dtype
        codec = make_segment_codec(name, cut, min(HEAD_DIM, cut.width), dtype)
        yield {
            "kind": "segments",
            "what": f"{name}, {count} pages, {cut.groups} groups of {cut.width}",
            "codec": name,
            "width": cut.groups * cut.width,
            "groups": cut.groups,
            "pages": count,
            **segment_speeds(codec, count, device),
        }


def segment_speeds(codec: Codec, count: int, device: Device) -> Row:
    kind, row, dim = device.kind, codec.cut.groups * codec.cut.width, codec.dim
    slots = 2 * count * PAGE
    planes = [
        hidden_states(slots, row, codec.dtype, kind).view(slots, row // dim, dim) for _ in "kv"
    ]
    items = torch.randperm(2 * count, device=kind)[:count]
    length = codec.segment_bytes
    staged = torch.empty((count, length), dtype=torch.uint8, device=kind)
    fits = torch.empty((count, codec.flags), dtype=torch.bool, device=kind)
    order = torch.arange(count, device=kind)
    encode = codec.encode_launch(planes, items, staged, order, 0, fits)
    decoded = [torch.empty_like(plane) for plane in planes]
    decode = codec.decode_launch(staged, decoded, items)
    encode.run()
    decode.run()

    some = items[:CHECKED_PAGES].cpu()
    on_host = [plane.cpu() for plane in planes]
    want, want_fits = codec.encode_reference(on_host, some)
    back = [torch.empty_like(plane) for plane in on_host]
    codec.decode_pages(want, back, some)
    pages = [plane.view(2 * count, PAGE, row) for plane in (*planes, *decoded, *back)]
    right = (
        torch.equal(staged[:CHECKED_PAGES].cpu(), want)
        and bool(want_fits.all())
        and bool(fits.all())
        and all(
            torch.equal(pages[2 + part][some].cpu(), pages[4 + part][some])
            and (not codec.lossless or torch.equal(plane[items], pages[2 + part][items]))
            for part, plane in enumerate(pages[:2])
        )
    )
    plain = torch.cat([plane[: count * PAGE] for plane in planes])
    work: Work = {"encode": encode.run, "decode": decode.run}
    work["copy"] = partial(torch.empty_like(plain).copy_, plain)
    times = {name: device.microseconds(one) for name, one in work.items()}
    return {
        **speeds(times, plain.nbytes),
        "share_of_bytes": count * length / plain.nbytes,
        "right": right,
    }
