"""Streams and events: the same code orders work on a GPU and, for tests, on a CPU.

- A stream runs its work in order while the caller goes on: a CUDA stream, or a thread on a CPU.
- Work overlaps on a CPU too, so a missing wait shows as a wrong result there.
- The *current* stream is the engine's; on a CPU the calling thread, unless a test puts a worker.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger("hcache")

Work = Callable[[], object]

_PROGRESS_SECONDS = 10.0
_LEAST_BUFFER = 256  # bytes of the smallest HostBuffer


class StreamFailed(RuntimeError):
    """Work on a stream raised; later work of that stream was not run."""


class Event(Protocol):
    """A point in the order of a stream."""

    def query(self) -> bool:
        """True if the stream has passed the point."""

    def synchronize(self) -> None:
        """Block until it has; on a CPU raises StreamFailed if earlier work went wrong."""

    def elapsed_time(self, later: Self) -> float:
        """Milliseconds to ``later``; both points have passed and were recorded with ``timed``."""


class Stream(ABC):
    """Runs work in order and does not block the caller."""

    @abstractmethod
    def run(self, work: Work) -> None:
        """Queue ``work`` after all earlier work."""

    @abstractmethod
    def record(self, *, timed: bool = False) -> Event:
        """An event after all earlier work."""

    def wait(self, event: Event) -> None:
        """Hold all later work until ``event`` of another stream has passed."""
        self.run(event.synchronize)

    def keep(self, tensor: torch.Tensor) -> None:  # noqa: B027
        """Do not reuse ``tensor`` of another stream before the work here is done. On a CPU the work
        holds its tensors, so this does nothing."""

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Within the block this is the current stream of the calling thread."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def new_stream(device: torch.device | str, name: str, *, in_turn: bool = False) -> Stream:
    """A new stream; ``in_turn``: its work has collectives; on a CPU the caller runs it."""
    return _door.new_stream(torch.device(device), name, in_turn=in_turn)


def current_stream(device: torch.device | str) -> Stream:
    """The stream that the calling thread works on."""
    return _door.current_stream(torch.device(device))


def run_here(device: torch.device, work: Callable[..., object], *args: Any) -> None:
    """Run ``work(*args)`` on the current stream; cheap enough for every layer."""
    _door.run_here(device, work, *args)


def wrap_engine_stream(engine_stream: Any) -> Stream:
    """One of the engine's own streams: a ``torch.cuda.Stream`` or the CPU's stand-in."""
    return _door.wrap_engine_stream(engine_stream)


def host_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Host memory that ``device`` copies to and from without waiting."""
    return _door.host_tensor(shape, dtype, torch.device(device))


