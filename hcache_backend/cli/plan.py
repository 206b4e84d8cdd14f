"""``hcache plan``: which layers to restore by which method, for a model on a machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hcache_backend.cli import common
from hcache_backend.cli.common import fail, say, table
from hcache_backend.config import nearest
from hcache_backend.plan.costs import Partition, describe
from hcache_backend.plan.encoded import PlannedCodec, encoded
from hcache_backend.plan.fleet import Conversations, FleetPlan
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.plan import LENGTHS, PartitionPlan, Resource, RestorePath
from hcache_backend.plan.presets import PRESETS, preset_profile
from hcache_backend.plan.profile import Profile, ProfileError, load_profile
from hcache_backend.plan.record import records, save_record

_TITLES = {
    "mix": "this partition",
    "hidden": "hidden states",
    "kv": "KV offload",
    "recompute": "recompute",
}
_RESOURCES: dict[Resource, str] = {"l3": "L3", "bus": "bus", "compute": "GPU"}
_WIDTH = 64
_MIN_LABEL = 0.02  # of the picture's width; narrower bars have no number
_LOOKS = {  # of the tasks of a method: label, letter and style in the terminal, colour in the PNG
    "recompute": ("recompute", "R", "magenta", "#b05fa8"),
    "hidden": ("hidden states", "H", "blue", "#2a7ab9"),
    "kv": ("KV", "K", "yellow", "#e8a33d"),
    None: ("L3", "L", "", "#9aa0a6"),  # read before the restore
}


def plan(
    model: common.Model,
    hardware: Annotated[
        str,
        typer.Option(
            "--hardware",
            "-w",
            help=f"Preset ({', '.join(PRESETS)}) or a file written by `hcache profile`.",
        ),
    ],
    ssds: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="SSDs of L3, 6.9 GB/s each as in the paper. 0: pages in host memory (default for "
            "presets). A profile has its own L3; 0 ignores it.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to restore.")] = 1024,
    tp: common.Ranks = 1,
    restore: Annotated[
        RestorePath,
        typer.Option(
            help="Option `restore` of the server. auto (default): L3 is read during the restore, "
            "if the server can do that; layerwise: before it."
        ),
    ] = "auto",
    codec: Annotated[PlannedCodec, typer.Option(help="Option `codec` of the server.")] = "auto",
    users: Annotated[
        int | None, typer.Option(min=1, help="Plan capacity for N conversations of --tokens each.")
    ] = None,
    turns_per_hour: Annotated[float, typer.Option(min=0.001, help="Turns of each of them.")] = 6.0,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a question and reply.")] = 500,
    replicas: Annotated[int, typer.Option(min=1, help="Servers of --tp GPUs and --ssds.")] = 1,
    as_json: common.AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the pipelines, as PNG.")] = None,
    apply: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Record this plan in the page store DIR: servers follow it from their next start. "
            "Pages stored by another plan become misses. The model must have been served from DIR "
            "before.",
        ),
    ] = None,
) -> None:
    """Plan which layers to store as hidden states, as KV, or not at all; predict restore times."""
    shape, dtype = common.served_model(model, tp)
    profile, is_preset = _find_hardware(hardware, ssds)
    extra = []
    if is_preset and dtype == "float32":
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
    fleet = None
    if users is not None:
        fleet = FleetPlan(result, Conversations(users, turns_per_hour, new_tokens), replicas)
    with common.explained():
        if plot is not None:
            _draw(result, plot)
        if apply is not None:
            _apply(apply, shape, result.stored)
    if as_json:
        report = result.report()
        report |= {"fleet": fleet.report()} if fleet is not None else {}
        common.print_json({**report, "notes": report["notes"] + extra})
    elif fleet is not None:
        _show_fleet(fleet, model)
    else:
        _show(result, model, extra)


def _apply(folder: Path, shape: ModelShape, partition: Partition) -> None:
    """Change the record of the model in a store folder, however its values are stored there."""

    def widths(of: ModelShape) -> tuple[int, ...]:
        heads = (of.heads, of.kv_heads, of.head_dim, of.value_dim)
        return (of.layers, of.hidden, of.mlp_width, *heads)

    found = [
        (name, record)
        for name, record in records(folder)
        if record.shape is not None and widths(record.shape) == widths(shape)
    ]
    if not found:
        fail(f"--apply {folder}: no server has used this model with it yet; start one first")
    update = {**asdict(partition), "reason": "hcache plan --apply"}
    for name, record in found:
        save_record(folder, name, record.model_copy(update=update), replace=True)


def _find_hardware(name: str, ssds: int | None) -> tuple[Profile, bool]:
    """The profile of ``--hardware``, and whether it is a preset."""
    if name in PRESETS:
        return preset_profile(name, ssds or 0), True
    if not Path(name).exists():
        hint = nearest(name, PRESETS, "the presets are ")
        fail(f"--hardware {name!r} is neither a preset nor a file; {hint}")
    with common.explained(ProfileError):
        profile = load_profile(Path(name))
    if ssds:
        fail(
            f"--ssds {ssds}: the profile {name} has its own measured L3; leave --ssds out, or give "
            "0 for pages that are in host memory"
        )
    return (profile if ssds is None else profile.model_copy(update={"l3": None})), False


def _machine(result: PartitionPlan) -> str:
    """The devices with their source, and where L3 is."""
    l3 = "pages in host memory"
    if result.profile.l3 is not None:
        way = "read first" if result.l3 == "first" else "overlapped"
        l3 = f"L3 at {result.profile.l3.per_second / 1e9:.1f} GB/s, {way}"
    return f"{_devices(result)} ({result.profile.source}), {l3}"


def _devices(result: PartitionPlan) -> str:
    return result.profile.device + (f" x {result.tp}" if result.tp > 1 else "")


def _show(result: PartitionPlan, path: Path, extra: list[str]) -> None:
    model = result.model
    say(
        f"{path}: {model.family}, {model.layers} layers, hidden size {model.hidden}, "
        f"{model.attention} ({model.heads} heads, {model.kv_heads} of KV)\n"
        f"{_machine(result)}, {result.tokens:,} tokens\n"
    )
    say(f"[bold]{describe(result.partition)}[/bold]\n")
    shown = table("", "", "bytes/token#", "of KV#", "restore, ms#", "slower, x#", "binds")
    for name in result.choices:
        size, seconds = result.bytes_per_token(name), result.seconds(name)
        shown.add_row(
            _TITLES[name],
            f"{size:,}",
            f"{size / (model.layers * model.kv_bytes):.2f}",
            f"{seconds * 1e3:,.1f}",
            "" if name == "mix" else f"{seconds / result.seconds('mix'):.2f}",
            result.binds(name),
        )
    say(shown)
    say("")
    for line in _pipelines(result):
        say(line)
    say(
        f"Bytes per token and layer: {model.hidden_bytes:,} as hidden states, "
        f"{model.kv_bytes:,} as KV.\n"
    )
    heads = ["restores of#", "recompute#", "take, ms#", "at best, ms#", "with R + H + K"]
    shown = table("", *heads, "from L3")
    for count in LENGTHS:
        at = result.at_length(count)
        shown.add_row(
            f"{count:,}",
            str(at.recompute_layers),
            f"{at.ms:,.1f}",
            f"{at.best_ms:,.1f}",
            " + ".join(map(str, at.best.values())),
            "refused" if at.refused else "read",
        )
    say(shown)
    for note in [*result.notes(), *extra]:
        say(f"- {note}")


def _pipelines(result: PartitionPlan) -> list[Text]:
    """The pipeline of the partition: one line per stream, time from left to right."""
    tasks = result.timeline("mix")
    total = max(task.end for task in tasks)
    streams = [name for name in ("l3", "transfer", "compute") if name in {t.stream for t in tasks}]
    lines = []
    for stream in streams:
        line = Text(f"{stream:>8} |")
        for column in range(_WIDTH):
            moment = (column + 0.5) / _WIDTH * total
            at = (t for t in tasks if t.stream == stream and t.start <= moment < t.end)
            task = next(at, None)
            line.append(*_LOOKS[task.method][1:3] if task else " ")
        lines.append(line.append("|"))
    legend = "R recompute, H hidden states, K KV" + ", L reading L3" * (len(lines) > 2)
    if result.recomputes_front:
        legend += ", with no front recomputed"
    return [*lines, Text(f"{'':>9} {legend}; {total * 1e3:,.1f} ms in all\n", style="dim")]


def _draw(plan: PartitionPlan, path: Path) -> None:
    """Write the pipelines of the partition and of every pure method as a PNG.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    streams = ["compute", "transfer"] + ["l3"] * (plan.l3 == "first")
    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(len(plan.choices), 1, height_ratios=(3, 2, 2, 2))
    longest = max(plan.seconds(name) for name in plan.choices)
    for axes, name in zip(panels, plan.choices, strict=True):
        # The partition alone fills its panel; the pure methods share one axis.
        end = 1e3 * (plan.seconds(name) if name == "mix" else longest)
        for task in plan.timeline(name):
            start, width = task.start * 1e3, (task.end - task.start) * 1e3
            row, colour = streams.index(task.stream), _LOOKS[task.method][3]
            axes.barh(row, width, 0.8, start, color=colour, edgecolor="white", linewidth=0.4)
            label = "all" if task.layer is None else str(task.layer)
            if width > _MIN_LABEL * end:
                axes.text(start + width / 2, row, label, ha="center", va="center", fontsize=9)
        axes.set_yticks(range(len(streams)), streams)
        axes.set_xlim(0, end)
        axes.set_ylim(-0.5, len(streams) - 0.5)
        heading = f"{_TITLES[name]}: {plan.seconds(name) * 1e3:,.1f} ms"
        axes.set_title(heading, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms")
    shown = list(_LOOKS.values())[: 4 if plan.l3 == "first" else 3]
    handles = [Patch(color=colour, label=label) for label, _, _, colour in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=10)
    figure.suptitle(
        f"Predicted: {plan.tokens:,} tokens are restored in {1e3 * plan.seconds('mix'):,.1f} ms\n"
        f"{plan.model.family}, {plan.model.layers} layers of {plan.model.hidden}, {_devices(plan)}",
        fontsize=12,
    )
    figure.savefig(path, dpi=130, format="png")


def _show_fleet(fleet: FleetPlan, path: Path) -> None:
    asked, replicas = fleet.conversations, fleet.replicas
    say(
        f"{path} on {_machine(fleet.plan)}\n{replicas:,} replica(s); {asked.number:,} "
        f"conversations of {fleet.plan.tokens:,} tokens, each with {asked.turns_per_hour:g} turns "
        f"of {asked.new_tokens:,} new tokens per hour\nComputed from mean rates, not measured.\n"
    )
    shown = table("", "", "each replica#", "all#", "")
    under_way = "for turns that are under way" if fleet.l2_bytes is not None else "turns pile up"
    sizes = {
        "L3": (fleet.l3_bytes / replicas, "every page once"),
        "L2, at least": (fleet.l2_bytes, under_way),
        "L3 is read": (fleet.read_rate, "per second"),
        "L3 is written": (fleet.write_rate, "per second"),
        "read from the shared L3": (fleet.network_rate, "per second, if turns go to any replica"),
    }
    for name, (each, what) in sizes.items():
        both = ("", "") if each is None else map(common.human_bytes, (each, each * replicas))
        shown.add_row(name, *both, what)
    say(shown)
    say("")
    shown = table("", "", "share of time#", "if all were computed#")
    for resource, name in _RESOURCES.items():
        computed = f"{fleet.recompute_busy:.2f}" if resource == "compute" else ""
        shown.add_row(name, f"{fleet.busy[resource]:.2f}", computed)
    say(shown)
    say(
        f"\nWith {fleet.most_conversations:,} conversations the {_RESOURCES[fleet.binds]} works "
        "all the time. New tokens count as prefill; to decode them takes longer."
    )
