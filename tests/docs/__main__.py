"""``python -m tests.docs``: check README, changelog and docs; ends with 1 when one is wrong."""

from pathlib import Path
from typing import Annotated

import typer

from tests.docs import capabilities
from tests.docs.blocks import block_findings, runnable
from tests.docs.links import link_findings
from tests.docs.names import name_findings, unmentioned, untabled
from tests.docs.pages import Finding, read_page

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ROOT / "docs" / "options.md"
LIMITS = ROOT / "docs" / "limits.md"


def pages_of(root: Path) -> list[Path]:
    """README, changelog and docs of a checkout."""
    return [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").glob("**/*.md"))]


def check(
    pages: Annotated[
        list[Path] | None, typer.Argument(help="Pages; default: README, changelog, docs.")
    ] = None,
    run: Annotated[bool, typer.Option(help="Run the blocks that are marked runnable.")] = True,
    write: Annotated[bool, typer.Option(help="Write the printed parts first.")] = False,
) -> None:
    findings: list[Finding] = []
    printed = capabilities.with_table(LIMITS.read_text())
    if write:
        LIMITS.write_text(printed)
    every = [read_page(path.resolve()) for path in pages or pages_of(ROOT)]
    if not pages:
        findings += [Finding(every[0].path, 1, problem) for problem in unmentioned(every)]
        findings += [Finding(OPTIONS, 1, problem) for problem in untabled(read_page(OPTIONS))]
        if LIMITS.read_text() != printed:
            problem = "its table of capabilities is not the product's: run with --write"
            findings.append(Finding(LIMITS, 1, problem))
    for page in every:
        found = [*link_findings(page, ROOT), *name_findings(page)]
        name = page.path.relative_to(ROOT) if page.path.is_relative_to(ROOT) else page.path
        typer.echo(f"{name}: {len(page.links)} links, {len(runnable(page))} runnable blocks")
        for block in runnable(page) if run else ():
            typer.echo(f"{name}:{block.line}: running")
            found += block_findings(page, block, ROOT)
        findings += found
    for finding in findings:
        typer.secho(str(finding), fg="red", err=True)
    if findings:
        typer.secho(f"{len(findings)} wrong", fg="red", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(check)
