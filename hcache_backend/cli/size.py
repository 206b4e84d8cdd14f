"""``hcache size``: how much host memory (L2) and disk (L3) conversations take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from typer import Argument, Option

from hcache_backend.cli import common
from hcache_backend.config import HCacheConfig
from hcache_backend.format.file import file_layout
from hcache_backend.format.page import RECOMPUTED, PageLayout, StoredLayer, hidden_layer
from hcache_backend.format.units import WHOLE, Segment, SegmentTable, units_per_group
from hcache_backend.plan.costs import Partition, describe
from hcache_backend.plan.encoded import PAGE_TOKENS, PlannedCodec, encoded
from hcache_backend.plan.model_shape import ModelShape


class Sizing(NamedTuple):
    """Room for conversations; page and host memory are a rank's, files those of all ranks.
    ``shadows`` are host pages that stand for tokens on the device, ``ratio`` is host memory as a
    multiple of the device's KV pool; None: the size of the pool was not given."""

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

    ``model`` is without a codec and served in ``dtype``: ``bfloat16``, ``float16`` or ``float32``.
    ``device_tokens`` are those of the device's KV pool (SGLang's ``max_total_num_tokens``).
    """
    from hcache_backend.restore.exchange import share_of_rank

    heads = -(-model.kv_heads // tp)  # of a rank
    stored = encoded(model, codec, dtype, tp=tp, page_size=page_size)
    plain, kv_bytes = (
        each.kv_bytes if model.latent else each.kv_bytes * heads // model.kv_heads
        for each in (model, stored)
    )
    if model.latent:  # SGLang's plain pages, of which every rank has the same
        table = SegmentTable((Segment(page_size * model.layers * kv_bytes),))
        page_bytes, files, share = table.page_bytes, 1, WHOLE
    else:
        share = share_of_rank(0, tp, page_size)
        hidden = hidden_layer(page_size, stored.hidden_bytes, model.hidden)
        kv_length, both = page_size * kv_bytes * share.of, model.head_dim + model.value_dim
        segments = []
        for width in (model.head_dim, model.value_dim):
            pieces = units_per_group(page_size, heads * width)
            segments.append(Segment(kv_length * width // both, share.of, pieces))
        kv = StoredLayer(tuple(segments))
        kinds = ((RECOMPUTED, partition.recompute), (hidden, partition.hidden), (kv, partition.kv))
        layers = tuple(layer for layer, count in kinds for _ in range(count))
        layout = PageLayout(page_size, layers, share)
        table, page_bytes = layout.table, layout.page_bytes
        files = tp if partition.kv else share.of  # K and V are those of a rank's own heads
    pages = conversations * (tokens // page_size)
    # SGLang's pool has a page more than it gives out.
    shadows = ((device_tokens or 0) // page_size + 1) * bool(partition.hidden)
    host_bytes = (pages + shadows) * page_bytes
    ratio = host_bytes / (device_tokens * model.layers * plain) if device_tokens else None
    file_bytes, files = file_layout(table, share).file_bytes, pages * files
    disk_bytes = files * file_bytes
    return Sizing(page_bytes, pages, shadows, host_bytes, ratio, file_bytes, files, disk_bytes)


def size(
    model: Annotated[Path, Argument(help=common.MODEL_HELP)],
    conversations: Annotated[int, Option(min=1, help="Conversations to keep.")],
    tokens: Annotated[int, Option(min=1, help="Tokens of each conversation.")],
    device_tokens: Annotated[
        int | None, Option(min=1, help="Tokens on the GPU: max_total_num_tokens in SGLang's log.")
    ] = None,
    mode: Annotated[
        Literal["auto", "hidden", "kv"],
        Option(help="Option `mode` of the server. auto: hidden states if they are smaller."),
    ] = "auto",
    codec: common.Codec = "auto",
    tp: common.Ranks = 1,
    page_size: Annotated[int, Option(min=1, help="Option --page-size of the server.")] = 64,
    folders: Annotated[int, Option(min=1, help="Folders of the page store.")] = 1,
    as_json: common.AsJson = False,
) -> None:
    """Compute the host memory and the disk that conversations take."""
    shape, dtype = common.served_model(model, tp)
    smaller = encoded(shape, codec, dtype, tp=tp, page_size=page_size).hidden_is_smaller
    hidden = not shape.latent and (mode == "hidden" or (mode == "auto" and smaller))
    partition = Partition(0, shape.layers, 0) if hidden else Partition(0, 0, shape.layers)
    asked = {"conversations": conversations, "tokens": tokens, "device_tokens": device_tokens}
    pages: dict[str, Any] = {**asked, "page_size": page_size, "codec": codec, "tp": tp}
    found = sizing(shape, dtype, partition, **pages)
    quota = math.ceil(found.disk_bytes / folders / HCacheConfig().high_water)
    gigabytes = math.ceil(found.host_bytes / 1e9)
    memory = f"--hicache-size {gigabytes}"
    if found.ratio is not None:
        memory += f" (or --hicache-ratio {math.ceil(10 * found.ratio) / 10})"
    elif hidden:
        memory += f", and {found.page_bytes:,} bytes for each {page_size} tokens on the GPU"
    text = (
        f"{describe(partition)}; {found.page_bytes:,} bytes per {page_size}-token page and rank\n"
        f"Host memory for all of them: {found.host_bytes / 1e9:,.1f} GB per rank: {memory}\n"
        f"Disk: {found.disk_bytes / 1e9:,.1f} GB in {found.files:,} files: "
        f"quota_bytes {quota} for each of {folders} folder(s)\n"
        "Host memory may hold fewer conversations than the disk: those in use within minutes."
    )
    options = {"hicache_size": gigabytes, "quota_bytes": quota}
    common.output({**found._asdict(), **options}, as_json, lambda _: common.say(text))
