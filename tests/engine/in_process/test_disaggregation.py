"""What a prefill server does not send yet."""

import inspect
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest

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
