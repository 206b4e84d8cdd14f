"""``hcache bench compare``: the same histories and the same workload, method by method."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.progress import Progress

from hcache_backend.benchmark.driver import Pace
from hcache_backend.cli import (
    compare_estimate,
    compare_load,
    compare_restore,
    compare_saving,
)
from hcache_backend.cli.bench_multiturn import PARALLEL, failing, load_tokenizer
from hcache_backend.cli.bench_server import METHODS, unwind_when_terminated
from hcache_backend.cli.bench_workloads import WorkloadOptions, choose
from hcache_backend.cli.common import errors, explained, print_json, progress_bar, screen
from hcache_backend.cli.compare_pictures import draw
from hcache_backend.cli.compare_plan import has_shape
from hcache_backend.cli.compare_report import markdown
from hcache_backend.cli.machine import Machine, find_machine
from hcache_backend.cli.tiny_model import TinyLlama, build
from hcache_backend.partition.model_config import read_model

REFERENCE = TinyLlama(layers=8, hidden=1024, heads=8, kv_heads=8, intermediate=2816)
"""Large enough that restoring matters, small enough for two cores."""
SMALLER = TinyLlama(layers=4, hidden=512, heads=4, kv_heads=4, intermediate=1408)
"""For the part ``load``: many requests by every method."""


class Comparison(NamedTuple):
    """The options of the command.

    Attributes:
        model: None: the reference models with random weights.
        methods: Those of parts ``restore`` and ``load``; some are known in one of them only.
        parts: Of ``restore``, ``saving`` and ``load``.
        settings: Of restores.
        tokens: Of the history that is restored.
        rounds: How often anything is timed that is timed by itself.
        scratch: Where L3 folders are while it runs; None: the system's place for such.
    """

    model: str | None
    methods: Sequence[str]
    parts: Sequence[str]
    settings: Sequence[str]
    tokens: int
    rounds: int
    workload: WorkloadOptions
    rates: Sequence[float]
    max_parallel: int | None
    pool_tokens: int | None
    host_ratio: float
    vocabulary: int
    server_args: Sequence[str]
    scratch: Path | None
    out: Path
    as_json: bool


def report_comparison(asked: Comparison) -> None:
    """Run, write the files, print the tables."""
    with failing(), explained():
        options = dataclasses.replace(asked.workload, tokenizer=lambda: load_tokenizer(asked.model))
        workload = choose(options)
        unwind_when_terminated()
        machine = find_machine()
        with TemporaryDirectory(prefix="hcache-compare-", dir=asked.scratch) as scratch:
            found = _about(asked, machine)

            @cache
            def model(shape: TinyLlama) -> str:
                return asked.model or str(build(shape, Path(scratch) / f"{shape.layers}-layers"))

            for part, run in (("restore", _restore), ("saving", _saving)):
                if part in asked.parts:
                    found[part] = run(asked, machine, model(REFERENCE), Path(scratch) / part)
            if "load" in asked.parts:
                plan = compare_load.LoadPlan(
                    machine=machine,
                    model=model(SMALLER),
                    workload=workload,
                    rates=asked.rates,
                    pace=Pace(
                        max_parallel=asked.max_parallel or workload.max_parallel or PARALLEL,
                        seed=asked.workload.seed,
                    ),
                    vocabulary=asked.vocabulary,
                    pool_tokens=asked.pool_tokens,
                    host_ratio=asked.host_ratio,
                    server_args=asked.server_args,
                    folder=Path(scratch) / "load",
                )
                described = _described(asked.model, SMALLER)
                found["load"] = {"model": described, **_load(plan, asked.methods)}
    with explained():
        _write(found, asked.out)
    if asked.as_json:
        print_json(found)
    else:
        screen.print(markdown(found), markup=False, highlight=False, soft_wrap=True)
        screen.print(f"Report: {asked.out}", markup=False, highlight=False, soft_wrap=True)


def _restore(asked: Comparison, machine: Machine, model: str, folder: Path) -> dict[str, Any]:
    methods = [name for name in compare_restore.METHODS_RESTORED if name in asked.methods]
    plan = compare_restore.RestorePlan(
        machine=machine,
        model=model,
        tokens=asked.tokens,
        rounds=asked.rounds,
        settings=asked.settings,
        vocabulary=asked.vocabulary,
        server_args=asked.server_args,
        folder=folder,
        seed=asked.workload.seed,
    )
    profile = compare_restore.find_profile(plan, methods)
    served = list(compare_restore.servers(plan, methods))
    about = f"restore: {len(served)} servers"
    if profile is not None:
        took = compare_estimate.seconds(plan, served, profile, plan.shape())
        about += f", about {math.ceil(took / 60)} minutes"
    errors.print(about, highlight=False)
    with _steps(compare_restore.steps(plan, methods)) as (_, advance):
        found = compare_restore.restore_all(plan, methods, profile, advance)
    return compare_restore.report(found, plan)


def _saving(asked: Comparison, machine: Machine, model: str, folder: Path) -> dict[str, Any]:
    plan = compare_saving.SavingPlan(
        machine=machine,
        model=model,
        rounds=asked.rounds,
        vocabulary=asked.vocabulary,
        server_args=asked.server_args,
        folder=folder,
        seed=asked.workload.seed,
    )
    with _steps(compare_saving.steps(plan)) as (_, advance):
        return compare_saving.save_all(plan, advance)


def _load(plan: compare_load.LoadPlan, asked: Sequence[str]) -> dict[str, Any]:
    methods = [name for name in asked if name in METHODS]
    with _steps(len(methods)) as (bar, advance):
        return compare_load.load_all(plan, methods, bar, advance)


@contextmanager
def _steps(total: int) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """A progress bar, and what to call with the name of each next step."""
    with progress_bar(hidden=False) as bar:
        task = bar.add_task("", total=total, completed=-1)  # the first step has only begun

        def advance(step: str) -> None:
            bar.update(task, advance=1, description=step)

        yield bar, advance


def _about(asked: Comparison, machine: Machine) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.name,
        "device_type": machine.device,
        "sglang_version": machine.sglang,
        "model": _described(asked.model, REFERENCE if asked.parts != ("load",) else SMALLER),
        "methods": {name: compare_restore.title(name) for name in asked.methods},
    }


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


def _write(found: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(_finite(found), indent=2) + "\n")
    out.with_suffix(".md").write_text(markdown(found))
    try:
        draw(found, out.with_suffix(""))
    except ImportError:
        errors.print("no pictures were drawn: pip install matplotlib")


def _finite(value: Any) -> Any:
    """``value`` as JSON can hold it."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
