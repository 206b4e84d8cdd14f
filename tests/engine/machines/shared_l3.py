"""Servers with page stores of their own, and one L3 that they share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.server import Server, ServerOptions
from tests.engine.harness import ours
from tests.engine.harness.conversations import Conversation, ask

PAGE = 16


def machine(
    model: Path, folder: Path, name: str, hcache: dict[str, Any], **options: Any
) -> ServerOptions:
    """A server whose page store is in a folder of its own, with options of ours."""
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "shared")}
    shared = {"backend": "file", **hcache.pop("shared", {})}
    return ours.our_server(
        model,
        folder / name,
        hcache={"shared": shared, **hcache},
        extra_env=env | options.pop("extra_env", {}),
        page_size=PAGE,
        **options,
    )


def values(folder: Path) -> set[Path]:
    """What SGLang's `file` backend has for all of them."""
    return set((folder / "shared").glob("*.bin"))


def until_all_is_shared(server: Server, folder: Path) -> None:
    """A value for each page of the page store, or for each rank's shard of one."""
    stored = server.options.log.parent
    server.until(lambda: len(values(folder)) == len(ours.stored_pages(stored)), "all to be shared")


def from_l3(server: Server, prompts: Sequence[list[int]]) -> Sequence[Conversation]:
    """What is asked of a server that has nothing in L1 and L2."""
    server.flush_cache()
    return ask(server, prompts, flush=True)


def assert_found(conversations: Sequence[Conversation]) -> None:
    for conversation in conversations:
        [turn] = conversation.turns
        assert turn.cached.storage >= len(turn.prompt) - 2 * PAGE, turn.cached


def assert_absent(conversations: Sequence[Conversation]) -> None:
    assert [c.turns[0].cached.total for c in conversations] == [0] * len(conversations)
