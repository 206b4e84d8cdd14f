"""``hcache size``: how much host memory (L2) and disk (L3) conversations take."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NamedTuple

import typer

from hcache_backend.cli import common
from hcache_backend.format.file import file_layout
from hcache_backend.format.page import RECOMPUTED, PageLayout, StoredLayer, hidden_layer
from hcache_backend.format.units import WHOLE, Segment, SegmentTable, Share
from hcache_backend.plan.costs import Partition, describe
from hcache_backend.plan.encoded import PAGE_TOKENS, PlannedCodec, encoded
from hcache_backend.plan.model_shape import ModelShape


class Sizing(NamedTuple):
    """Room for conversations; page and host memory are a rank's, files those of all ranks.

    Attributes:
        shadows: Host pages that stand for the tokens on the device.
        ratio: Host memory as a multiple of the device's KV pool; None: its size was not given.
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
    page_size: int = PAGE_TOKENS,
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
        hidden, kv = _stored(model, dtype, codec, page_size, heads, share)
        kinds = ((RECOMPUTED, partition.recompute), (hidden, partition.hidden), (kv, partition.kv))
        layers = tuple(layer for layer, count in kinds for _ in range(count))
        layout = PageLayout(page_size, layers, share)
        table, page_bytes = layout.table, layout.page_bytes
        files = tp if partition.kv else share.of  # K and V are those of a rank's own heads
    pages = conversations * (tokens // page_size)
    # SGLang's pool has a page more than it gives out.
    shadows = ((device_tokens or 0) // page_size + 1) * bool(partition.hidden)
    host_bytes = (pages + shadows) * page_bytes
    ratio = host_bytes / (device_tokens * model.layers * kv_bytes) if device_tokens else None
    file_bytes, files = file_layout(table, share).file_bytes, pages * files
    disk_bytes = files * file_bytes
    return Sizing(page_bytes, pages, shadows, host_bytes, ratio, file_bytes, files, disk_bytes)


def _stored(
    model: ModelShape, dtype: str, codec: str, page_size: int, heads: int, share: Share
) -> tuple[StoredLayer, StoredLayer]:
    """A layer of hidden states, and one of K and V in ``heads`` heads of each rank."""
    import torch

    from hcache_backend.host.segments import KVSegments
    from hcache_kernels.codecs import UnsupportedRows, make_codec

    values = getattr(torch, dtype)
    if codec == "auto":
        codec = "exp4" if dtype == "bfloat16" else "none"
    hidden = hidden_layer(page_size, model.hidden_bytes, model.hidden)
    with suppress(UnsupportedRows):
        row_bytes = make_codec(codec, model.hidden, values).row_bytes
        hidden = hidden_layer(page_size, row_bytes, model.hidden, codec)
    pool = SimpleNamespace(
        k_buffer=[torch.empty((1, heads, model.head_dim), dtype=values, device="meta")],
        v_buffer=[torch.empty((1, heads, model.value_dim), dtype=values, device="meta")],
    )
    try:
        kv = KVSegments(pool, (0,), page_size, share, share.of, codec)
    except UnsupportedRows:
        kv = KVSegments(pool, (0,), page_size, share, share.of)
    return hidden, kv.stored_layer(0)


def size(
    model: Annotated[Path, typer.Argument(help=common.MODEL_HELP)],
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
    tp: common.Ranks = 1,
    page_size: Annotated[int, typer.Option(min=1, help="Option --page-size of the server.")] = 64,
    folders: Annotated[int, typer.Option(min=1, help="Folders of the page store.")] = 1,
    as_json: common.AsJson = False,
) -> None:
    """Compute the host memory and the disk that conversations take."""
    shape, dtype = common.served_model(model, tp)
    smaller = encoded(shape, codec, dtype, tp=tp, page_size=page_size).hidden_is_smaller
    hidden = not shape.latent and (mode == "hidden" or (mode == "auto" and smaller))
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
    quota = math.ceil(found.disk_bytes / folders)
    gigabytes = math.ceil(found.host_bytes / 1e9)
    if as_json:
        options = {"hicache_size": gigabytes, "quota_bytes": quota}
        common.print_json({**found._asdict(), **options})
        return
    memory = f"--hicache-size {gigabytes}"
    if found.ratio is not None:
        memory += f" (or --hicache-ratio {math.ceil(10 * found.ratio) / 10})"
    elif hidden:
        memory += f", and {found.page_bytes:,} bytes for each {page_size} tokens on the GPU"
    common.say(
        f"{describe(partition)}; {found.page_bytes:,} bytes per {page_size}-token page and rank\n"
        f"Host memory for all of them: {found.host_bytes / 1e9:,.1f} GB per rank: {memory}\n"
        f"Disk: {found.disk_bytes / 1e9:,.1f} GB in {found.files:,} files: "
        f"quota_bytes {quota} for each of {folders} folder(s)\n"
        "Host memory may hold fewer conversations than the disk: those in use within minutes."
    )
