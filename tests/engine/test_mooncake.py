"""Hidden-state pages in a Mooncake cluster: another server's pages are used, if they prove it."""

from pathlib import Path

import pytest

from bench.harness import mooncake
from bench.harness.server import Server, ServerOptions
from tests.engine.harness import ours
from tests.engine.harness.conversations import ask, converse, make_conversations

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(mooncake.missing() is not None, reason=f"no Mooncake: {mooncake.missing()}"),
]


def test_what_one_server_wrote_another_one_reads_and_believes_nothing_else(
    model: Path, tmp_path: Path
) -> None:
    def server(name: str) -> Server:
        return Server(
            ServerOptions(
                model,
                tmp_path / f"{name}.log",
                storage_backend="mooncake",
                extra_config=mooncake.store_config(cluster),
                extra_env=ours.hidden_mode_env(partition=ours.partition(1, 2, 1)),
            )
        )

    with mooncake.cluster(tmp_path) as cluster:
        first, second = make_conversations(2, turns=1, tokens=300)
        with server("writer") as writer:
            converse(writer, [first, second])
            ours.assert_sound_hidden_mode(writer)
        with server("reader") as reader:
            prompts = [first.turns[0].prompt, second.turns[0].prompt]
            again = ask(reader, prompts)
            assert [c.turns[0].cached.storage for c in again] == [256, 256]
            assert [c.outputs for c in again] == [first.outputs, second.outputs]
            halves = [
                key for key in mooncake.keys(cluster) if key.endswith("_v")
            ]  # the second ones
            mooncake.damage(cluster, halves)
            once_more = ask(reader, prompts)
            assert [c.turns[0].cached.storage for c in once_more] == [0, 0]
            assert "is not the requested one (checksum): counted as a miss" in reader.log_text()
            ours.assert_nothing_went_wrong(reader)
    ours.assert_no_cache_output(model, [first, second, *once_more])
