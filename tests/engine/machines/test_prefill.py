"""Prefill servers with an L3: what they restore is what decode servers get."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from bench.harness import disaggregation, router
from bench.harness.disaggregation import DecodeServer, PrefillServer
from bench.harness.router import Router
from bench.harness.server import ServerError, ServerOptions
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    random_tokens,
)
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_no_cache_output_up_to_ties,
    assert_nothing_went_wrong,
    assert_restored_from_l3,
    assert_sound_own_pages,
    faulty,
    our_server,
    partition,
)

WHY_NOT = disaggregation.missing()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no transfer: {WHY_NOT}"),
]

PAGE = 64
LONG = pytest.mark.long
KINDS: dict[str, dict[str, Any]] = {
    "mixed": {"partition": partition(1, 2, 1)},
    "hidden": {"partition": partition(0, 4, 0)},
    "own": {"mode": "kv"},
    "encoded": {"mode": "kv", "codec": "exp4"},
    "layerwise": {"partition": partition(1, 2, 1), "restore": "layerwise"},
    "plain": {"mode": "kv", "pages": "plain"},
}


def prefill_server(
    model: Path, folder: Path, name: str, kind: str, **options: Any
) -> PrefillServer:
    """A prefill server; all of them have the same L3."""
    if kind == "encoded":
        options["dtype"] = "bfloat16"
    log = folder / f"{name}.log"
    return PrefillServer(our_server(model, folder, hcache=KINDS[kind], log=log, **options))


def decode_server(
    model: Path, folder: Path, *prefill: PrefillServer, dtype: str = "float32"
) -> DecodeServer:
    """A decode server without a cache of its own."""
    options = ServerOptions(model, folder / "decode.log", cache="radix", dtype=dtype)
    return DecodeServer(options, prefill)


@pytest.mark.parametrize(
    ("kind", "servers"),
    [
        pytest.param("mixed", 1, marks=pytest.mark.versions),
        *(pytest.param(kind, 1, marks=LONG) for kind in KINDS if kind != "mixed"),
        pytest.param("mixed", 2, marks=LONG),
        pytest.param("own", 2, marks=LONG),
    ],
)
def test_tokens_are_those_of_one_server_without_a_cache(
    kind: str, servers: int, model: Path, tmp_path: Path
) -> None:
    """L3 serves prefill servers after a flush, and one that has just started."""
    dtype = "bfloat16" if kind == "encoded" else "float32"
    with ExitStack() as stack:
        prefill = [
            stack.enter_context(prefill_server(model, tmp_path, f"prefill-{number}", kind))
            for number in range(servers)
        ]
        decode = stack.enter_context(decode_server(model, tmp_path, *prefill, dtype=dtype))
        conversations = converse(decode, make_conversations(2, turns=2, tokens=200))
        for server in prefill:
            assert_sound(server, kind)
            server.kill()
        new = stack.enter_context(prefill_server(model, tmp_path, "new", kind))
        decode.prefill = [new]
        again = ask(decode, [conversation.history for conversation in conversations])
        assert_sound(new, kind)
    assert_restored_from_l3(conversations, PAGE)
    for conversation in again:
        [turn] = conversation.turns
        assert turn.cached.storage >= len(turn.prompt) - 2 * PAGE, turn.cached
    if kind == "encoded":
        assert_no_cache_output_up_to_ties(model, tmp_path, [*conversations, *again])
    else:
        assert_no_cache_output(model, [*conversations, *again])


def assert_sound(server: PrefillServer, kind: str) -> None:
    if kind == "plain":
        assert_nothing_went_wrong(server)
    else:
        assert_sound_own_pages(server, KINDS[kind].get("mode", "hidden"))


def test_a_server_killed_in_the_middle_of_a_restore_loses_nothing(
    model: Path, tmp_path: Path
) -> None:
    """The prefill server dies while its forward pass waits for a layer; the next one answers from
    L3, however late that layer comes."""
    trigger = tmp_path / "trigger"
    env = faulty("layer_held", trigger)
    prompt = random_tokens(400, 1)
    first = prefill_server(model, tmp_path, "first", "mixed", extra_env=env)
    second = prefill_server(model, tmp_path, "second", "mixed", extra_env=env)
    with ThreadPoolExecutor(1) as pool, first, decode_server(model, tmp_path, first) as decode:
        [before] = ask(decode, [prompt])

        def held_request() -> Any:
            """A request whose restore has got to the layer that is held."""
            trigger.touch()
            asked = pool.submit(decode.generate, prompt, 16)
            decode.until(trigger.with_suffix(".held").exists, "a restore to be held")
            return asked

        lost = held_request()
        first.kill()
        with suppress(ServerError):
            lost.result()
        for file in tmp_path.glob("trigger*"):
            file.unlink()
        with second:
            decode.prefill = [second]
            late = held_request()
            trigger.unlink()
            assert late.result().cached.storage == 384
            after = Conversation([prompt])
            after.add(prompt, late.result())
            assert_nothing_went_wrong(second)
    assert_no_cache_output(model, [before, after])


@LONG
@pytest.mark.skipif(router.missing() is not None, reason=f"no router: {router.missing()}")
@pytest.mark.long
def test_sglangs_router_stands_in_front_of_a_pair(model: Path, tmp_path: Path) -> None:
    """Clients know neither of the two."""
    with (
        prefill_server(model, tmp_path, "prefill", "own") as prefill,
        decode_server(model, tmp_path) as decode,
        Router([prefill, decode], tmp_path / "router.log") as front,
    ):
        conversations = converse(front, make_conversations(2, turns=2, tokens=200))
        assert_sound(prefill, "own")
    assert_restored_from_l3(conversations, PAGE)
    assert_no_cache_output(model, conversations)
