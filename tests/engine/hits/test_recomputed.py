"""First layers that are not stored: the load recomputes them, though the others were restored while
L3 was read."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.harness.server import Server
from tests.engine.harness.clients import Clients
from tests.engine.harness.conversations import converse, make_conversations, random_tokens
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_no_cache_replies_up_to_ties,
    assert_restored_from_l3,
)
from tests.engine.harness.trouble import Trouble
from tests.engine.hits.eager_servers import (
    FAULTS,
    PAGE,
    asked,
    assert_fine,
    counting,
    eager_server,
    read_batches,
    tell_faults,
)

pytestmark = pytest.mark.engine


@pytest.fixture(
    scope="module", params=["recompute, mixed", pytest.param("recompute", marks=pytest.mark.long)]
)
def shared(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    options = eager_server(
        model, tmp_path_factory.mktemp("recomputed"), request.param, faults=FAULTS
    )
    with Server(options) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    read_batches(shared, None)
    shared.flush_cache()
    yield shared
    assert_fine(shared, "recompute")
    assert "not used: recomputation" not in shared.log_text()


def test_first_layers_are_recomputed_at_the_load(model: Path, server: Server) -> None:
    events = dict.fromkeys(("ready_at_load", "not_ready_at_load", "eager"), "tokens")
    with counting(server, whole="slices", **events) as found:
        conversations = converse(server, make_conversations(2, turns=3, tokens=250))
    assert found["ready_at_load"] > found["not_ready_at_load"]
    assert found["eager"] > 0 and not found["whole"]
    assert_restored_from_l3(conversations, PAGE)
    assert_no_cache_output(model, conversations)


def test_first_layers_are_recomputed_behind_the_device_for_two_at_once(
    model: Path, server: Server
) -> None:
    """Three prompts share a part: the first brings it back, the others what is left of theirs."""
    same, rest = random_tokens(400, 1), [random_tokens(400, seed) for seed in (2, 3, 4)]
    for tokens_of in rest:
        server.generate(same + tokens_of, 1)
    server.flush_cache()
    conversations = [*asked(server, same + rest[0])]
    with counting(server, eager="tokens") as found:
        conversations += asked(server, same + rest[1], same + rest[2])
    for conversation in conversations[1:]:
        cached = conversation.turns[0].cached
        assert cached.device == 400 and cached.storage > 300
    assert found["eager"] > 400
    assert_no_cache_output(model, conversations)


def test_random_conversations_while_l3_fails(model: Path, server: Server) -> None:
    """The long form is in test_conversations.py."""
    trouble = Trouble(server.options.log.parent, partial(tell_faults, server), stall_s=0.5, seed=2)
    clients, bouts = Clients(server, 3, aborted=0.2, kept=1 << 30, seed=2), 0
    while bouts < 2 or not clients.counts["storage"]:
        with trouble.going_on():
            clients.begin(5)
        server.flush_cache()
        bouts += 1
    assert_no_cache_replies_up_to_ties(model, clients.turns)
