"""Launches on the emulator: compiled as for a device, given the arguments' own memory."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from hcache_kernels.launch import Launch
from tests.dark.python.hcache_dark import VARIABLE, mark_compiled
from tests.kernels.compiled import source

from .machine import Run, decode
from .memory import Global, Span
from .operands import PARAMETER_BYTES, Step
from .program import Program, parse
from .watchers import Lines, Races, Watcher

_FORMATS = {"u64": "<Q", "u32": "<I4x", "f32": "<f4x"}


class Compiled(NamedTuple):
    program: Program
    steps: Sequence[Step]
    kernel: Any  # as Triton gives it


_compiled: dict[tuple[Any, ...], Compiled] = {}


def compiled(launch: Launch, capability: int, edit: Callable[[str], str] | None = None) -> Compiled:
    """The kernel of a launch, for devices of compute capability ``capability`` (90: 9.0)."""
    one = source(launch.kernel, launch.arguments)
    options = tuple(launch.options.items())
    key = (
        launch.kernel,
        str(one.signature),
        str(one.constants),
        str(one.attrs),
        options,
        capability,
    )
    if edit is not None or key not in _compiled:
        target = GPUTarget("cuda", capability, 32)
        kernel = triton.compile(one, target=target, options=launch.options)
        if kernel.metadata.global_scratch_size or kernel.metadata.num_ctas > 1:
            raise NotImplementedError("memory of Triton's own, clusters of programs")
        program = parse(edit(kernel.asm["ptx"]) if edit else kernel.asm["ptx"])
        if edit is not None:
            return Compiled(program, decode(program), kernel)
        _compiled[key] = Compiled(program, decode(program), kernel)
    return _compiled[key]


def spans_of(arguments: dict[str, Any]) -> list[Span]:
    """Memory of a launch: its tensors, and the planes of further layers that a table names."""
    tensors = {name: one for name, one in arguments.items() if isinstance(one, torch.Tensor)}
    spans = [Span.of(name, one) for name, one in tensors.items()]
    if "table" in tensors and "first" in tensors:
        for column, plane in enumerate(("first", "second")):
            like = Span.of(plane, tensors.get(plane, tensors["first"]))
            for start in tensors["table"][:, column].tolist():
                spans.append(Span(start, start + like.end - like.start, plane))
    return spans


def run(
    launch: Launch,
    capability: int,
    watchers: Sequence[Watcher] = (),
    order: Random | None = None,
    edit: Callable[[str], str] | None = None,
) -> Compiled:
    """Run a launch, whose tensors are on the CPU; ``edit`` changes the text of its PTX before."""
    made = compiled(launch, capability, edit)
    one = source(launch.kernel, launch.arguments)
    names = [name for name, kind in one.signature.items() if kind != "constexpr"]
    values = [launch.arguments[name] for name in names] + [0, 0]  # memory of Triton's own
    held = b"".join(
        struct.pack(_FORMATS[kind], _number(value, kind))
        for value, kind in zip(values, made.program.parameters.values(), strict=True)
    )
    assert len(held) == PARAMETER_BYTES * len(values)
    memory = Global(spans_of(launch.arguments))
    x, y, z = (*launch.grid, 1, 1)[:3]
    shared = made.kernel.metadata.shared
    Run(made.program, made.steps, (x, y, z), held, memory, shared, watchers, order).all()
    return made


def _number(value: Any, kind: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return float(value) if kind == "f32" else int(value) % (1 << int(kind[1:]))


def emulate(capability: int, seed: int | None = None) -> None:
    """From here on every launch of this process runs on the emulator. With a ``seed`` warps come
    in an order by chance, and races are faults."""
    order = None if seed is None else Random(seed)
    dark = VARIABLE in os.environ

    def run_it(launch: Launch) -> None:
        if 0 not in launch.grid:
            lines = Lines()
            watchers = [Races()] * (order is not None) + [lines] * dark
            run(launch, capability, watchers, order)
            if dark:
                mark_compiled(lines.seen)

    Launch.run = run_it
