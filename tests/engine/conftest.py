"""Fixtures of the engine tests."""

from pathlib import Path

import pytest

from bench.harness.models import build_model


@pytest.fixture(scope="session")
def model_cache(pytestconfig: pytest.Config) -> Path:
    """Where tiny models are kept between test runs (they are keyed by their content)."""
    return pytestconfig.cache.mkdir("models")


@pytest.fixture(scope="session")
def model(model_cache: Path) -> Path:
    """The model of tests that need no particular one: a Llama with as many KV heads as heads."""
    return build_model("llama", model_cache)
