"""What a full L3 keeps: the beginnings of conversations in use, also of those that L1 serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.harness.server import CachedTokens, Server, ServerOptions
from tests.engine.harness.conversations import random_tokens
from tests.engine.harness.ours import (
    assert_hidden_mode,
    assert_nothing_went_wrong,
    attach,
    attach_config,
    hidden_mode_env,
    stored_pages,
)

pytestmark = [pytest.mark.engine, pytest.mark.versions]

PAGE = 64


@pytest.fixture(
    scope="module",
    params=[
        ("hidden", 1),
        *(pytest.param(o, marks=pytest.mark.long) for o in (("kv", 1), ("hidden", 2), ("kv", 2))),
    ],
    ids=lambda param: f"{param[0]}, ranks: {param[1]}",
)
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The server's device and its host memory have room for all that a test sends."""
    mode, ranks = request.param
    log = tmp_path_factory.mktemp(mode) / "server.log"
    env = hidden_mode_env(mode=mode)
    options = ServerOptions(model, log, max_total_tokens=8192, tp=ranks, extra_env=env)
    with Server(options) as server:
        if mode == "hidden":
            assert_hidden_mode(server)
        yield server
        assert_nothing_went_wrong(server)


@pytest.fixture(autouse=True)
def detached(server: Server) -> Iterator[None]:
    """Tests leave the shared server without a backend."""
    yield
    server.detach_storage()


class L3:
    """L3 of `server` in `folders`, with room for `pages` of those of `prompts` in all."""

    def __init__(
        self, server: Server, folders: Sequence[Path], pages: int, prompts: Sequence[list[int]]
    ) -> None:
        self._server = server
        self._folders = folders
        server.flush_cache()
        self._attach()
        for prompt in prompts:
            send(server, prompt)
        page = stored_pages(folders[0].parent.parent)[0]
        files = -(-pages // len(folders)) * server.options.tp  # each rank's share is one
        quota = files * page.stat().st_size
        self._server.clear_storage()
        self._server.flush_cache()
        self._server.detach_storage()
        self._attach(quota_bytes=quota)

    def _attach(self, **options: Any) -> None:
        dirs = [str(folder) for folder in self._folders]
        attach(self._server, attach_config(self._folders[0], dirs=dirs, **options))

    def found(self, *prompts: Sequence[int]) -> list[int]:
        """Tokens of each prompt that L3 has; to be called once, as it stores what it has not."""
        self._server.detach_storage()
        self._server.flush_cache()
        self._attach()
        replies = [self._server.generate([*prompt, 0], 1) for prompt in prompts]
        self._server.detach_storage()
        return [reply.cached.storage for reply in replies]


def send(server: Server, prompt: Sequence[int]) -> CachedTokens:
    """All pages of `prompt` are computed, in L1 or from L3, and then in L3."""
    reply = server.generate([*prompt, 0], 1)
    server.wait_backed_up()
    return reply.cached


def test_a_shared_prompt_is_kept_for_the_newest_user(server: Server, tmp_path: Path) -> None:
    """Which pages of a folder go first is in tests/unit/store/test_recency.py."""
    folders = [tmp_path / "l3" / str(number) for number in range(3)]
    shared = random_tokens(5 * PAGE, seed=10)
    users = [[*shared, *random_tokens(10 * PAGE, seed=10 + user)] for user in range(1, 11)]
    l3 = L3(server, folders, 60, users[:1])
    for prompt in users:
        send(server, prompt)
    [tokens] = l3.found(users[-1])
    assert tokens >= 900
