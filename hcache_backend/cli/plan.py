"""``hcache plan``: which layers to restore by which method, for a model on a machine."""

from __future__ import annotations

from dataclasses import asdict, astuple
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from rich.text import Text

from hcache_backend.cli.common import (
    AsJson,
    explained,
    fail,
    print_json,
    screen,
    served_model,
    table,
)
from hcache_backend.cli.fleet import show_fleet
from hcache_backend.config import nearest
from hcache_backend.partition.costs import LayerMethod, Partition, describe
from hcache_backend.partition.encoded import PlannedCodec, encoded
from hcache_backend.partition.fleet import Conversations, FleetPlan
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.plan import (
    LENGTHS,
    PartitionPlan,
    RestorePath,
    server_plan,
)
from hcache_backend.partition.presets import PRESETS, preset_profile
from hcache_backend.partition.profile import Profile, ProfileError, load_profile
from hcache_backend.partition.record import records, save_record

_TITLES = {
    "mix": "this partition",
    "hidden": "hidden states",
    "kv": "KV offload",
    "recompute": "recompute",
}
_WIDTH = 64
_MIN_LABEL = 0.02  # of the picture's width; narrower bars have no number


class _Look(NamedTuple):
    """How the tasks of a method are drawn: in the terminal, and in the PNG."""

    label: str
    letter: str
    style: str
    colour: str


_LOOKS: dict[LayerMethod | None, _Look] = {  # None: reading L3 before the restore
    "recompute": _Look("recompute", "R", "magenta", "#b05fa8"),
    "hidden": _Look("hidden states", "H", "blue", "#2a7ab9"),
    "kv": _Look("KV", "K", "yellow", "#e8a33d"),
    None: _Look("L3", "L", "", "#9aa0a6"),
}
_IDLE = _Look("idle", " ", "", "white")


def plan(
    model: Annotated[Path, typer.Option("--model", "-m", help="A config.json, or its folder.")],
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
            "--ssds",
            min=0,
            help="SSDs of L3, 6.9 GB/s each as in the paper. 0: pages in host memory (default for "
            "presets). A profile has its own L3; 0 ignores it.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to restore.")] = 1024,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")] = 1,
    l3: Annotated[
        Literal["overlapped", "first"] | None,
        typer.Option(
            "--l3",
            help="Plan the paper's way, where recomputed layers are not stored. overlapped: L3 is "
            "read during the restore; first: before it (HiCache's prefetch).",
        ),
    ] = None,
    restore: Annotated[
        RestorePath | None,
        typer.Option(
            "--restore",
            help="Option `restore` of the server. auto (default): L3 is read during the restore, "
            "if the server can do that; layerwise: before it.",
        ),
    ] = None,
    codec: Annotated[
        PlannedCodec | None,
        typer.Option(
            "--codec",
            help="Option `codec` of the server. Default: auto; with --l3: none, as in the paper.",
        ),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            "--users",
            min=1,
            help="Plan capacity for N conversations of --tokens each.",
        ),
    ] = None,
    turns_per_hour: Annotated[
        float, typer.Option("--turns-per-hour", min=0.001, help="Turns of each conversation.")
    ] = 6.0,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=1, help="Tokens of a question and its reply.")
    ] = 500,
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, help="Servers, each with --tp GPUs and --ssds.")
    ] = 1,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write a picture of the pipelines, as PNG.")
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(
            "--apply",
            metavar="DIR",
            help="Record this plan in the page store DIR: servers follow it from their next start. "
            "Pages stored by another plan become misses. The model must have been served from DIR "
            "before.",
        ),
    ] = None,
) -> None:
    """Plan which layers to store as hidden states, as KV, or not at all; predict restore times."""
    shape, dtype = served_model(model, tp)
    profile, is_preset = _find_hardware(hardware, ssds)
    extra = []
    if is_preset and dtype == "float32":
        shape, dtype = shape.model_copy(update={"element_bytes": 2}), "float16"
        extra.append("float32 is planned as 16 bits: so SGLang serves it on a GPU")
    codec = codec or ("auto" if l3 is None else "none")
    plain, shape = shape, encoded(shape, codec, dtype, tp=tp)
    if shape != plain:
        extra.append(
            f"codec {codec}: {dtype} hidden states take {shape.hidden_bytes:,} of "
            f"{plain.hidden_bytes:,} bytes, K and V {shape.kv_bytes:,} of {plain.kv_bytes:,}"
        )
    elif codec not in ("auto", "none"):
        extra.append(f"codec {codec} does not apply to {dtype}; planned without it")
    if l3 is None:
        result = server_plan(profile, shape, tokens, tp, restore or "auto")
    elif restore is None:
        result = PartitionPlan(profile, shape, tokens, tp, l3)
    else:
        fail(f"--l3 {l3}: --restore {restore} says where L3 is; leave one of them out")
    fleet = None
    if users is not None:
        fleet = FleetPlan(result, Conversations(users, turns_per_hour, new_tokens), replicas)
    if plot is not None:
        with explained():
            _draw(result, plot)
    if apply is not None:
        _apply(apply, shape, result.stored)
    if as_json:
        report = result.report()
        report |= {"fleet": fleet.report()} if fleet is not None else {}
        print_json({**report, "notes": report["notes"] + extra})
    elif fleet is not None:
        machine = f"{_devices(result)} ({result.profile.source}), {_l3(result)}"
        show_fleet(fleet, f"{model} on {machine}")
    else:
        _show(result, model, extra)


