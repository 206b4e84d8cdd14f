"""Hooks on SGLang: applied once, and SGLang goes on if one of ours raises."""

from __future__ import annotations

import enum
import functools
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from hcache_backend import metrics
from hcache_backend.metrics import logger
from hcache_backend.ranks import OutOfStep
from hcache_backend.sglang.runtime import current

Original = Callable[..., Any]  # SGLang's function under a hook, and our hooks around it


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
    function: Original
    on_error: OnError = OnError.GO_ON


def install(hooks: list[Hook]) -> str | None:
    """Put ``hooks`` around SGLang's functions, each once; returns a message about missing ones, or
    None. SGLang's own registry looks at every name of every module."""
    missing = [hook.target for hook in hooks if not _put_around(hook)]
    return f"SGLang has no place for the hooks on {', '.join(missing)}" if missing else None


def hooks_on(function: object) -> tuple[Original, ...]:
    """Our hooks around a function, also within wrappers of other plugins."""
    found: tuple[Original, ...] = getattr(function, "hcache_hooks", ())
    return found


def _put_around(hook: Hook) -> bool:
    """Put a hook around its target, if it is not there yet; False if SGLang has no such target."""
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


@functools.cache
def guarded(hook: Hook) -> Original:
    """The function of ``hook``; if it raises, SGLang goes on by ``hook.on_error``."""
    function, reasons = hook.function, set[type[Exception]]()
    if hook.on_error is OnError.RAISE:
        return function

    @functools.wraps(function)
    def around(original: Original, *args: Any, **kwargs: Any) -> Any:
        """Run the hook. If it raises, return or raise what SGLang's function did: it runs once."""
        results, errors = list[Any](), list[Exception]()  # of SGLang's function

        def call_original(*a: Any, **kw: Any) -> Any:
            """SGLang's function, for the hook: also note the result or the error."""
            try:
                results.append(original(*a, **kw))
            except Exception as error:
                errors.append(error)
                raise
            return results[-1]

        vars(call_original)["__wrapped__"] = original  # hooks ask for its signature
        try:
            return function(call_original, *args, **kwargs)
        except OutOfStep:
            raise
        except Exception as error:
            if errors:
                raise errors[-1] from None
            metrics.PROBLEMS.count("hook")
            if type(error) not in reasons:
                reasons.add(type(error))
                raised = "hcache: the hook on %s raised an error (logged once): %s"
                logger.exception(raised, hook.target, hook.on_error.value)
            if hook.on_error is OnError.END_L3:
                current().weights.cannot_restore(f"the hook on {hook.target} failed: {error!r}")
        return results[-1] if results else original(*args, **kwargs)

    return around
