"""What SGLang can do beside own pages: rows of the table in docs/limits.md."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from bench.harness.drafts import drafting
from bench.harness.models import build_model
from bench.harness.server import CachedTokens, Server
from tests.engine.harness import ours
from tests.engine.harness.clients import Clients
from tests.engine.harness.conversations import (
    converse,
    make_conversations,
    turns_of,
)
from tests.engine.harness.vision import IMAGE, build_vision_model, image, words

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("mode", "tp"),
    [
        ("hidden", 1),
        pytest.param("kv", 1, marks=pytest.mark.long),
        pytest.param("hidden", 2, marks=pytest.mark.long),
        pytest.param("kv", 2, marks=pytest.mark.long),
    ],
)
def test_host_memory_that_is_a_buffer_only(mode: str, tp: int, model: Path, tmp_path: Path) -> None:
    """Nodes go while they are read, and the device gets pages that others have asked L3 for."""
    options = ours.our_server(
        model,
        tmp_path,
        hcache={"mode": mode},
        page_size=16,
        max_total_tokens=2048,
        hicache_ratio=1.5,
        tp=tp,
        extra_args=["--hicache-host-memory-mode", "buffer_only"],
        extra_env={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"},
    )
    with Server(options) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=200))
        ours.assert_restored_from_l3(conversations, 16)
        clients = Clients(server, 12, aborted=0.2, kept=20)
        kinds = ("replied", "aborted", "disconnected", "device", "storage")
        clients.talk(2, until=lambda: all(clients.counts[kind] for kind in kinds))
        server.wait_backed_up()
        assert clients.counts["host"] == 0
        ours.assert_sound_own_pages(server, mode)
        assert "L3 is off" not in server.log_text()
        assert "is not the requested one" not in server.log_text()
    options.log = tmp_path / "restarted.log"
    with Server(options) as server:
        again = converse(server, make_conversations(2, turns=1, tokens=200))
    assert all(turn.cached.storage == 192 for turn in turns_of(again))
    ours.assert_no_cache_output(model, [*conversations, *again])
    ours.assert_no_cache_replies_up_to_ties(model, clients.turns)


@pytest.mark.parametrize("kind", ["drafts", pytest.param("data-parallel", marks=pytest.mark.long)])
def test_one_request_at_a_time_by_priorities(kind: str, model_cache: Path, tmp_path: Path) -> None:
    """The start's check wants to run more requests; those of low priority wait for others."""
    options: dict[str, Any] = {}
    if kind == "drafts":
        drafts = drafting("STANDALONE", model_cache, tmp_path)
        model, arguments = drafts.model, drafts.arguments
    else:
        model = build_model("qwen3_moe", model_cache)
        arguments = ["--enable-dp-attention", "--dp-size", "2", "--mem-fraction-static", "0.3"]
        options["tp"] = 2
    limit = 1 if kind == "drafts" else 2  # of both groups of ranks
    options["extra_args"] = [
        *arguments,
        *("--max-running-requests", str(limit)),
        *("--enable-priority-scheduling", "--disable-priority-preemption"),
    ]
    started = ours.our_server(model, tmp_path, hcache={"mode": "kv"}, page_size=16, **options)
    conversations = make_conversations(4, turns=2, tokens=120)
    with Server(started) as server, ThreadPoolExecutor(len(conversations)) as pool:
        for _ in range(2):
            prompts = [conversation.next_prompt() for conversation in conversations]
            replies = [
                pool.submit(server.generate, prompt, 16, priority=number % 3)
                for number, prompt in enumerate(prompts)
            ]
            for conversation, prompt, reply in zip(conversations, prompts, replies, strict=True):
                conversation.add(prompt, reply.result())
            server.flush_cache()
        ours.assert_sound_own_pages(server, "kv")
    ours.assert_restored_from_l3(conversations, 16)
    ours.assert_no_cache_output(model, conversations)


class Answer(NamedTuple):
    """Tokens of a reply, and where those of its prompt were."""

    tokens: list[int]
    cached: CachedTokens


def look(server: Server, text: str, seed: int | None = None) -> Answer:
    """Ask about the picture of that seed."""
    body: dict[str, Any] = {
        "text": text,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True},
        "return_logprob": True,
    }
    if seed is not None:
        body["image_data"] = [image(seed)]
    reply = requests.post(f"{server.url}/generate", json=body, timeout=600)
    said = reply.json()["meta_info"]
    return Answer([token for _, token, _ in said["output_token_logprobs"]], CachedTokens.of(said))


def test_images_and_positions_of_three_dimensions(model_cache: Path, tmp_path: Path) -> None:
    """A page with a part of an image is that of no other image."""
    model = build_vision_model(model_cache)
    options = ours.our_server(
        model,
        tmp_path,
        hcache={"mode": "auto"},
        page_size=16,
        extra_args=["--mm-attention-backend", "sdpa"],
    )
    text = f"{words(72, 1)} {IMAGE} {words(200, 2)}"
    tokens, before = 72 + 1 + 16 + 1 + 200, 64
    with Server(options) as server:

        def after_a_flush(seed: int) -> Answer:
            server.flush_cache()
            return look(server, text, seed)

        cold = look(server, text, 1)
        other = after_a_flush(2)
        restored, other_restored = after_a_flush(1), after_a_flush(2)
        ours.assert_sound_own_pages(server, "kv")
        assert "positions of several dimensions" in server.log_text()
    assert cold.cached == CachedTokens()
    assert other.cached.storage == before
    whole = (tokens - 1) // 16 * 16
    assert restored.cached.storage == other_restored.cached.storage == whole
    assert restored.tokens == cold.tokens != other.tokens == other_restored.tokens


# ---- data-parallel attention ----


@pytest.mark.parametrize(
    ("name", "tp", "restore"),
    [
        pytest.param("qwen3_moe", 2, "auto", marks=pytest.mark.versions),
        pytest.param("deepseek", 2, "auto", marks=pytest.mark.versions),
        pytest.param("qwen3_moe", 2, "layerwise", marks=pytest.mark.long),
        # Two ranks have heads of one request, or the same latents.
        pytest.param("qwen3_moe", 4, "auto", marks=pytest.mark.long),
        pytest.param("deepseek", 4, "auto", marks=pytest.mark.long),
    ],
)
def test_a_conversation_finds_its_pages_in_the_other_group(
    name: str, tp: int, restore: str, model_cache: Path, tmp_path: Path
) -> None:
    model = build_model(name, model_cache)
    options = ours.our_server(
        model,
        tmp_path,
        hcache={"mode": "auto", "restore": restore},
        page_size=16,
        tp=tp,
        extra_args=("--enable-dp-attention", "--dp-size", "2", "--mem-fraction-static", "0.3"),
    )
    with Server(options) as server:
        # One request at a time: the other group is idle meanwhile, and has the next one.
        conversations = converse(server, make_conversations(3, turns=2, tokens=200))
        groups = [[turn.reply.meta_info["dp_rank"] for turn in c.turns] for c in conversations]
        assert groups == [[0, 1], [1, 0], [0, 1]]
        ours.assert_restored_from_l3(conversations, 16)
        together = make_conversations(3, turns=2, tokens=200, seed=7)
        ours.assert_restored_from_l3(converse(server, together, concurrent=True), 16)
        ours.assert_sound_own_pages(server, "kv")
    ours.assert_no_cache_output(model, [*conversations, *together])
    assert all(turn.cached.device == 0 for turn in turns_of(conversations))
