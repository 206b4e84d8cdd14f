"""``hcache profile``: measure this machine's rates for ``hcache plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import ByteSize
from typer import Option

from hcache_backend.cli import common
from hcache_backend.cli.common import Failure, errors, say, table
from hcache_backend.config import HCacheConfig
from hcache_backend.plan.disk import read_rate
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.profile import Profile, Rate

_TITLES = {
    "hidden_copy": "hidden states, host to device",
    "kv_load": "KV, host to pool",
    "projection": "projection to K and V",
    "dense": "forward pass without attention",
    "attention": "attention",
}


def profile(
    model: common.Model,
    out: Annotated[Path | None, Option("--out", "-o", help="Write the profile here.")] = None,
    folders: common.Folders = None,
    dirs: common.Dirs = None,
    seconds: Annotated[float, Option(min=0.01, max=600, help="For each part, about.")] = 2.0,
    as_json: common.AsJson = False,
) -> None:
    """Measure L3, the way to the device, projection and recomputation on this machine."""
    shape, _ = common.served_model(model)
    config = common.settings(folders, dirs)
    if out is not None and not out.absolute().parent.is_dir():
        raise Failure(f"--out {out}: there is no folder {out.absolute().parent}")
    measured = _measure(shape, config, seconds, hidden=as_json)
    if out is not None:
        measured.save(out)
    common.output(measured.model_dump(mode="json"), as_json, lambda _: _show(measured))
    if out is not None and not as_json:
        say(f"Written to {out}; use it with `hcache plan --model {model} --hardware {out}`.")


def _measure(shape: ModelShape, config: HCacheConfig, seconds: float, *, hidden: bool) -> Profile:
    # torch takes seconds to import, and the other commands do without it
    import torch

    from hcache_backend.plan.measure import OPERATIONS, Bench, measure

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if shape.element_bytes == 4 else torch.bfloat16
    with common.progress_bar(hidden=hidden) as progress:
        task = progress.add_task("L3 folders", total=2 + len(OPERATIONS))
        rate = read_rate(config, shape, seconds)
        if not rate.direct:
            say("L3 was read through the page cache: the disk itself may be slower", console=errors)

        def begin(operation: str) -> None:
            title = _TITLES.get(operation, "copies during products")
            progress.update(task, advance=1, description=title)

        try:
            bench = Bench(shape, device, dtype, seconds)
            return measure(bench, Rate(per_second=rate.per_second), config.dirs, begin=begin)
        except torch.OutOfMemoryError:
            hint = "stop what else uses it, try again"
            raise Failure(f"the device has no room for one layer; {hint}") from None


def _show(measured: Profile) -> None:
    say(f"{measured.device}, {measured.dtype}, {measured.date}\n")
    shown = table("", "one layer", "rate#", "fixed, us#", "tokens#", "ms#")
    if measured.l3 is not None:
        shown.add_row("L3, all folders", _rate(measured.l3.per_second, "B/s"))
    for name, title in _TITLES.items():
        rate: Rate = getattr(measured, name)
        speed = _rate(rate.per_second, "B/s" if name in ("hidden_copy", "kv_load") else "FLOP/s")
        tokens, seconds = max(measured.points[name])
        fixed = f"{rate.seconds * 1e6:,.0f}"
        shown.add_row(title, speed, fixed, f"{tokens:,}", f"{seconds * 1e3:,.2f}")
    say(shown)
    if not measured.copies:
        say("Copies were measured alone, not during matrix products as on GPUs.")
        return
    ways = table("", "copies", "alone#", "during products#", "products keep#")
    for way in measured.copies:
        used = " (used)" if way is measured.copies[0] else ""
        speeds = _rate(way.alone, "B/s"), _rate(way.beside, "B/s"), f"{way.products:.0%}"
        ways.add_row(way.name + used, *speeds)
    say(ways)


def _rate(value: float, unit: str) -> str:
    """A rate as people read it, in powers of 1,000."""
    return ByteSize(value).human_readable(decimal=True, separator=" ")[:-1] + unit
