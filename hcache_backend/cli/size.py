"""``hcache size``: how much host memory (L2) and disk (L3) conversations take."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from hcache_backend.cli.common import AsJson, check_ranks, explained, print_json, screen
from hcache_backend.config import HCacheConfig
from hcache_backend.format.file import file_layout
from hcache_backend.format.page import RECOMPUTED, PageLayout, StoredLayer, hidden_layer, kv_layer
from hcache_backend.format.units import WHOLE, Segment, SegmentTable, units_per_group
from hcache_backend.partition.costs import Partition
from hcache_backend.partition.encoded import PlannedCodec, encoded
from hcache_backend.partition.model_config import ModelConfigError, read_dtype, read_model
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.plan import describe


@dataclass(frozen=True)
class Sizing:
    """What conversations take.

    Attributes:
        page_bytes: Host memory of a page on one rank.
        pages: Pages of all conversations.
        shadows: Host pages that stand for the tokens on the device.
        host_bytes: Host memory that HiCache is to get on every rank.
        ratio: The same as a multiple of the device's KV pool; None: its size was not given.
        file_bytes: Bytes of a page file.
        files: Page files in L3, all ranks together.
        disk_bytes: Their bytes.
    """

    page_bytes: int
    pages: int
    shadows: int
    host_bytes: int
    ratio: float | None
    file_bytes: int
    files: int
    disk_bytes: int


def sizing(
    model: ModelShape,
    dtype: str,
    partition: Partition,
    *,
    conversations: int,
    tokens: int,
    device_tokens: int | None = None,
    page_size: int = 64,
    codec: PlannedCodec = "auto",
    tp: int = 1,
) -> Sizing:
    """Room for ``conversations`` of ``tokens`` tokens, of which full pages are kept.

    Args:
        model: Without a codec.
        dtype: What the model is served in: ``bfloat16``, ``float16`` or ``float32``.
        device_tokens: Tokens in the device's KV pool (SGLang's ``max_total_num_tokens``).
    """
    from hcache_backend.restore.exchange import share_of_rank

    heads = -(-model.kv_heads // tp)
    kv_bytes = model.kv_bytes if model.latent else model.kv_bytes * heads // model.kv_heads
    if model.latent:  # SGLang's plain pages, of which every rank has the same
        table = SegmentTable((Segment(page_size * model.layers * kv_bytes),))
        page_bytes, files, share = table.page_bytes, 1, WHOLE
    else:
        share = share_of_rank(0, tp, page_size)
        layout = PageLayout(
            page_size, _layers(model, dtype, partition, page_size, codec, tp), share
        )
        table, page_bytes = layout.table, layout.page_bytes
        files = tp if partition.kv else share.of  # K and V are those of a rank's own heads
    pages = conversations * (tokens // page_size)
    # SGLang's pool has a page more than it gives out.
    shadows = ((device_tokens or 0) // page_size + 1) * bool(partition.hidden)
    host_bytes = (pages + shadows) * page_bytes
    ratio = host_bytes / (device_tokens * model.layers * kv_bytes) if device_tokens else None
    file_bytes = file_layout(table, share).file_bytes
    disk = pages * files
    return Sizing(
        page_bytes, pages, shadows, host_bytes, ratio, file_bytes, disk, disk * file_bytes
    )


def _layers(
    model: ModelShape, dtype: str, partition: Partition, page_size: int, codec: str, tp: int
) -> tuple[StoredLayer, ...]:
    import torch

    from hcache_backend.restore.exchange import share_of_rank
    from hcache_kernels.codecs import Cut, UnsupportedRows, make_codec, make_segment_codec

    values, ranks = getattr(torch, dtype), share_of_rank(0, tp, page_size).of
    if codec == "auto":
        codec = "exp4" if dtype == "bfloat16" else "none"
    row_bytes, of_hidden = model.hidden_bytes, "none"
    with suppress(UnsupportedRows):
        row_bytes, of_hidden = make_codec(codec, model.hidden, values).row_bytes, codec
    heads = -(-model.kv_heads // tp)
    width = heads * model.head_dim
    of_kv = "none"
    unit_bytes: tuple[int, int] | None = None
    with suppress(UnsupportedRows, KeyError):
        cut = Cut(width, page_size // units_per_group(page_size, width))
        segments = make_segment_codec(codec, cut, model.head_dim, values)
        of_kv, unit_bytes = segments.code, segments.unit_bytes
    hidden = hidden_layer(page_size, row_bytes, model.hidden, of_hidden)
    k_values, v_values = width * ranks, heads * model.value_dim * ranks
    kv = kv_layer(page_size, k_values, v_values, values.itemsize, ranks, of_kv, unit_bytes)
    return (
        *(RECOMPUTED,) * partition.recompute,
        *(hidden,) * partition.hidden,
        *(kv,) * partition.kv,
    )


def size(
    model: Annotated[Path, typer.Argument(help="A config.json, or its folder.")],
    conversations: Annotated[int, typer.Option(min=1, help="Conversations to keep.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each conversation.")],
    device_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens on the GPU: max_total_num_tokens in SGLang's log."),
    ] = None,
    mode: Annotated[
        Literal["auto", "hidden", "kv"],
        typer.Option(help="Option `mode` of the server. auto: hidden states if they are smaller."),
    ] = "auto",
    codec: Annotated[PlannedCodec, typer.Option(help="Option `codec` of the server.")] = "auto",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    page_size: Annotated[int, typer.Option(min=1, help="Option --page-size of the server.")] = 64,
    folders: Annotated[int, typer.Option(min=1, help="Folders of the page store.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Compute the host memory and the disk that conversations take."""
    with explained(ModelConfigError):
        shape, dtype = read_model(model), read_dtype(model)
    check_ranks(shape, tp)
    smaller = encoded(shape, codec, dtype, tp=tp, page_size=page_size).hidden_is_smaller
    hidden = mode == "hidden" or (mode == "auto" and smaller)
    hidden = hidden and not shape.latent
    partition = Partition(0, shape.layers, 0) if hidden else Partition(0, 0, shape.layers)
    found = sizing(
        shape,
        dtype,
        partition,
        conversations=conversations,
        tokens=tokens,
        device_tokens=device_tokens,
        page_size=page_size,
        codec=codec,
        tp=tp,
    )
    quota = math.ceil(found.disk_bytes / folders / HCacheConfig().high_water)
    gigabytes = math.ceil(found.host_bytes / 1e9)
    if as_json:
        print_json({**asdict(found), "hicache_size": gigabytes, "quota_bytes": quota})
        return
    options = f"--hicache-size {gigabytes}"
    if found.ratio is not None:
        options += f" (or --hicache-ratio {math.ceil(10 * found.ratio) / 10})"
    elif hidden:
        options += f", and {found.page_bytes:,} bytes for each {page_size} tokens on the GPU"
    lines = (
        f"{describe(partition)}; {found.page_bytes:,} bytes per {page_size}-token page and rank",
        f"Host memory for all of them: {found.host_bytes / 1e9:,.1f} GB per rank: {options}",
        f"Disk: {found.disk_bytes / 1e9:,.1f} GB in {found.files:,} files: "
        f"quota_bytes {quota} for each of {folders} folder(s)",
        "Host memory may hold fewer conversations than the disk: those in use within minutes.",
    )
    for line in lines:
        screen.print(line, highlight=False, soft_wrap=True)
