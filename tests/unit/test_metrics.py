"""Metrics as a process of several keeps them: in files."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest, multiprocess

from hcache_backend import metrics

WITHOUT_A_FOLDER = """
import logging, shutil, sys
from hcache_backend import metrics
from hcache_backend.store import StoreStats

logging.basicConfig(stream=sys.stdout)
shutil.rmtree(sys.argv[1])
metrics.MODE.set("hidden", "own")
metrics.TOKENS.count("captured", 1)
metrics.SUSPENDED.only("why")
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
    assert done.stdout.count("hcache: metrics could not be written") == 1
    assert done.stdout.endswith("[True]\n")


SAYS = """
import os, sys
from hcache_backend import metrics

for what in sys.argv[1:]:
    if what == "inherit":  # as a server that is started again in a container, with the same PID
        for path in os.scandir(os.environ["PROMETHEUS_MULTIPROC_DIR"]):
            kind = path.name.rpartition("_")[0]
            os.rename(path.path, f"{os.path.dirname(path.path)}/{kind}_{os.getpid()}.db")
    elif what == "suspended":
        metrics.SUSPENDED.set("flush_needed")
    else:
        metrics.MODE.set(what, "own")
        metrics.RATES.set("l3_read", what, value=len(what))
metrics.TOKENS.count("captured", 1)
print("said", flush=True)
sys.stdin.readline()
"""


@contextmanager
def saying(folder: Path, *what: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that, and lives to the end of the block, where it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAYS, *what],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "said\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def shown(folder: Path) -> set[str]:
    """Our gauges on the page of servers with their metrics in ``folder``, and a count."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(folder))
    lines = generate_latest(registry).decode().splitlines()
    return {line for line in lines if line[0] != "#" and not line.endswith(" 0.0")}


def values(*modes: str, captured: int) -> set[str]:
    found = {f'hcache_mode_info{{mode="{mode}",pages="own"}} 1.0' for mode in modes}
    found |= {
        f'hcache_expected_tokens_per_second{{backend="{mode}",operation="l3_read"}} {len(mode)}.0'
        for mode in modes
    }
    return found | {f"hcache_captured_tokens_total {captured}.0"}


@pytest.mark.parametrize("inherit", [[], ["inherit"]], ids=["another PID", "the same PID"])
def test_gauges_of_a_killed_server_end_with_it_and_its_counts_do_not(
    inherit: list[str], tmp_path: Path
) -> None:
    with saying(tmp_path, "hidden", "suspended"):
        suspended = 'hcache_l3_suspended{reason="flush_needed"} 1.0'
        assert shown(tmp_path) == values("hidden", captured=1) | {suspended}
    with saying(tmp_path, *inherit, "kv"):
        assert shown(tmp_path) == values("kv", captured=2)


def test_gauges_of_living_ranks_stay_also_in_another_container(tmp_path: Path) -> None:
    with saying(tmp_path, "hidden") as rank:
        for path in tmp_path.glob("*.db"):  # nobody here knows that PID
            path.rename(path.with_name(path.name.replace(f"_{rank.pid}.", "_99999999.")))
        with saying(tmp_path, "kv"):
            assert shown(tmp_path) == values("hidden", "kv", captured=2)
    with saying(tmp_path, "plain"):
        assert shown(tmp_path) == values("plain", captured=3)


def test_every_gauge_is_of_a_living_process() -> None:
    gauges = [metrics.MODE, metrics.CAPABILITY, metrics.SUSPENDED, metrics.CODEC, metrics.SHARED]
    every = [metric for metric in metrics.ALL if isinstance(metric.family, Gauge)]
    assert every == [*gauges, metrics.RATES]
    assert {gauge.family._multiprocess_mode for gauge in every} == {"livemax", "livemin"}
