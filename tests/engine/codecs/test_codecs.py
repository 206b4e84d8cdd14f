"""Hidden states that are stored encoded: what comes back, and what must never come back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.harness.models import HIDDEN, LAYERS
from bench.harness.server import Server, ServerOptions
from hcache_backend.format.envelope import parse_name
from hcache_backend.format.file import parse_header
from hcache_kernels.codecs import make_codec
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    turns_of,
)
from tests.engine.harness.ours import (
    assert_hidden_mode,
    assert_no_cache_output,
    assert_no_cache_output_up_to_ties,
    assert_nothing_went_wrong,
    assert_restored_from_l3,
    assert_sound_hidden_mode,
    best_tokens,
    faulty,
    our_server,
    stored_pages,
)
from tests.engine.harness.reference import assert_equal_tokens

pytestmark = pytest.mark.engine

PAGE = 128
WIDE_TOKEN, TRIED_TOKEN = 1000, 847
"""Their embeddings are made to overflow exp4; the second one is a token of the self-check."""


def change_weights(model: Path, folder: Path, name: str, change: Callable[..., None]) -> Path:
    """A copy of ``model`` in ``folder``, one of whose weights ``change`` has changed."""
    copy = folder / "model"
    shutil.copytree(model, copy)
    (file,) = copy.glob("*.safetensors")
    weights = load_file(file)
    change(weights[name])
    save_file(weights, file, {"format": "pt"})
    return copy


def segments(path: Path) -> tuple[bytes, torch.Tensor]:
    """Key of a page file, and its layer segments: uint8 ``[layers * page, row_bytes]``."""
    name = parse_name(path.name)
    assert name is not None
    data = bytearray(path.read_bytes())
    header = parse_header(memoryview(data))
    start = header.layout.header_bytes + header.layout.table.segments[0].length
    end = header.layout.header_bytes + header.layout.payload_bytes
    return name[1], torch.frombuffer(data, dtype=torch.uint8)[start:end].view(LAYERS * PAGE, -1)


@pytest.mark.long
def test_exp4_output_and_pages_are_those_of_exact_hidden_states(
    model: Path, tmp_path: Path
) -> None:
    runs, pages = {}, {}
    for codec, asked in (("none", {"codec": "none"}), ("exp4", {})):  # the default
        folder = tmp_path / codec
        options = our_server(model, folder, hcache=asked, dtype="bfloat16", page_size=PAGE)
        with Server(options) as server:
            runs[codec] = converse(server, make_conversations(2, turns=3, tokens=300))
            assert_sound_hidden_mode(server)
            assert f"codec {codec}" in server.log_text()
            assert_restored_from_l3(runs[codec], PAGE)
        pages[codec] = dict(map(segments, stored_pages(folder)))
    assert [c.outputs for c in runs["exp4"]] == [c.outputs for c in runs["none"]]
    assert_no_cache_output_up_to_ties(model, tmp_path, runs["exp4"])

    exp4 = make_codec("exp4", HIDDEN, torch.bfloat16)
    assert len(pages["exp4"]) >= 12
    assert pages["exp4"].keys() == pages["none"].keys()
    for key, encoded in pages["exp4"].items():
        exact = pages["none"][key]
        assert torch.equal(exp4.decode(encoded).view(torch.uint8), exact)
        assert encoded.numel() <= 0.77 * exact.numel()


@pytest.mark.long
def test_lossy_codecs_serve_and_stay_close_and_do_not_share_pages(
    model: Path, tmp_path: Path
) -> None:
    """int8 and fp8 have rows of one length: only the namespace keeps them apart."""

    def options(codec: str, log: str, **more: Any) -> ServerOptions:
        return our_server(model, tmp_path, hcache={"codec": codec}, log=tmp_path / log, **more)

    for codec, share in (("fp8", 0.8), ("int8", 0.88)):
        with Server(options(codec, f"{codec}.log")) as server:
            conversations = converse(server, make_conversations(3, turns=3, tokens=300))
            assert_hidden_mode(server)
            assert_nothing_went_wrong(server)  # every page was checked, by the codec's tolerance
            assert_restored_from_l3(conversations, 64)
        for first in (conversation.turns[0] for conversation in conversations):
            assert first.cached.storage == 0
            assert_equal_tokens(first.reply.output_ids, best_tokens(model, first))
        pairs = [
            pair
            for turn in turns_of(conversations)
            for pair in zip(turn.reply.output_ids, best_tokens(model, turn), strict=True)
        ]
        assert sum(got == want for got, want in pairs) >= share * len(pairs)
    exact_bytes = LAYERS * 64 * HIDDEN * 4
    assert all(path.stat().st_size <= 0.33 * exact_bytes for path in stored_pages(tmp_path))

    trigger = tmp_path / "trigger"
    fault = faulty("wrong_rope", trigger)
    with Server(options("fp8", "restarted.log", extra_env=fault)) as server:
        again = ask(server, [conversation.turns[0].prompt for conversation in conversations])
        assert all(c.turns[0].cached.storage == 256 for c in again)
        # A wrong projection in service shows through the tolerance, too.
        before = set(stored_pages(tmp_path))
        converse(server, make_conversations(1, turns=1, seed=1))
        assert before < set(stored_pages(tmp_path))
        trigger.touch()
        converse(server, make_conversations(1, turns=1, seed=2))
        server.wait_for_log("the self-check in service failed: projected K of model.layers.0")
        server.wait_for_log(r"\d+ pages that this server wrote were deleted")
        assert set(stored_pages(tmp_path)) == before


def test_a_row_that_overflows_keeps_its_page_from_l3_and_exp4_in_use(
    model: Path, tmp_path: Path
) -> None:
    def spread(embeddings: torch.Tensor) -> None:
        """Ten values of different exponents make the row; all others lie far below them."""
        for token in (WIDE_TOKEN, TRIED_TOKEN):
            embeddings[token] *= 2.0**-40
            embeddings[token, :10] = 2.0 ** -torch.arange(10)

    served = change_weights(model, tmp_path, "model.embed_tokens.weight", spread)
    conversations = make_conversations(2, turns=3, tokens=200)
    for question in (q for c in conversations for q in c.questions):
        question[:] = [1 if token in (WIDE_TOKEN, TRIED_TOKEN) else token for token in question]
    hit, other = conversations
    hit.questions[1][100] = WIDE_TOKEN
    with Server(our_server(served, tmp_path, dtype="bfloat16")) as server:
        converse(server, conversations)
        assert_hidden_mode(server)
        first_turn = (200 + 16) // 64 * 64
        assert [turn.cached.storage for turn in hit.turns[:2]] == [0, first_turn]
        # The page before the row's is stored where the backup began before the verdict was there.
        assert hit.turns[2].cached.storage in (first_turn, first_turn + 64)
        assert_restored_from_l3([other], 64)
        assert_nothing_went_wrong(server)
        log = server.log_text()
        assert "codec 'exp4' cannot encode 1 tokens of this step" in log
        assert "codec 'exp4' cannot encode 1 of the 48 tokens that were tried" in log
        assert "is not used" not in log
    assert_no_cache_output_up_to_ties(served, tmp_path, conversations)


@pytest.mark.long
def test_exp4_gives_way_to_none_where_hidden_states_are_not_bfloat16(
    model: Path, tmp_path: Path
) -> None:
    def first_turns(codec: str) -> tuple[list[Conversation], str]:
        options = our_server(
            model, tmp_path, hcache={"codec": codec}, log=tmp_path / f"{codec}.log"
        )
        with Server(options) as server:
            conversations = converse(server, make_conversations(2, turns=1, tokens=400))
            assert_hidden_mode(server)
            return list(conversations), server.log_text()

    asked, log = first_turns("exp4")
    assert (
        "hcache: codec 'exp4' is not used, hidden states are stored as they are (codec 'none'): "
        "codec 'exp4' takes bfloat16 hidden states, not torch.float32"
    ) in log
    # What was written then belongs to the codec that was used.
    exact, _ = first_turns("none")
    assert all(c.turns[0].cached.storage == 384 for c in exact)
    assert_no_cache_output(model, [*asked, *exact])


def test_a_codec_that_breaks_the_model_is_refused_at_start_up(model: Path, tmp_path: Path) -> None:
    """One dimension far above all others, as large models have: int8 rounds the rest away."""

    def tower(norm: torch.Tensor) -> None:
        norm[7] *= 200

    served = change_weights(model, tmp_path, "model.layers.2.input_layernorm.weight", tower)
    with Server(our_server(served, tmp_path, hcache={"codec": "int8"})) as server:
        conversations = converse(server, make_conversations(2, turns=2))
        assert_hidden_mode(server)
        assert_restored_from_l3(conversations, 64)
        assert server.wait_for_log(
            r"codec 'int8' is not used, hidden states are stored as they are \(codec 'none'\): "
            r"projected [KV] of model.layers.2.self_attn differs from the model's by"
        )
    assert_no_cache_output(served, conversations)
