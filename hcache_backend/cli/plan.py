"""``hcache plan``, ``profile`` and ``size``: a model on a machine, predicted, measured, stored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ByteSize
from rich.text import Text
from typer import Argument, Option

from hcache_backend.cli import common
from hcache_backend.cli.common import Failure, say, table
from hcache_backend.config import HCacheConfig
from hcache_backend.format.file import file_layout
from hcache_backend.format.page import (
    RECOMPUTED,
    PageLayout,
    StoredLayer,
    hidden_layer,
    with_index_keys,
)
from hcache_backend.format.units import Segment, units_per_group
from hcache_backend.plan.model_shape import (
    INDEX_KEY_BYTES,
    PAGE_TOKENS,
    ModelShape,
    PlannedCodec,
    encoded,
)
from hcache_backend.plan.plan import LENGTHS, PartitionPlan, RestorePath
from hcache_backend.plan.profile import PRESETS, Profile, Rate, load_profile, preset_profile
from hcache_backend.plan.restore import Partition, describe
from hcache_backend.plan.start import StartStep, start_steps

_NAMES = ", ".join(PRESETS)
_OPERATIONS = {
    "hidden_copy": "hidden states, host to device",
    "kv_load": "KV, host to pool",
    "projection": "projection to K and V",
    "dense": "forward pass without attention",
    "attention": "attention",
}
Mode = Literal["auto", "hidden", "kv"]


def plan(
    model: common.Model,
    hardware: Annotated[str, Option("--hardware", "-w", help=f"A profile's file, or {_NAMES}.")],
    ssds: Annotated[int | None, Option(min=0, help="Of L3, 6.9 GB/s each; 0: host memory.")] = None,
    tokens: Annotated[int, common.quantity("Tokens to restore.")] = 1024,
    tp: common.Ranks = 1,
    restore: Annotated[RestorePath, Option(help="Option `restore` of the server.")] = "auto",
    codec: common.Codec = "auto",
    kv: common.KVType = "auto",
    as_json: common.AsJson = False,
) -> None:
    """Plan which layers to store as hidden states, as KV, or not at all; predict restore times."""
    profile, card, extra = _profile(hardware, ssds), PRESETS.get(hardware.lower()), []
    shape, sides, dtype, *_, weights = served = common.served_model(model, tp, kv, profile.device)
    memory = card and card.memory
    if memory is not None and weights > tp * memory:
        cards = f"{tp} card(s) of {memory / 1e9:.0f} GB"
        extra.append(f"weights about {weights / 1e9:,.0f} GB on {cards}: they do not fit")
    if profile.model is None and dtype == "float32":  # assumed numbers are those of a GPU
        shape, dtype = shape.model_copy(update={"element_bytes": 2}), "float16"
        extra.append("float32 is planned as 16 bits: so SGLang serves it on a GPU")
    plain, shape = shape, encoded(shape, codec, dtype, tp=tp)
    if shape == plain and codec not in ("auto", "none"):
        extra.append(f"codec {codec} is not for {shape.attention} in {dtype}; planned without it")
    result = PartitionPlan(profile, shape, tokens, tp, restore, sides)
    report = result.report()
    report["notes"][:0] = extra
    start = start_steps(result, served, memory)
    report["start"] = [step._asdict() for step in start]
    common.output(report, as_json, lambda _: _show(result, start, report["notes"], model))


def _profile(hardware: str, ssds: int | None) -> Profile:
    """The profile of a preset or a file; ``ssds``: L3's disks. Raises a Failure or ConfigError."""
    if (preset := hardware.lower()) in PRESETS:
        return preset_profile(preset, ssds or 0)
    if not Path(hardware).exists():
        hint = f"the presets are {_NAMES}; make one with `hcache profile`"
        raise Failure(f"--hardware {hardware!r} is neither a preset nor a file; {hint}")
    profile = load_profile(Path(hardware))
    if ssds:
        raise Failure(f"--ssds {ssds}: {hardware} has its own measured L3; leave it out, or give 0")
    return profile if ssds is None else profile.model_copy(update={"l3": None})


