"""How much host memory (L2) and disk (L3) so many conversations take.

::

    hcache plan --model config.json --hardware a100-40g --json \\
      | python docs/size.py --device-tokens 40000 --histories 200 --tokens 8000

It goes by the partition of the plan, and by the formats of own pages and their files. Models of
16-bit values are taken for bfloat16, which codec ``auto`` encodes.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

from hcache_backend.config import HCacheConfig
from hcache_backend.page import RECOMPUTED, PageLayout, hidden_layer, kv_layer
from hcache_backend.restore.exchange import share_of_rank
from hcache_backend.store.format import file_layout
from hcache_backend.units import units_per_group
from hcache_kernels.codecs import (
    CODECS,
    SEGMENT_CODECS,
    Cut,
    UnsupportedRows,
    make_codec,
    make_segment_codec,
)

_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_CODECS = ("auto", *CODECS)


@dataclass(frozen=True)
class PageSize:
    """What a page takes.

    Attributes:
        rank_bytes: Host memory of a page on one rank.
        files: Files of a page in L3, all ranks together.
        file_bytes: Of each of them.
        has_shadows: Whether the pages of the device's KV pool take host memory too.
    """

    rank_bytes: int
    files: int
    file_bytes: int
    has_shadows: bool


def page_size(plan: dict[str, Any], tokens: int, codec: str, kv_mode: bool) -> PageSize:
    """The size of own pages of ``tokens`` tokens, by the output of ``hcache plan --json``.

    Raises:
        UnsupportedRows: The codec cannot hold this model's hidden states.
    """
    model, ranks, itemsize = plan["model"], plan["tp"], plan["model"]["element_bytes"]
    layers = {"kv": model["layers"]} if kv_mode else plan["layers"]
    share, heads = share_of_rank(0, ranks, tokens), -(-model["kv_heads"] // ranks)
    if codec == "auto":
        codec = "exp4" if itemsize == 2 else "none"
    of_hidden = "none" if kv_mode else codec
    row_bytes = make_codec(of_hidden, model["hidden"], _DTYPES[itemsize]).row_bytes
    kv_bytes = _kv_bytes(plan)
    width = kv_bytes // (2 * itemsize)
    encoded: tuple[str, tuple[int, int]] | tuple[()] = ()
    if codec in SEGMENT_CODECS and itemsize == 2:
        cut = Cut(width, tokens // units_per_group(tokens, width))
        unit = make_segment_codec(codec, cut, width // heads, torch.bfloat16)
        encoded = unit.code, unit.unit_bytes
    kv_values = width * share.of
    stored = {
        "recompute": RECOMPUTED,
        "hidden": hidden_layer(tokens, row_bytes, model["hidden"], of_hidden),
        "kv": kv_layer(tokens, kv_values, kv_values, itemsize, share.of, *encoded),
    }
    methods = [m for m in stored for _ in range(layers.get(m, 0))]
    layout = PageLayout(tokens, tuple(stored[m] for m in methods), share)
    files = ranks if "kv" in methods else share.of  # K and V are those of a rank's own heads
    file_bytes = file_layout(layout.table, share).file_bytes
    return PageSize(layout.page_bytes, files, file_bytes, not kv_mode)


def _kv_bytes(plan: dict[str, Any]) -> int:
    """Bytes of K and V of one token and layer on one rank, as they are."""
    model = plan["model"]
    heads = -(-model["kv_heads"] // plan["tp"])
    return int(heads * (model["head_dim"] + model["value_dim"]) * model["element_bytes"])


@dataclass(frozen=True)
class Sizing:
    """What conversations take.

    Attributes:
        page: A page.
        pages: Of all conversations.
        shadows: Pages of host memory for what is on the device.
        host_bytes: Host memory that HiCache is to get on every rank.
        ratio: The same as a multiple of the device's KV pool.
        files: Page files in L3, all ranks together.
        disk_bytes: Their bytes.
    """

    page: PageSize
    pages: int
    shadows: int
    host_bytes: int
    ratio: float
    files: int
    disk_bytes: int


def size(
    plan: dict[str, Any],
    *,
    device_tokens: int,
    histories: int,
    tokens: int,
    page_tokens: int = 64,
    codec: str = "auto",
    kv_mode: bool = False,
) -> Sizing:
    """Room for ``histories`` conversations of ``tokens`` tokens, of which full pages are kept.

    Args:
        plan: The output of ``hcache plan --json``.
        device_tokens: Tokens in the device's KV pool.

    Raises:
        UnsupportedRows: The codec cannot hold this model's hidden states.
    """
    page = page_size(plan, page_tokens, codec, kv_mode)
    pages = histories * (tokens // page_tokens)
    # SGLang's pool has a page more than it gives out.
    shadows = (device_tokens // page_tokens + 1) * page.has_shadows
    host_bytes = (pages + shadows) * page.rank_bytes
    device_bytes = device_tokens * plan["model"]["layers"] * _kv_bytes(plan)
    files = pages * page.files
    ratio = host_bytes / device_bytes
    return Sizing(page, pages, shadows, host_bytes, ratio, files, files * page.file_bytes)


def main(
    device_tokens: Annotated[int, typer.Option(min=1, help="SGLang's max_total_num_tokens.")],
    histories: Annotated[int, typer.Option(min=1, help="Conversations to keep.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")],
    page_tokens: Annotated[int, typer.Option("--page-size", min=1, help="SGLang's.")] = 64,
    codec: Annotated[str, typer.Option(help=", ".join(_CODECS))] = "auto",
    kv_mode: Annotated[bool, typer.Option("--kv-mode", help="K and V only.")] = False,
    folders: Annotated[int, typer.Option(min=1, help="Folders of the store.")] = 1,
) -> None:
    """Read `hcache plan --json` from standard input; print what to give to SGLang and to us."""
    if codec not in _CODECS:
        raise typer.BadParameter(f"codec {codec!r}: there are {', '.join(_CODECS)}")
    try:
        found = size(
            json.load(sys.stdin),
            device_tokens=device_tokens,
            histories=histories,
            tokens=tokens,
            page_tokens=page_tokens,
            codec=codec,
            kv_mode=kv_mode,
        )
    except UnsupportedRows as error:
        raise typer.BadParameter(f"codec {codec!r}: {error}") from None
    page, gigabytes = found.page, found.host_bytes / 1e9
    quota = math.ceil(found.disk_bytes / folders / HCacheConfig().high_water)
    print(
        f"page of {page_tokens} tokens: {page.rank_bytes:,} bytes of host memory on each rank,\n"
        f"  in L3 {page.files} x {page.file_bytes:,} bytes\n"
        f"L2, each rank: {found.pages:,} pages + {found.shadows:,} shadows = "
        f"{gigabytes:,.1f} GB: "
        f"--hicache-size {math.ceil(gigabytes)}\n"
        f"  or --hicache-ratio {math.ceil(found.ratio * 10) / 10}\n"
        f"L3: {found.files:,} files = {found.disk_bytes / 1e9:,.1f} GB: "
        f"quota_bytes {quota:,} for each of {folders} folder(s)"
    )


if __name__ == "__main__":
    typer.run(main)
