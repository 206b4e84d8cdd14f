"""Codecs, and layer segments of pages in pinned memory, on the shapes of a 7B model.

- codecs: GB/s of hidden states (not of encoded bytes), encoding and decoding, against a copy within
  device memory of the same hidden states
- segments: K and V of a layer, GB/s of them: encoding and decoding in device memory, against a copy
  there; saved to pages in pinned memory and loaded from them as in service, encoded (encode and
  scatter, gather and decode) and as they are; all pages in one launch each

Rows name the goals that they miss. Goals are for a device like an H100, and for as many pages as a
restore has: a single page is bound by its launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product

import torch

from bench.gpu.program import Device, GpuRun, Row
from bench.gpu.shapes import HEADER_BYTES, PAGE
from hcache_kernels.codecs import SEGMENT_CODECS, Codec, Cut, make_codec, make_segment_codec
from hcache_kernels.launch import Launch
from hcache_kernels.pages.kernel import gather_launch, gather_planes_launch

Work = dict[str, Callable[[], object]]

HEAD_DIM = 128
CHECKED_ROWS = 256
CHECKED_PAGES = 4
GOALS_GBS = {"encode": 300, "decode": 1000}  # in device memory
GOALS_FASTER = {"saved": "uncoded_save", "loaded": "uncoded_load"}
"""An encoded page is smaller, so it must not be slower than the other."""


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
    for name, width, n in product(("exp4", "int8", "fp8"), widths, tokens):
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
    missed = [name for name, least in GOALS_GBS.items() if gbs[name] < least]
    for name, plain in GOALS_FASTER.items():
        if name in gbs and gbs[name] < gbs[plain]:
            missed.append(name)
    return {
        **{f"{name}_us": us for name, us in times_us.items()},
        **{f"{name}_gbs": speed for name, speed in gbs.items()},
        "missed": missed,
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
        device.release()


def segment_speeds(codec: Codec, count: int, device: Device) -> Row:
    kind, row, dim = device.kind, codec.cut.groups * codec.cut.width, codec.dim
    slots = 2 * count * PAGE
    planes = [
        hidden_states(slots, row, codec.dtype, kind).view(slots, row // dim, dim) for _ in "kv"
    ]
    items = torch.randperm(2 * count, device=kind)[:count]
    length = codec.segment_bytes
    staged = torch.empty((count, length), dtype=torch.uint8, device=kind)
    pinned = device.pinned(2 * count, HEADER_BYTES + length)
    fits = torch.empty((count, codec.flags), dtype=torch.bool, device=kind)
    order = torch.arange(count, device=kind)
    encode = codec.encode_launch(planes, items, staged, order, 0, fits)
    scatter = gather_launch(pinned, items, HEADER_BYTES, staged, save=True)
    gathered = torch.empty_like(staged)
    gather = gather_launch(pinned, items, HEADER_BYTES, gathered)
    decoded = [torch.empty_like(plane) for plane in planes]
    decode = codec.decode_launch(gathered, decoded, items)
    saved, loaded = partial(run_all, encode, scatter), partial(run_all, gather, decode)
    saved()
    loaded()

    some = items[:CHECKED_PAGES].cpu()
    on_host = [plane.cpu() for plane in planes]
    want, want_fits = codec.encode_reference(on_host, some)
    back = [torch.empty_like(plane) for plane in on_host]
    codec.decode_pages(want, back, some)
    pages = [plane.view(2 * count, PAGE, row) for plane in (*planes, *decoded, *back)]
    right = (
        torch.equal(staged[:CHECKED_PAGES].cpu(), want)
        and torch.equal(pinned[some, HEADER_BYTES:], want)
        and bool(want_fits.all())
        and bool(fits.all())
        and all(
            torch.equal(pages[2 + part][some].cpu(), pages[4 + part][some])
            and (not codec.lossless or torch.equal(plane[items], pages[2 + part][items]))
            for part, plane in enumerate(pages[:2])
        )
    )
    by_group = (2 * count, PAGE, codec.cut.groups, -1)
    held = [plane.view(torch.uint8).view(by_group) for plane in planes]
    plain = [plane[items].transpose(1, 2).reshape(count, -1) for plane in held]
    size = plain[0].shape[1]
    raw = device.pinned(2 * count, HEADER_BYTES + 2 * size)
    uncoded = [
        gather_launch(raw, items, HEADER_BYTES + part * size, rows, save=True)
        for part, rows in enumerate(plain)
    ]
    pool = [torch.empty_like(plane) for plane in held]
    uncoded_load = gather_planes_launch(raw, items, HEADER_BYTES, pool, items)
    uncoded_save = partial(run_all, *uncoded)
    uncoded_save()
    uncoded_load.run()
    right &= all(torch.equal(pool[part][items], held[part][items]) for part in (0, 1))
    target = torch.empty_like(plain[0])
    work: Work = {"encode": encode.run, "decode": decode.run, "saved": saved, "loaded": loaded}
    work["copy"] = partial(target.copy_, plain[0])
    work |= {"uncoded_save": uncoded_save, "uncoded_load": uncoded_load.run}
    times = {name: device.microseconds(one) for name, one in work.items()}
    times["copy"] *= 2  # of K and of V
    return {
        **speeds(times, 2 * count * size),
        "share_of_bytes": length / (2 * size),
        "right": right,
    }


def run_all(*launches: Launch) -> None:
    for launch in launches:
        launch.run()
