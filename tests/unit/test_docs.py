"""README, changelog and docs are right, in short sentences, and the checks find what is wrong."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hcache_backend.config import HCacheConfig
from tests.docs import blocks, capabilities
from tests.docs.__main__ import LIMITS, OPTIONS, ROOT, pages_of
from tests.docs.blocks import block_findings, runnable
from tests.docs.links import link_findings
from tests.docs.names import VARIABLES, name_findings, unmentioned, untabled
from tests.docs.pages import Page, read_page
from tests.docs.sentences import sentences

MakePage = Callable[[str], Page]


@pytest.fixture
def page(tmp_path: Path) -> MakePage:
    """Makes a page of a repository that has ``there.md``, ``code.py`` and ``folder``."""
    (tmp_path / "there.md").write_text("# One\n\n## `Two` words, a comma\n\n# One\n")
    (tmp_path / "code.py").write_text("1\n2\n")
    (tmp_path / "folder").mkdir()

    def make(text: str) -> Page:
        path = tmp_path / "page.md"
        path.write_text(text)
        return read_page(path)

    return make


@pytest.mark.parametrize("path", pages_of(ROOT), ids=lambda path: path.name)
def test_links_and_names_of_our_pages(path: Path) -> None:
    page = read_page(path)
    assert [*map(str, link_findings(page, ROOT)), *map(str, name_findings(page))] == []


def test_commands_and_metrics_stand_in_our_pages(page: MakePage) -> None:
    assert list(unmentioned([read_page(path) for path in pages_of(ROOT)])) == []
    missing = list(unmentioned([page("`hcache plan`, `hcache_problems_total`")]))
    for name in ("hcache verify", "hcache_store_pages"):
        assert f"no page speaks of {name}" in missing
    assert not any(found.endswith(("hcache plan", "hcache_problems")) for found in missing)


def test_capabilities_are_those_of_the_product() -> None:
    text = LIMITS.read_text()
    assert capabilities.with_table(text) == text
    assert capabilities.with_table(text.replace("two-batch", "another")) == text


def test_options_and_variables_stand_in_tables(page: MakePage) -> None:
    assert list(untabled(read_page(OPTIONS))) == []
    rows = OPTIONS.read_text().splitlines(keepends=True)
    for name in (*HCacheConfig.model_fields, *VARIABLES):
        [row] = (row for row in rows if row.startswith("|") and f"`{name}`" in row.split("|")[1])
        without = "".join(other for other in rows if other is not row)
        assert f"{name} stands 0 times" in list(untabled(page(f"`{name}`\n\n{without}")))
    twice = "".join(rows) + '\n| option | default |\n|-|-|\n| `mode` | `"auto"` |\n'
    assert list(untabled(page(twice))) == ["mode stands 2 times"]


def test_the_map_has_every_folder_of_the_product() -> None:
    named = {code.text for code in read_page(ROOT / "docs" / "structure.md").codes}
    for file in (*ROOT.glob("hcache_backend/**/__init__.py"), *ROOT.glob("kernels/*/__init__.py")):
        folder = f"{file.parent.relative_to(ROOT)}/"
        assert folder in named or folder == "hcache_backend/", folder


@pytest.mark.parametrize(
    "target",
    [
        "there.md", "there.md#one", "there.md#two-words-a-comma", "there.md#one-1", "folder",
        "#a-heading", "code.py#L2", "https://example.org/x?y#z",
    ],
)  # fmt: skip
def test_links_that_lead_somewhere(target: str, page: MakePage, tmp_path: Path) -> None:
    written = page(f"# A heading\n\n[text]({target}) and ![picture]({target})\n")
    assert len(written.links) == 2
    assert list(link_findings(written, tmp_path)) == []


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("not-there.md", "no such file"),
        ("there.md#three", "there.md has no heading #three"),
        ("#nowhere", "page.md has no heading #nowhere"),
        ("code.py#L3", "code.py has no #L3"),
        ("../outside.md", "out of the repository"),
        ("https://nothost/x", "'nothost' is no host"),
        ("ftp://example.org/x", "neither a file"),
    ],
)
def test_links_that_lead_nowhere(target: str, problem: str, page: MakePage, tmp_path: Path) -> None:
    (tmp_path.parent / "outside.md").touch()
    written = page(f"# A heading\n\nwords\nand [text]({target})\n\n<img src='{target}'>\n")
    found = list(link_findings(written, tmp_path))
    assert [finding.line for finding in found] == [4, 6]
    assert all(problem in finding.message for finding in found)


@pytest.mark.parametrize(
    "text",
    [
        "`hcache verify [--repair] [--rebuild]`, `hcache plan -m X --ssds 4`, `hcache --help`",
        "`hcache: KV mode`, `hcache_backend/sglang`, `hcache_backend.cli`, `--page-size 64`",
        '`hcache_store_pages_total{event="dropped_full"}`, `hcache_stage_seconds{stage}`',
        "`HCACHE_ENABLE=1`, `make demo`, `bench/paper.py`, `bench/results/DEVICE/`",
        "`format/page.py:PageLayout.seal`, `config.py:parse_config`, `kernels/x.py:9`",
        "`python -m tests.docs --no-run`, `python -m bench.paper`",
        '```sh\npython -m sglang.launch_server --tp 2 \\\n --x \'{"hcache": {"mode": "kv"}}\'\n```',
        "```toml\n[hcache]\ndirs = ['/mnt/ssd0']\n```",
        '```sh\nexport HCACHE_CONFIG=\'{"codec": "int8"}\'\n```',
    ],
)
def test_names_that_exist(text: str, page: MakePage) -> None:
    # The launch line above has one option that SGLang lacks.
    found = [f.message for f in name_findings(page(text)) if not f.message.endswith("option --x")]
    assert found == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`hcache verfy`", "`hcache` has no command 'verfy'"),
        ("`hcache stats --jsn`", "`hcache stats` has no option --jsn"),
        ("```console\n$ hcache gc \\\n  --quota 3\n```", "`hcache gc` has no option --quota"),
        ("`--hicache-sise`", "has an option --hicache-sise"),
        ("```sh\nsglang.launch_server --modle M\n```", "SGLang's server has no option --modle"),
        ("`HCACHE_ENABLED`", "HCACHE_ENABLED is no variable"),
        ("`hcache_page_total`", "hcache_page_total is no metric"),
        ('`hcache_problems_total{event="x"}`', "hcache_problems_total has no label event"),
        ('`hcache_store_pages_total{event="lost"}`', "the store counts no lost"),
        ("`bench/papers.py`", "there is no bench/papers.py"),
        ("`make demos`", "the Makefile has no target demos"),
        ('```json\n{"hcache": {"dir": []}}\n```', "did you mean 'dirs'?"),
        ('```sh\nHCACHE_CONFIG=\'{"codec": "zip"}\'\n```', "option 'codec' is 'zip'"),
        ("```toml\n[hcache]\nquota_bytes = 'all'\n```", "option 'quota_bytes' is 'all'"),
        ("```toml\nquota = 1\n```", "unknown option 'quota'"),
        ('| option | default |\n|-|-|\n| `mode` | `"kv"` |', "default of 'mode' is \"auto\""),
        ("| option | default |\n|-|-|\n| `speed` | none |", "'speed' is no option"),
        ("`format/page.py:PageLayout.unseal`", "page.py defines no PageLayout.unseal"),
        ("`bench/nothing.py:main`", "there is no bench/nothing.py"),
        ("`sglang/hook_registry.py:Hook.unhook`", "sglang/hook_registry.py defines no Hook.unhook"),
        ("```sh\npython -m bench.nothing --out x\n```", "there is no program bench.nothing"),
        (
            "```sh\npython -m bench.demo \\\n --turned 2\n```",
            "no program in bench has an option --turned",
        ),
    ],
)
def test_names_that_do_not_exist(text: str, problem: str, page: MakePage) -> None:
    assert problem in "\n".join(finding.message for finding in name_findings(page(text)))


def run(written: Page, root: Path) -> list[str]:
    return [
        f"{finding.line}: {finding.message}"
        for block in runnable(written)
        for finding in block_findings(written, block, root)
    ]


def test_blocks_run_in_a_home_and_a_folder_of_their_own(page: MakePage, tmp_path: Path) -> None:
    written = page(
        "```sh runnable\ncat code.py > new\nmkdir ~/made\n```\n"
        "```sh runnable\ntest ! -e new\ntest ! -e ~/made\n```\n"
        "```sh\nexit 1\n```\n"
    )
    assert len(runnable(written)) == 2
    assert run(written, tmp_path) == []
    assert not (tmp_path / "new").exists()


def test_a_block_that_fails_is_named(page: MakePage, tmp_path: Path) -> None:
    [found] = run(page("text\n\n```sh runnable\necho why >&2\nfalse\n```\n"), tmp_path)
    assert found == "4: `echo why >&2` ended with status 1\n    why"


def test_a_console_block_prints_what_stands_there(page: MakePage, tmp_path: Path) -> None:
    right = "```console runnable\n$ cat code.py\n1\n2\n$ for i in a b c d; do\n> echo $i; done\n"
    assert run(page(f"{right}a\n...\nd\n```\n"), tmp_path) == []
    assert run(page(f"{right}...\n```\n"), tmp_path) == []
    [found] = run(page(f"{right}a\nb\nC\nd\n```\n"), tmp_path)
    assert found.startswith("5: `for i in a b c d; do` prints something else\nExpected:\n    a\n")
    [found] = run(page(f"{right}a\n...\ne\n```\n"), tmp_path)
    assert found.endswith("Got:\n    a\n    b\n    c\n    d\n")
    assert run(page(f"{right}a\nb\nc\n```\n"), tmp_path) != []


def test_a_block_that_hangs_ends(
    page: MakePage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SECONDS", 0.2)
    monkeypatch.setattr(blocks, "GRACE_SECONDS", 0.2)
    [found] = run(page("```sh runnable\nsleep 600 & sleep 600\n```\n"), tmp_path)
    assert "took longer than" in found


def test_what_cannot_be_run_is_said(page: MakePage, tmp_path: Path) -> None:
    [found] = run(page("```python runnable\n1\n```\n"), tmp_path)
    assert "is sh or console, not 'python'" in found
    [found] = run(page("```console runnable\nls\n```\n"), tmp_path)
    assert "begins with `$ `" in found


def test_the_command_ends_with_1_and_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# A\n\n[b](c.md)\n")
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs", str(tmp_path / "page.md")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"{tmp_path / 'page.md'}:3: link to 'c.md'" in done.stderr


AVERAGE, LONGEST = 18, 40  # words


def wrong(path: Path) -> list[str]:
    found = list(sentences(path))
    average = sum(sentence.words for sentence in found) / len(found)
    long = [f"line {s.line}: {s.words} words: {s.text}" for s in found if s.words > LONGEST]
    return [*long, *([f"{average:.1f} words on average"] if average >= AVERAGE else [])]


@pytest.mark.parametrize("path", pages_of(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(path: Path) -> None:
    found = wrong(path)
    assert not found, "\n".join(found)


def test_code_headings_and_tables_are_no_sentences(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n\nOne `piece of code` counts once. Version 0.5 is\nno end, e.g. here! So\n\n"
        "| a | table |\n|---|---|\n| with | cells |\n\n- An item [with a link](to/there.md)\n\n"
        "```sh\nmake demo\n```\n"
    )
    assert [sentence.words for sentence in sentences(page)] == [4, 7, 1, 5]
    assert [sentence.line for sentence in sentences(page)] == [3, 3, 3, 10]


def test_a_long_sentence_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{'word ' * LONGEST}end. {'Short. ' * 9}")
    assert [text[:17] for text in wrong(page)] == ["line 1: 41 words:"]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", ["options", "operations", "serving", "limits"])
def test_cells_of_tables_are_short(name: str) -> None:
    lines = (ROOT / "docs" / f"{name}.md").read_text().splitlines()
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert [cell for cell in cells if len(cell.split()) > 35] == []
