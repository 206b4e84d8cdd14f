"""`make test-long` finds its tests: nothing else runs it in every change."""

import json
import subprocess
from pathlib import Path

import pytest


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
