"""What is installed, and the files around it: packages, examples, the version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from hcache_backend.config import parse_config

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXAMPLES = ROOT / "examples"


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in PROJECT["project"]


def configs() -> dict[str, dict[str, Any]]:
    """The extra configs that README and examples show."""
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


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_issue_templates_can_be_read(path: Path) -> None:
    template = yaml.safe_load(path.read_text())
    assert template["name"] and template["description"]
    assert all(part["type"] in ("textarea", "input") for part in template["body"])
