"""The demo's second table: hidden states with every codec, in the type that models are served in.

The first table's models are float32, where all agree to the token. ``exp4`` is for bfloat16, so the
codecs are compared in that type, over short conversations whose caches are flushed between
turns, with a server without a cache and with exact hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from bench.demo.conversations import MethodRun, Script, run_method, steps
from bench.harness.machine import Machine
from bench.harness.methods import PAGE_SIZE
from bench.harness.models import TinyLlama
from bench.harness.reference import reference_of

REFERENCE, OURS = "recompute", "hcache-hidden"
EXACT = "none"
LOSSLESS = "exp4"
CODECS = (EXACT, LOSSLESS, "int8", "fp8")
DTYPE = "bfloat16"


def codec_steps(script: Script) -> int:
    """How often :func:`run_codecs` calls ``advance``."""
    return (1 + len(CODECS)) * steps(script)


def run_codecs(
    script: Script, model: Path, machine: Machine, scratch: Path, advance: Callable[[str], None]
) -> dict[str, MethodRun]:
    """A server without a cache (:data:`REFERENCE`), then one for each codec.

    Raises:
        ServerError: A server did not start, or a request failed.
    """
    folder = scratch / "codec-reference"
    runs = {REFERENCE: run_method(REFERENCE, script, model, machine, folder, advance, DTYPE)}
    for codec in CODECS:
        folder = scratch / f"codec-{codec}"
        runs[codec] = run_method(OURS, script, model, machine, folder, advance, DTYPE, codec)
    return runs


def codec_report(runs: Mapping[str, MethodRun], shape: TinyLlama) -> dict[str, Any]:
    """What ``demo.json`` says about the codecs."""
    return {
        "dtype": DTYPE,
        "problems": codec_problems(runs),
        "codecs": {name: _entry(name, runs, shape) for name in CODECS},
    }


def codec_problems(runs: Mapping[str, MethodRun]) -> list[str]:
    """What went wrong, one line each: history that was not restored, another token with exp4."""
    found = []
    for name in CODECS:
        found += not_restored(name, runs[name])
    same, total = _same_tokens(LOSSLESS, runs, EXACT)
    if same < total:
        found.append(
            f"codec {LOSSLESS}: {total - same} of {total} tokens differ, and it is lossless"
        )
    return found


def not_restored(codec: str, run: MethodRun) -> list[str]:
    """History that did not come back from pages with the codec, one line each."""
    found = [f"codec {codec}, {line}" for line in missing_history(run, PAGE_SIZE)]
    if f"codec {codec}" not in run.note:
        found.append(f"codec {codec}: the server says {run.note!r}")
    return found


def missing_history(run: MethodRun, page_size: int) -> list[str]:
    """Turns whose history did not come back from L3, one line each."""
    found = []
    for turn in run.turns:
        where = f"conversation {turn.conversation}, turn {turn.turn}"
        if turn.turn > 0 and turn.l3_tokens < turn.history_tokens - page_size:
            found.append(
                f"{where}: {turn.l3_tokens} of {turn.history_tokens} history tokens came from L3"
            )
        elif turn.turn > 0 and turn.restore is None:
            found.append(f"{where}: the trace shows no restore")
    return found


def _entry(codec: str, runs: Mapping[str, MethodRun], shape: TinyLlama) -> dict[str, Any]:
    run = runs[codec]
    stored = run.stored_bytes / run.stored_tokens if run.stored_tokens else 0.0
    same, total = _same_tokens(codec, runs, REFERENCE)
    return {
        "stored_bytes_per_token": stored,
        "share_of_kv": round(stored / (shape.kv_bytes_per_token / 2), 4),
        "l3_tokens": sum(turn.l3_tokens for turn in run.turns),
        "as_recomputed": same,
        "as_uncoded": None if codec == EXACT else _same_tokens(codec, runs, EXACT)[0],
        "reply_tokens": total,
    }


def _same_tokens(codec: str, runs: Mapping[str, MethodRun], reference: str) -> tuple[int, int]:
    """Reply tokens up to the first that differs, and all of them; behind that, texts differ."""
    same = total = 0
    exact = reference_of(codec, runs[codec], runs[reference])
    for turn, wanted in zip(runs[codec].turns, exact.turns, strict=True):
        pairs = list(zip(turn.output_ids, wanted.output_ids, strict=True))
        differences = (i for i, (got, want) in enumerate(pairs) if got != want)
        same += next(differences, len(pairs))
        total += len(pairs)
    return same, total


def codec_table(report: Mapping[str, Any]) -> Table:
    """The codecs, for a terminal of 80 columns."""
    view = Table(
        box=box.SIMPLE_HEAD,
        title=f"HCache with each codec, the same model in {report['dtype']}",
        title_justify="left",
    )
    view.add_column("codec", no_wrap=True)
    heads = ("bytes\nper token", "share\nof KV", "tokens\nfrom L3", "as\nrecomputed", "as\nuncoded")
    for column in (*heads, "of reply\ntokens"):
        view.add_column(column, justify="right", no_wrap=True)
    for name, entry in report["codecs"].items():
        uncoded = entry["as_uncoded"]
        view.add_row(
            name,
            f"{entry['stored_bytes_per_token']:,.0f}",
            f"{entry['share_of_kv']:.2f}",
            f"{entry['l3_tokens']:,}",
            f"{entry['as_recomputed']}",
            "-" if uncoded is None else f"{uncoded}",
            f"{entry['reply_tokens']}",
        )
    return view
