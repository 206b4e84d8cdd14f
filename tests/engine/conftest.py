"""Fixtures of the engine tests."""

from pathlib import Path

import pytest

from bench.harness.models import build_model
from tests.kit.models import MODELS


@pytest.fixture(scope="session")
def model_cache() -> Path:
    return MODELS


@pytest.fixture(scope="session")
def model(model_cache: Path) -> Path:
    """The model of tests that need no particular one: a Llama with as many KV heads as heads."""
    return build_model("llama", model_cache)
