"""``torch.cuda`` on a CPU, for one thread: what is launched waits in its stream until it must run.

Tensors of the device are :class:`DeviceTensor`, so ``is_cuda`` and ``device`` are those of a GPU,
and operations that mix them with the CPU's raise as on a GPU. Every operation on them is put into
the current stream; its result has the right shape and is full of :data:`POISON`. A stream runs when
somebody waits for it, and only up to there, so that work without its wait finds poison, or finds
what should have been overwritten later. While a graph is recorded, operations go to the graph, and
a replay puts them into the stream again. Kernels run in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hcache_kernels.launch import Launch
from tests.order import accesses

CUDA = torch.device("cuda", 0)
POISON = 0xA5
POLLS = 3
"""Queries of an event that are answered no, although nothing else would make its stream run."""

aten = torch.ops.aten
Work = Callable[[], object]

EMPTY = {
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
}
"""Launch nothing."""
SIZED_BY_DATA = {*accesses.FACTS, *accesses.SIZED_BY_DATA, aten.repeat_interleave.Tensor}
"""The host waits for these."""
READS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__repr__"}


class DeviceTensor(torch.Tensor):
    """Memory of the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # the modes below do it
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream: Any) -> None:
        """Work that waits holds its tensors."""


class Event:
    """As ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._stream: Stream | None = None
        self._behind, self._polls, self.time = 0, 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._stream, self._polls = stream or _current[-1], 0
        # An event can be recorded again: what waits for this recording keeps its place.
        self._stream.put(self._passes)
        self._behind = self._stream.given

    def _passes(self) -> None:
        self.time = clock()

    def query(self) -> bool:
        if self._stream is None or self._stream.done >= self._behind:
            return True
        self._polls += 1
        if self._polls > POLLS:
            self.synchronize()
        return self._polls > POLLS

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.drain(self._behind)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _current[-1]).wait_event(self)

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.time - self.time)


class Stream:
    """As ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self._queue: deque[Work] = deque()
        self.given = self.done = 0
        _streams.append(self)
        self.cuda_stream = len(_streams)

    def put(self, work: Work) -> None:
        """Work behind everything that this stream was given before."""
        if _recorded and self is _current[-1]:
            _recorded[-1].append(work)
        else:
            self._queue.append(work)
            self.given += 1

    def drain(self, until: float = math.inf) -> None:
        """Run what it was given, up to the work of that number."""
        with _not_seen(), torch.inference_mode():
            while self._queue and self.done < until:
                self.done += 1
                self._queue.popleft()()

    def wait_event(self, event: Event) -> None:
        stream, behind = event._stream, event._behind
        if stream is not None and stream is not self:
            self.put(lambda: stream.drain(behind))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return not self._queue

    def synchronize(self) -> None:
        self.drain()


clock: Callable[[], float] = time.perf_counter
_streams: list[Stream] = []
_current: list[Stream] = []
_recorded: list[list[Work]] = []
_seen = [True]
_registered: dict[int, int] = {}
"""Address of memory of the host that was registered -> bytes."""


class Graph:
    """As ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def replay(self) -> None:
        for work in self.works:
            _current[-1].put(work)


@contextmanager
def record(graph: Graph, **_: Any) -> Iterator[None]:
    """As ``torch.cuda.graph``."""
    _recorded.append(graph.works)
    try:
        with use(Stream()):
            yield
    finally:
        _recorded.pop()


@contextmanager
def use(stream: Stream | None) -> Iterator[None]:
    """As ``torch.cuda.stream``."""
    _current.append(stream or _current[-1])
    try:
        yield
    finally:
        _current.pop()


def synchronize(device: object = None) -> None:
    """As ``torch.cuda.synchronize``; the stream that was made last runs first."""
    for stream in reversed(_streams):
        stream.drain()


# ---- memory ----


@contextmanager
def _not_seen() -> Iterator[None]:
    before, _seen[0] = _seen[0], False
    try:
        yield
    finally:
        _seen[0] = before


def on_device(tensor: torch.Tensor) -> bool:
    return hasattr(tensor.untyped_storage(), "of_device")


def pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in memory of the host that the device reaches."""
    start = tensor.data_ptr()
    return hasattr(tensor.untyped_storage(), "pinned") or any(
        at <= start < at + size for at, size in _registered.items()
    )


