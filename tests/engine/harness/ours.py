"""Servers with our backend, and what tests ask about what they stored and said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .conversations import Conversation
from .reference import assert_equal_tokens, greedy
from .server import Server, ServerOptions


def extra_config(folder: Path, **options: Any) -> dict[str, Any]:
    """Extra config that loads our backend with the options `hcache`; every page is checked."""
    return {
        "backend_name": "hcache",
        "module_path": "hcache_backend",
        "class_name": "HCacheStorage",
        "interface_v1": 1,
        "prefetch_threshold": 16,
        "hcache": {"dirs": [str(folder / "l3")], "mode": "hidden", "check_every_pages": 1}
        | options,
    }


def our_server(
    model: Path, folder: Path, *, hcache: dict[str, Any] | None = None, **options: Any
) -> ServerOptions:
    """Options of a server with our backend in `folder`."""
    return ServerOptions(
        model=model,
        log=options.pop("log", folder / "server.log"),
        storage_backend="dynamic",
        extra_config=extra_config(folder, **(hcache or {})),
        **options,
    )


def stored_pages(folder: Path) -> list[Path]:
    """The page files below `folder`."""
    return sorted((folder / "l3").glob("**/*.page"))


def assert_hidden_mode(server: Server) -> None:
    log = server.log_text()
    assert "hcache: hidden mode:" in log
    assert "KV mode" not in log


def assert_nothing_went_wrong(server: Server) -> None:
    """No check failed, nothing of ours or of HiCache raised."""
    log = server.log_text()
    for sign in ("self-check", "storage get failed", "storage set failed", "not captured"):
        assert sign not in log, sign
    assert "Exception in thread" not in log


def assert_no_cache_output(model: Path, conversations: Sequence[Conversation]) -> None:
    """Every reply is, token for token, what the model says without any cache (float32)."""
    for conversation in conversations:
        for turn in conversation.turns:
            (want,) = greedy(model, [turn.prompt], len(turn.reply.output_ids))
            assert_equal_tokens(turn.reply.output_ids, want.tokens)


def assert_restored_from_l3(conversations: Sequence[Conversation], page_size: int) -> None:
    """Every turn after the first got all whole pages of its history from storage."""
    for conversation in conversations:
        for turn in conversation.turns[1:]:
            assert turn.cached.storage >= turn.history_tokens - page_size, turn.cached
