"""``hcache plan``: which layer should come back how, for a model on a machine."""

from __future__ import annotations

import difflib
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from hcache_backend.cli import plan_picture
from hcache_backend.cli.common import AsJson, explained, fail, print_json, screen, table
from hcache_backend.partition.model_config import ModelConfigError, read_model
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.plan import LENGTHS, Plan, RestorePath, describe
from hcache_backend.partition.presets import PRESETS, preset_profile
from hcache_backend.partition.profile import Profile, ProfileError, load_profile

TITLES = {
    "mix": "this partition",
    "hidden": "hidden states",
    "kv": "KV offload",
    "recompute": "recompute",
}
_LETTERS = {
    "recompute": ("R", "magenta"),
    "hidden": ("H", "blue"),
    "kv": ("K", "yellow"),
    None: ("L", ""),
}
_WIDTH = 64


def plan(
    model: Annotated[Path, typer.Option("--model", "-m", help="A config.json, or its folder.")],
    hardware: Annotated[
        str,
        typer.Option(
            "--hardware", "-w", help=f"{', '.join(PRESETS)}, or a file of hcache profile."
        ),
    ],
    ssds: Annotated[
        int | None,
        typer.Option(
            "--ssds",
            min=0,
            help="SSDs of L3 (6.9 GB/s each, as in the paper); 0: host memory, the default of a "
            "preset. A profile has its own L3; 0 leaves it out.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of a restore.")] = 1024,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")] = 1,
    l3: Annotated[
        Literal["overlapped", "first"] | None,
        typer.Option(
            "--l3",
            help="overlapped: L3 is read while layers are restored (the paper, the default); "
            "first: before (HiCache's prefetch).",
        ),
    ] = None,
    restore: Annotated[
        RestorePath | None,
        typer.Option(
            "--restore",
            help="Instead of --l3, as a server with this option restore plans. layerwise: L3 is "
            "read first; eager: meanwhile.",
        ),
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write a picture of the pipelines, as PNG.")
    ] = None,
) -> None:
    """Which layers to store as hidden states, as KV, or not at all, and how fast that restores."""
    try:
        shape = read_model(model)
    except ModelConfigError as error:
        fail(str(error))
    _check_ranks(shape, tp)
    profile, is_preset = _find_hardware(hardware, ssds)
    halved = is_preset and shape.element_bytes == 4
    if halved:
        shape = shape.model_copy(update={"element_bytes": 2})
    if l3 is not None and restore is not None:
        fail(f"--l3 {l3}: --restore {restore} says where L3 is; leave one of them out")
    if restore is not None:
        l3 = "overlapped" if restore == "eager" else "first"
    result = Plan(profile, shape, tokens, tp, l3 or "overlapped", restore)
    extra = ["float32 is planned as 16 bits: so SGLang serves it on a GPU"] if halved else []
    if plot is not None:
        try:
            with explained():
                plan_picture.draw(result, TITLES, plot)
        except ImportError:
            fail("--plot needs matplotlib: pip install matplotlib")
    if as_json:
        report = result.report()
        print_json({**report, "notes": report["notes"] + extra})
    else:
        _show(result, model, extra)


def _find_hardware(name: str, ssds: int | None) -> tuple[Profile, bool]:
    """The profile that ``--hardware`` means, and whether it is a preset."""
    if name in PRESETS:
        return preset_profile(name, ssds or 0), True
    path = Path(name)
    if not path.exists():
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the presets are {', '.join(PRESETS)}"
        fail(f"--hardware {name!r} is neither a preset nor a file; {hint}")
    try:
        profile = load_profile(path)
    except ProfileError as error:
        fail(str(error))
    if ssds:
        fail(
            f"--ssds {ssds}: the profile {name} has its own measured L3; leave --ssds out, or give "
            "0 for pages that are in host memory"
        )
    return (profile if ssds is None else profile.model_copy(update={"l3": None})), False


def _check_ranks(shape: ModelShape, tp: int) -> None:
    if shape.heads % tp:
        fail(f"--tp {tp}: must divide the model's {shape.heads} attention heads")
    if not shape.latent and shape.kv_heads % tp and tp % shape.kv_heads:
        fail(f"--tp {tp}: must divide the model's {shape.kv_heads} KV heads, or be a multiple")


def _show(result: Plan, path: Path, extra: list[str]) -> None:
    model, profile = result.model, result.profile
    screen.print(
        f"{path}: {model.family}, {model.layers} layers, hidden size {model.hidden}, "
        f"{model.attention} ({model.heads} heads, {model.kv_heads} of KV)\n"
        f"{profile.device}{f' x {result.tp}' if result.tp > 1 else ''} ({profile.source}), "
        f"{_l3(result)}, {result.tokens:,} tokens\n",
        highlight=False,
        soft_wrap=True,
    )
    screen.print(f"[bold]{describe(result.partition)}[/bold]", highlight=False)
    closed = result.closed_form
    if closed:
        screen.print(f"(the paper's closed form: {describe(closed)})", highlight=False)
    screen.print()
    shown = table("", "", "bytes a token#", "of KV#", "restore, ms#", "slower, x#", "binds")
    kv_bytes = model.layers * model.kv_bytes
    best = result.seconds("mix")
    for name, partition in result.choices.items():
        size, seconds = partition.bytes_per_token(model), result.seconds(name)
        shown.add_row(
            TITLES[name],
            f"{size:,}",
            f"{size / kv_bytes:.2f}",
            f"{seconds * 1e3:,.1f}",
            "" if name == "mix" else f"{seconds / best:.2f}",
            result.binds(name),
        )
    screen.print(shown)
    screen.print()
    for line in picture(result):
        screen.print(line, soft_wrap=True)
    screen.print(
        f"A token and layer takes {model.hidden_bytes:,} bytes as hidden states, "
        f"{model.kv_bytes:,} as KV.\n",
        highlight=False,
    )
    shown = table("", "restores of#", "recompute#", "take, ms#", "at best, ms#", "with R + H + K")
    for count in LENGTHS:
        found = result.at_length(count)
        shown.add_row(
            f"{count:,}",
            str(found.recompute_layers),
            f"{found.seconds * 1e3:,.1f}",
            f"{found.best_seconds * 1e3:,.1f}",
            " + ".join(str(part) for part in astuple(found.best)),
        )
    screen.print(shown)
    for note in [*result.notes(), *extra]:
        screen.print(f"- {note}", highlight=False, soft_wrap=True)


def _l3(result: Plan) -> str:
    if result.profile.l3 is None:
        return "pages in host memory"
    rate = result.profile.l3.per_second / 1e9
    return f"L3 at {rate:.1f} GB/s, {'read first' if result.l3 == 'first' else 'overlapped'}"


def picture(result: Plan) -> list[Text]:
    """The pipeline of the partition, a line for every stream, a column for a share of the time."""
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
            letter, style = _LETTERS[task.method] if task else (" ", "")
            line.append(letter, style)
        line.append("|")
        lines.append(line)
    legend = "R recompute, H hidden states, K KV" + (", L reading L3" if len(lines) > 2 else "")
    lines.append(Text(f"{'':>9} {legend}; {total * 1e3:,.1f} ms in all\n", style="dim"))
    return lines
