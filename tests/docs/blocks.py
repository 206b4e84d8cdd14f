"""Runs the blocks that are marked ``runnable``, each with a home and a folder of its own.

The folder has links to everything in the checkout; new files of a block stay in the folder.
"""

import doctest
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import Block, Finding, Page

MARK = "runnable"
_ROOT = Path(__file__).resolve().parents[2]
SECONDS, GRACE_SECONDS = 300, 10
"""Time limit of a command, for one that hangs, and what it has to end after SIGINT."""

TIMED_OUT = (124, 137)
_COLUMNS = 100
_SHOWN_LINES = 8


class Step(NamedTuple):
    """A command of a block, and the output that it has to print (None: any); ``...`` in it stands
    for any text."""

    line: int
    command: str
    output: str | None


def runnable(page: Page) -> list[Block]:
    return [block for block in page.blocks if MARK in block.info[1:]]


def block_findings(page: Page, block: Block, root: Path) -> Iterator[Finding]:
    """Run ``block`` in a copy of the checkout ``root``; the first thing that is wrong."""
    if block.language not in ("sh", "console"):
        message = f"a runnable block is sh or console, not {block.language!r}"
        yield Finding(page.path, block.line, message)
        return
    try:
        steps = _steps(block)
    except ValueError as error:
        yield Finding(page.path, block.line, str(error))
        return
    with tempfile.TemporaryDirectory(prefix="docs-") as temporary:
        folder, home = Path(temporary, "checkout"), Path(temporary, "home")
        folder.mkdir()
        home.mkdir()
        for item in root.resolve().iterdir():
            if item.name not in (".git", "out"):
                (folder / item.name).symlink_to(item)
        for step in steps:
            problem = _run(step, folder, home)
            if problem is not None:
                yield Finding(page.path, *problem)
                return


def _steps(block: Block) -> list[Step]:
    """The commands of a block.

    Raises:
        ValueError: A console block that does not begin with a command.
    """
    if block.language == "sh":
        return [Step(block.line, block.text, None)]
    steps: list[Step] = []
    for line, text in enumerate(block.text.splitlines(), start=block.line):
        if text.startswith("$ "):
            steps.append(Step(line, text[2:], ""))
        elif not steps:
            raise ValueError("a console block begins with `$ ` and a command")
        elif text.startswith("> ") and not steps[-1].output:
            steps[-1] = steps[-1]._replace(command=f"{steps[-1].command}\n{text[2:]}")
        else:
            steps[-1] = steps[-1]._replace(output=f"{steps[-1].output}{text.rstrip()}\n")
    return steps


def _run(step: Step, folder: Path, home: Path) -> tuple[int, str] | None:
    """Line and message of what went wrong, or None."""
    ended = _execute(step.command, folder, home)
    lines = [line.rstrip() for line in ended.stdout.rstrip().splitlines()]
    first = step.command.strip().splitlines()[0]
    if ended.returncode:
        late = f" ({SECONDS} s are over)" if ended.returncode in TIMED_OUT else ""
        shown = "\n    ".join(lines[-_SHOWN_LINES:])
        return step.line, f"`{first}` ended with status {ended.returncode}{late}\n    {shown}"
    printed, compare = "".join(f"{line}\n" for line in lines), doctest.OutputChecker()
    if step.output is None or compare.check_output(step.output, printed, doctest.ELLIPSIS):
        return None
    wanted = doctest.Example(step.command, step.output)
    differs = compare.output_difference(wanted, printed, doctest.ELLIPSIS)
    return step.line, f"`{first}` prints something else\n{differs}"


def _execute(command: str, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HCACHE_", "XDG_")) and name != "NO_COLOR"
    }
    environment = {
        **kept,
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(_ROOT),  # python -m bench.NAME, as in a checkout
        "COLUMNS": str(_COLUMNS),
        "TERM": "dumb",
    }
    # It ends the whole process group.
    limit = ["timeout", "--signal=INT", f"--kill-after={GRACE_SECONDS}", str(SECONDS)]
    return subprocess.run(
        [*limit, "bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
