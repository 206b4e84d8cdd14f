"""Every program has a help text; a wrong option is named before a server starts."""

import importlib

import pytest

from bench.harness.report import aligned
from bench.record import PROGRAMS

MODULES = [*PROGRAMS.values()]


@pytest.mark.parametrize("module", MODULES)
def test_a_program_says_what_it_is_told(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = importlib.import_module(module).PROGRAM
    with pytest.raises(SystemExit, match="0"):
        program.main(["--help"])
    said = capsys.readouterr().out
    assert str(program.doc).splitlines()[0] in said and "--out" in said
    assert all(setting.name in said for setting in program.settings)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("clients", ["--clients", "magic"], "argument --clients: 'magic' must be of bench_serving"),
        ("clients", ["--turns", "1"], "argument --turns: 1 must be at least 2"),
        ("returns", ["--model-path", "/no/model"], "--model-path: /no/model: there is nothing"),
        ("restores", ["magic"], "argument study: invalid choice: 'magic' (choose from"),
        ("restores", ["pages", "--tokens", "1"], "argument --tokens: 1 must be at least 64"),
        ("codecs", ["--turns", "100"], "at most 4096 fit into the KV pool"),
    ],
)
def test_a_wrong_option_is_named_with_what_would_be_right(
    module: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = importlib.import_module(f"bench.{module}").PROGRAM
    with pytest.raises(SystemExit, match="2"):
        program.main(arguments)
    assert message in capsys.readouterr().err


def test_tables_on_a_terminal_have_columns() -> None:
    tables = "| a | long head |\n|---|--:|\n| word | 1 |\n\n| b |\n|---|\n| 2 |"
    assert aligned(tables) == "a     long head\nword          1\n\nb\n2"
