"""The SGLang versions that can be looked at here: the installed one, and those that
requirements/versions.sh unpacked."""

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from hcache_backend.contract.source import Source

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv" / "versions"


def installed() -> Path | None:
    """The folder that holds the package `sglang` which Python would import."""
    spec = find_spec("sglang")
    return Path(spec.origin).parents[1] if spec and spec.origin else None


@cache
def source(wanted: str) -> Source:
    """The sources of a version; skips the test, with the reason, where they are not here."""
    here = installed()
    if here is not None and version("sglang") == wanted:
        return Source(here)
    folder = FOLDER / wanted
    if not (folder / "sglang").is_dir():
        reason = FOLDER / f"{wanted}.missing"
        said = (
            reason.read_text().strip()
            if reason.is_file()
            else "requirements/versions.sh did not run"
        )
        pytest.skip(f"SGLang {wanted} is not here: {said}")
    return Source(folder)
