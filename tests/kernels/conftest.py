"""What compiled kernels use of a GPU is printed at the end of the run, passed or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import pytest

from tests.kernels.compilation import Usage, compile_all


@pytest.fixture(scope="module")
def usages(request: pytest.FixtureRequest) -> dict[str, Usage]:
    """Results of the module's tested ``JOBS``, all compiled before its first test."""
    tests = (item for item in request.session.items if isinstance(item, pytest.Function))
    names = {test.callspec.params["job"] for test in tests if test.module is request.module}
    return compile_all(
        {name: request.module.JOBS[name] for name in request.module.JOBS if name in names}
    )


@pytest.fixture
def usage(
    job: str, usages: dict[str, Usage], record_property: Callable[[str, object], None]
) -> Usage:
    """What the program ``job`` uses; goes into the table at the end."""
    record_property("usage", (job, *astuple(usages[job])))
    return usages[job]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found]
    told = (dict(getattr(report, "user_properties", ())).get("usage") for report in reports)
    usages = {usage[0]: usage[1:] for usage in told if usage}
    if not usages:
        return
    terminalreporter.section("compiled kernels")
    width = max(map(len, usages))
    terminalreporter.line(f"{'':{width}}  registers  spilled bytes  shared KiB")
    for name, (registers, stack, shared) in sorted(usages.items()):
        terminalreporter.line(f"{name:{width}}  {registers:9}  {stack:13}  {shared / 1024:10.1f}")