def _machine(result: PartitionPlan) -> str:
    """The devices with their source, and where L3 is."""
    l3 = "pages in host memory"
    if result.profile.l3 is not None:
        way = "read first" if result.l3 == "first" else "overlapped"
        way += " with recomputing the front" * result.recomputes_front
        l3 = f"L3 at {result.profile.l3.per_second / 1e9:.1f} GB/s, {way}"
    devices = result.profile.device + (f" x {result.tp}" if result.tp > 1 else "")
    return f"{devices} ({result.profile.source}), {l3}"


def _methods(result: PartitionPlan) -> list[tuple[str, PartitionPlan, str]]:
    """Methods to serve a hit: title, plan, and the plan's choice of layers for that method."""
    tier, read = ("L3", "read, then ") if result.profile.l3 else ("host memory", "")
    methods = [
        ("this backend", result, "mix"),
        (f"SGLang's own {tier} (plain {result.model.cached}, {read}loaded)", result.plain, "kv"),
        ("computed", result, "recompute"),
        ("hidden states only", result, "hidden"),
    ]
    return [method for method in methods if method[-1] in result.choices]


def _show(result: PartitionPlan, start: list[StartStep], notes: list[str], path: Path) -> None:
    model, plain = result.model, result.plain.model
    methods = table("", "", "bytes/token#", "of plain#", "time, ms#", "times ours#", "limited by")
    for title, plan, choice in _methods(result):
        size, seconds = plan.bytes_per_token(choice), plan.seconds(choice)
        share, times = size / result.plain.bytes_per_token("kv"), seconds / result.seconds("mix")
        cells = f"{size:,}", f"{share:.2f}", f"{seconds * 1e3:,.1f}", f"{times:.2f}"
        methods.add_row(title, *cells, plan.binds(choice))
    lengths = table("", "hits of tokens#", "layers recomputed#", "time, ms#", "such hits are")
    for count in LENGTHS:
        hit = result.at_length(count)
        served = "computed instead" if hit["refused"] else "restored"
        lengths.add_row(f"{count:,}", f"{hit['recompute_layers']}", f"{hit['ms']:,.1f}", served)
    steps = table("", "a start, computed", "s#", "at")
    for step in start:
        steps.add_row(step.name, f"{step.seconds:,.1f}", step.often)
    say(
        f"{path}: {model.family}, {model.layers} layers, hidden size {model.hidden}, "
        f"{model.attention} ({model.heads} heads, {model.kv_heads} of KV)\n"
        f"{_machine(result)}, {result.tokens:,} tokens\n",
        Text(f"{describe(result.partition, model.latent)}\n{result.finding}\n", "bold"),
        methods,
        f"\nBytes per token and layer: hidden states {model.hidden_bytes:,} "
        f"({plain.hidden_bytes:,} plain), "
        f"{model.cached} {model.kv_bytes:,} ({plain.kv_bytes:,} plain)\n",
        lengths,
        "",
        steps,
        *(f"- {note}" for note in notes),
    )


def profile(
    model: common.Model,
    out: Annotated[Path | None, Option("--out", "-o", help="Write the profile here.")] = None,
    folders: common.Folders = None,
    dirs: common.Dirs = None,
    seconds: Annotated[float, Option(min=0.01, max=600, help="For each part, about.")] = 2.0,
    as_json: common.AsJson = False,
) -> None:
    """Measure L3, the way to the device, projection and recomputation on this machine."""
    shape = common.served_model(model).shape
    config = common.settings(folders, dirs)
    if out is not None and not out.absolute().parent.is_dir():
        raise Failure(f"--out {out}: there is no folder {out.absolute().parent}")
    measured = _measure(shape, config, seconds, quiet=as_json)
    if out is not None:
        measured.save(out)
    common.output(measured.model_dump(mode="json"), as_json, lambda _: _show_profile(measured))
    if out is not None and not as_json:
        say(f"Written to {out}; use it with `hcache plan --model {model} --hardware {out}`.")


def _measure(shape: ModelShape, config: HCacheConfig, seconds: float, *, quiet: bool) -> Profile:
    """Measure this machine, about ``seconds`` for each part; ``quiet``: without progress bar."""
    import torch  # takes seconds, and the other commands do without it

    from hcache_backend.plan.measure import Bench, measure, read_rate
    from hcache_backend.streams import local_device

    dtype = torch.float32 if shape.element_bytes == 4 else torch.bfloat16
    with common.progress_bar(hidden=quiet) as progress:
        task = progress.add_task("L3 folders", total=1 + len(_OPERATIONS))
        l3, direct = read_rate(config, shape, seconds)
        if not direct:
            say("L3 was read through the page cache: the disk may be slower", console=common.errors)

        def begin(operation: str) -> None:
            progress.update(task, advance=1, description=_OPERATIONS[operation])

        try:
            bench = Bench(shape, local_device(), dtype, seconds)
            return measure(bench, l3, config.dirs, begin=begin)
        except torch.OutOfMemoryError:
            raise Failure("the device has no room for one layer; stop what else uses it") from None


