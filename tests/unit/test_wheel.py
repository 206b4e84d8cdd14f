"""The wheel, and examples that commands and Prometheus read."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hcache_backend import __version__
from hcache_backend.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PACKAGES = {"hcache_backend": ROOT / "hcache_backend", "hcache_kernels": ROOT / "kernels"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built as ``pip wheel`` builds it, from a copy: setuptools leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for path in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "hcache_backend", "kernels"):
        source.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", str(ROOT / path), str(source)], check=True)
    build = f"from setuptools import build_meta as b; b.build_wheel({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_has_every_module_and_says_that_it_is_typed(wheel: zipfile.ZipFile) -> None:
    wanted = {
        f"{name}/{path.relative_to(folder)}"
        for name, folder in PACKAGES.items()
        for path in [*folder.rglob("*.py"), folder / "py.typed"]
    }
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == wanted


def test_an_index_can_show_the_wheel(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    found = HeaderParser().parsestr(wheel.read(name).decode())
    assert found["Version"] == __version__
    assert found["Description-Content-Type"] == "text/markdown"
    assert found["Author"] and found["Keywords"] and found.get_all("Classifier")
    assert {"dev", "plot", "kvikio"} <= set(found.get_all("Provides-Extra") or ())
    required = found.get_all("Requires-Dist") or []
    assert 'triton; platform_system == "Linux"' in required
    [entries] = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    assert "[sglang.srt.plugins]" in wheel.read(entries).decode()


def test_the_command_says_its_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"hcache-backend {__version__}\n"


def test_the_example_of_a_configuration_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCACHE_CONFIG", raising=False)
    done = CliRunner().invoke(app, ["config", str(EXAMPLES / "hcache.toml")])
    assert done.exit_code == 0 and "quota_bytes = 500000000000" in done.output


def test_prometheus_in_the_example_loads_the_alerts() -> None:
    compose = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    mounts = dict(mount.split(":")[:2] for mount in compose["services"]["prometheus"]["volumes"])
    for file in mounts:
        assert (EXAMPLES / file).is_file()
    prometheus = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    [rules] = prometheus["rule_files"]
    assert mounts["../dashboards/alerts.yml"] == f"/etc/prometheus/{rules}"
    [scraped] = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    assert scraped.split(":")[0] in compose["services"]
