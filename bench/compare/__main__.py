"""``python -m bench.compare``: the same histories and the same workload, method by method."""

from __future__ import annotations

import math
import shlex
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from bench.compare import load, restore, saving
from bench.compare.pictures import draw
from bench.compare.plan import has_shape
from bench.compare.report import markdown
from bench.compare.restore import METHODS_RESTORED, SETTINGS
from bench.harness.machine import find_machine
from bench.harness.methods import METHODS, PAGE_SIZE, SERVED, check_model, chosen
from bench.harness.models import TinyLlama
from bench.harness.program import VOCABULARY, failing, stamp, steps
from bench.harness.report import OUT, write_json
from bench.harness.server import unwind_when_terminated
from bench.multiturn.driver import PARALLEL, Pace
from bench.workload.options import Name, WorkloadOptions, choose
from hcache_backend.cli.common import AsJson, errors, fail, print_json, screen
from hcache_backend.partition.model_config import read_model

REFERENCE = TinyLlama(layers=8, hidden=1024, heads=8, kv_heads=8, intermediate=2816)
"""Large enough that restoring matters, small enough for two cores."""
SMALLER = TinyLlama(layers=4, hidden=512, heads=4, kv_heads=4, intermediate=1408)
"""For the part ``load``: many requests by every method."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    methods: Annotated[
        str, typer.Option(help="Methods, with commas between them. Default: all.")
    ] = ",".join(METHODS),
    part: Annotated[
        Literal["all", "restore", "saving", "load"],
        typer.Option(
            help="restore: one history at a time, timed in the server; saving: time between tokens "
            "while hidden states are saved; load: a workload at rates."
        ),
    ] = "all",
    settings: Annotated[
        str,
        typer.Option(
            help="restore: disk (L3 as it is); with the CPU engine also balanced (a bus on which "
            "copying takes as long as projecting) and slow (an L3 of a third of that rate)."
        ),
    ] = ",".join(SETTINGS),
    model_path: Annotated[
        str | None,
        typer.Option(
            help="Model. Default: a random Llama with 8 layers, hidden size 1024; load: 4 and 512."
        ),
    ] = None,
    server_args: Annotated[
        str, typer.Option(help="More arguments of every server, as --load-format dummy.")
    ] = "",
    tokens: Annotated[
        int, typer.Option(min=64, help="restore: tokens of the history, whole pages of 64.")
    ] = 4096,
    rounds: Annotated[
        int, typer.Option(min=1, help="restore and saving: how often each is timed.")
    ] = 5,
    workload: Annotated[Name, typer.Option(help="load: what is asked.")] = "sharegpt4",
    num_clients: Annotated[int, typer.Option(min=1, help="load: sessions.")] = 12,
    max_rounds: Annotated[
        int | None, typer.Option(min=1, help="load: rounds of a session, at most.")
    ] = 6,
    scale: Annotated[
        float | None,
        typer.Option(
            help="load: multiplies lengths and intervals. Default: 1; with the random Llama 0.2."
        ),
    ] = None,
    interval: Annotated[
        float | None, typer.Option(min=0, help="load: seconds between rounds of a session.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(min=1, help="load: tokens of a history.")
    ] = None,
    rates: Annotated[
        str, typer.Option(help="load: requests or sessions per second, with commas between them.")
    ] = "0.2,0.5,1",
    max_parallel: Annotated[
        int | None, typer.Option(min=1, help="load: requests in flight at most.")
    ] = None,
    pool_tokens: Annotated[
        int | None,
        typer.Option(
            min=256,
            help="load: tokens of the device's KV pool. Default: an eighth of all histories.",
        ),
    ] = None,
    host_ratio: Annotated[
        float, typer.Option(help="load: host memory, as a multiple of that; above 1.")
    ] = 1.25,
    sharegpt: Annotated[
        Path | None, typer.Option(help="load: JSON file of conversations (sharegpt).")
    ] = None,
    vocabulary: Annotated[int, typer.Option(min=2, help="Random ids are below it.")] = VOCABULARY,
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths, tokens and times.")] = 1,
    scratch_dir: Annotated[
        Path | None,
        typer.Option(help="Disk for the L3 folders, which are removed. Default: that of TMPDIR."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The report; .md and pictures go beside it.")] = OUT
    / "compare.json",
    as_json: AsJson = False,
) -> None:
    """The same histories and the same workload with every method, each with a server of its own.

    Methods: ideal (everything still on the device), recompute, file (SGLang's file L3), host
    (HiCache without L3), hcache-hidden, hcache-kv, hcache (automatic); hcache-hidden-eager and
    hcache-eager restore while L3 is being read; hybrid (restore only): KV and recomputation without
    hidden states.
    """
    wanted = chosen("--methods", methods, tuple(METHODS))
    tried = chosen("--settings", settings, SETTINGS)
    for name, known in (("restore", METHODS_RESTORED), ("load", SERVED)):
        if part in ("all", name) and not set(wanted) & set(known):
            fail(f"--methods {methods}: part {name} knows none of them, but {', '.join(known)}")
    if tokens % PAGE_SIZE:
        whole = tokens // PAGE_SIZE * PAGE_SIZE
        fail(f"--tokens {tokens}: must be whole pages of {PAGE_SIZE}, as {whole}")
    if not 1 < host_ratio < math.inf:
        fail(f"--host-ratio {host_ratio:g}: must be above 1: HiCache wants more host than device")
    check_model(model_path)
    rates_asked = _numbers(rates)
    parts = ("restore", "saving", "load") if part == "all" else (part,)
    extra_args = shlex.split(server_args)
    with failing():
        asked = choose(
            WorkloadOptions(
                workload="sharegpt" if sharegpt else workload,
                num_clients=num_clients,
                seed=seed,
                max_rounds=max_rounds,
                sharegpt=sharegpt,
                interval=interval,
                scale=scale or (0.2 if model_path is None else 1.0),
                max_context=max_context,
                model=model_path,
            )
        )
        unwind_when_terminated()
        machine = find_machine()
        found = {
            **stamp(machine),
            "model": _described(model_path, SMALLER if parts == ("load",) else REFERENCE),
            "methods": {name: METHODS[name].title for name in wanted},
        }
        with TemporaryDirectory(prefix="hcache-compare-", dir=scratch_dir) as name:
            scratch = Path(name)

            @cache
            def model(shape: TinyLlama) -> str:
                return model_path or str(shape.build(scratch))

            if "restore" in parts:
                restores = restore.RestorePlan(
                    machine=machine,
                    model=model(REFERENCE),
                    tokens=tokens,
                    rounds=rounds,
                    settings=tried,
                    vocabulary=vocabulary,
                    server_args=extra_args,
                    folder=scratch / "restore",
                    seed=seed,
                )
                methods_restored = [name for name in METHODS_RESTORED if name in wanted]
                profile = restore.find_profile(restores, methods_restored)
                with steps(restore.steps(restores, methods_restored)) as (_, advance):
                    rows = restore.restore_all(restores, methods_restored, profile, advance)
                found["restore"] = restore.report(rows, restores)
            if "saving" in parts:
                saves = saving.SavingPlan(
                    machine=machine,
                    model=model(REFERENCE),
                    rounds=rounds,
                    vocabulary=vocabulary,
                    server_args=extra_args,
                    folder=scratch / "saving",
                    seed=seed,
                )
                with steps(saving.steps(saves)) as (_, advance):
                    found["saving"] = saving.save_all(saves, advance)
            if "load" in parts:
                loads = load.LoadPlan(
                    machine=machine,
                    model=model(SMALLER),
                    workload=asked,
                    rates=rates_asked,
                    pace=Pace(
                        max_parallel=max_parallel or asked.max_parallel or PARALLEL, seed=seed
                    ),
                    vocabulary=vocabulary,
                    pool_tokens=pool_tokens,
                    host_ratio=host_ratio,
                    server_args=extra_args,
                    folder=scratch / "load",
                )
                served = [name for name in wanted if name in SERVED]
                with steps(len(served)) as (bar, advance):
                    loaded = load.load_all(loads, served, bar, advance)
                found["load"] = {"model": _described(model_path, SMALLER), **loaded}
        write_json(out, found)
        out.with_suffix(".md").write_text(markdown(found))
        try:
            draw(found, out.with_suffix(""))
        except ImportError:
            errors.print("No pictures were drawn: matplotlib is not installed.")
    if as_json:
        print_json(found)
    else:
        screen.print(markdown(found), markup=False, highlight=False, soft_wrap=True)
        screen.print(f"Report: {out}", markup=False, highlight=False, soft_wrap=True)


def _described(model: str | None, shape: TinyLlama) -> str:
    """The model in a line: a folder by its own name and its shape; None: one of our own."""
    if model is None:
        name = "random Llama"
        return f"{name}, {shape.layers} layers, hidden size {shape.hidden}, {shape.heads} heads"
    if not has_shape(model):
        return model
    name, found = Path(model).resolve().name, read_model(Path(model))
    return (
        f"{name} ({found.family}, {found.layers} layers, hidden size {found.hidden}, "
        f"{found.heads} heads)"
    )


def _numbers(rates: str) -> list[float]:
    found = []
    for text in rates.split(","):
        try:
            rate = float(text)
        except ValueError:
            rate = 0.0
        if not 0 < rate < math.inf:
            fail(f"--rates {text.strip()!r}: must be numbers above 0, as 0.5,1,2")
        found.append(rate)
    return found


if __name__ == "__main__":
    app()
