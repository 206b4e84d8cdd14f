"""What a thread does: whose memory it asks for, what it copies, which bytes its operations touch.

Whose memory a tensor is shows where it is made: a ``device`` that is a variable names the GPU on a
machine that has one; a statement that says ``"cpu"`` in so many letters, or names no device, wants
the host. What an operation makes of the device's memory is the device's.
"""

import ast
import itertools
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.order import accesses, rules
from tests.order.clocks import HOST, Frame, site
from tests.order.memory import Kind, Memory

aten = torch.ops.aten
_local = threading.local()


@contextmanager
def unseen() -> Iterator[None]:
    """What torch does within the block is said by whoever opened it."""
    before = getattr(_local, "unseen", False)
    _local.unseen = True
    try:
        yield
    finally:
        _local.unseen = before


class Watch:
    """Sees every torch operation of the thread that enters it."""

    def __init__(self, memory: Memory) -> None:
        self._modes = (_Operations(memory), _Requests(memory))

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


@contextmanager
def streams_are_kept(memory: Memory) -> Iterator[None]:
    """Within the block ``Tensor.record_stream`` takes the stand-ins' streams."""
    original = torch.Tensor.record_stream
    torch.Tensor.record_stream = lambda self, stream: memory.keep(self, stream.actor)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.Tensor.record_stream = original  # type: ignore[method-assign]


FACTORIES = {
    torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.full, torch.arange,
    torch.tensor, torch.as_tensor, torch.rand, torch.randn, torch.randint, torch.randperm,
    torch.zeros_like, torch.empty_like, torch.ones_like, torch.full_like,
    torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_tensor,
}  # fmt: skip
FROM_HOST_VALUES = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}
NOT_WRITTEN = {torch.empty, torch.empty_strided, torch.empty_like, torch.Tensor.new_empty}


