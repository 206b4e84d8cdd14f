"""All that differs between the supported versions of SGLang, and which these are."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

SUPPORTED = ("0.5.21", "0.5.22", "0.5.23")

_STOPPED = SimpleNamespace(running=False)  # a timer of SGLang's


def sglang_version() -> str:
    """The installed version, or ``unknown`` if SGLang has no metadata."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def untested(text: str | None = None) -> str | None:
    """How the SGLang ``text`` (default: the installed one) differs from tested ones, or None."""
    text = sglang_version() if text is None else text
    number, tested = _number(text), [_number(known) for known in SUPPORTED]
    if number in tested:
        return None
    age = "newer" if number > tested[-1] else "older" if number else "of another kind"
    return f"SGLang {text} is {age} than the tested ones, {SUPPORTED[0]} to {SUPPORTED[-1]}"


def is_first() -> bool:
    """True for 0.5.21: its Mooncake transfer does not wait, and preempted requests leave locks."""
    return _number(sglang_version()) == _number(SUPPORTED[0])


def _number(text: str) -> tuple[int, ...]:
    """Empty for a version that has no number."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match is not None else ()


def known_arguments(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of ``arguments`` that this version's function has. HostKVCache has its geometry among
    its arguments from 0.5.22 on; before, it asks the device pool."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


def set_extend_range(request: Any, before: int, end: int) -> None:
    """Let a prefill of SGLang's ``request`` compute tokens ``before`` to ``end``."""
    if hasattr(request, "set_extend_range"):
        request.set_extend_range(before, end)
    else:
        request.prefix_len, request.extend_end = before, end


def bind_pages(translator: object, batch: object) -> None:
    """Let attention find the pages of a ``batch`` that ``ForwardBatch.init_new`` did not make: from
    0.5.22 on they are in a plan of the batch, which the default backend of Blackwell reads."""
    bind = getattr(translator, "bind_own_plan", None)
    if bind is not None:
        bind(batch)


def set_timeout(cache: Any, operation: Any, *, runs: bool) -> None:
    """Let the time of a prefetch under policy ``timeout`` begin now, or not run. From 0.5.23 on it
    begins when its request could have been admitted, which a record in the cache says."""
    operation.start_time = time.monotonic() if runs else math.inf
    records = getattr(cache, "_storage_prefetch_wait", {})
    records.pop(operation.handle, None)
    if not runs:
        records[operation.handle] = SimpleNamespace(expired=False, timer=_STOPPED)
