"""The wheel, the version, and examples that commands, Prometheus and the README read."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hcache_backend import __version__
from hcache_backend.cli.main import app
from hcache_backend.config import parse_config
from hcache_backend.sglang.compat import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def configs() -> dict[str, dict[str, Any]]:
    [readme] = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    _, maps, _ = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    texts = {
        "README": readme,
        "hcache.toml": (EXAMPLES / "hcache.toml").read_text(),
        "kubernetes.yaml": maps["data"]["hcache.toml"],
    }
    return {name: tomllib.loads(text) for name, text in texts.items()}


@pytest.mark.parametrize("name", ["README", "hcache.toml", "kubernetes.yaml"])
def test_extra_configs_are_right_and_alike(name: str) -> None:
    config = configs()[name]
    assert config["module_path"] == "hcache_backend"
    options = parse_config(config["hcache"], "hcache")
    assert options.quota_bytes == 500_000_000_000
    other = configs()["hcache.toml"]
    assert config | {"hcache": None} == other | {"hcache": None}


def test_examples_start_a_server_as_the_readme_does() -> None:
    [command] = re.findall(
        r"sglang\.launch_server (.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    wanted = set(re.findall(r"--[a-z0-9-]+", command)) - {"--model-path"}
    dockerfile = (EXAMPLES / "Dockerfile").read_text()
    assert wanted <= set(re.findall(r"--[a-z0-9-]+", dockerfile))
    assert set(re.findall(r"^([A-Z]+) ", dockerfile, re.MULTILINE)) == {
        *("ARG", "FROM", "COPY", "RUN", "WORKDIR", "VOLUME", "ENTRYPOINT", "CMD")
    }


def test_volumes_of_the_examples_are_the_folders_of_their_configs() -> None:
    [folder] = configs()["hcache.toml"]["hcache"]["dirs"]
    compose = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]["sglang"]
    assert any(volume.endswith(f":{folder}") for volume in compose["volumes"])
    claim, _, stateful = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    pod = stateful["spec"]["template"]["spec"]
    [mount] = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "pages"]
    assert mount["mountPath"] == folder
    [volume] = [one for one in pod["volumes"] if one["name"] == "pages"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert pod["securityContext"]["fsGroup"] == 1000


def test_users_of_the_examples_have_a_home_and_a_place_for_weights() -> None:
    """A container of user 1000 could write nowhere: the download of weights failed."""
    *_, stateful = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    [container] = stateful["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    [claim] = stateful["spec"]["volumeClaimTemplates"]
    home = mounts[claim["metadata"]["name"]]
    assert environment["HOME"] == home and environment["HF_HOME"].startswith(f"{home}/")
    compose = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]["sglang"]
    assert compose["user"] == "${RUN_AS:-0:0}" and compose["environment"]["HOME"] == "/tmp"
    folder = compose["environment"]["HF_HOME"]
    assert any(volume.endswith(f":{folder}") for volume in compose["volumes"])
    assert environment["USER"] and compose["environment"]["USER"]


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
        for path in [*folder.rglob("*.py"), *folder.rglob("seams.json"), folder / "py.typed"]
    }
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == wanted


def test_an_index_can_show_the_wheel(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    found = HeaderParser().parsestr(wheel.read(name).decode())
    assert found["Version"] == __version__
    assert found["Description-Content-Type"] == "text/markdown"
    assert {"dev", "kvikio"} <= set(found.get_all("Provides-Extra") or ())
    assert 'triton; platform_system == "Linux"' in (found.get_all("Requires-Dist") or [])
    [entries] = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    assert "[sglang.srt.plugins]" in wheel.read(entries).decode()


def test_every_page_names_the_versions_of_sglang_that_are_tested() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    ranges = {
        r for page in pages for r in re.findall(r"(0\.5\.\d+) to (0\.5\.\d+)", page.read_text())
    }
    assert ranges == {(SUPPORTED[0], SUPPORTED[-1])}
    assert f"sglang:v{SUPPORTED[-1]}\n" in (EXAMPLES / "Dockerfile").read_text()


def test_the_command_says_its_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"hcache-backend {__version__}\n"


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
