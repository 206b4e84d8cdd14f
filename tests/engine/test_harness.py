"""The harness against SGLang's own `file` backend: what our backend is later held to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness.conversations import converse, make_conversations, random_tokens
from tests.engine.harness.models import ARCHITECTURES, build_model
from tests.engine.harness.reference import assert_equal_tokens, greedy
from tests.engine.harness.server import Server, ServerOptions

pytestmark = pytest.mark.engine


def file_backend(model: Path, folder: Path, **options: object) -> ServerOptions:
    return ServerOptions(
        model=model,
        log=folder / "server.log",
        storage_backend="file",
        extra_config={"prefetch_threshold": 16},
        extra_env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "l3")},
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_flushed_turns_come_back_from_storage_with_the_reference_tokens(
    name: str, model_cache: Path, tmp_path: Path
) -> None:
    model = build_model(name, model_cache)
    with Server(file_backend(model, tmp_path)) as server:
        (conversation,) = converse(server, make_conversations(1, turns=2))
        for turn in conversation.turns:
            (want,) = greedy(model, [turn.prompt], len(turn.reply.output_ids))
            assert_equal_tokens(turn.reply.output_ids, want.tokens)
        first, second = conversation.turns
        assert first.cached.storage == 0
        assert second.cached.storage >= second.history_tokens - server.options.page_size


def test_wait_backed_up_returns_when_every_full_page_is_in_l3(
    model_cache: Path, tmp_path: Path
) -> None:
    model = build_model("llama", model_cache)
    with Server(file_backend(model, tmp_path)) as server:
        server.generate(random_tokens(600, seed=1), 40)
        server.wait_backed_up()
        assert len(list((tmp_path / "l3").glob("*.bin"))) == 639 // server.options.page_size