def _given_out(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` is memory of the device from here on, and nobody wrote it."""
    storage = tensor.untyped_storage()
    storage.of_device = True  # type: ignore[attr-defined]
    if len(storage):
        torch.tensor([], dtype=torch.uint8).set_(storage).fill_(POISON)
    return tensor


def _device_tensor(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DeviceTensor):
        return tensor
    return tensor.as_subclass(DeviceTensor) if on_device(tensor) else tensor


def plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, DeviceTensor) else value


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return tensor


def _to_device(source: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
    """A copy on the device, by the current stream; what is not pinned is staged at once."""
    made = _given_out(torch.empty_like(source))
    held = source if non_blocking and pinned(source) else source.clone()
    _current[-1].put(lambda: made.copy_(held))
    return made


def _is_cuda(device: Any) -> bool:
    return (
        device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"
    )


class _Functions(TorchFunctionMode):
    """Whose memory is meant, and what goes between host and device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not _seen[0]:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name in ("to", "cuda", "cpu") and first is not None:
            return _device_tensor(self._moved(name, first, args[1:], kwargs))
        if name == "copy_" and first is not None and isinstance(args[1], torch.Tensor):
            return self._copied(first, *args[1:], **kwargs)
        if name == "pin_memory":
            with _not_seen():
                return _pin(plain(first).clone())
        if name == "is_pinned":
            return pinned(first)
        if first is not None and on_device(first):
            if name in ("numpy", "__array__"):
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            if name in READS:
                _current[-1].drain()
                with _not_seen():
                    return func(*tree_map(plain, args), **kwargs)
        if "device" in kwargs or kwargs.get("pin_memory"):
            return _device_tensor(self._made(func, args, kwargs))
        _refuse_mixed(name, args, kwargs)
        return tree_map(_device_tensor, func(*args, **kwargs))

    @staticmethod
    def _made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        there, pin = _is_cuda(kwargs.pop("device", None)), kwargs.pop("pin_memory", False)
        with _not_seen():
            made = func(*tree_map(plain, args), **kwargs)
            if pin:
                return _pin(made)
            if not there:
                return made
            if "empty" in func.__name__:
                return _given_out(made)
            return _to_device(made)

    @staticmethod
    def _moved(name: str, source: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        given = [*args, kwargs.get("device"), kwargs.get("dtype")]
        target = {"cuda": CUDA, "cpu": torch.device("cpu")}.get(name)
        dtype = next((a for a in given if isinstance(a, torch.dtype)), None)
        for one in given:
            if isinstance(one, (str, torch.device)):
                target = torch.device(one)
            elif isinstance(one, torch.Tensor):
                target, dtype = one.device, one.dtype
        non_blocking = kwargs.get("non_blocking", False) or (len(args) > 1 and args[-1] is True)
        here, there = on_device(source), None if target is None else _is_cuda(target)
        if there is None or there == here:
            return source if dtype in (None, source.dtype) else source.to(dtype)
        with _not_seen():
            if there:
                converted = source if dtype is None else source.to(dtype)
                return _to_device(converted, non_blocking=non_blocking)
            if non_blocking:
                made = _pin(torch.empty_like(plain(source), dtype=dtype))
                _current[-1].put(lambda: made.copy_(plain(source)))
                return made
            _current[-1].drain()
            copied: torch.Tensor = plain(source).to(dtype or source.dtype, copy=True)
            return copied

    @staticmethod
    def _copied(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        ends = on_device(to), on_device(source)
        with _not_seen():
            target, held = plain(to), plain(source)
            if ends == (False, False):
                return to.copy_(source)
            if ends == (True, False) and not (non_blocking and pinned(source)):
                held = held.clone()
            _current[-1].put(lambda: target.copy_(held))
            if ends == (False, True) and not (non_blocking and pinned(to)):
                _current[-1].drain()
        return to


def _refuse_mixed(name: str, args: Any, kwargs: Any) -> None:
    """Raise, as CUDA does, if an operation is given memory of both."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()]
    if name in ("__getitem__", "__setitem__") and tensors and on_device(tensors[0]):
        return  # indices of the CPU are copied
    if len({on_device(tensor) for tensor in tensors}) > 1:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, cuda:0 and cpu")


class _Operations(TorchDispatchMode):
    """Operations on memory of the device run late."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        args, kwargs = tree_map(plain, args), tree_map(plain, kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not _seen[0] or not any(map(on_device, tensors)):
            return func(*args, **kwargs)
        if func in EMPTY:
            return _given_out(func(*args, **kwargs))
        given = accesses.arguments(func, args, kwargs)
        if written := [tensor for _, tensor, is_written in given if is_written]:
            _current[-1].put(lambda: func(*args, **kwargs))
            return written[0] if len(written) == 1 else tuple(written)
        if any(result.alias_info is not None for result in func._schema.returns):
            return func(*args, **kwargs)  # a view
        masks = func is aten.index.Tensor and any(
            i is not None and i.dtype is torch.bool for i in args[1]
        )
        if func in SIZED_BY_DATA or masks:
            _current[-1].drain()
            return tree_map(self._settled, func(*args, **kwargs))
        shapes = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        made = tree_map(self._like, shapes)

        def run() -> None:
            results = tree_leaves(func(*args, **kwargs))
            for one, result in zip(tree_leaves(made), results, strict=True):
                one.copy_(result)

        _current[-1].put(run)
        return made

    @staticmethod
    def _settled(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        result.untyped_storage().of_device = True  # type: ignore[attr-defined]
        return result

    @staticmethod
    def _like(shape: Any) -> Any:
        if not isinstance(shape, torch.Tensor):
            return shape
        return _given_out(torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype))


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return torch.device("meta") if isinstance(value, torch.device) else value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


# ---- kernels ----


def _launched(run: Callable[[Launch], None]) -> Callable[[Launch], None]:
    def launch(self: Launch) -> None:
        with _not_seen():
            arguments = {name: plain(value) for name, value in self.arguments.items()}
            late = Launch(self.kernel, self.grid, arguments, self.warps, self.stages)
            if any(isinstance(v, DeviceTensor) for v in self.arguments.values()):
                launches.append(self)
                _current[-1].put(lambda: run(late))
            else:
                run(late)

    return launch


launches: list[Launch] = []
"""What was launched on the device."""


class Runtime:
    """The part of ``torch.cuda.cudart()`` that pins memory."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        _registered[address] = size
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        del _registered[address]
        return 0


PROPERTIES = SimpleNamespace(multi_processor_count=132, name="a stand-in", total_memory=80 << 30)

NAMES: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "CUDAGraph": Graph,
    "graph": record,
    "stream": use,
    "synchronize": synchronize,
    "current_stream": lambda device=None: _current[-1],
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: bool(_recorded),
    "cudart": Runtime,
    "mem_get_info": lambda device=None: (60 << 30, 80 << 30),
    "empty_cache": lambda: None,
    "get_device_name": lambda device=None: "a stand-in",
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: PROPERTIES,
    "device_of": lambda tensor: contextlib.nullcontext(),
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "_sleep": lambda cycles: None,
}


@contextmanager
def stand_in() -> Iterator[None]:
    """Within the block the calling thread has a GPU."""
    with ExitStack() as stack:
        for name, value in NAMES.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(Launch, "run", _launched(Launch.run)))
        stack.callback(_streams.clear)
        stack.callback(launches.clear)
        stack.enter_context(use(Stream()))
        stack.enter_context(_Operations())
        stack.enter_context(_Functions())
        yield
        synchronize()
