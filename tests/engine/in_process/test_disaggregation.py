"""What a prefill server does not send yet, and why a decode server offloads plain pages."""

import inspect
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.decode_kvcache_offload_manager import DecodeKVCacheOffloadManager
from sglang.srt.managers.cache_controller import HiCacheController

from hcache_backend.sglang import compat, disaggregation


@pytest.mark.parametrize(
    ("version", "overlap", "loads", "sent"),
    [
        ("0.5.22", True, [], 1),
        ("0.5.22", True, ["a load"], 0),
        ("0.5.21.post1", False, [], 1),
        ("0.5.21", False, ["a load"], 0),
        ("0.5.21", True, [], 0),
    ],
)
def test_a_prefix_is_sent_at_once_unless_it_may_be_on_its_way(
    version: str, overlap: bool, loads: list[str], sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a load, or by a forward pass that the transfer does not wait for; all arguments of the
    installed version go on."""
    monkeypatch.setattr(compat, "sglang_version", lambda: version)
    function = pkgutil.resolve_name(disaggregation.SEND_PREFIX.target)
    tree = SimpleNamespace(cache_controller=SimpleNamespace(ack_load_queue=loads))
    req, calls = SimpleNamespace(early_send_prefix_end=None), list[Any]()
    given: dict[str, Any] = dict.fromkeys(inspect.signature(function).parameters, True)
    given |= {"self": SimpleNamespace(tree_cache=tree, enable_overlap=overlap), "req": req}
    scheduler, first, *others = given.items()
    arguments = (scheduler[1], first[1])
    disaggregation.before_sending_prefix(
        lambda *args, **named: calls.append((args, named)), *arguments, **dict(others)
    )
    assert calls == [(arguments, dict(others))] * sent
    # With a staging buffer the first answer is that for all chunks of the request.
    assert req.early_send_prefix_end == (None if sent else 0)


# ---- decode servers ----


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
