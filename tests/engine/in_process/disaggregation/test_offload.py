"""Why a decode server offloads plain pages."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.decode_kvcache_offload_manager import DecodeKVCacheOffloadManager
from sglang.srt.managers.cache_controller import HiCacheController

PAGE = 4


def test_offload_does_not_tell_where_in_a_sequence_a_page_is() -> None:
    """An own page says it, so it could not be stored (`page_without_position`), even if the manager
    asked anybody for its host pool and its controller. If this fails, SGLang does tell."""
    told: list[inspect.BoundArguments] = []
    signature = inspect.signature(HiCacheController.write_storage)

    def write_storage(*args: Any, **kwargs: Any) -> int:
        told.append(signature.bind(controller, *args, **kwargs))
        return len(told)

    controller = SimpleNamespace(
        get_hash_str=lambda tokens, prior: f"{prior}{len(tokens)}", write_storage=write_storage
    )
    manager: Any = object.__new__(DecodeKVCacheOffloadManager)
    manager.page_size, manager.cache_controller, manager.ongoing_backup = PAGE, controller, {}
    req = SimpleNamespace(rid="a request", extra_key=None, cache_salt=None)
    last = manager._trigger_backup(req, [*range(2 * PAGE)], [7] * 2 * PAGE, 0.0, "before")
    assert last == "before44"
    assert [call.arguments["hash_value"] for call in told] == [["before4", "before44"]]
    assert [call.arguments.get("prefix_keys") for call in told] == [None]
