"""A Markdown page, taken apart: what it links to, what can be linked to, and what is code."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

_PARSER = MarkdownIt("commonmark").enable("table")
_HTML_LINK = re.compile(r"""(?:href|src)\s*=\s*["']([^"']*)["']""")


class Finding(NamedTuple):
    """Something that is wrong, and where."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


class Piece(NamedTuple):
    """A link's target, or the text of inline code, with the line it stands in."""

    line: int
    text: str


class Block(NamedTuple):
    """A fenced block. ``line`` is that of its first line of text."""

    line: int
    info: tuple[str, ...]
    text: str

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""


class Row(NamedTuple):
    """A row of a table: for each cell its text and the inline code in it."""

    line: int
    cells: tuple[str, ...]
    codes: tuple[tuple[str, ...], ...]


class Table(NamedTuple):
    header: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Page:
    """``links`` are targets of links and images, ``anchors`` what a link to the page can end with,
    ``codes`` inline code, ``blocks`` fenced ones."""

    path: Path
    links: tuple[Piece, ...]
    anchors: frozenset[str]
    codes: tuple[Piece, ...]
    blocks: tuple[Block, ...]
    tables: tuple[Table, ...]


def read_page(path: Path) -> Page:
    tokens = _PARSER.parse(path.read_text())
    links: list[Piece] = []
    codes: list[Piece] = []
    anchors: set[str] = set()
    for line, token in _inlines(tokens):
        for child_line, child in _children(line, token):
            target = child.attrGet("href") or child.attrGet("src")
            if child.type in ("link_open", "image") and target is not None:
                links.append(Piece(child_line, str(target)))
            elif child.type == "code_inline":
                codes.append(Piece(child_line, child.content))
            elif child.type == "html_inline":
                links += [Piece(child_line, found) for found in _HTML_LINK.findall(child.content)]
    counts: Counter[str] = Counter()
    for before, token in pairwise(tokens):
        if before.type == "heading_open":
            slug = _slug(token)
            anchors.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
            counts[slug] += 1
    for token in tokens:
        if token.type == "html_block" and token.map is not None:
            links += [Piece(token.map[0] + 1, text) for text in _HTML_LINK.findall(token.content)]
    blocks = tuple(
        Block(token.map[0] + 2, tuple(token.info.split()), token.content)
        for token in tokens
        if token.type == "fence" and token.map is not None
    )
    return Page(
        path, tuple(links), frozenset(anchors), tuple(codes), blocks, tuple(_tables(tokens))
    )


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The text of each paragraph or list item with its line; inline code is the word "Code".

    Headings, cells of tables and blocks are no prose.
    """
    tokens = _PARSER.parse(path.read_text())
    for before, token in pairwise(tokens):
        if token.type == "inline" and before.type == "paragraph_open":
            line = token.map[0] + 1 if token.map else 1
            yield line, "".join(_word(child) for child in token.children or ())


def _word(child: Token) -> str:
    if child.type in ("softbreak", "hardbreak"):
        return " "
    if child.type == "html_inline" and child.content.startswith("<!--"):
        return ""
    return "Code" if child.type == "code_inline" else child.content


def _inlines(tokens: Sequence[Token]) -> Iterator[tuple[int, Token]]:
    """Every inline token with its line; cells of tables have that of their row."""
    line = 1
    for token in tokens:
        if token.map is not None:
            line = token.map[0] + 1
        if token.type == "inline":
            yield line, token


def _children(line: int, token: Token) -> Iterator[tuple[int, Token]]:
    for child in token.children or ():
        yield line, child
        line += child.type in ("softbreak", "hardbreak")


def _slug(heading: Token) -> str:
    """What GitHub calls a heading in an address."""
    text = "".join(
        child.content
        for child in heading.children or ()
        if child.type in ("text", "code_inline", "softbreak")
    )
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def _tables(tokens: Sequence[Token]) -> Iterator[Table]:
    rows: list[Row] = []
    cells: list[Token] = []
    line = 1
    for token in tokens:
        if token.type == "table_open":
            rows = []
        elif token.type == "tr_open":
            cells, line = [], token.map[0] + 1 if token.map else line
        elif token.type == "inline":
            cells.append(token)
        elif token.type == "tr_close":
            texts = tuple(cell.content for cell in cells)
            codes = tuple(
                tuple(c.content for c in cell.children or () if c.type == "code_inline")
                for cell in cells
            )
            rows.append(Row(line, texts, codes))
        elif token.type == "table_close":
            yield Table(rows[0].cells, tuple(rows[1:]))
