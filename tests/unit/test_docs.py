"""README, changelog and docs are right, in short sentences, and the checks find what is wrong."""

import re
from pathlib import Path

import pytest
import typer

from tests.docs import capabilities
from tests.docs.__main__ import LIMITS, OPTIONS, ROOT, check, pages_of
from tests.docs.links import link_findings
from tests.docs.names import name_findings, unmentioned, untabled
from tests.docs.pages import read_page
from tests.docs.sentences import sentences

EVERY_PAGE = pytest.mark.parametrize(
    "path", pages_of(ROOT), ids=lambda path: str(path.relative_to(ROOT))
)


@EVERY_PAGE
def test_links_and_names_of_our_pages(path: Path) -> None:
    page = read_page(path)
    assert [*map(str, link_findings(page, ROOT)), *map(str, name_findings(page))] == []


def test_commands_and_metrics_stand_in_our_pages() -> None:
    assert list(unmentioned([read_page(path) for path in pages_of(ROOT)])) == []
    assert "no page speaks of hcache verify" in unmentioned([])


def test_capabilities_are_those_of_the_product() -> None:
    text = LIMITS.read_text()
    assert capabilities.with_table(text) == text


def test_options_and_variables_stand_in_tables(tmp_path: Path) -> None:
    assert list(untabled(read_page(OPTIONS))) == []
    page = tmp_path / "options.md"
    rows = OPTIONS.read_text().splitlines()
    page.write_text("\n".join(row for row in rows if not row.startswith("| `mode`")))
    assert list(untabled(read_page(page))) == ["mode stands 0 times"]


def test_the_map_has_every_folder_of_the_product() -> None:
    named = {code.text for code in read_page(ROOT / "docs" / "structure.md").codes}
    for file in (
        *ROOT.glob("hcache_backend/*/**/__init__.py"),
        *ROOT.glob("kernels/*/__init__.py"),
    ):
        assert f"{file.parent.relative_to(ROOT)}/" in named


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](not-there.md)", "no such file"),
        ("[a](there.md#three)", "there.md has no heading #three"),
        ("<img src='../outside.md'>", "out of the repository"),
        ("[a](https://nothost/x)", "'nothost' is no host"),
        ("`hcache verfy`", "`hcache` has no command 'verfy'"),
        ("```console\n$ hcache gc \\\n  --quota 3\n```", "`hcache gc` has no option --quota"),
        ("`--hicache-sise`", "has an option --hicache-sise"),
        ("```sh\nsglang.launch_server --modle M\n```", "SGLang's server has no option --modle"),
        ("`HCACHE_ENABLED`", "HCACHE_ENABLED is no variable"),
        ("`hcache_page_total`", "hcache_page_total is no metric"),
        ('`hcache_store_pages_total{event="lost"}`', "the store counts no lost"),
        ("`bench/papers.py`", "there is no bench/papers.py"),
        ("`make demos`", "the Makefile has no target demos"),
        ('```json\n{"hcache": {"dir": []}}\n```', "did you mean 'dirs'?"),
        ('| option | default |\n|-|-|\n| `mode` | `"kv"` |', "default of 'mode' is \"auto\""),
        ("`format/page.py:PageLayout.unseal`", "page.py defines no PageLayout.unseal"),
        ("```sh\npython -m bench.nothing --out x\n```", "there is no program bench.nothing"),
        ("```sh\npython -m bench.demo --turned 2\n```", "no program in bench has an option"),
    ],
)
def test_what_is_wrong_is_found(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# One\n")
    path = tmp_path / "page.md"
    path.write_text(text)
    page = read_page(path)
    [finding] = [*link_findings(page, tmp_path), *name_findings(page)]
    assert problem in finding.message


RUNNABLE = "```console runnable\n$ printf '1\\n2\\n'\n{}\n```\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RUNNABLE.format("1\n2"), ""),
        (RUNNABLE.format("...\n3"), "prints something else\nExpected:\n    ...\n    3\n"),
        ("```sh runnable\ntouch new\ntest -e README.md\n```", ""),
        ("text\n\n```sh runnable\necho why >&2\nfalse\n```", ":4: `echo why >&2` ended with"),
        ("```python runnable\n1\n```", "is sh or console, not 'python'"),
        ("```console runnable\nls\n```", "begins with `$ `"),
    ],
)
def test_runnable_blocks_do_what_they_say(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    if said:
        with pytest.raises(typer.Exit):
            check([page])
    else:
        check([page])
    assert said in capsys.readouterr().err
    assert not (ROOT / "new").exists()


AVERAGE, LONGEST = 18, 30  # words
METAPHORS = re.compile(r"\b(?:told|said|hears?|heard|harmless|tenants?|spoil\w*)\b", re.IGNORECASE)
MOST_WORDS = 30  # of our own, which a reader must learn


def wrong(path: Path) -> list[str]:
    found = list(sentences(path))
    average = sum(sentence.words for sentence in found) / len(found)
    long = [f"line {s.line}: {s.words} words: {s.text}" for s in found if s.words > LONGEST]
    return [*long, *([f"{average:.1f} words on average"] if average >= AVERAGE else [])]


@EVERY_PAGE
def test_sentences_are_short(path: Path) -> None:
    found = wrong(path)
    assert not found, "\n".join(found)


def test_a_long_sentence_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{'word ' * LONGEST}end. {'Short. ' * 9}")
    assert [text[:17] for text in wrong(page)] == [f"line 1: {LONGEST + 1} words:"]


@pytest.mark.parametrize(
    "path", [*pages_of(ROOT), *ROOT.glob("hcache_backend/**/*.py"), *ROOT.glob("kernels/**/*.py")]
)
def test_text_and_names_have_no_metaphors(path: Path) -> None:
    assert METAPHORS.findall(path.read_text()) == []


def test_the_vocabulary_is_small() -> None:
    text = (ROOT / "docs" / "structure.md").read_text().partition("\n## Glossary\n")[2]
    _, _, *words = (line for line in text.splitlines() if line.startswith("| ") or "---" in line)
    assert 20 < len(words) <= MOST_WORDS


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", ["options", "operations", "serving", "limits"])
def test_cells_of_tables_are_short(name: str) -> None:
    lines = (ROOT / "docs" / f"{name}.md").read_text().splitlines()
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert [cell for cell in cells if len(cell.split()) > 35] == []
