"""Entry point ``sglang.srt.plugins``: runs in every SGLang process, before its arguments exist. It
registers one bootstrap hook."""

from __future__ import annotations

from typing import Any

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def activate() -> None:
    """Have SGLang call :func:`_after_load_model` once a process has loaded a model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(LOAD_MODEL, _after_load_model, HookType.AFTER)


def _after_load_model(result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    from hcache_backend.start.attach import bootstrap, note_draft

    (note_draft if runner.is_draft_worker else bootstrap)(runner)
    return result
