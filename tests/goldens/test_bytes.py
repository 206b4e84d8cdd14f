"""Pages in host memory, page files, index records and namespaces are what they were."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env
from tests.goldens.golden import compare

ROOT = Path(__file__).parents[2]


def test_pages_of_every_layout_and_codec(tmp_path: Path) -> None:
    engine = cpu_engine_env()
    paths = os.pathsep.join((str(ROOT), engine["PYTHONPATH"]))
    run = subprocess.run(
        [sys.executable, "-m", "tests.goldens.page_machine"],
        cwd=ROOT,
        env={**os.environ, **engine, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    compare("pages.txt", run.stdout.splitlines())
