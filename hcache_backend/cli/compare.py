"""``hcache bench compare``: its options."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from hcache_backend.cli.bench_server import (
    HYBRID,
    METHODS,
    PAGE_SIZE,
    check_model,
    need_aiohttp,
)
from hcache_backend.cli.bench_workloads import VOCABULARY, Name, WorkloadOptions
from hcache_backend.cli.common import AsJson, fail
from hcache_backend.cli.compare_restore import METHODS_RESTORED, SETTINGS


def compare(
    methods: Annotated[
        str, typer.Option(help="Which, with commas between them. Default: all.")
    ] = ",".join((*METHODS, HYBRID)),
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
        str, typer.Option(help="load: requests or sessions a second, with commas between them.")
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
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, tokens and times.")] = 1,
    scratch_dir: Annotated[
        Path | None,
        typer.Option(help="Disk for the L3 folders, which are removed. Default: that of TMPDIR."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The report; .md and pictures go beside it.")] = Path(
        "bench"
    )
    / "results"
    / "compare.json",
    as_json: AsJson = False,
) -> None:
    """The same histories and the same workload with every method, each with a server of its own.

    Methods: ideal (everything still on the device), recompute, file (SGLang's file L3), host
    (HiCache without L3), hcache-hidden, hcache-kv, hcache (automatic); hcache-hidden-eager and
    hcache-eager restore while L3 is being read; hybrid (restore only): KV and recomputation without
    hidden states.
    """
    chosen = _names("--methods", methods, (*METHODS, HYBRID))
    tried = _names("--settings", settings, SETTINGS)
    for name, known in (("restore", METHODS_RESTORED), ("load", tuple(METHODS))):
        if part in ("all", name) and not set(chosen) & set(known):
            fail(f"--methods {methods}: part {name} knows none of them, but {', '.join(known)}")
    if tokens % PAGE_SIZE:
        whole = tokens // PAGE_SIZE * PAGE_SIZE
        fail(f"--tokens {tokens}: must be whole pages of {PAGE_SIZE}, as {whole}")
    if not 1 < host_ratio < math.inf:
        fail(f"--host-ratio {host_ratio:g}: must be above 1: HiCache wants more host than device")
    small = 0.2 if model_path is None else 1.0
    check_model(model_path)
    need_aiohttp()
    from hcache_backend.cli import bench_compare

    bench_compare.report_comparison(
        bench_compare.Comparison(
            model=model_path,
            methods=chosen,
            parts=("restore", "saving", "load") if part == "all" else (part,),
            settings=tried,
            tokens=tokens,
            rounds=rounds,
            workload=WorkloadOptions(
                workload="sharegpt" if sharegpt else workload,
                num_clients=num_clients,
                seed=seed,
                max_rounds=max_rounds,
                sharegpt=sharegpt,
                interval=interval,
                scale=small if scale is None else scale,
                max_context=max_context,
            ),
            rates=_numbers(rates),
            max_parallel=max_parallel,
            pool_tokens=pool_tokens,
            host_ratio=host_ratio,
            vocabulary=vocabulary,
            server_args=shlex.split(server_args),
            scratch=scratch_dir,
            out=out,
            as_json=as_json,
        )
    )


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    found = [name.strip() for name in text.split(",")]
    for name in found:
        if name not in known:
            fail(f"{option} {name!r}: must be of {', '.join(known)}")
    return list(dict.fromkeys(found))


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