def _apply(folder: Path, shape: ModelShape, partition: Partition) -> None:
    """Change the record of the model in a store folder."""
    found = [
        (name, record)
        for name, record in records(folder)
        if record.shape is not None and _dimensions(record.shape) == _dimensions(shape)
    ]
    if not found:
        fail(f"--apply {folder}: no server has used this model with it yet; start one first")
    for name, record in found:
        with explained():
            reason = {"reason": "hcache plan --apply"}
            changed = record.model_copy(update={**asdict(partition), **reason})
            save_record(folder, name, changed, replace=True)


def _dimensions(shape: ModelShape) -> tuple[int, ...]:
    """What tells models apart, however their values are stored."""
    widths = (shape.hidden, shape.mlp_width, shape.head_dim, shape.value_dim)
    return (shape.layers, shape.heads, shape.kv_heads, *widths)


def _find_hardware(name: str, ssds: int | None) -> tuple[Profile, bool]:
    """The profile that ``--hardware`` means, and whether it is a preset."""
    if name in PRESETS:
        return preset_profile(name, ssds or 0), True
    path = Path(name)
    if not path.exists():
        hint = nearest(name, PRESETS, "the presets are ")
        fail(f"--hardware {name!r} is neither a preset nor a file; {hint}")
    with explained(ProfileError):
        profile = load_profile(path)
    if ssds:
        fail(
            f"--ssds {ssds}: the profile {name} has its own measured L3; leave --ssds out, or give "
            "0 for pages that are in host memory"
        )
    return (profile if ssds is None else profile.model_copy(update={"l3": None})), False


def _show(result: PartitionPlan, path: Path, extra: list[str]) -> None:
    model = result.model
    screen.print(
        f"{path}: {model.family}, {model.layers} layers, hidden size {model.hidden}, "
        f"{model.attention} ({model.heads} heads, {model.kv_heads} of KV)\n"
        f"{_devices(result)} ({result.profile.source}), "
        f"{_l3(result)}, {result.tokens:,} tokens\n",
        highlight=False,
        soft_wrap=True,
    )
    screen.print(f"[bold]{describe(result.partition)}[/bold]", highlight=False)
    screen.print()
    shown = table("", "", "bytes/token#", "of KV#", "restore, ms#", "slower, x#", "binds")
    kv_bytes = model.layers * model.kv_bytes
    best = result.seconds("mix")
    for name in result.choices:
        size, seconds = result.bytes_per_token(name), result.seconds(name)
        shown.add_row(
            _TITLES[name],
            f"{size:,}",
            f"{size / kv_bytes:.2f}",
            f"{seconds * 1e3:,.1f}",
            "" if name == "mix" else f"{seconds / best:.2f}",
            result.binds(name),
        )
    screen.print(shown)
    screen.print()
    for line in _pipelines(result):
        screen.print(line, soft_wrap=True)
    screen.print(
        f"Bytes per token and layer: {model.hidden_bytes:,} as hidden states, "
        f"{model.kv_bytes:,} as KV.\n",
        highlight=False,
    )
    heads = ["", "restores of#", "recompute#", "take, ms#", "at best, ms#", "with R + H + K"]
    shown = table(*heads, *["from L3"] * (result.restore is not None))
    for count in LENGTHS:
        found = result.at_length(count)
        row = [
            f"{count:,}",
            str(found.recompute_layers),
            f"{found.seconds * 1e3:,.1f}",
            f"{found.best_seconds * 1e3:,.1f}",
            " + ".join(str(part) for part in astuple(found.best)),
        ]
        if result.restore is not None:
            row.append("refused" if found.refused else "read")
        shown.add_row(*row)
    screen.print(shown)
    for note in [*result.notes(), *extra]:
        screen.print(f"- {note}", highlight=False, soft_wrap=True)


def _devices(result: PartitionPlan) -> str:
    return result.profile.device + (f" x {result.tp}" if result.tp > 1 else "")


def _l3(result: PartitionPlan) -> str:
    if result.profile.l3 is None:
        return "pages in host memory"
    rate = result.profile.l3.per_second / 1e9
    return f"L3 at {rate:.1f} GB/s, {'read first' if result.l3 == 'first' else 'overlapped'}"


def _pipelines(result: PartitionPlan) -> list[Text]:
    """The pipeline of the partition: one line per stream, time from left to right."""
    tasks = result.timeline("mix")
    total = max(task.end for task in tasks)
    lines = []
    for stream in ("l3", "transfer", "compute"):
        mine = [task for task in tasks if task.stream == stream]
        if not mine:
            continue
        line = Text(f"{stream:>8} |")
        for column in range(_WIDTH):
            moment = (column + 0.5) / _WIDTH * total
            task = next((task for task in mine if task.start <= moment < task.end), None)
            look = _LOOKS[task.method] if task else _IDLE
            line.append(look.letter, look.style)
        line.append("|")
        lines.append(line)
    legend = "R recompute, H hidden states, K KV" + (", L reading L3" if len(lines) > 2 else "")
    if result.recomputes_front:
        legend += ", with no front recomputed"
    lines.append(Text(f"{'':>9} {legend}; {total * 1e3:,.1f} ms in all\n", style="dim"))
    return lines


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
            row, colour = streams.index(task.stream), _LOOKS[task.method].colour
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
    handles = [
        Patch(color=look.colour, label=look.label)
        for method, look in _LOOKS.items()
        if method is not None or plan.l3 == "first"
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=10)
    figure.suptitle(
        f"Predicted: {plan.tokens:,} tokens are restored in {1e3 * plan.seconds('mix'):,.1f} ms\n"
        f"{plan.model.family}, {plan.model.layers} layers of {plan.model.hidden}, {_devices(plan)}",
        fontsize=12,
    )
    figure.savefig(path, dpi=130, format="png")
