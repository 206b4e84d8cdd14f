"""Writes what three former programs recorded as results of ``bench.restores``; runs once.

Rounds stay as they were measured. Medians and ratios are computed of them as the present program
does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.restores import STUDIES, compared

HERE = Path(__file__).parent
ABOUT = ("date", "device", "device_type", "sglang_version", "cores", "model", "tokens")


def write(study: str, old: dict[str, Any], titles: dict[str, str], rows: Any, stored: Any) -> None:
    about = {name: old[name] for name in ABOUT if name in old}
    found = {"study": study, "bus_mb_per_s": None, "titles": titles, "left_out": {}, "rows": rows}
    text = json.dumps({**about, **found, "stored": stored}, indent=1)
    (HERE / f"restores_{study}.json").write_text(text + "\n")


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    (HERE / f"{name}.json").unlink()
    (HERE / f"{name}.png").unlink(missing_ok=True)
    return found


def row(study: str, limit: str, part: str, rounds: dict[str, list[float]]) -> dict[str, Any]:
    found = compared(rounds, STUDIES[study].ratios)
    return {"limit": limit, "part": part, **found, "rounds_ms": rounds}


pages = read("pages")
turns = pages["turns_ms"]
rows = [
    row("pages", "as it is", part, {kind: [turn[n] for turn in turns[kind]] for kind in turns})
    for n, part in enumerate(("backup", "load", "restore"))
]
write("pages", pages, {kind: f"{kind} pages" for kind in turns}, rows, [])

codec = read("throttled")
rows = [
    row("codec", f"L3 at {rate} MB/s", "restore", rounds)
    for rate, rounds in codec["times_ms"].items()
]
stored = [
    {"method": f"`{name}`", "limit": None, "bytes_per_token": size / codec["tokens"]}
    for name, size in codec["bytes"].items()
]
write("codec", codec, {name: f"`{name}`" for name in codec["bytes"]}, rows, stored)

peers = read("peers")
restore = peers["restore"]
peers["tokens"] = restore["tokens"]
disk = {name: found["disk"] for name, found in restore["methods"].items()}
parts = {"restore": "ms", "reading L3": "l3_ms", "load": "load_ms", "first token": "ttft_ms"}
rows = [
    {
        "limit": "as it is",
        "part": part,
        "ms": {name: found[key] for name, found in disk.items()},
        "ratios": {},
        "rounds_ms": {name: f["all_ms"] for name, f in disk.items()} if key == "ms" else None,
    }
    for part, key in parts.items()
]
stored = [
    {"method": restore["methods"][name]["title"], "limit": None, "bytes_per_token": size}
    for name, found in disk.items()
    if (size := found["bytes_per_token"])
]
write("methods", peers, {name: peers["methods"][name] for name in disk}, rows, stored)
