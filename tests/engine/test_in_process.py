"""Runs the tests of tests/engine/in_process, which import SGLang, in their own interpreter."""

from pathlib import Path

import pytest

from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env
from tests.inner_pytest import run_pytest

pytestmark = [pytest.mark.engine, pytest.mark.versions]


def test_classes_against_sglangs_own(tmp_path: Path) -> None:
    env = {**cpu_engine_env(), "XDG_CACHE_HOME": str(tmp_path)}
    run_pytest("in_process", cwd=Path(__file__).parent, env=env)
