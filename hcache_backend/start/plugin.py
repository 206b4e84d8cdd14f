"""Entry point ``sglang.srt.plugins``: runs in every SGLang process, before its arguments exist. It
registers one bootstrap hook, and where SGLang's HTTP server puts its keys in front of its routes,
that of hints."""

from __future__ import annotations

from typing import Any

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
# The second one is asked by servers without keys.
ROUTES = (
    "sglang.srt.utils.auth.add_api_key_middleware",
    "sglang.srt.utils.auth.app_has_admin_force_endpoints",
)


def activate() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(LOAD_MODEL, _after_load_model, HookType.AFTER)
    for target in ROUTES:
        HookRegistry.register(target, _before_routes, HookType.BEFORE)


def _before_routes(app: Any, *args: Any, **kwargs: Any) -> None:
    from hcache_backend.metrics import harmless
    from hcache_backend.sglang.hint_route import add_route

    with harmless("hint_route", "this server takes no hints"):
        add_route(app)


def _after_load_model(result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    from hcache_backend.start.attach import bootstrap, note_draft

    (note_draft if runner.is_draft_worker else bootstrap)(runner)
    return result
