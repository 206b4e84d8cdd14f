"""What the commands say: ``hcache config``, what a server left in its store, and rare cases."""

import errno
import json
import resource
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from hcache_backend.cli import common, doctor, metrics_page, store
from hcache_backend.cli.common import human_bytes
from hcache_backend.cli.main import app
from hcache_backend.config import OUR_BACKEND, ConfigError, parse_config, start_config
from hcache_backend.contract.check import ContractResult
from hcache_backend.format.page import PageLayout, StoredLayer, hidden_layer, kv_layer
from hcache_backend.format.units import Segment, SegmentTable
from hcache_backend.server_report import LayerGroup, ServerReport, read_report, write_report
from hcache_backend.sglang import compat
from hcache_backend.store import SERVER_REPORT, PageStore


class DiskUsage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB"), (5 << 50, "5.0 PiB")]
)
def test_bytes_as_people_read_them(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_more_findings_than_are_shown_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"a{n}.page" for n in range(store._SHOWN_AT_MOST + 5)]
    found: dict[str, Any] = {"pages": 0, "bytes": 0, "repaired": 0, "missing": names}
    found |= {"damaged": [], "unknown": [], "index": [], "problems": len(names)}
    store._show_findings({"folders": {"/mnt": found}})
    assert "and 5 more (see --json)" in capsys.readouterr().out


def test_a_python_without_sglang_or_without_our_plugin_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> ContractResult:
        raise ModuleNotFoundError("SGLang is not installed")

    monkeypatch.setattr(doctor.contract, "check_installed", missing)
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    first, second, *_ = doctor._check_sglang()
    assert (first.subject, "not installed" in first.detail) == ("SGLang", True)
    assert "not registered with SGLang" in second.detail


@pytest.mark.parametrize(
    ("version", "problems", "verdict", "said"),
    [
        ("0.5.23", (), "good", "0.5.23: tested; all 9 seams are there"),
        ("0.5.23", ("a", "b"), "fair", "0.5.23: tested, but not as it is installed here"),
        ("0.5.99", (), "fair", "SGLang 0.5.99 is newer than the tested ones"),
        ("0.5.99", ("a", "b"), "fair", "plain pages; of 9 seams 2 are missing: a; b"),
    ],
)
def test_the_doctor_looks_up_every_seam(
    version: str,
    problems: tuple[str, ...],
    verdict: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor.contract, "check_installed", lambda: ContractResult(9, problems))
    monkeypatch.setattr(doctor, "sglang_version", lambda: version)
    monkeypatch.setattr(doctor, "untested", lambda: compat.untested(version))
    found = doctor._check_seams()
    assert found.verdict == verdict and said in found.detail


