"""Metrics of several processes in files, and ``hcache top`` on pages that they write."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Gauge, generate_latest, multiprocess
from typer.testing import CliRunner

from hcache_backend import metrics
from hcache_backend.cli.main import app
from hcache_backend.cli.metrics_page import (
    NoMetrics,
    fetch,
    parse,
    summary,
)
from hcache_backend.config import parse_config
from hcache_backend.store import PageStore, StoreStats
from tests.kit.http import serving


@dataclass
class Pages:
    """A server that answers each request with the next of ``pages``, the last one always again."""

    url: str = ""
    pages: list[str | int] = field(default_factory=list)

    def answer(self, path: str, body: Any) -> tuple[int, str]:
        page = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        return (page, "") if isinstance(page, int) else (200, page)


@pytest.fixture
def server() -> Iterator[Pages]:
    server = Pages()
    with serving(server.answer) as server.url:
        yield server


def test_no_proxy_hears_of_a_server(server: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    server.pages = [503]
    with serving(lambda path, body: seen.append(path) or (200, "a proxy")) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("no_proxy", "127.0.0.0/8")  # urllib knows no such network
        with pytest.raises(NoMetrics, match="answered 503"):
            fetch(server.url)
    assert seen == []


def written() -> str:
    return generate_latest(REGISTRY).decode()


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["top", "-i", "0.2", *arguments], env={"COLUMNS": "150"})
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def pages() -> list[str]:
    """Two pages of one server, with work in between."""
    for metric in metrics.ALL:
        metric.clear()  # other tests of the process may have counted
    metrics.MODE.set("hidden", "own", "own")
    metrics.CODEC.set("int8", "none")
    counters = metrics.StoreCounters(stats := StoreStats())
    stats.add(bytes_read=1000, pages_evicted=3)
    counters.publish()
    metrics.TOKENS.count("captured", 64)
    metrics.PROBLEMS.count("page_checksum")
    metrics.L3_TOKENS.count("slower", 48)
    metrics.RATES.set("l3_read", "hcache", value=2500)
    for _ in range(90):
        metrics.STAGE_SECONDS.observe("restore", 0.002)
    first = written()
    metrics.TOKENS.count("captured", 128)
    stats.add(bytes_read=500)
    counters.publish()
    for _ in range(10):
        metrics.STAGE_SECONDS.observe("restore", 0.09)
    return [first, written()]


def test_rates_and_times_are_those_between_two_pages(pages: list[str]) -> None:
    before, after = (parse(page) for page in pages)
    assert before.counters["store"]["bytes_read"] == 1000
    seen, alone = summary(after, before), summary(after, after)
    elapsed = after.time - before.time
    assert seen["per_second"]["tokens"]["captured"] == pytest.approx(128 / elapsed)
    assert seen["per_second"]["store"]["bytes_read"] == pytest.approx(500 / elapsed)
    assert seen["per_second"]["stage_seconds"]["restore"] == pytest.approx(0.9 / elapsed)
    assert seen["totals"]["stages"]["restore"] == 100
    assert alone["per_second"] is None and alone["totals"] == after.counters
    anew = before._replace(time=after.time + 1)
    assert summary(anew, after)["per_second"] is None


def once(server: Pages, *shown: str) -> str:
    """What is shown of a server with these pages; lines are wrapped."""
    server.pages = list(shown)
    _, output = run(server.url, "--once")
    return " ".join(output.replace("│", " ").split())


def test_what_is_behind_l3_shows_and_whether_it_answers(server: Pages, pages: list[str]) -> None:
    metrics.SHARED.set("mooncake", "answers")
    answers = written()
    metrics.SHARED.set("mooncake", "answers", value=0)
    metrics.SHARED.set("mooncake", "silent")
    metrics.SHARED_PAGES.count("read", 7)
    metrics.RATES.set("shared_read", "hcache", value=1234)
    said = once(server, answers, written())
    assert "shared: mooncake" in said and "shared_silent: True" in said
    assert "'shared_read': 1234" in said
    assert re.search(r"shared read .* 7\.0 ", said)
    assert not parse(answers).state["shared_silent"]
    for family in (metrics.SHARED, *metrics.SHARED_PAGES.counters, metrics.RATES):
        family.clear()
    assert parse(written()).state["shared"] is None


def test_how_full_each_folder_is_shows(server: Pages, pages: list[str], tmp_path: Path) -> None:
    config = parse_config({"dirs": [str(tmp_path)], "quota_bytes": 400_000}, "test")
    store = PageStore(config, b"writer-1")
    metrics.StoreCounters(store.stats)
    page = [memoryview(bytearray(70_000))]
    assert store.put(b"n" * 16, [bytes(32)], [page]) == [True]
    deadline = time.monotonic() + 20
    while not (found := parse(written()).state["l3_bytes"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert 70_000 < found[f"pages of {tmp_path}"] < 90_000
    assert found[f"quota of {tmp_path}"] == 400_000
    assert "l3_bytes: {'pages of" in once(server, written())
    assert found[f"free of {tmp_path}"] > 400_000
    store.close()
    metrics.FOLDERS.only()
    assert parse(written()).state["l3_bytes"] == {}


def test_suspended_l3_shows_with_its_reason_and_kv_mode(server: Pages, pages: list[str]) -> None:
    metrics.SUSPENDED.only("flush_needed")
    metrics.PROBLEMS.clear()
    said = once(server, written())
    assert "suspended: flush_needed" in said and "problems" not in said
    metrics.SUSPENDED.only()
    metrics.MODE.set("hidden", "own", "own", value=0)
    metrics.MODE.set("kv", "plain", "own")
    page = parse(written()).state
    names = ("suspended", "mode", "pages", "codec")
    assert [page[name] for name in names] == [None, "kv", "plain", None]
    metrics.MODE.clear()


def test_one_picture_of_a_server_and_of_one_that_is_not_there(
    server: Pages, pages: list[str]
) -> None:
    server.pages = list(pages)
    status, output = run("--once", server.url.removeprefix("http://"), "http://127.0.0.1:9")
    assert status == 1
    for said in (
        "mode: hidden",
        "codec: none",
        r"tokens captured +[\d.]+ +192.0 ",
        r"l3_tokens slower +0.00 +48.0 ",
        "tokens_per_second: {'l3_read': 2500}",
        r"problems page_checksum +0.00 +1.0 ",
        "the server does not answer.*refused",
    ):
        assert re.search(said, output), said


def test_json_has_totals_and_rates(server: Pages, pages: list[str]) -> None:
    def seen() -> tuple[int, dict[str, Any]]:
        status, output = run("--json", f"{server.url}/metrics")
        [found] = json.loads(output)["servers"]
        return status, found

    server.pages = list(pages)
    status, found = seen()
    assert (status, found["totals"]["tokens"]["captured"]) == (0, 192)
    assert 0 < found["per_second"]["tokens"]["captured"] <= 128 / 0.2
    server.pages = list(reversed(pages))  # it was started anew
    assert seen()[1]["per_second"] is None
    server.pages = [503]
    status, found = seen()
    assert (status, found["error"]) == (1, "/metrics answered 503")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (404, "start it with --enable-metrics"),
        (503, "answered 503"),
        ("# TYPE up gauge\nup 1\n", "no hcache metrics on /metrics"),
        ("<html>hello</html>", "is no Prometheus page"),
    ],
)
def test_what_is_wrong_with_a_server_is_said(page: str | int, message: str, server: Pages) -> None:
    server.pages = [page]
    with pytest.raises(NoMetrics, match=message):
        fetch(server.url)


def test_the_live_view_goes_on_until_it_is_interrupted(server: Pages, pages: list[str]) -> None:
    server.pages = [pages[0], 503, pages[1]]
    ours, theirs = os.openpty()
    termios.tcsetwinsize(ours, (50, 150))
    command = [sys.executable, "-m", "hcache_backend.cli.main", "top", "-i", "0.2", server.url]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, start_new_session=True) as top:
        os.close(theirs)
        seen = ""
        for wanted in ("captured", "answered 503", "192"):
            while wanted not in seen:
                seen += os.read(ours, 65536).decode(errors="replace")
        top.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal's other end is gone
            while os.read(ours, 65536):
                pass
        assert top.wait(20) == 0
    os.close(ours)
    assert "Traceback" not in seen


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("file:///proc/version", "must be http://HOST:PORT"),
        ("ftp://127.0.0.1", "must be http://HOST:PORT"),
        ("http://127.0.0.1:port", "does not answer"),
        ("http://[::1", "does not answer"),
    ],
)
def test_wrong_addresses(address: str, message: str) -> None:
    with pytest.raises(NoMetrics, match=message):
        fetch(address)


WITHOUT_A_FOLDER = """
import logging, shutil, sys
from hcache_backend import metrics
from hcache_backend.store import StoreStats

