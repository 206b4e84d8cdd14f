"""``hcache plan``: which layers to restore by which method, for a model on a machine."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated

from typer import Option

from hcache_backend.cli import common
from hcache_backend.cli.common import Failure, human_bytes, say, table
from hcache_backend.config import nearest
from hcache_backend.plan.costs import Partition, describe
from hcache_backend.plan.encoded import encoded
from hcache_backend.plan.fleet import Conversations, FleetPlan
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.plan import LENGTHS, PartitionPlan, Resource, RestorePath
from hcache_backend.plan.presets import PRESETS, preset_profile
from hcache_backend.plan.profile import Profile, load_profile
from hcache_backend.plan.record import records, save_record

_NAMES = ", ".join(PRESETS)
_TITLES = {"mix": "this partition", "hidden": "hidden states", "kv": "KV offload"}
_RESOURCES: dict[Resource, str] = {"l3": "L3", "bus": "bus", "compute": "GPU"}
_LOOKS = {  # of the tasks of a method in the PNG; None: L3, read before the restore
    "recompute": ("recompute", "#b05fa8"),
    "hidden": ("hidden states", "#2a7ab9"),
    "kv": ("KV", "#e8a33d"),
    None: ("L3", "#9aa0a6"),
}
_WIDTHS = attrgetter("layers", "hidden", "mlp_width", "heads", "kv_heads", "head_dim", "value_dim")
"""The numbers of a model that do not depend on how its values are stored."""


def plan(
    model: common.Model,
    hardware: Annotated[str, Option("--hardware", "-w", help=f"A profile's file, or {_NAMES}.")],
    ssds: Annotated[
        int | None,
        Option(min=0, help="SSDs of L3, 6.9 GB/s each; 0: host memory. A profile has its own L3."),
    ] = None,
    tokens: Annotated[int, Option(min=1, help="Tokens to restore.")] = 1024,
    tp: common.Ranks = 1,
    restore: Annotated[
        RestorePath,
        Option(help="Option `restore` of the server: L3 is read during the restore, or before it."),
    ] = "auto",
    codec: common.Codec = "auto",
    users: Annotated[int | None, Option(min=1, help="Conversations to plan capacity for.")] = None,
    turns_per_hour: Annotated[float, Option(min=0.001, help="Turns of each of them.")] = 6.0,
    new_tokens: Annotated[int, Option(min=1, help="Tokens of a question and reply.")] = 500,
    replicas: Annotated[int, Option(min=1, help="Servers of --tp GPUs and --ssds.")] = 1,
    as_json: common.AsJson = False,
    plot: Annotated[Path | None, Option(help="Draw the pipelines, as PNG.")] = None,
    apply: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Record this plan in the page store DIR, from which the model was served before: "
            "servers follow it from their next start. Pages of another plan become misses.",
        ),
    ] = None,
) -> None:
    """Plan which layers to store as hidden states, as KV, or not at all; predict restore times."""
    shape, dtype = common.served_model(model, tp)
    profile = _profile(hardware, ssds)
    extra = []
    if hardware in PRESETS and dtype == "float32":
        shape, dtype = shape.model_copy(update={"element_bytes": 2}), "float16"
        extra.append("float32 is planned as 16 bits: so SGLang serves it on a GPU")
    plain, shape = shape, encoded(shape, codec, dtype, tp=tp)
    if shape != plain:
        extra.append(
            f"codec {codec}: {dtype} hidden states take {shape.hidden_bytes:,} of "
            f"{plain.hidden_bytes:,} bytes, K and V {shape.kv_bytes:,} of {plain.kv_bytes:,}"
        )
    elif codec not in ("auto", "none"):
        extra.append(f"codec {codec} does not apply to {dtype}; planned without it")
    result = PartitionPlan(profile, shape, tokens, tp, restore)
    report = result.report()
    report["notes"] += extra
    show = partial(_show, result, report["notes"])
    if users is not None:
        fleet = FleetPlan(result, Conversations(users, turns_per_hour, new_tokens), replicas)
        report["fleet"], show = fleet.report(), partial(_show_fleet, fleet)
    if plot is not None:
        _draw(result, plot)
    if apply is not None:
        _apply(apply, shape, result.stored)
    common.output(report, as_json, lambda _: show(model))


def _apply(folder: Path, shape: ModelShape, partition: Partition) -> None:
    """Change the record of the model in a store folder, however its values are stored there."""
    known = [(name, record) for name, record in records(folder) if record.shape is not None]
    found = [(name, record) for name, record in known if _WIDTHS(record.shape) == _WIDTHS(shape)]
    if not found:
        hint = "no server has used this model with it yet; start one first"
        raise Failure(f"--apply {folder}: {hint}")
    update = {**asdict(partition), "reason": "hcache plan --apply"}
    for name, record in found:
        save_record(folder, name, record.model_copy(update=update), replace=True)


def _profile(hardware: str, ssds: int | None) -> Profile:
    """The profile of ``--hardware``; raises a Failure or a ProfileError."""
    if hardware in PRESETS:
        return preset_profile(hardware, ssds or 0)
    if not Path(hardware).exists():
        hint = nearest(hardware, PRESETS, "the presets are ")
        raise Failure(f"--hardware {hardware!r} is neither a preset nor a file; {hint}")
    profile = load_profile(Path(hardware))
    if ssds:
        hint = "leave --ssds out, or give 0 for pages that are in host memory"
        raise Failure(f"--ssds {ssds}: the profile {hardware} has its own measured L3; {hint}")
    return profile if ssds is None else profile.model_copy(update={"l3": None})


def _machine(result: PartitionPlan) -> str:
    """The devices with their source, and where L3 is."""
    l3 = "pages in host memory"
    if result.profile.l3 is not None:
        way = "read first" if result.l3 == "first" else "overlapped"
        l3 = f"L3 at {result.profile.l3.per_second / 1e9:.1f} GB/s, {way}"
    devices = result.profile.device + (f" x {result.tp}" if result.tp > 1 else "")
    return f"{devices} ({result.profile.source}), {l3}"


def _show(result: PartitionPlan, notes: list[str], path: Path) -> None:
    model = result.model
    methods = table("", "", "bytes/token#", "of KV#", "restore, ms#", "slower, x#", "binds")
    for name in result.choices:
        size, seconds = result.bytes_per_token(name), result.seconds(name)
        share, slower = size / (model.layers * model.kv_bytes), seconds / result.seconds("mix")
        cells = f"{size:,}", f"{share:.2f}", f"{seconds * 1e3:,.1f}"
        factor = "" if name == "mix" else f"{slower:.2f}"
        methods.add_row(_TITLES.get(name, name), *cells, factor, result.binds(name))
    heads = ("recompute#", "take, ms#", "at best, ms#", "with R + H + K", "from L3")
    lengths = table("", "restores of#", *heads)
    for count in LENGTHS:
        at = result.at_length(count)
        cells = f"{at.recompute_layers}", f"{at.ms:,.1f}", f"{at.best_ms:,.1f}"
        best = " + ".join(map(str, at.best.values()))
        lengths.add_row(f"{count:,}", *cells, best, "refused" if at.refused else "read")
    say(
        f"{path}: {model.family}, {model.layers} layers, hidden size {model.hidden}, "
        f"{model.attention} ({model.heads} heads, {model.kv_heads} of KV)\n"
        f"{_machine(result)}, {result.tokens:,} tokens\n",
        f"[bold]{describe(result.partition)}[/bold]\n",
        methods,
        f"\nBytes per token and layer: {model.hidden_bytes:,} as hidden states, "
        f"{model.kv_bytes:,} as KV.\n",
        lengths,
        *(f"- {note}" for note in notes),
    )


def _draw(plan: PartitionPlan, path: Path) -> None:
    """Write the pipelines of the partition and of every pure method as a PNG. Raises OSError."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure, model = Figure(figsize=(9, 5), layout="constrained"), plan.model
    axes, rows, used = figure.subplots(), list[str](), dict[str, Patch]()
    for name in plan.choices:
        tasks, seconds = plan.timeline(name), plan.seconds(name)
        for stream in dict.fromkeys(task.stream for task in tasks):
            mine = [task for task in tasks if task.stream == stream]
            spans = [(1e3 * task.start, 1e3 * (task.end - task.start)) for task in mine]
            looks = [_LOOKS[task.method] for task in mine]
            used |= {label: Patch(color=colour, label=label) for label, colour in looks}
            colours = [colour for _, colour in looks]
            axes.broken_barh(spans, (len(rows), 0.8), facecolors=colours, edgecolor="w", lw=0.3)
            rows.append(f"{_TITLES.get(name, name)}, {1e3 * seconds:,.1f} ms: {stream}")
    axes.set_yticks([row + 0.4 for row in range(len(rows))], rows)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.suptitle(
        f"Predicted: {plan.tokens:,} tokens are restored in {1e3 * plan.seconds('mix'):,.1f} ms\n"
        f"{model.family}, {model.layers} layers of {model.hidden}; {plan.tp} {plan.profile.device}"
    )
    figure.legend(handles=list(used.values()), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=130, format="png")