def test_a_reader_that_goes_away_is_no_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``hcache ls | head``."""

    def gone(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(common, "existing_store", gone)
    ended = CliRunner().invoke(app, ["ls"])
    assert (ended.exit_code, ended.output) == (1, "")


@pytest.mark.parametrize(
    ("given", "gone"), [("ingest a.txt", "command 'ingest'"), ("hint retain", "command 'hint'")]
)
def test_what_is_gone_is_named(given: str, gone: str) -> None:
    status, said = hcache(*given.split())
    assert status == 2 and f"No such {gone}" in said


# ---- options ----


EXTRA = {
    "backend_name": "hcache",
    **OUR_BACKEND,
    "interface_v1": 1,
}


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCACHE_CONFIG", raising=False)


def hcache(*arguments: object) -> tuple[int, str]:
    given = [str(argument) for argument in arguments]
    done = CliRunner().invoke(app, given, env={"COLUMNS": "500"})
    return done.exit_code, done.output


def checked(folder: Path, table: Any, *options: str) -> tuple[int, str]:
    path = folder / "config.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return hcache("config", path, *options)


@pytest.mark.parametrize(
    "change",
    [
        {"hcache": {"dir": ["/a"]}},
        {"hcache": {"dirs": ["a"]}},
        {"hcache": {"quota_bytes": "many"}},
        {"interface_v1": 0},
        {"dirs": ["/a"]},
        {"prefetch_treshold": 1},
        {"prefetch_threshold": "64"},
        {"prefetch_timeout_base": "2s"},
        {"hicache_storage_pass_prefix_keys": 1},
    ],
)
def test_errors_are_those_of_a_start(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        start_config({**EXTRA, **change})
    status, said = checked(tmp_path, {**EXTRA, **change})
    assert (status, said) == (2, f"hcache: {str(error.value).removeprefix('hcache: ')}\n")
    assert "hcache: hcache" not in said


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({**EXTRA, "class_name": "Other"}, "'class_name' is 'Other'; it must be 'HCacheStorage'"),
        ({"hcache": {}}, "'backend_name' is None; it must be 'hcache'"),
        ({"backend_name": "x"}, "'module_path' is None; it must be 'hcache_backend'"),
        ({**EXTRA, "backend_name": None}, "'backend_name' is None; it must be 'hcache'"),
        ({**EXTRA, "tp_lcm_size": 0}, "'tp_lcm_size' is 0; it must be one of 1, 2, 4, 8"),
        ({**EXTRA, "tp_lcm_size": "4"}, "'tp_lcm_size' is '4'; it must be of type int"),
        (
            {**EXTRA, "hcache": {"tp_lcm_size": 4}},
            "hcache: 'tp_lcm_size' must stand in SGLang's extra config, outside of the table 'hca",
        ),
        ({"mod": 1}, "HCACHE_CONFIG: unknown option 'mod'; did you mean 'mode'?"),
        ("{", "config.json': Expecting property name"),
    ],
)
def test_a_server_would_not_use_it(table: Any, said: str, tmp_path: Path) -> None:
    status, output = checked(tmp_path, table)
    assert status == 2 and said in output


def test_a_right_one_shows_its_options(tmp_path: Path) -> None:
    options = {"dirs": ["/a"], "quota_bytes": "1TB"}
    status, said = checked(tmp_path, {**EXTRA, "hcache": options})
    assert status == 0 and "quota_bytes = 1000000000000" in said
    assert "no errors; read as extra config\n" in said
    status, said = checked(tmp_path, options, "--json")
    found = json.loads(said)
    assert found["checks"][0]["subject"] == "/a" and len(found.pop("checks")) == 4
    shown = {"dirs": ["/a"], "quota_bytes": 10**12}
    assert found == {"kind": "HCACHE_CONFIG", "options": shown}


def test_a_file_is_named_as_on_the_command_line_of_sglang(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text('mode = "kv"')
    status, said = hcache("config", f"@{tmp_path / 'good.toml'}")
    assert status == 0 and "mode = 'kv'" in said


def test_an_empty_file_says_for_what_it_was_taken(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").touch()
    status, said = hcache("config", tmp_path / "empty.toml")
    why = "read as HCACHE_CONFIG, because it has no key of SGLang's extra config\n"
    assert status == 0 and why in said


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"quota_bytes": 500}, "is 500 B, room 5.0 GiB; few pages fit. Sizes have units, as in "),
        (
            {"quota_bytes": "900000TB"},
            "fair: {}: quota: option 'quota_bytes' is 799.4 PiB, room 5.0 GiB: more than page ",
        ),
        ({"quota_bytes": "2GiB"}, None),
        ({}, None),
    ],
)
def test_a_quota_is_compared_with_the_disk(
    changes: dict[str, Any], warned: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: DiskUsage(9 << 30, 0, 9 << 30))
    monkeypatch.setattr(doctor, "device_of_root", lambda: -1)
    folder = tmp_path / "pages"
    status, said = checked(tmp_path, {"dirs": [str(folder)], **changes})
    assert status == 0 and f"good: {folder}: does not exist yet; will be made in" in said
    assert warned.format(folder) in said if warned else "fair:" not in said
    file = tmp_path / "config.json"
    checks = json.loads(hcache("doctor", "--config", file, "--json")[1])["checks"]
    found = {check["subject"]: check for check in checks}
    assert f"{folder}: free" in found  # of the file, not of the environment
    quota = found.get(f"{folder}: quota", {"verdict": "good"})
    assert quota["verdict"] == ("fair" if warned else "good")


def test_disks_that_are_not_mounted_or_have_two_folders_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "device_of_root", lambda: tmp_path.stat().st_dev)
    first, second = tmp_path / "ssd0" / "pages", tmp_path / "ssd1" / "pages"
    status, said = checked(tmp_path, {"dirs": [str(first), str(second)]})
    assert status == 0 and said.startswith(f"{tmp_path / 'config.json'}: no errors; read as")
    for folder in first, second:
        assert (
            f"fair: {folder}: does not exist yet; will be made in {tmp_path}; that is the" in said
        )
    assert f"fair: {second}: disk: that of an earlier folder" in said
    assert f"{first}: disk" not in said
    (tmp_path / "file").touch()
    said = checked(tmp_path, {"dirs": [str(first), str(tmp_path / "file")]})[1]
    assert "no errors in its options, and 1 folder(s) that do not work here; read as" in said


def test_pages_that_are_there_are_room_for_pages(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: DiskUsage(9 << 30, 0, 0))
    store = PageStore(parse_config({"dirs": [str(folder)]}, "test"), b"writer-1", background=False)
    assert store.put(b"n" * 16, [bytes(32)], [[memoryview(bytearray(70_000))]]) == [True]
    store.close()
    config = parse_config({"dirs": [str(folder)], "quota_bytes": "2GiB"}, "test")
    *_, quota = doctor._check_unwritten(folder, config)
    assert quota.detail.startswith("option 'quota_bytes' is 2.0 GiB, room 76.0 KiB: more than")


def test_sizes_of_ranks_that_only_some_servers_take_are_warned_of(tmp_path: Path) -> None:
    status, said = checked(tmp_path, {**EXTRA, "tp_lcm_size": 5})
    assert status == 0 and "fair: tp_lcm_size: 5: with own pages a server takes 1, 2, 4, 8" in said
    assert "fair: tp_lcm_size" not in checked(tmp_path, {**EXTRA, "tp_lcm_size": 4})[1]


def test_an_extra_config_is_no_hcache_config(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {**EXTRA, "prefetch_threshold": 64, "hcache": {"dirs": ["/a"]}}
    monkeypatch.setenv("HCACHE_CONFIG", json.dumps(table))
    status, said = hcache("doctor")
    assert (status, said.count("HCACHE_CONFIG"), said.count("quota_bytes")) == (2, 1, 0)
    assert "'hcache', 'prefetch_threshold' must stand in SGLang's extra config" in said


SMI = "#!/bin/sh\nprintf 'NVIDIA H200, 143771 MiB, 570.1\\n%.0s' 1 2\n"


@pytest.mark.parametrize(
    ("script", "verdict", "said"),
    [
        (SMI, "good", "2 x NVIDIA H200, 143771 MiB, 570.1"),
        ("#!/bin/sh\nexit 9\n", "fair", "no GPU: servers on a CPU only ("),
        ("#!/bin/sh\n", "fair", "no GPU: servers on a CPU only (nvidia-smi lists none)"),
        (None, "fair", "no GPU: servers on a CPU only ("),
    ],
)
def test_doctor_looks_for_gpus(
    script: str | None, verdict: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = next(iter(doctor._check_machine()))
    assert (found.subject, found.verdict) == ("GPU, driver", verdict)
    assert found.detail.startswith(said)


def test_doctor_knows_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(limit: int, shared: int) -> dict[str, doctor.Check]:
        monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (limit, limit))
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: DiskUsage(shared, 0, shared))
        return {check.subject: check for check in doctor._check_machine()}

    found = looked(8 << 20, 64 << 20)
    assert "GiB, of which" in found["host memory"].detail
    assert found["ulimit -l"].verdict == found["/dev/shm"].verdict == "fair"
    assert found["ulimit -l"].detail.startswith("a limit, 8.0 MiB: ")
    assert found["/dev/shm"].detail.startswith("64.0 MiB; several GPUs need more")
    found = looked(resource.RLIM_INFINITY, 16 << 30)
    assert found["ulimit -l"].verdict == found["/dev/shm"].verdict == "good"


@pytest.mark.parametrize("name", ["absent.toml", "absent.json", "absent"])
def test_a_file_that_is_not_there(name: str, tmp_path: Path) -> None:
    status, said = hcache("config", tmp_path / name)
    assert status == 2 and "Traceback" not in said and name in said


def test_no_secret_is_shown(tmp_path: Path) -> None:
    options = {"shared": {"backend": "file", "config": {"access_key": "s3cr3t"}}}
    for form in ((), ("--json",)):
        status, said = checked(tmp_path, {**EXTRA, "hcache": options}, *form)
        assert status == 0 and "'file'" in said.replace('"', "'") and "s3cr3t" not in said


BY_SPEC = LayerGroup(
    layers=(0, 2), method="spec", detail="fused weight 512x256", exactness="100% equal"
)
BY_MODULE = LayerGroup(layers=(1,), method="generic", detail="V is nowhere", exactness="99% equal")
KV = ServerReport(
    time=0.0, model="m", mode="kv", pages="own", reason="LoRA", codec=None, projection=()
)


def reported(**changes: Any) -> ServerReport:
    return KV.model_copy(update=changes)


def hidden(**changes: Any) -> ServerReport:
    common = {"mode": "hidden", "reason": None, "codec": "exp4", "projection": (BY_SPEC,)}
    return reported(**common | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    config = parse_config({"dirs": [str(folder)], "min_free_bytes": 0}, "test")
    PageStore(config, b"writer-1", background=False).close()
    return folder


def of_store(command: str, folder: Path, *options: str) -> str:
    status, said = hcache(command, "-d", folder, *options)
    assert status == 0, said
    return said


def test_stats_and_ls_say_what_mode_the_last_server_was_in(folder: Path) -> None:
    assert "Last server" not in of_store("stats", folder)
    write_report(folder, reported(codec="exp4"))
    for command in ("stats", "ls"):
        said = of_store(command, folder)
        assert f"Last server of {folder}: m, started " in said
        assert said.endswith(": kv mode, own pages; LoRA; codec exp4\n")
    [found] = json.loads(of_store("stats", folder, "--json"))["folders"]
    listed = json.loads(of_store("ls", folder, "--json"))
    assert listed["pages"] == []
    for last in (found["last_server"], listed["last_servers"][str(folder)]):
        assert (last["mode"], last["reason"], last["codec"]) == ("kv", "LoRA", "exp4")


NAMES = (  # of models and folders: texts of others
    "the KV pool is not [slots, heads, head_dim]",
    "/models/[/x]m",
    "[bold]m[/bold]",
    ":smile:",
    "[link=file:///x]m",
)


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_shown_as_they_are(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name.replace("/", "~")
    PageStore(parse_config({"dirs": [str(folder)]}, "test"), b"writer-1", background=False).close()
    write_report(folder, reported(model=name, reason=name))
    for command in ("stats", "ls", "verify", "doctor"):
        said = of_store(command, folder) if command != "doctor" else hcache(command, folder)[1]
        assert str(folder) in said
        assert command == "verify" or (f"{name}, started" in said and f"; {name}" in said)
    status, said = hcache("stats", folder / name)
    assert status == 2 and f"{folder / name} is not a page store" in said
    with_title = Console(markup=False, width=500)
    with with_title.capture() as shown:
        with_title.print(metrics_page.panels_of([{"url": name, "mode": name}]))
    assert shown.get().count(name) == 2


def test_names_that_move_a_cursor_or_are_no_text_are_escaped(folder: Path) -> None:
    write_report(folder, reported(model="m\x1b[2J\x07\rn\u202e"))
    said = of_store("stats", folder)
    assert "m\\x1b[2J\\x07\\rn\\u202e, started" in said
    assert not set("\x1b\x07\r\u202e") & set(said)
    assert common.printable("ü¿ 語\n/mnt/\udce9") == "ü¿ 語\n/mnt/\\udce9"


def test_a_row_that_a_program_reads_is_one_line(folder: Path) -> None:
    """As in ``hcache stats | grep``, whatever the terminal's width was."""
    done = CliRunner().invoke(app, ["stats", "-d", str(folder)], env={"COLUMNS": "20"})
    [row] = [line for line in done.output.splitlines() if str(folder) in line]
    assert len(row.split()) == 8 and done.exit_code == 0


