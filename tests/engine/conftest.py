"""Fixtures of the engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_cache(pytestconfig: pytest.Config) -> Path:
    """Where tiny models are kept between test runs (they are keyed by their content)."""
    return pytestconfig.cache.mkdir("models")
