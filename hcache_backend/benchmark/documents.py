"""Documents in files: what ``hcache ingest`` gives to a server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LINES = ".jsonl"


class DocumentError(ValueError):
    """A document cannot be read; the message names the file, and what would be right."""


@dataclass(frozen=True)
class Document:
    """One document and where it is; its content is read when it is sent.

    Attributes:
        name: Its path, with the number or the ``id`` of its line in a JSONL file.
        digest: SHA-256 of what is sent for it, without what stands before all documents.
        offset: Of its line in a JSONL file, in bytes; None: the whole file is the document.
    """

    name: str
    digest: str
    path: Path
    offset: int | None = None

    def prompt(self, prefix: str) -> str | list[int]:
        """What is sent: ``prefix`` and the text, or token ids as they are.

        Raises:
            DocumentError: It changed since it was listed, or cannot be read any more.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset or 0)
                data = file.read() if self.offset is None else file.readline()
        except OSError as error:
            raise DocumentError(f"{self.path}: {error.strerror}") from None
        content = _text(data, self.name) if self.offset is None else _entry(data, self.name)[0]
        if _digest(content) != self.digest:
            raise DocumentError(f"{self.name}: changed while it was being ingested")
        return prefix + content if isinstance(content, str) else content


def find_documents(paths: Sequence[Path], has_prefix: bool) -> list[Document]:
    """All documents of files and folders, in the order of their names.

    A file is a document, in UTF-8. A ``.jsonl`` file has one in each line: an object with ``text``,
    or ``input_ids`` (token ids), and an ``id`` where it likes. Folders are searched; hidden files
    are left out. The same content twice is one document.

    Args:
        has_prefix: A text is to stand before every document: token ids have no place for it.

    Raises:
        DocumentError: One cannot be read, or there is none.
    """
    found: dict[str, Document] = {}
    for path in paths:
        for file in _files(path):
            for document, content in _documents(file):
                if has_prefix and not isinstance(content, str):
                    raise DocumentError(
                        f"{document.name}: has 'input_ids', and --prefix-file is a text: put its "
                        "tokens before those of the document, and leave --prefix-file out"
                    )
                found.setdefault(document.digest, document)
    if not found:
        raise DocumentError(f"{', '.join(map(str, paths))}: no document is there")
    return list(found.values())


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for below in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in below.relative_to(path).parts)
        if below.is_file() and not hidden:
            yield below


def _documents(path: Path) -> Iterator[tuple[Document, str | list[int]]]:
    try:
        if path.suffix != LINES:
            content = _text(path.read_bytes(), str(path))
            if content.strip():  # an empty file is none
                yield Document(str(path), _digest(content), path), content
            return
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}:{number}"
                    entry, name = _entry(line, where)
                    yield Document(name or where, _digest(entry), path, offset), entry
                offset += len(line)
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from None


def _entry(line: bytes, where: str) -> tuple[str | list[int], str]:
    """Content and ``id`` of a line."""
    try:
        entry = json.loads(_text(line, where))
    except ValueError as error:
        raise DocumentError(f"{where}: not JSON: {error}") from None
    if isinstance(entry, dict):
        name = f"{where} ({entry['id']})" if "id" in entry else ""
        text, ids = entry.get("text"), entry.get("input_ids")
        if isinstance(text, str) and text and ids is None:
            return text, name
        if text is None and isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return ids, name
    raise DocumentError(
        f"{where}: must be an object with 'text', or with 'input_ids' (a list of token ids), and "
        f"is {line.decode()[:60].strip()}"
    )


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{where}: not UTF-8 text at byte {error.start}") from None


def _digest(content: str | list[int]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
