"""SGLang plugin: the scheduler of a CPU server writes a trace of what it does, see ``recorder.py``.

``HCACHE_GOLDEN`` is a JSON object, see ``tests.goldens.recorder.Settings``.
"""

import json
import os
from typing import Any

VARIABLE = "HCACHE_GOLDEN"
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def activate() -> None:
    if VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tests.goldens import recorder, seams

    settings = recorder.Settings(**json.loads(os.environ[VARIABLE]))
    recorder.count_what_waits()
    begun: list[Any] = []

    def begin(runner: Any, *args: Any, **kwargs: Any) -> None:
        """In the scheduler's process and thread, before the weights are loaded."""
        if not begun:  # a draft model has a runner of its own
            begun.append(runner)
            seams.watch(recorder.Trace(settings))

    HookRegistry.register(LOAD_MODEL, begin, HookType.BEFORE)