@pytest.mark.parametrize("time", [-1.0, 1e12, 1e300, float("nan"), float("inf")])
def test_a_report_of_no_time_is_no_report(time: float, folder: Path) -> None:
    write_report(folder, reported(time=time))
    assert "Last server" not in of_store("stats", folder)


@pytest.mark.parametrize(
    ("layers", "codec"),
    [
        ((hidden_layer(16, 98, 64, "exp4"), kv_layer(16, 32, 32, 2, 2)), "exp4, none"),
        ((StoredLayer(()), hidden_layer(16, 98, 64, "exp4")), "exp4"),
        (16384, None),
        (8, None),
    ],
)
def test_stats_say_by_what_each_namespace_is_encoded(
    layers: tuple[StoredLayer, ...] | int, codec: str | None, folder: Path
) -> None:
    """Plain pages, here of so many bytes, have no header of ours."""
    if isinstance(layers, int):
        page, table = np.zeros(layers, np.uint8), SegmentTable((Segment(layers),))
    else:
        layout = PageLayout(16, layers)
        page, table = np.zeros(layout.page_bytes, np.uint8), layout.table
        layout.seal(page, b"n" * 16, bytes(32), b"writer-1")
    store = PageStore(parse_config({"dirs": [str(folder)]}, "test"), b"writer-1", background=False)
    assert store.put(b"n" * 16, [bytes(32)], [[page.data]], table=table) == [True]
    store.close()
    [found] = json.loads(of_store("stats", folder, "--json"))["folders"]
    [space] = found["namespaces"].values()
    assert space["codec"] == codec
    assert (codec or "-") in of_store("stats", folder)


