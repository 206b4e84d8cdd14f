"""Runs tests/kernels/operations compiled for a GPU, on the emulator of tests/ptx."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.inner_pytest import run_pytest

FOLDER = Path(__file__).resolve().parent / "operations"
ROOT = FOLDER.parents[2]
SAMPLE = [
    "test_steps.py",
    "test_codecs.py::test_int8",
    "test_codecs.py::test_exp4",
    "test_project_kv.py::test_heads_smaller_than_a_tile",
    "test_project_kv.py::test_what_fp8_cannot_hold_saturates_and_nan_stays",
]
"""What takes less than a minute, with compilations."""


def test_a_sample_on_hopper() -> None:
    said = run_pytest(
        *("--ptx", "sm_90", "-m", "not long"),
        *(f"{FOLDER}/{one}" for one in SAMPLE),
        cwd=ROOT,
        env={},
    )
    assert " skipped" not in said.splitlines()[-1]


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
def test_all(device: str, seed: int | None, record_property: Callable[[str, object], None]) -> None:
    """With a seed warps run in an order by chance, and races are faults."""
    chosen = [] if seed is None else ["--ptx-seed", str(seed)]
    said = run_pytest("--ptx", device, *chosen, "-m", "not long", str(FOLDER), cwd=ROOT, env={})
    record_property("tests", said.splitlines()[-1])