def _show_profile(measured: Profile) -> None:
    layer = table("", "one layer", "rate#", "fixed, us#", "tokens#", "ms#")
    if measured.l3 is not None:
        layer.add_row("L3, all folders", _rate(measured.l3.per_second, "B/s"))
    for name, title in _OPERATIONS.items():
        rate: Rate = getattr(measured, name)
        speed = _rate(rate.per_second, "B/s" if name in ("hidden_copy", "kv_load") else "FLOP/s")
        tokens, seconds = max(measured.points[name])  # the most tokens that were tried
        fixed = f"{rate.seconds * 1e6:,.0f}"
        layer.add_row(title, speed, fixed, f"{tokens:,}", f"{seconds * 1e3:,.2f}")
    head = f"{measured.device}, {measured.dtype}, {measured.date}\n"
    say(head, layer, "Each was measured alone. On a GPU copies and products run at the same time.")


def _rate(value: float, unit: str) -> str:
    """A rate as people read it, in powers of 1,000."""
    return ByteSize(value).human_readable(decimal=True, separator=" ")[:-1] + unit


class Sizing(NamedTuple):
    """Room for conversations; page and host memory are a rank's, files those of all ranks.
    ``shadows`` are host pages that stand for tokens on the device. ``least_bytes`` of host memory
    exceed the device's KV pool, too: ``ratio`` times it, None if its size was not given."""

    page_bytes: int
    pages: int
    shadows: int
    host_bytes: int
    least_bytes: int
    ratio: float | None
    file_bytes: int
    files: int
    disk_bytes: int


