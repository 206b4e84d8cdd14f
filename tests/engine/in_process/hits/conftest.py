"""Scenes that tests of hits share. The modules need SGLang: see the conftest.py above."""

from typing import Any

import pytest


@pytest.fixture(params=[False, True], ids=["unsorted", "sorted"])
def scene(request: pytest.FixtureRequest) -> Any:
    from tests.engine.in_process.hits.eager_scene import Scene

    return Scene(need_sort=request.param)
