"""The demo's report and verdict, from canned results; no server."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.demo import PROGRAM, damage, finding, problems, size_gb

BYTES = {"from_l3": 256, "same_reply": True, "same_logprobs": True}
PARTS: dict[str, Any] = {
    "history_tokens": 944,
    "computed_ms": [2000.0, 2100.0, 9000.0],
    "restart": {
        "file": {"ms": [500.0, 400.0, 300.0], "from_l3": [896] * 3, "same_replies": True},
        "ours": {"ms": [420.0, 300.0, 310.0], "from_l3": [896] * 3, "same_replies": True},
    },
    "burst": {"file": {"seconds": 5.5, "share": 0.625}, "ours": {"seconds": 1.9, "share": 1.0}},
    "damaged": {
        "file": {"from_l3": 960, "same_reply": False, "change": 14.25},
        "ours": {"from_l3": 0, "same_reply": True, "change": 0.0},
    },
    "hung": {
        "file": {"seconds": 10.2, "same_reply": True},
        "ours": {"seconds": 2.5, "same_reply": True},
    },
    "bfloat16": {
        "file": {"bytes_per_token": 23040.0, **BYTES},
        "ours": {"bytes_per_token": 16704.0, **BYTES},
    },
    "hidden": {
        "file": {"bytes_per_token": 138240.0, **BYTES},
        "ours": {"bytes_per_token": 69248.0, **BYTES},
    },
}


def report_of(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "device": "a machine",
        "sglang_version": "0.5.21",
        "model": "SmolLM2-135M-Instruct",
        "why_random": None,
        "disk_gb": {"set_up": 7.8, "used": 0.8},
        **parts,
        "problems": problems(parts),
    }


def run_with(parts: dict[str, Any], out: Path) -> int:
    demo = replace(PROGRAM, measure=lambda run: report_of(parts), serves=False)
    return demo.main(["--out", str(out)])


def test_a_run_is_told_in_lines_of_eighty_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep"
    assert run_with(PARTS, out) == 0
    said = capsys.readouterr().out
    lines = said.removesuffix(f"Results: {out}/demo.json\n").splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line[:46].strip(): line[46:].split() for line in lines if "  " in line}
    assert rows["killed and started: ms to the first token"] == ["2,100", "400", "310"]
    assert rows["... share of the histories from disk"] == ["-", "62%", "100%"]
    assert rows["a damaged page: the same reply"] == ["-", "NO", "yes"]
    assert rows["the disk hangs: s to the first token"] == ["-", ">", "10", "2.5"]
    text = " ".join(lines)
    assert "0.72 of the bytes of `file`" in text and "0.50 of the bytes of K and V" in text
    assert json.loads((out / "demo.json").read_text())["problems"] == []
    assert (out / "demo.png").exists()


@pytest.mark.parametrize(("ours", "start"), [(310.0, "310 ms by hcache"), (410.0, "400 ms by SG")])
def test_the_title_begins_with_the_soonest(ours: float, start: str) -> None:
    parts = deepcopy(PARTS)
    parts["restart"]["ours"]["ms"] = [ours] * 3
    assert finding(report_of(parts)).startswith(f"After a restart the first token comes in {start}")


@pytest.mark.parametrize(
    ("part", "key", "value", "problem"),
    [
        ("restart", "same_replies", False, "restart: the reply of hcache differs"),
        ("restart", "from_l3", [896, 0, 896], "restart: nothing came from L3"),
        ("burst", "share", 0.0, "burst: nothing came from L3"),
        ("bfloat16", "same_reply", False, "bfloat16: the reply of hcache differs"),
        ("damaged", "same_reply", False, "damaged: the reply of hcache differs"),
        ("hung", "same_reply", False, "hung: the reply of hcache differs"),
        ("hidden", "from_l3", 0, "hidden: nothing came from L3"),
    ],
)
def test_the_program_ends_with_one_when_a_reply_differs_or_a_hit_did_not_come(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    part: str,
    key: str,
    value: object,
    problem: str,
) -> None:
    parts = deepcopy(PARTS)
    parts[part]["ours"][key] = value
    assert run_with(parts, tmp_path) == 1
    assert f"FAILED {problem}" in capsys.readouterr().out
    other = deepcopy(PARTS)
    other[part]["file"][key] = value
    assert problems(other) == []  # of another backend


def test_a_machine_whose_disk_cannot_be_held_has_no_line_about_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(PARTS | {"hung": {"file": None, "ours": None}}, tmp_path) == 0
    assert "hangs" not in capsys.readouterr().out


def test_a_sector_in_the_middle_is_damaged_and_no_more(tmp_path: Path) -> None:
    page = tmp_path / "one.page"
    page.write_bytes(bytes(20_000))
    damage(page)
    found = page.read_bytes()
    assert len(found) == 20_000 and found.count(255) == 4096
    assert found[7952:12048] == b"\xff" * 4096
    (tmp_path / "link").symlink_to(page)
    assert size_gb(tmp_path) == 20_000 / 1e9
