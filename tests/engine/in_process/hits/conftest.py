"""Scenes that tests of hits share."""

from __future__ import annotations

import pytest

from tests.engine.in_process.hits.eager_scene import Scene


@pytest.fixture(params=[False, True], ids=["unsorted", "sorted"])
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(need_sort=request.param)
