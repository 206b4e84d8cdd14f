"""The harness against SGLang's own caches: what our backend is later held to."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.models import ARCHITECTURES, build_model
from bench.harness.server import CachedTokens, Server, ServerOptions
from tests.engine.harness.conversations import converse, make_conversations, random_tokens
from tests.engine.harness.lora import build_lora
from tests.engine.harness.ours import TIE_NATS
from tests.engine.harness.reference import assert_equal_or_tie, assert_equal_tokens, greedy

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


@pytest.mark.parametrize(
    "name",
    [
        *ARCHITECTURES,
        "qwen2_moe",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("phi3", "stablelm", "gemma", "gemma3", "mixtral", "olmoe")
        ),
    ],
)
def test_flushed_turns_come_back_from_storage_with_the_reference_tokens(
    name: str, model_cache: Path, tmp_path: Path
) -> None:
    model = build_model(name, model_cache)
    with Server(file_backend(model, tmp_path)) as server:
        (conversation,) = converse(server, make_conversations(1, turns=2))
    for turn in conversation.turns:
        (want,) = greedy(model, [turn.prompt], len(turn.reply.output_ids))
        assert len(set(want.tokens)) > 5  # a model that repeats itself would hide wrong KV
        assert_equal_tokens(turn.reply.output_ids, want.tokens)
    first, second = conversation.turns
    assert first.cached.storage == 0
    assert second.cached.storage >= second.history_tokens - server.options.page_size


@pytest.mark.long
def test_mla_says_the_same_after_an_l3_hit_as_after_a_device_hit(
    model_cache: Path, tmp_path: Path
) -> None:
    """No comparison with the reference: on a CPU, SGLang's own MLA runs already differ from it."""
    prompt = random_tokens(300, seed=1)
    with Server(file_backend(build_model("deepseek", model_cache), tmp_path)) as server:
        server.generate(prompt, 16)
        from_device = server.generate(prompt, 16)
        server.flush_cache()
        from_l3 = server.generate(prompt, 16)
    assert from_device.cached == CachedTokens(device=256, host=0, storage=0)
    assert from_l3.cached == CachedTokens(device=0, host=0, storage=256)
    assert from_l3.output_ids == from_device.output_ids


def test_two_tensor_parallel_ranks_in_concurrent_conversations(model: Path, tmp_path: Path) -> None:
    with Server(file_backend(model, tmp_path, tp=2)) as server:
        conversations = converse(server, make_conversations(3, turns=2), concurrent=True)
    for turn in (turn for conversation in conversations for turn in conversation.turns):
        (want,) = greedy(model, [turn.prompt], len(turn.reply.output_ids))
        assert_equal_tokens(turn.reply.output_ids, want.tokens)
    for conversation in conversations:
        assert conversation.turns[1].cached.storage >= 192


def test_bfloat16_equals_a_run_without_a_cache_up_to_ties(model: Path, tmp_path: Path) -> None:
    with Server(file_backend(model, tmp_path, dtype="bfloat16")) as server:
        conversations = converse(server, make_conversations(2, turns=2))
    plain = ServerOptions(model, tmp_path / "plain.log", cache="none", dtype="bfloat16")
    with Server(plain) as server:
        for turn in (turn for conversation in conversations for turn in conversation.turns):
            want = server.generate(turn.prompt, len(turn.reply.output_ids), logprobs=True)
            assert want.cached == CachedTokens(0, 0, 0)
            assert_equal_or_tie(turn.reply.output_ids, want.output_ids, want.top2, TIE_NATS)


def test_the_radix_cache_without_hicache_loses_what_is_flushed(model: Path, tmp_path: Path) -> None:
    prompt = random_tokens(300, seed=2)
    (want,) = greedy(model, [prompt], 16)
    with Server(ServerOptions(model, tmp_path / "server.log", cache="radix")) as server:
        cold, hit = server.generate(prompt, 16), server.generate(prompt, 16)
        server.flush_cache()
        flushed = server.generate(prompt, 16)
    assert [r.cached.device for r in (cold, hit, flushed)] == [0, 256, 0]
    for reply in (cold, hit, flushed):
        assert_equal_tokens(reply.output_ids, want.tokens)


def test_wait_backed_up_returns_when_every_full_page_is_in_l3(model: Path, tmp_path: Path) -> None:
    with Server(file_backend(model, tmp_path)) as server:
        server.generate(random_tokens(600, seed=1), 40)
        server.wait_backed_up()
        assert len(list((tmp_path / "l3").glob("*.bin"))) == 639 // server.options.page_size


def test_cleared_storage_holds_nothing(model: Path, tmp_path: Path) -> None:
    prompt = random_tokens(300, seed=3)
    with Server(file_backend(model, tmp_path)) as server:
        server.generate(prompt, 4)
        server.flush_cache()
        assert server.clear_storage().status_code == 200
        assert list((tmp_path / "l3").glob("*.bin")) == []
        assert server.generate(prompt, 4).cached == CachedTokens(0, 0, 0)


def test_an_adapter_changes_the_output_and_only_its_own(
    model: Path, model_cache: Path, tmp_path: Path
) -> None:
    adapter = build_lora(model, model_cache)
    prompt = random_tokens(300, seed=4)
    (want,) = greedy(model, [prompt], 16)
    lora_args = ["--enable-lora", "--lora-backend", "torch_native", "--lora-paths"]
    options = file_backend(model, tmp_path, extra_args=[*lora_args, f"tiny={adapter}"])
    with Server(options) as server:
        for _ in range(2):  # computed, then from L3: the adapter is part of the page's key
            assert_equal_tokens(server.generate(prompt, 16).output_ids, want.tokens)
            adapted = server.generate(prompt, 16, lora="tiny")
            assert adapted.output_ids != want.tokens
            server.flush_cache()
        assert adapted.cached.storage == 256