logging.basicConfig(stream=sys.stdout)
shutil.rmtree(sys.argv[1])
metrics.MODE.set("hidden", "own", "own")
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
        metrics.MODE.set(what, "own", "own")
        metrics.RATES.set("l3_read", what, value=len(what))
metrics.TOKENS.count("captured", 1)
print("said", flush=True)
sys.stdin.readline()
"""


@contextmanager
def saying(folder: Path, *what: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that, and lives to the end of the block, where it is killed."""
    command = [sys.executable, "-c", SAYS, *what]
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "said\n"
            yield process
        finally:
            process.kill()


def shown(folder: Path) -> set[str]:
    """Our gauges on the page of servers with their metrics in ``folder``, and a count."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(folder))
    lines = generate_latest(registry).decode().splitlines()
    return {line for line in lines if line[0] != "#" and not line.endswith(" 0.0")}


def values(*modes: str, captured: int) -> set[str]:
    found = {f"hcache_captured_tokens_total {captured}.0"}
    rate = "hcache_expected_tokens_per_second"
    for mode in modes:
        found.add(f'hcache_mode_info{{expected="own",mode="{mode}",pages="own"}} 1.0')
        found.add(f'{rate}{{backend="{mode}",operation="l3_read"}} {len(mode)}.0')
    return found


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


def test_a_link_in_the_folder_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    (tmp_path / "other").write_text("of somebody")
    (tmp_path / f"gauge_livemax_{os.getpid()}.new").symlink_to(tmp_path / "other")
    metrics._take_file("livemax")
    os.close(metrics._held.pop(tmp_path / f"gauge_livemax_{os.getpid()}.db"))
    assert (tmp_path / "other").read_text() == "of somebody"


def test_every_gauge_is_of_a_living_process() -> None:
    gauges = [metrics.MODE, metrics.CAPABILITY, metrics.SUSPENDED, metrics.CODEC, metrics.SHARED]
    every = [metric for metric in metrics.ALL if isinstance(metric.family, Gauge)]
    assert every == [metrics.FOLDERS, *gauges, metrics.RATES]
    assert {gauge.family._multiprocess_mode for gauge in every} == {"livemax", "livemin"}
