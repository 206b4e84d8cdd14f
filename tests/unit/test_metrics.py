"""Metrics as a process of several keeps them: in files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WITHOUT_A_FOLDER = """
import logging, shutil, sys
from hcache_backend.engine import metrics
from hcache_backend.store import StoreStats

logging.basicConfig(stream=sys.stdout)
shutil.rmtree(sys.argv[1])
metrics.MODE.set("hidden", "own", "")
metrics.TOKENS.count("captured", 1)
metrics.SuspendedGauge().set("why")
counters = metrics.StoreCounters(stats := StoreStats())
stats.add(bytes_read=1)
counters.publish()
with metrics.timed("l3_read"):
    print([True])
"""


def test_where_metrics_cannot_be_kept_the_work_goes_on_and_one_line_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_FOLDER, str(folder)],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hcache: metrics cannot be kept") == 1
    assert done.stdout.endswith("[True]\n")