def page_layout(
    model: ModelShape,
    dtype: str,
    partition: Partition,
    *,
    page_size: int = PAGE_TOKENS,
    codec: PlannedCodec = "auto",
    tp: int = 1,
) -> PageLayout:
    """The layout of the first rank's pages of a ``model`` (without a codec) served in ``dtype``."""
    from hcache_backend.restore.exchange import shard_of_rank

    heads = _heads_of_rank(model, tp)
    stored = encoded(model, codec, dtype, tp=tp, page_size=page_size)
    kv_bytes = stored.kv_bytes * heads // model.kv_heads
    shard = shard_of_rank(0, tp, page_size)
    hidden = hidden_layer(page_size, stored.hidden_bytes, model.hidden)
    length, widths = page_size * kv_bytes * shard.of, model.head_dim + model.value_dim
    segments = (
        Segment(length * width // widths, shard.of, units_per_group(page_size, heads * width))
        for width in (model.head_dim, model.value_dim)
    )
    kv = StoredLayer(tuple(segments))
    if model.latent:
        kv = hidden_layer(page_size, kv_bytes, model.kv_width)
    sparse = with_index_keys(kv, page_size, page_size * INDEX_KEY_BYTES)
    keys = model.index_bytes // INDEX_KEY_BYTES  # layers that have some
    kinds = (
        (RECOMPUTED, partition.recompute),
        (hidden, partition.hidden),
        (sparse, keys),
        (kv, partition.kv - keys),
    )
    layers = tuple(layer for layer, count in kinds for _ in range(count))
    return PageLayout(page_size, layers, shard)


def _heads_of_rank(model: ModelShape, tp: int) -> int:
    return model.kv_heads if model.latent else -(-model.kv_heads // tp)


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
    """Room for ``conversations`` of ``tokens`` tokens, of which full pages are kept. ``model`` is
    without a codec and served in ``dtype``: ``bfloat16``, ``float16`` or ``float32``. The device's
    KV pool has ``device_tokens`` (SGLang's ``max_total_num_tokens``)."""
    layout = page_layout(model, dtype, partition, page_size=page_size, codec=codec, tp=tp)
    shard, plain = layout.shard, model.kv_bytes * _heads_of_rank(model, tp) // model.kv_heads
    pages = conversations * (tokens // page_size)
    # K and V are a rank's own heads.
    files = pages * (shard.of if model.latent or not partition.kv else tp)
    # SGLang's pool has a page more than it gives out.
    device_pages = (device_tokens or 0) // page_size + 1
    pool_bytes = (device_tokens or 0) * (partition.layers * plain + model.index_bytes)
    shadows = device_pages * bool(partition.hidden)
    page_bytes, stride = layout.page_bytes, layout.stride
    host_bytes = (pages + shadows) * stride
    least_bytes = max(host_bytes, pool_bytes + stride, (device_pages + shadows) * stride)
    ratio = least_bytes / pool_bytes if pool_bytes else None
    file_bytes = file_layout(layout.table, shard).file_bytes
    host = shadows, host_bytes, least_bytes, ratio
    return Sizing(page_bytes, pages, *host, file_bytes, files, files * file_bytes)


def size(
    model: Annotated[Path, Argument(help=common.MODEL_HELP)],
    conversations: Annotated[int, common.quantity("Conversations to keep.")],
    tokens: Annotated[int, common.quantity("Tokens of each conversation.")],
    device_tokens: Annotated[int | None, common.quantity("Tokens in the GPU's KV pool.")] = None,
    mode: Annotated[Mode, Option(help="Option `mode` of the server.")] = "auto",
    codec: common.Codec = "auto",
    kv: common.KVType = "auto",
    tp: common.Ranks = 1,
    page_size: Annotated[int, Option(min=1, help="Option --page-size of the server.")] = 64,
    folders: Annotated[int, Option(min=1, help="Folders of the page store.")] = 1,
    as_json: common.AsJson = False,
) -> None:
    """Compute the host memory and the disk that conversations take."""
    shape, sides, dtype, *_ = common.served_model(model, tp, kv)
    smaller = encoded(shape, codec, dtype, tp=tp, page_size=page_size).hidden_is_smaller
    layers = shape.layers - (0 if sides is None else sides.layers)
    hidden = not (shape.latent or sides) and (mode == "hidden" or (mode == "auto" and smaller))
    partition = Partition(0, layers, 0) if hidden else Partition(0, 0, layers)
    wanted = {"conversations": conversations, "tokens": tokens, "device_tokens": device_tokens}
    arguments: dict[str, Any] = {**wanted, "page_size": page_size, "codec": codec, "tp": tp}
    room = sizing(shape, dtype, partition, **arguments)
    # A quota of 0 would keep nothing, not even one page of a longer conversation.
    quota = max(room.file_bytes, math.ceil(room.disk_bytes / folders))
    gigabytes = math.ceil(room.least_bytes / 1e9)
    memory = f"{room.host_bytes / 1e9:,.1f} GB per rank"
    memory += f", {tp * room.host_bytes / 1e9:,.1f} GB for {tp} ranks" if tp > 1 else ""
    memory += f": --hicache-size {gigabytes}"
    if room.ratio is not None:
        memory += f" (or --hicache-ratio {math.ceil(10 * room.ratio) / 10})"
    lines = [
        f"{describe(partition, shape.latent)}; "
        f"{room.page_bytes:,} bytes per {page_size}-token page and rank",
        f"Host memory for all of them: {memory}",
        f"Disk: {room.disk_bytes / 1e9:,.1f} GB in {room.files:,} files: "
        f"quota_bytes {quota} for each of {folders} folder(s)",
        "Host memory only needs the conversations in use at once, and more than the GPU's pool.",
    ]
    if not room.pages:
        lines.append(f"Nothing is stored: fewer than {page_size} tokens fill no page")
    if device_tokens is None:
        lines.append("Host memory must exceed the KV pool of the GPU: give --device-tokens")
    if tp > shape.kv_heads and not (hidden or shape.latent):
        each = f"each of the {shape.kv_heads} KV heads is stored by {tp // shape.kv_heads} ranks"
        lines.append(f"Disk and host memory have K and V several times: {each}")
    if sides is not None:
        lines.append(
            f"Not counted, of the {sides.layers} other layers: a {sides.kind} behind each prompt "
            f"and reply, {sides.size:,} bytes"
        )
    options = {"hicache_size": gigabytes, "quota_bytes": quota, "sides": sides and sides.size}
    common.output({**room._asdict(), **options}, as_json, lambda _: say(*lines))
