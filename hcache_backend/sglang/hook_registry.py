"""Hooks on SGLang: applied once, and SGLang goes on if one of ours raises."""

from __future__ import annotations

import enum
import functools
import logging
import pkgutil
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from hcache_backend import metrics
from hcache_backend.ranks import OutOfStep
from hcache_backend.sglang.runtime import current

logger = logging.getLogger("hcache")


class OnError(enum.Enum):
    """SGLang's way on if a hook raises; SGLang's own errors and OutOfStep are always raised."""

    GO_ON = "SGLang goes on as if there were no hook"
    END_L3 = (
        "SGLang goes on; L3 is off until a restart, because it could hold or serve wrong K and V"
    )
    RAISE = "the error is raised, to a caller of ours or while the server starts"


class Hook(NamedTuple):
    """One AROUND hook: ``function(original, *args, **kwargs)``."""

    target: str
    function: Callable[..., Any]
    on_error: OnError = OnError.GO_ON


def install(hooks: list[Hook]) -> str | None:
    """Put ``hooks`` around SGLang's functions, each once; returns a message about missing ones, or
    None. SGLang's own registry would look at every name of every module for each hook."""
    missing = [hook.target for hook in hooks if not _put_around(hook)]
    return f"SGLang has no place for the hooks on {', '.join(missing)}" if missing else None


def hooks_on(function: object) -> tuple[Callable[..., Any], ...]:
    """Our hooks around a function, also within wrappers of other plugins."""
    found: tuple[Callable[..., Any], ...] = getattr(function, "hcache_hooks", ())
    return found


def _put_around(hook: Hook) -> bool:
    path, _, name = hook.target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
        original = getattr(owner, name)
    except (ImportError, AttributeError):
        return False
    around, others = guarded(hook), hooks_on(original)
    if around in others:
        return True

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    vars(hooked)["hcache_hooks"] = (*others, around)
    setattr(owner, name, hooked)
    return True


class _Original:
    """SGLang's function as a hook calls it; remembers its result or error."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function  # hooks ask for its signature
        self.returned = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self.__wrapped__(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.returned = True
        return self.result


@functools.cache
def guarded(hook: Hook) -> Callable[..., Any]:
    """The function of ``hook``; if it raises, SGLang goes on by ``hook.on_error``."""
    function, reasons = hook.function, set[type[Exception]]()
    if hook.on_error is OnError.RAISE:
        return function

    @functools.wraps(function)
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = _Original(original)
        try:
            return function(call, *args, **kwargs)
        except OutOfStep:
            raise
        except Exception as error:
            if call.error is not None:
                raise call.error from None
            metrics.PROBLEMS.count("hook")
            if type(error) not in reasons:
                reasons.add(type(error))
                logger.exception(
                    "hcache: the hook on %s raised an error (logged once): %s",
                    hook.target,
                    hook.on_error.value,
                )
            if hook.on_error is OnError.END_L3:
                current().cannot_restore(f"the hook on {hook.target} failed: {error!r}")
        return call.result if call.returned else original(*args, **kwargs)

    return around


class Results:
    """Values of ours that belong to results of SGLang's, which are not hashable; gone with them."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}

    def add(self, result: Any, value: Any) -> None:
        self._values[id(result)] = value
        weakref.finalize(result, self._values.pop, id(result), None).atexit = False

    def of(self, result: Any) -> Any:
        """None if there is none."""
        return self._values.get(id(result))