@contextmanager
def pinning(size: int) -> Iterator[None]:
    """Log every ten seconds that ``size`` bytes are still being pinned; 100 GB take a minute."""
    ended, start = threading.Event(), time.monotonic()

    def log_progress() -> None:
        while not ended.wait(_PROGRESS_SECONDS):
            seconds = time.monotonic() - start
            logger.info("hcache: pinning %.1f GB: %.0f s so far", size / 1e9, seconds)

    threading.Thread(target=log_progress, name="hcache-pinning", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def held_for_device(values: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    source = torch.from_numpy(np.ascontiguousarray(values))
    return host_tensor(source.shape, source.dtype, device).copy_(source)


def to_device(values: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """A copy of ``values`` on ``device``, made on the current stream without waiting."""
    return held_for_device(values, device).to(torch.device(device), non_blocking=True)


class HostBuffer(NamedTuple):
    """``values`` in memory of :func:`host_tensor`, also as ``array``; ``memory``: all bytes."""

    memory: torch.Tensor
    values: torch.Tensor
    array: npt.NDArray[Any]


class HostBuffers:
    """Reused memory of :func:`host_tensor`, for one thread."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[HostBuffer]] = {}

    def take(self, length: int, dtype: torch.dtype) -> HostBuffer:
        """A buffer of ``length`` values, not set, for the caller until :meth:`give_back`."""
        size = max(_LEAST_BUFFER, 1 << (length * dtype.itemsize - 1).bit_length())  # bytes
        free = self._free.setdefault((size, dtype), [])
        if free and free[-1].values.shape == (length,):
            return free.pop()  # the views of another length would have to be made anew
        with torch.inference_mode(mode=False):  # its tensors cannot be written outside of it
            memory = free.pop().memory if free else host_tensor((size,), torch.uint8, self._device)
            values = memory[: length * dtype.itemsize].view(dtype)
            return HostBuffer(memory, values, values.numpy())

    def give_back(self, buffer: HostBuffer) -> None:
        """Reuse ``buffer``; the device must be done with it."""
        self._free[buffer.memory.numel(), buffer.values.dtype].append(buffer)


def free_memory(device: torch.device | str) -> float:
    """Free bytes of a GPU's memory, with those that torch kept; infinity for a CPU."""
    return _door.free_memory(torch.device(device))


def release_memory(device: torch.device) -> None:
    """Give back the GPU memory that torch keeps for later tensors of the current stream: forward
    passes have another stream, and NCCL and cuBLAS allocate outside of torch."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def recording_graph() -> bool:
    return _door.recording_graph()


def local_device() -> torch.device:
    """The GPU of this machine, or its CPU if torch sees none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gpu_name(device: torch.device) -> str | None:
    """The product name of a GPU; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


class _CudaEvent:
    """A torch event recorded on ``stream``; it is reused when this one dies."""

    _free: ClassVar[dict[bool, list[Any]]] = {False: [], True: []}  # by ``timed``

    def __init__(self, stream: Any, *, timed: bool) -> None:
        self._unused = self._free[timed]  # where __del__ puts the torch event; a pop is atomic
        try:
            self.event = self._unused.pop()
        except IndexError:  # none is left
            self.event = torch.cuda.Event(enable_timing=timed)
        self.event.record(stream)

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_time(self, later: _CudaEvent) -> float:
        return float(self.event.elapsed_time(later.event))

    def __del__(self) -> None:
        # A stream that already waits for it keeps to the point recorded then.
        self._unused.append(self.event)


class _CudaStream(Stream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self, *, timed: bool = False) -> Event:
        return _CudaEvent(self._stream, timed=timed)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)

    def keep(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(self._stream)

    @contextmanager
    def as_current(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield


class _ThreadEvent:
    def __init__(self) -> None:
        self._to_come = threading.Lock()  # every step makes several: a lock is cheap
        self._passed = not self._to_come.acquire()
        self._error: BaseException | None = None
        self._time = 0.0

    def pass_now(self, error: BaseException | None) -> None:
        self._error, self._time, self._passed = error, time.perf_counter(), True
        self._to_come.release()

    def query(self) -> bool:
        return self._passed

    def synchronize(self) -> None:
        with self._to_come:
            pass
        if self._error is not None:
            raise StreamFailed(f"{type(self._error).__name__}: {self._error}") from self._error

    def elapsed_time(self, later: _ThreadEvent) -> float:
        return 1e3 * (later._time - self._time)


class WorkerStream(Stream):
    """A thread that works through a queue. After an error it runs no more work, which would build
    on a missing result. Events still pass, with the error, so that no caller waits for ever."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._serve, name=f"hcache-{name}", daemon=True).start()

    def run(self, work: Work) -> None:
        context = contextvars.copy_context()  # the engine keeps its batch in context variables
        context.run(_current.set, None)  # inside the work, this thread is the current stream
        self._queue.put(lambda: self._error is None and context.run(work))

    def record(self, *, timed: bool = False) -> Event:
        event = _ThreadEvent()
        self._queue.put(lambda: event.pass_now(self._error))
        return event

    # Tensors that the engine made in inference mode can only be written in that mode.
    @torch.inference_mode()
    def _serve(self) -> None:
        """The thread: run what is queued, for ever. :meth:`run` and :meth:`record` see an error."""
        while True:
            work = self._queue.get()
            try:
                work()
            except BaseException as error:
                self._error = error
            del work  # it may hold the last reference to large tensors


class _InlineStream(Stream):
    """The calling thread as a stream: work is done when ``run`` returns."""

    _error: BaseException | None = None

    def run(self, work: Work) -> None:
        work()

    def record(self, *, timed: bool = False) -> Event:
        event = _ThreadEvent()
        event.pass_now(self._error)
        return event


class CallerStream(_InlineStream):
    """The calling thread as a stream that never raises: after an error it skips all work."""

    def run(self, work: Work) -> None:
        """Run ``work`` now. An error is kept for the events that are recorded later."""
        if self._error is None:
            try:
                with torch.inference_mode():
                    work()
            except Exception as error:
                self._error = error


_INLINE = _InlineStream()
_current: contextvars.ContextVar[Stream | None] = contextvars.ContextVar("stream", default=None)


class Door:
    """Source of all streams: CUDA's on a GPU, threads on a CPU. Methods are the functions above."""

    def __init__(self) -> None:
        self._named: dict[str, torch.cuda.Stream] = {}  # CUDA's: a name is one stream
        self._name_of: dict[int, str] = {}  # of the streams made here, by their CUDA handle

    def new_stream(self, device: torch.device, name: str, *, in_turn: bool = False) -> Stream:
        """On CUDA one stream for each ``name``. On a CPU a new thread; ``in_turn``: the caller."""
        if device.type == "cuda":
            # 0, the lowest, is SGLang's priority, too: its work waits for ours, chunk by chunk.
            if name not in self._named:
                self._named[name] = stream = torch.cuda.Stream(device, priority=0)
                self._name_of[stream.cuda_stream] = name
            return _CudaStream(self._named[name])
        return CallerStream() if in_turn else WorkerStream(name)

    def current_stream(self, device: torch.device) -> Stream:
        if device.type == "cuda":
            return _CudaStream(torch.cuda.current_stream(device))
        return _current.get() or _INLINE

    def run_here(self, device: torch.device, work: Callable[..., object], *args: Any) -> None:
        stream = None if device.type == "cuda" else _current.get()
        if stream is None:
            work(*args)  # torch launches on CUDA's current stream; on a CPU the caller does it
        else:
            stream.run(partial(work, *args))

    def wrap_engine_stream(self, engine_stream: Any) -> Stream:
        """A CUDA stream of SGLang as a :class:`Stream`; on a CPU the calling thread."""
        if not isinstance(engine_stream, torch.cuda.Stream):
            return _INLINE
        # torch hands out 32 streams in turn, so two may be the same. Warns once.
        if (ours := self._name_of.pop(engine_stream.cuda_stream, None)) is not None:
            logger.warning("hcache: stream '%s' is also SGLang's: they wait for each other", ours)
        return _CudaStream(engine_stream)

    def host_tensor(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")

    def free_memory(self, device: torch.device) -> float:
        release_memory(device)  # otherwise a start that measured finds less than the next
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")

    def recording_graph(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_door = Door()


@contextmanager
def through(door: Door) -> Iterator[None]:
    """Within the block every stream comes from ``door``: for tests."""
    global _door  # noqa: PLW0603
    before, _door = _door, door
    try:
        yield
    finally:
        _door = before