def _show_fleet(fleet: FleetPlan, path: Path) -> None:
    asked, replicas = fleet.conversations, fleet.replicas
    under_way = "for turns that are under way" if fleet.l2_bytes is not None else "turns pile up"
    sizes = {
        "L3": (fleet.l3_bytes / replicas, "every page once"),
        "L2, at least": (fleet.l2_bytes, under_way),
        "L3 is read": (fleet.read_rate, "per second"),
        "L3 is written": (fleet.write_rate, "per second"),
        "read from behind L3": (fleet.network_rate, "per second, if turns go to any replica"),
    }
    amounts = table("", "", "each replica#", "all#", "")
    for name, (each, what) in sizes.items():
        both = ("", "") if each is None else map(human_bytes, (each, each * replicas))
        amounts.add_row(name, *both, what)
    loads = table("", "", "share of time#", "if all were computed#")
    for resource, name in _RESOURCES.items():
        computed = f"{fleet.recompute_busy:.2f}" if resource == "compute" else ""
        loads.add_row(name, f"{fleet.busy[resource]:.2f}", computed)
    say(
        f"{path} on {_machine(fleet.plan)}\n{replicas:,} replica(s); {asked.number:,} "
        f"conversations of {fleet.plan.tokens:,} tokens, each with {asked.turns_per_hour:g} turns "
        f"of {asked.new_tokens:,} new tokens per hour\nComputed from mean rates, not measured.\n",
        amounts,
        "",
        loads,
        f"\nWith {fleet.most_conversations:,} conversations the {_RESOURCES[fleet.binds]} works "
        "all the time. New tokens count as prefill; to decode them takes longer.",
    )
