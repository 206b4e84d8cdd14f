"""The same histories and the same workload with every method, each with a server of its own.

Parts: restore (one history at a time, timed in the server), saving (time between tokens while
hidden states are saved), load (a workload at rates).

Methods: ideal (everything still on the device), recompute, file (SGLang's file L3), host (HiCache
without L3), hcache-hidden, hcache-kv, hcache (automatic); hcache-hidden-eager and hcache-eager
restore while L3 is being read. Only for restore: hybrid (KV and recomputation without hidden
states), nixl (NIXL's backend for local files), mooncake (Mooncake's store, in memory).

The random Llama has 8 layers and hidden size 1024; for load 4 and 512, and --scale is 0.2.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.compare import load, restore, saving
from bench.compare.pictures import PICTURES
from bench.compare.plan import has_shape
from bench.compare.report import markdown
from bench.compare.restore import METHODS_RESTORED, SETTINGS
from bench.harness.machine import find_machine
from bench.harness.methods import METHODS, PAGE_SIZE, SERVED
from bench.harness.models import TinyLlama
from bench.harness.program import add_model_options, at_least, failing, names, parser, stamp
from bench.harness.report import OUT, write_json, write_picture
from bench.multiturn.driver import PARALLEL, Pace
from bench.workload.options import add_workload_options, choose
from hcache_backend.cli.common import print_json, screen
from hcache_backend.partition.model_config import read_model

REFERENCE = TinyLlama(layers=8, hidden=1024, heads=8, kv_heads=8, intermediate=2816)
"""Large enough that restoring matters, small enough for two cores."""
SMALLER = TinyLlama(layers=4, hidden=512, heads=4, kv_heads=4, intermediate=1408)
"""For the part ``load``: many requests by every method."""
PARTS = ("restore", "saving", "load")


def options() -> argparse.ArgumentParser:
    """The options of the program."""
    made = parser("bench.compare", __doc__)
    add = made.add_argument
    add("--methods", type=names(tuple(METHODS)), default=",".join(METHODS), help="which methods")
    add("--part", choices=("all", *PARTS), default="all", help="which part")
    add_model_options(made)
    add("--rounds", type=at_least(1), default=5, help="restore, saving: how often each is timed")
    add("--scratch-dir", type=Path, help="disk for the L3 folders; default: that of TMPDIR")
    add(
        "--out",
        type=Path,
        default=OUT / "compare.json",
        help="the report; .md and pictures go beside it",
    )
    add("--json", dest="as_json", action="store_true", help="print JSON instead of tables")
    restored = made.add_argument_group("restore").add_argument
    restored(
        "--settings",
        type=names(SETTINGS),
        default=",".join(SETTINGS),
        help="disk (L3 as it is); with the CPU engine also balanced (a bus on which copying takes "
        "as long as projecting) and slow (an L3 of a third of that rate)",
    )
    restored(
        "--tokens",
        type=at_least(PAGE_SIZE),
        default=4096,
        help=f"tokens of the history, whole pages of {PAGE_SIZE}",
    )
    add_workload_options(made, "load: what is asked", "sharegpt4")
    made.set_defaults(num_clients=12, max_rounds=6)
    loaded = made.add_argument_group("load: servers, and when requests are sent").add_argument
    loaded("--rates", type=_rates, default="0.2,0.5,1", help="requests or sessions per second")
    loaded("--max-parallel", type=at_least(1), help="requests in flight at most")
    loaded(
        "--pool-tokens",
        type=at_least(256),
        help="tokens of the device's KV pool; default: an eighth of all histories",
    )
    loaded(
        "--host-ratio", type=float, default=1.25, help="host memory, as a multiple of that; above 1"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parsed = options()
    given = parsed.parse_args(arguments)
    parts = PARTS if given.part == "all" else (given.part,)
    for part, known in (("restore", METHODS_RESTORED), ("load", SERVED)):
        if part in parts and not set(given.methods) & set(known):
            parsed.error(f"--methods: part {part} knows none of them, but {', '.join(known)}")
    if given.tokens % PAGE_SIZE:
        whole = given.tokens // PAGE_SIZE * PAGE_SIZE
        parsed.error(f"--tokens {given.tokens}: must be whole pages of {PAGE_SIZE}, as {whole}")
    if not 1 < given.host_ratio < math.inf:
        parsed.error(
            f"--host-ratio {given.host_ratio:g}: must be above 1: HiCache wants more host than "
            "device"
        )
    if given.scale is None and given.model_path is None:
        given.scale = 0.2
    with failing():
        found = measure(given, parts)
        write_json(given.out, found)
        given.out.with_suffix(".md").write_text(markdown(found))
        for part in parts:
            write_picture(
                given.out.with_name(f"{given.out.stem}_{part}.png"), found, PICTURES[part]
            )
    if given.as_json:
        print_json(found)
    else:
        screen.print(markdown(found), markup=False, highlight=False, soft_wrap=True)
        screen.print(f"Report: {given.out}", markup=False, highlight=False, soft_wrap=True)
    return 0


def measure(given: argparse.Namespace, parts: Sequence[str]) -> dict[str, Any]:
    """Run the parts; returns the content of ``compare.json``.

    Raises:
        MachineError: SGLang cannot serve here.
        WorkloadError: There is no such workload.
        ServerError: A server did not start, or a request failed.
        UnusableServer: A server does not take the workload.
    """
    asked = choose(given)
    machine = find_machine()
    found: dict[str, Any] = {
        **stamp(machine),
        "model": _described(given.model_path, SMALLER if parts == ("load",) else REFERENCE),
        "methods": {name: METHODS[name].title for name in given.methods},
    }
    common = {
        "machine": machine,
        "vocabulary": given.vocabulary,
        "server_args": given.server_args,
        "seed": given.seed,
    }
    with TemporaryDirectory(prefix="hcache-compare-", dir=given.scratch_dir) as scratch:
        folders = {part: Path(scratch) / part for part in parts}

        @cache
        def model(shape: TinyLlama) -> str:
            return given.model_path or str(shape.build(Path(scratch)))

        if "restore" in parts:
            restores = restore.RestorePlan(
                **common,
                model=model(REFERENCE),
                methods=given.methods,
                tokens=given.tokens,
                rounds=given.rounds,
                settings=given.settings,
                folder=folders["restore"],
            )
            found["restore"] = restore.run(restores)
        if "saving" in parts:
            saves = saving.SavingPlan(
                **common, model=model(REFERENCE), rounds=given.rounds, folder=folders["saving"]
            )
            found["saving"] = saving.run(saves)
        if "load" in parts:
            most = given.max_parallel or asked.max_parallel or PARALLEL
            loads = load.LoadPlan(
                **common,
                model=model(SMALLER),
                methods=[name for name in given.methods if name in SERVED],
                workload=asked,
                rates=given.rates,
                pace=Pace(max_parallel=most, seed=given.seed),
                pool_tokens=given.pool_tokens,
                host_ratio=given.host_ratio,
                folder=folders["load"],
            )
            found["load"] = {
                "model": _described(given.model_path, SMALLER),
                **load.run(loads),
            }
    return found


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


def _rates(text: str) -> list[float]:
    """Type of an option: numbers above 0 with commas between them."""
    with suppress(ValueError):
        found = [float(rate) for rate in text.split(",")]
        if all(0 < rate < math.inf for rate in found):
            return found
    raise argparse.ArgumentTypeError(f"{text!r} must be numbers above 0, as 0.5,1,2")


if __name__ == "__main__":
    sys.exit(main())