class _Requests(TorchFunctionMode):
    """What the program asks for: where memory is, and what goes between host and device."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory, self._clocks = memory, memory.clocks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(_local, "unseen", False):
            return func(*args, **kwargs)
        if func in FACTORIES:
            return self._made(func, args, kwargs)
        if func is torch.Tensor.to:
            return self._moved(args, kwargs)
        if func is torch.Tensor.cpu:
            return self._copied(args[0], args[0].clone, None, waits=True)
        if func in (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__):
            self._read_by_host(args[0], func.__name__)
            with unseen():
                return func(*args, **kwargs)
        if func is torch.Tensor.pin_memory:
            with unseen():
                pinned = args[0].clone()
            self._memory.register(pinned, Kind.PINNED)
            return pinned
        return func(*args, **kwargs)

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        like = next((a for a in args[:1] if isinstance(a, torch.Tensor)), None)
        device = kwargs.get("device")
        if device is not None:
            on_device = not says_cpu()
        else:
            on_device = like is not None and self._memory.kind(like) is Kind.DEVICE
        if func is torch.as_tensor and like is not None:
            return self._moved((like, device), {}) if device is not None else like
        with unseen():
            made = func(*args, **kwargs)
        if pinned:
            self._memory.register(made, Kind.PINNED)
        elif on_device:
            block = self._memory.register(made, Kind.DEVICE)
            if func not in NOT_WRITTEN:
                actor = self._clocks.current
                step = self._clocks.step(actor, site())
                self._memory.access(block, accesses.whole(block, made), actor, step, "write")
            if func in FROM_HOST_VALUES:
                self._clocks.host_waits_for_stream(self._clocks.current, "tensor(device)")
        return made

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        source, *rest = args
        wanted = kwargs.get("device", rest[0] if rest else None)
        here = self._memory.kind(source)
        if isinstance(wanted, torch.Tensor):
            there = self._memory.kind(wanted)
        elif isinstance(wanted, (str, torch.device, int)):
            there = None if says_cpu() else Kind.DEVICE
        else:
            there = here
        if (there is Kind.DEVICE) == (here is Kind.DEVICE):
            moved: torch.Tensor = source.to(*rest, **kwargs)
            return moved
        waits = not (kwargs.get("non_blocking", False) or (len(rest) > 2 and rest[2]))
        return self._copied(source, lambda: source.to(*rest, **kwargs), there, waits=waits)

    def _copied(
        self,
        source: torch.Tensor,
        convert: Callable[[], torch.Tensor],
        there: Kind | None,
        *,
        waits: bool,
    ) -> torch.Tensor:
        """A copy between host and device, on the current stream."""
        memory, here = self._memory, self._memory.find(source)
        if here is None and there is None:
            return convert()
        with unseen():
            copy = convert()
            if copy.untyped_storage()._cdata == source.untyped_storage()._cdata:
                copy = copy.clone()
        actor = self._clocks.current
        step = self._clocks.step(actor, site())
        if here is not None:
            region = accesses.whole(here, source)
            memory.access(here, region, actor, step, "read", held=here.kind is Kind.PINNED)
        if there is Kind.DEVICE or not waits:
            block = memory.register(copy, there or Kind.PINNED)
            held = block.kind is Kind.PINNED
            region = accesses.whole(block, copy)
            memory.access(block, region, actor, step, "write", held=held)
        # Torch stages what is not pinned: the host goes on only when its memory was read.
        if waits or (here is None and there is Kind.DEVICE):
            self._clocks.host_waits_for_stream(actor, "to(device)" if there else "to(host)")
        return copy

    def _read_by_host(self, tensor: torch.Tensor, how: str) -> None:
        block = self._memory.find(tensor)
        if block is None or block.name == "arena":  # its accesses are declared, page by page
            return
        actor = self._clocks.current if block.kind is Kind.DEVICE else HOST
        step = self._clocks.step(actor, site())
        self._memory.access(block, accesses.whole(block, tensor), actor, step, "read", held=True)
        if block.kind is Kind.DEVICE:
            self._clocks.host_waits_for_stream(actor, how)


class _Operations(TorchDispatchMode):
    """What operations read and write."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory, self._clocks = memory, memory.clocks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(_local, "unseen", False) or func in accesses.VIEWS:
            return func(*args, **kwargs)
        given = [
            (position, tensor, written, self._memory.find(tensor))
            for position, tensor, written in accesses.arguments(func, args, kwargs)
        ]
        result = func(*args, **kwargs)
        if any(block is not None for *_, block in given):
            self._saw(func, args, kwargs, given, result)
        return result

    def _saw(self, func: Any, args: Any, kwargs: Any, given: list[Any], result: Any) -> None:
        memory, clocks = self._memory, self._clocks
        storages = {tensor.untyped_storage()._cdata for _, tensor, *_ in given}
        results = list(accesses.tensors(result))
        fresh = [r for r in results if r.untyped_storage()._cdata not in storages]
        if results and not fresh and not any(written for _, _, written, _ in given):
            return  # a view
        on_device = any(block and block.kind is Kind.DEVICE for *_, block in given)
        actor = clocks.current if on_device else HOST
        step = clocks.step(actor, site())
        copies = func in (aten.copy_.default, aten._to_copy.default)
        with unseen():
            for how in ("read", "write"):
                for position, tensor, written, block in given:
                    if block is None or (how == "write") != written:
                        continue
                    region = accesses.touched(func, args, position, tensor, block)
                    held = copies and block.kind is Kind.PINNED
                    memory.access(block, region, actor, step, how, held=held)
        if not on_device:
            return
        if self._waits(func, args, kwargs, given):
            clocks.host_waits_for_stream(actor, func.name().split("::")[1])
        if func not in accesses.FACTS:
            for tensor in fresh:
                block = memory.register(tensor, Kind.DEVICE)
                memory.access(block, accesses.whole(block, tensor), actor, step, "write")

    def _waits(self, func: Any, args: Any, kwargs: Any, given: list[Any]) -> bool:
        """Whether the host learns something from the device by this operation."""
        if func in accesses.FACTS or func in accesses.SIZED_BY_DATA:
            return True
        if func in accesses.INDEXED:
            masks = [i for i in args[1] or () if i is not None and i.dtype is torch.bool]
            scalar = len(args) > 2 and args[2].numel() == 1
            return not scalar and any(self._memory.kind(m) is Kind.DEVICE for m in masks)
        if func is aten.copy_.default:
            (_, _, _, to), (_, source, _, of) = given[:2]
            kinds = (to and to.kind, of and of.kind)
            if kinds == (Kind.DEVICE, Kind.DEVICE):
                return False
            if kinds == (Kind.DEVICE, None) and source.dim() == 0:
                return False  # a number goes with the launch
            pageable = None in kinds
            return pageable or not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return False


# ---- whose memory is meant ----

_says_cpu: dict[tuple[Any, int], bool] = {}


def says_cpu() -> bool:
    """Whether the statement that asks for a device names the host, or always means it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and rules.is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return False
    key = (frame.f_code, frame.f_lasti)
    if key not in _says_cpu:
        where = Frame(frame.f_code, frame.f_lineno)
        _says_cpu[key] = _names_cpu(frame) or rules.HOST_MEMORY.covers(where)
    return _says_cpu[key]


def _names_cpu(frame: FrameType) -> bool:
    """Whether one of the arguments of the call that a frame is in is, or has in it, ``"cpu"``."""
    at = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    first, last, start, end = next(at)
    if first is None or last is None or start is None or end is None:
        return False
    lines = [linecache.getline(frame.f_code.co_filename, n) for n in range(first, last + 1)]
    lines[-1] = lines[-1].encode()[:end].decode()
    lines[0] = lines[0].encode()[start:].decode()
    try:
        call = ast.parse("".join(lines).strip(), mode="eval").body
    except SyntaxError:
        return False
    given = [*call.args, *call.keywords] if isinstance(call, ast.Call) else [call]
    nodes = itertools.chain.from_iterable(map(ast.walk, given))
    return any(isinstance(node, ast.Constant) and node.value == "cpu" for node in nodes)