@pytest.mark.parametrize(
    ("report", "verdict", "said"),
    [
        (KV, "good", ": kv mode, own pages; LoRA"),
        (reported(codec="exp4"), "good", "; LoRA; codec exp4"),
        (
            reported(tokens_per_second={"l3_read": 20480.4, "prefill": 915.0}),
            "good",
            "; LoRA; tokens per second: l3_read 20,480, prefill 915",
        ),
        (reported(pages="plain"), "fair", ": kv mode, plain pages; LoRA"),
        (
            hidden(),
            "good",
            ": hidden mode, own pages; codec exp4; layers 0, 2 by spec: fused weight 512x256 "
            "(100% equal)",
        ),
        (
            hidden(projection=(BY_SPEC, BY_MODULE)),
            "fair",
            "(100% equal); layers 1 by their attention modules: V is nowhere (99% equal)",
        ),
        (
            hidden(recomputation="K 100% equal"),
            "good",
            "(100% equal); recomputed layers: K 100% equal",
        ),
        (
            hidden(unused={"recomputation": "LoRA", "b": "why"}),
            "good",
            "(100% equal); not used: recomputation (LoRA), b (why)",
        ),
    ],
)
def test_doctor_says_how_the_last_server_projected_and_why(
    report: ServerReport, verdict: str, said: str, folder: Path
) -> None:
    write_report(folder, KV)
    write_report(folder, report)
    assert not list(folder.glob(".*"))
    assert read_report(folder) == report
    checks = json.loads(of_store("doctor", folder, "--json"))["checks"]
    [check] = [check for check in checks if check["subject"] == f"{folder}: last server"]
    assert check["verdict"] == verdict
    assert check["detail"].endswith(said)
    assert (folder / SERVER_REPORT).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"\xff", b'{"time": "yesterday"}'])
def test_a_report_that_cannot_be_read_is_no_report(text: bytes, folder: Path) -> None:
    (folder / SERVER_REPORT).write_bytes(text)
    assert read_report(folder) is None
    assert "last server" not in of_store("doctor", folder)
