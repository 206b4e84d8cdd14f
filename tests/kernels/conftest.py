"""What compiled kernels use of a GPU is printed at the end of the run, passed or not."""

from __future__ import annotations

import pytest

from tests.kernels.compilation import Usage, compile_all

USAGES = pytest.StashKey[dict[str, Usage]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[USAGES] = {}


@pytest.fixture(scope="module")
def usages(request: pytest.FixtureRequest) -> dict[str, Usage]:
    """Of the module's ``JOBS`` that are tested, all compiled before its first test."""
    tests = (item for item in request.session.items if isinstance(item, pytest.Function))
    names = {test.callspec.params["job"] for test in tests if test.module is request.module}
    usages = compile_all(
        {name: request.module.JOBS[name] for name in request.module.JOBS if name in names}
    )
    request.config.stash[USAGES].update(usages)
    return usages


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    usages = config.stash[USAGES]
    if not usages:
        return
    terminalreporter.section("compiled kernels")
    width = max(map(len, usages))
    terminalreporter.line(f"{'':{width}}  registers  spilled bytes  shared KiB")
    for name, usage in usages.items():
        terminalreporter.line(
            f"{name:{width}}  {usage.registers:9}  {usage.stack:13}  {usage.shared / 1024:10.1f}"
        )
