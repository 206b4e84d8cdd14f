"""The model of the kits, which speaks their words."""

from pathlib import Path

import pytest

from .standins import speaking_model


@pytest.fixture(scope="session")
def speaker(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(model_cache, tmp_path_factory.mktemp("kits") / "speaker")
