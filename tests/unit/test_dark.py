"""Statements that no test runs, and long tests: each is known."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.dark.__main__ import environment
from tests.dark.python import hcache_dark
from tests.dark.report import MOST, Dark, Listed, statements

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_listed_stands_in_the_source_and_is_little() -> None:
    listed, every = Listed.read(), statements()
    assert not list((listed.counts - every).elements())
    assert listed.counts.total() <= MOST * every.total()


def test_every_reason_is_a_sentence() -> None:
    assert all(reason.endswith(".") and " " in reason for reason in Listed.read().reasons.values())


def test_the_list_and_a_run_are_compared() -> None:
    one, two, rare = (("a.py", "f", text) for text in ("x()", "y()", "z()"))
    listed = Listed({one: "A reason.", rare: "A reason."}, Counter([one, one, rare]), {rare})
    assert listed.problems(Counter([one, one])) == []
    assert listed.problems(Counter([one, one, rare, two])) == ["dark, and not listed: a.py:f: y()"]
    assert listed.problems(Counter([one])) == ["listed, and not dark: a.py:f: x()"]


PROGRAM = """
import os, signal
from hcache_backend.store import maintenance
from hcache_backend.format import units
units.Shard(0, 1).eighths
if os.fork():
    os.wait()
else:
    units.Shard(1, 2).of
    from hcache_backend.cli.common import settings
    settings(None)
    os.kill(os.getpid(), signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_statements_that_ran_are_known_although_the_process_was_killed(tmp_path: Path) -> None:
    """Also those of a fork, and of a module that only the fork imported."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(tmp_path), cwd=ROOT, check=False
    )
    assert run.returncode == -signal.SIGKILL
    dark = {key for _, _, key in Dark.read(tmp_path).places}
    text = (ROOT / "hcache_backend/cli/common.py").read_text()
    owned = {key for key in statements() if key[:2] == ("hcache_backend/cli/common.py", "settings")}
    assert owned and owned - dark and owned & dark, text
    assert ("hcache_backend/format/units.py", "", "class Shard(NamedTuple):") not in dark


@pytest.mark.parametrize(
    ("text", "owners"),
    [
        ('"""Doc."""\nfrom __future__ import annotations\nx = 1\n', [("", "x = 1")]),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    b\n", [("", "if TYPE_CHECKING:")]),
        (
            "class A:\n    def f(self):\n        '''Doc.'''\n        try:\n            g()\n"
            "        except E:\n            pass\n",
            [
                ("", "class A:"),
                ("A", "def f(self):"),
                ("A.f", "try:"),
                ("A.f", "g()"),
                ("A.f", "pass"),
            ],
        ),
    ],
)
def test_what_counts_as_a_statement(
    text: str, owners: list[tuple[str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    assert [(one.owner, one.text) for one in hcache_dark.read(path).statements] == owners


def test_the_long_tests_are_found() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["make", "test-long", "ARGS=--collect-only -q tests/engine/test_soak.py tests/order"],
        cwd=root,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/engine/test_soak.py::" in done.stdout
    assert "tests/order/test_engine.py::" in done.stdout


def test_results_of_tests_that_are_gone_go(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        from pathlib import Path
        from tests.long_results import LongResults

        def pytest_configure(config):
            config.addinivalue_line("markers", "long: takes long")
            config.pluginmanager.register(LongResults(Path("long.json")))
        """
    )
    pytester.makepyfile(
        test_a="import pytest\n@pytest.mark.long\ndef test_one(): pass\ndef test_two(): pass\n",
        test_b="import pytest\n@pytest.mark.long\ndef test_three(): pass\n",
    )
    results = pytester.path / "long.json"
    others = ["test_a.py::test_gone", "test_b.py::test_three", "test_gone.py::test_one"]
    results.write_text(json.dumps(dict.fromkeys(others, "before")))
    pytester.runpytest("-m", "long", "test_a.py::test_one").assert_outcomes(passed=1)
    assert json.loads(results.read_text()).keys() == {*others, "test_a.py::test_one"}
    pytester.runpytest("-m", "long", "test_a.py").assert_outcomes(passed=1, deselected=1)
    found = json.loads(results.read_text())
    assert found.keys() == {"test_a.py::test_one", "test_b.py::test_three"}
    assert found["test_b.py::test_three"] == "before"
    assert found["test_a.py::test_one"]["outcome"] == "passed"
