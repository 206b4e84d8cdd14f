"""Models are as large as SGLang says: what tests/unit compares with is what it says today."""

import json
import os
import subprocess
import sys

from tests.contract.versions import ROOT
from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env
from tests.unit.partition.pipelines import public_models


def test_the_recorded_numbers_are_sglangs() -> None:
    models = public_models()
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.shapes"],
        input=json.dumps({name: model["config"] for name, model in models.items()}),
        cwd=ROOT,
        env={**os.environ, **cpu_engine_env()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: model["sglang"] for name, model in models.items()}
