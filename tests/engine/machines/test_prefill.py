"""Prefill servers with an L3: what they restore is what decode servers get."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench.harness.models import build_model
from bench.harness.server import ServerError, ServerOptions
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    random_tokens,
    turns_of,
)
from tests.engine.harness.disaggregation import DecodeServer, PrefillServer

from .servers import TRANSFER, started

pytestmark = [pytest.mark.engine, TRANSFER]

PAGE = 64
LONG = pytest.mark.long
KINDS: dict[str, dict[str, Any]] = {
    "mixed": {"partition": ours.partition(1, 2, 1)},
    "hidden": {"partition": ours.partition(0, 4, 0)},
    "own": {"mode": "kv"},
    "latents": {"mode": "kv"},  # of another model
    "encoded": {"mode": "kv", "codec": "exp3"},
    "encoded, mixed": {"partition": ours.partition(1, 2, 1), "codec": "exp3"},
    "layerwise": {"partition": ours.partition(1, 2, 1), "restore": "layerwise"},
    "plain": {"mode": "plain"},
}


def prefill_server(
    model: Path, folder: Path, name: str, kind: str, **options: Any
) -> PrefillServer:
    """A prefill server; all of them have the same L3."""
    if is_encoded(kind):
        options["dtype"] = "bfloat16"
    hcache, log = KINDS[kind] | options.pop("hcache", {}), folder / f"{name}.log"
    return PrefillServer(ours.our_server(model, folder, hcache=hcache, log=log, **options))


def decode_server(
    model: Path, folder: Path, *prefill: PrefillServer, **options: Any
) -> DecodeServer:
    """A decode server without a cache of its own."""
    log = folder / "decode.log"
    return DecodeServer(ServerOptions(model, log, cache="radix", **options), prefill)


def is_encoded(kind: str) -> bool:
    return "codec" in KINDS[kind]


@LONG
@pytest.mark.parametrize(
    ("kind", "servers", "tp"),
    [
        *((kind, 1, 1) for kind in KINDS),
        ("mixed", 2, 1),
        ("own", 2, 1),
        ("mixed", 1, 2),
        ("own", 1, 2),
        ("latents", 1, 2),
    ],
)
def test_tokens_are_those_of_one_server_without_a_cache(
    kind: str, servers: int, tp: int, model_cache: Path, tmp_path: Path
) -> None:
    """L3 serves prefill servers after a flush, and one that has just started; their ranks (`tp`)
    are not the decode server's."""
    model = build_model("deepseek" if kind == "latents" else "llama", model_cache)
    dtype = "bfloat16" if is_encoded(kind) else "float32"
    prefill = [
        prefill_server(model, tmp_path, f"prefill-{number}", kind, tp=tp)
        for number in range(servers)
    ]
    decode = decode_server(model, tmp_path, *prefill, dtype=dtype)
    new = prefill_server(model, tmp_path, "new", kind, tp=tp)
    with started(*prefill, decode):
        conversations = converse(decode, make_conversations(2, turns=2, tokens=200))
        for server in prefill:
            assert_sound(server, kind)
            server.kill()
        with new:
            decode.prefill = [new]
            again = ask(decode, [conversation.history for conversation in conversations])
            assert_sound(new, kind)
    ours.assert_restored_from_l3(conversations, PAGE)
    assert_found(again)
    if is_encoded(kind):
        ours.assert_no_cache_output_up_to_ties(model, tmp_path, [*conversations, *again])
    else:
        ours.assert_no_cache_output(model, [*conversations, *again])


def assert_found(conversations: Sequence[Conversation]) -> None:
    """L3 had what was asked for."""
    for conversation in conversations:
        [turn] = conversation.turns
        assert turn.cached.storage >= len(turn.prompt) - 2 * PAGE, turn.cached


def assert_sound(server: PrefillServer, kind: str) -> None:
    if kind == "plain":
        ours.assert_nothing_went_wrong(server)
    else:
        ours.assert_sound_own_pages(server, KINDS[kind].get("mode", "hidden"))


@pytest.mark.versions
def test_a_server_killed_in_the_middle_of_a_restore_loses_nothing(
    model: Path, tmp_path: Path
) -> None:
    """Tokens are those of one server without a cache: of turns that L3 serves after a flush, and of
    requests to the next prefill server, when the first one died while its forward pass waited for
    a layer, however late that layer comes there."""
    trigger = tmp_path / "trigger"
    env = ours.faulty("layer_held", trigger)
    first = prefill_server(model, tmp_path, "first", "mixed", extra_env=env)
    decode = decode_server(model, tmp_path, first)
    with ThreadPoolExecutor(1) as pool, started(first, decode):
        conversations = converse(decode, make_conversations(2, turns=2, tokens=200))
        assert_sound(first, "mixed")

        def held_request() -> Future[Any]:
            """A request whose restore has got to the layer that is held."""
            trigger.touch()
            asked = pool.submit(ask, decode, [conversations[0].history])
            decode.until(trigger.with_suffix(".held").exists, "a restore to be held")
            return asked

        lost = held_request()
        first.kill()
        with suppress(ServerError):
            lost.result()
        for file in tmp_path.glob("trigger*"):
            file.unlink()
        with prefill_server(model, tmp_path, "second", "mixed", extra_env=env) as second:
            decode.prefill = [second]
            late = held_request()
            trigger.unlink()
            again = [*late.result(), *ask(decode, [conversations[1].history])]
            assert_sound(second, "mixed")
    ours.assert_restored_from_l3(conversations, PAGE)
    assert_found(again)
    ours.assert_no_cache_output(model, [*conversations, *again])


@pytest.mark.parametrize(
    "restore",
    [pytest.param("auto", marks=pytest.mark.versions), pytest.param("layerwise", marks=LONG)],
)
def test_layers_that_come_late_are_sent_late(restore: str, model: Path, tmp_path: Path) -> None:
    """Of two requests in one batch the first one loads what the second one then finds on the
    device, although its layers have not come."""
    trigger = tmp_path / "trigger"
    prefill = prefill_server(
        model, tmp_path, "prefill", "hidden",
        # A check of what was loaded would read K and V as soon as the load was launched.
        hcache={"restore": restore, "check_every_pages": 0},
        extra_env=ours.faulty("loads_late,prefetches_paired", trigger),
    )  # fmt: skip
    decode, shared = decode_server(model, tmp_path, prefill), random_tokens(640, 1)
    with started(prefill, decode), ThreadPoolExecutor(1) as pool:
        ask(decode, [shared], flush=True)
        ask(decode, [random_tokens(1280, 2)], flush=True)
        trigger.touch()
        prompts = [shared + random_tokens(100, seed) for seed in (3, 4)]
        late = pool.submit(ask, decode, prompts, flush=False, concurrent=True)
        decode.until(trigger.with_suffix(".waits").exists, "a forward pass to wait for a layer")
        assert not trigger.with_suffix(".sent").exists()
        trigger.unlink()
        asked = late.result()
        assert_sound(prefill, "hidden")
    assert [turn.cached.total for turn in turns_of(asked)] == [640, 640]
    ours.assert_no_cache_output(model, asked)
