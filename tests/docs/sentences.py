"""Lengths of the sentences of a page, in words."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import prose

_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[^a-z])")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|etc)\.", re.I)


class Sentence(NamedTuple):
    """A sentence, the line in which its paragraph begins, and its number of words."""

    line: int
    text: str
    words: int


def sentences(path: Path) -> Iterator[Sentence]:
    """The sentences of paragraphs and lists; headings, tables and blocks are left out.

    A paragraph ends a sentence, too. A word is a run of characters with a letter or a digit; a
    piece of inline code is one word.
    """
    for line, text in prose(path):
        for part in _END.split(_ABBREVIATION.sub(r"\1", text)):
            words = sum(any(c.isalnum() for c in word) for word in part.split())
            if words:
                yield Sentence(line, part, words)
