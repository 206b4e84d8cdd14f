"""The list of statements that no test runs fits the source, and marks say what ran."""

from __future__ import annotations

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
