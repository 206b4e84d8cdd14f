"""The text of a kernel in PTX, taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

SIZES = {"pred": 1, "b8": 1, "b16": 2, "b32": 4, "b64": 8}
_PARAMETER = re.compile(r"\.param \.([usbf]\d+) (?:.* )?(\w+),?$")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%?\w+)<(\d+)>$")
_LOCATION = re.compile(r"\.loc\s+(\d+) (\d+) (\d+)(?:.*inlined_at (\d+) (\d+))?")
_STATEMENT = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_IGNORED = (".version", ".target", ".address_size", ".pragma", ".extern", ".global", ".visible")


class Fault(Exception):
    """What the kernel did wrong, or what the emulator does not know."""


class Instruction(NamedTuple):
    opcode: str
    operands: tuple[str, ...]  # {...} and [...] are one
    guard: str | None  # a predicate register
    negated: bool
    line: int  # of the PTX
    places: tuple[tuple[str, int], ...]  # file and line of Python, and where it was inlined

    def __str__(self) -> str:
        at = " in ".join(f"{file}:{line}" for file, line in self.places)
        return f"PTX line {self.line}, {self.opcode} {', '.join(self.operands)}, of {at}"


@dataclass
class Program:
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)  # bytes, by prefix of the name
    parameters: dict[str, str] = field(default_factory=dict)  # types, in their order
    threads: int = 0

    def size_of(self, register: str) -> int:
        return self.registers[register.rstrip("0123456789")]


def parse(text: str) -> Program:
    """The only kernel of a module; sections of debug information are left out."""
    program, files, places = Program(), dict[str, str](), list[tuple[str, str]]()
    found: list[tuple[Instruction, list[tuple[str, str]]]] = []
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.split("//")[0].strip()
        if line.startswith((".section", ".file")):
            break
        if line.startswith("$") and line.endswith(":"):
            program.labels[line[:-1]] = len(found)
        elif match := _LOCATION.match(line):
            places = [(match[1], match[2]), (match[4], match[5])][: 2 if match[4] else 1]
        elif match := _PARAMETER.match(line):
            program.parameters[match[2]] = match[1]
        elif line.startswith(".reqntid"):
            program.threads = int(line.split()[1])
        elif not line.startswith(_IGNORED) and line not in ("{", "}", ")"):
            for statement in filter(None, (part.strip() for part in line.split(";"))):
                if match := _REGISTERS.match(statement):
                    program.registers[match[2]] = SIZES[match[1]]
                else:
                    found.append((_instruction(statement, number), places))
    for match in re.finditer(r'\.file\s+(\d+) "(.*)"', text):
        files[match[1]] = match[2]
    for one, of in found:
        there = tuple((files.get(file, "?"), int(at)) for file, at in of)
        program.instructions.append(one._replace(places=there))
    return program


def _instruction(statement: str, line: int) -> Instruction:
    match = _STATEMENT.match(statement)
    if match is None:
        raise Fault(f"PTX line {line} is not understood: {statement}")
    return Instruction(
        match[3], tuple(_OPERAND.findall(match[4])), match[2], match[1] == "!", line, ()
    )
