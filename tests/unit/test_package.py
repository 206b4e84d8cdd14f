"""The wheel, the examples and the files that hosts of repositories read."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hcache_backend import __version__
from hcache_backend.cli.main import app
from hcache_backend.config import start_config

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
    assert {"dev", "ingest", "plot", "kvikio"} <= set(found.get_all("Provides-Extra") or ())
    required = found.get_all("Requires-Dist") or []
    assert 'triton; platform_system == "Linux"' in required
    [entries] = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    assert "[sglang.srt.plugins]" in wheel.read(entries).decode()


def test_the_command_says_its_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"hcache {__version__}\n"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def configuration(text: str) -> dict[str, Any]:
    """A table of options of ours in an extra config, as a server would check it."""
    table = tomllib.loads(text)
    assert (table["module_path"], table["class_name"]) == ("hcache_backend", "HCacheStorage")
    return start_config(table).model_dump()


def test_the_example_of_a_configuration_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCACHE_CONFIG", raising=False)
    path = EXAMPLES / "hcache.toml"
    assert configuration(path.read_text())["quota_bytes"] == 500 * 10**9
    done = CliRunner().invoke(app, ["config", str(path)])
    assert done.exit_code == 0 and "quota_bytes = 500000000000" in done.output


def test_the_dockerfile_copies_files_that_exist_and_serves_with_our_backend() -> None:
    text = re.sub(r"\\\n", " ", (EXAMPLES / "Dockerfile").read_text())
    steps = [line.split(None, 1) for line in text.splitlines() if line and line[0] != "#"]
    assert [step for step, _ in steps[:2]] == ["ARG", "FROM"]
    for step, rest in steps:
        assert step in {"ARG", "FROM", "COPY", "RUN", "VOLUME", "EXPOSE", "STOPSIGNAL",
                        "ENTRYPOINT", "CMD"}  # fmt: skip
        if step == "COPY":
            assert all((ROOT / path).exists() for path in rest.split()[:-1])
        if step in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in yaml.safe_load(rest))
    [entry] = [yaml.safe_load(rest) for step, rest in steps if step == "ENTRYPOINT"]
    options = dict(pairwise(entry))
    assert options["--hicache-storage-backend"] == "dynamic"
    assert options["--hicache-storage-backend-extra-config"] == "@/etc/hcache.toml"


def test_the_manifest_mounts_the_store_and_gives_it_to_the_user() -> None:
    claim, settings, server = documents(EXAMPLES / "kubernetes.yaml")
    options = configuration(settings["data"]["hcache.toml"])
    pod = server["spec"]["template"]["spec"]
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert pod["terminationGracePeriodSeconds"] >= 25
    [container] = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    [pages] = [volume for volume in pod["volumes"] if volume["name"] == "pages"]
    assert pages["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert all(str(path).startswith(mounts["pages"] + "/") for path in options["dirs"])


def test_compose_builds_the_image_and_mounts_files_that_exist() -> None:
    [compose] = documents(EXAMPLES / "compose.yaml")
    build = compose["services"]["sglang"]["build"]
    assert (EXAMPLES / build["context"] / build["dockerfile"]).is_file()
    for mount in compose["services"]["prometheus"]["volumes"]:
        assert (EXAMPLES / mount.split(":")[0]).is_file()
    [prometheus] = documents(EXAMPLES / "prometheus.yml")
    assert prometheus["rule_files"] == ["alerts.yml"]


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_templates_are_forms(name: str) -> None:
    [form] = documents(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert form["name"] and form["description"]
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(part["type"] in ("textarea", "dropdown", "input") for part in form["body"])
