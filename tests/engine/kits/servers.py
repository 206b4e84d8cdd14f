"""Servers for SGLang's kits: SGLang's own `file` as control, and ours in each mode."""

from pathlib import Path
from typing import Any

from bench.harness.server import Server, ServerOptions
from tests.engine.harness import ours

MODES: dict[str, dict[str, Any]] = {
    "auto": {"mode": "auto"},
    "hidden": {"mode": "hidden", "partition": ours.partition(0, 4, 0)},
    "kv": {"mode": "kv"},
}
PAGE = 64


def options(l3: str, model: Path, folder: Path, **chosen: Any) -> ServerOptions:
    """Options of a server with an L3 of that name: `file`, or a mode of ours.

    Kits send no key of an administrator, so there is none. A profile says that hidden states of two
    layers and K and V of two are the fastest: a measured one says it sometimes.
    """
    chosen["extra_args"] = [*chosen.pop("extra_args", ()), "--admin-api-key", ""]
    if l3 == "file":
        return ours.file_backend(model, folder, page_size=PAGE, **chosen)
    profile = ours.slow_profile(folder, hidden_copy=1.0, projection=2.0, kv_load=2.0, dense=1e3)
    hcache = {"profile": str(profile), **MODES[l3]}
    return ours.our_server(model, folder, hcache=hcache, page_size=PAGE, **chosen)


def assert_sound(server: Server, l3: str) -> None:
    """The server is in the mode of that name, and nothing went wrong."""
    if l3 == "hidden":
        ours.assert_hidden_mode(server)
    if l3 == "kv":
        ours.assert_own_pages_of_kv(server)
    if l3 == "auto":
        assert "plain pages" not in server.log_text()
    ours.assert_nothing_went_wrong(server)
