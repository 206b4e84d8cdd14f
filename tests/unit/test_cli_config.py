"""``hcache config`` says what a server's start would say."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hcache_backend.cli.main import app
from hcache_backend.config import ConfigError, start_config

EXTRA = {"module_path": "hcache_backend", "class_name": "HCacheStorage", "interface_v1": 1}


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCACHE_CONFIG", raising=False)


def checked(folder: Path, table: Any, *options: str) -> tuple[int, str]:
    path = folder / "config.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    done = CliRunner().invoke(app, ["config", str(path), *options], env={"COLUMNS": "500"})
    return done.exit_code, done.output


@pytest.mark.parametrize(
    "change",
    [
        {"hcache": {"dir": ["/a"]}},
        {"hcache": {"dirs": ["a"]}},
        {"hcache": {"quota_bytes": "many"}},
        {"interface_v1": 0},
        {"dirs": ["/a"]},
        {"prefetch_treshold": 1},
    ],
)
def test_errors_are_those_of_a_start(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        start_config({**EXTRA, **change})
    status, said = checked(tmp_path, {**EXTRA, **change})
    assert (status, said) == (2, f"hcache: {error.value}\n")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({**EXTRA, "class_name": "Other"}, "'class_name' is 'Other'; it must be 'HCacheStorage'"),
        ({"hcache": {}}, "'module_path' is None; it must be 'hcache_backend'"),
        ({"mod": 1}, "HCACHE_CONFIG: unknown option 'mod' (value 1); did you mean 'mode'?"),
        ("{", "config.json: neither JSON nor @file.toml"),
    ],
)
def test_a_server_would_not_use_it(table: Any, said: str, tmp_path: Path) -> None:
    status, output = checked(tmp_path, table)
    assert status == 2 and said in output


def test_a_right_one_shows_its_options(tmp_path: Path) -> None:
    options = {"dirs": ["/a"], "quota_bytes": "1TB"}
    status, said = checked(tmp_path, {**EXTRA, "hcache": options})
    assert status == 0 and "quota_bytes = 1000000000000" in said
    status, said = checked(tmp_path, options, "--json")
    shown = {"dirs": ["/a"], "quota_bytes": 10**12}
    assert json.loads(said) == {"kind": "HCACHE_CONFIG", "options": shown}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for name in ("absent.toml", "absent.json"):
        done = CliRunner().invoke(app, ["config", str(tmp_path / name)])
        assert done.exit_code == 2 and "Traceback" not in done.output
