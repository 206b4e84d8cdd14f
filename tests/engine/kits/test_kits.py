"""SGLang's kits for radix caches, KL, schedulers and sessions, on one server of each L3."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from bench.harness.server import CachedTokens, Reply, Server
from tests.engine.harness.conversations import Turn
from tests.engine.harness.ours import assert_no_cache_replies_up_to_ties

from .servers import MODES, PAGE, assert_sound, options
from .standins import case, kit, random_prompts, tokenizer_of

pytestmark = pytest.mark.engine

KL = 1e-6
"""In float32; kits have 0.003 for half types."""


class Served(NamedTuple):
    """A server with an L3 of that name, and its tokenizer."""

    l3: str
    server: Server
    model: Path
    tokenizer: Any

    def case(self, mixin: type, **attributes: Any) -> Any:
        """A kit's class of tests that asks this server."""
        return case(
            mixin,
            base_url=self.server.url,
            process=self.server.process,
            model=str(self.model),
            tokenizer=self.tokenizer,
            **attributes,
        )


ALL = ("file", "auto", "hidden", "kv")


def runs(*short: str, long: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parameters `served` and `name`: the tests of a kit that run always, and in long runs only."""
    return pytest.mark.parametrize(
        ("served", "name"),
        [
            pytest.param("auto", name, marks=pytest.mark.versions, id=f"{name}-short")
            for name in short
        ]
        + [
            pytest.param(l3, name, marks=pytest.mark.long, id=f"{name}-{l3}")
            for l3 in ALL
            for name in (*short, *long)
        ],
        indirect=["served"],
    )


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("long") is not None


@pytest.fixture(scope="module")
def servers(
    speaker: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Server]]:
    """The server with an L3 of that name: the same for all tests, unless it died."""
    running: dict[str, Server] = {}

    def alive(l3: str) -> bool:
        server = running.get(l3)
        return bool(server and server.process and server.process.poll() is None)

    with contextlib.ExitStack() as stack:

        def served_by(l3: str) -> Server:
            if not alive(l3):
                chosen = options(
                    l3,
                    speaker,
                    tmp_path_factory.mktemp(l3),
                    max_total_tokens=12_288,
                    # Kits ask for 100,000 tokens and abort.
                    extra_args=["--enable-streaming-session", "--allow-auto-truncate"],
                    # As the fixtures of the kits have it.
                    extra_env={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"},
                )
                running[l3] = stack.enter_context(Server(chosen))
            return running[l3]

        yield served_by
        for l3 in filter(alive, MODES):
            assert_sound(running[l3], l3)


@pytest.fixture
def served(
    request: pytest.FixtureRequest, servers: Callable[[str], Server], speaker: Path
) -> Served:
    return Served(request.param, servers(request.param), speaker, tokenizer_of(speaker))


@pytest.fixture
def flushed_kl(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """L1 and L2 are flushed before each request of the KL kits; answers are kept here."""
    kept = []
    for name in ("kl_test_utils", "kl_multiturn_utils"):
        module = kit(name)

        def generate(base_url: str, *args: Any, ask: Any = module._generate, **options: Any) -> Any:
            kit("kl_test_utils")._flush_cache(base_url)
            answers = ask(base_url, *args, **options)
            kept.extend(answers)
            return answers

        monkeypatch.setattr(module, "_generate", generate)
    return kept


def from_storage(answers: list[dict[str, Any]]) -> int:
    """Tokens that L3 had."""
    return sum(CachedTokens.of(answer["meta_info"]).storage for answer in answers)


@runs("test_l3_prefetch_full_prefix_hit_after_flush")
def test_full_prefix(name: str, served: Served) -> None:
    mixin = kit("kits.unified_radix_cache_kit").AccuracyTwoPassMixin
    getattr(served.case(mixin, l3_prefetch_page_size=PAGE), name)()


@runs(
    "test_multiturn_prefill_cache_hit_branching",
    long=["test_multiturn_decode_cache_hit_branching", "test_multiturn_logprobs_match"],
)
def test_kl_of_turns_with_a_flush_before_each(
    name: str,
    served: Served,
    long: bool,
    flushed_kl: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    kits, turns = kit("kits.unified_radix_cache_kit"), kit("kl_multiturn_utils")
    asked = served.case(
        kits.UnifiedRadixTreeTestMixin,
        input_ids=random_prompts(4, 512, seed=int(long)),  # not in L3 of the other run
        kl_threshold=KL,
        max_new_tokens=64 if long else 8,
        num_groups=2,
        branches_per_group=3 if long else 2,
        # Whole pages are found; the kit's own default is for pages of one token.
        prefill_cache_assert=staticmethod(turns.make_mamba_prefill_assert(PAGE)),
        decode_cache_assert=staticmethod(turns.make_mamba_decode_assert(PAGE)),
    )
    getattr(asked, name)()
    record_property("kl", measured_kl(capsys))
    record_property("tokens_from_storage", from_storage(flushed_kl))
    assert from_storage(flushed_kl) >= 1024


@runs(long=[f"test_input_output_logprobs_match_{hit}_cache_hit" for hit in ("prefill", "decode")])
def test_kl_of_cache_hits_with_a_flush_before_each(
    name: str,
    served: Served,
    flushed_kl: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    utils = kit("kl_test_utils")
    # Where the kit keeps prompts that it has downloaded.
    key = f"{served.model}_{utils.DEFAULT_PROMPT_TOKENS}_{utils.DEFAULT_NUM_SAMPLES}"
    monkeypatch.setitem(utils._cached_input_ids, key, random_prompts(8, 600, seed=2))
    asked = served.case(
        kit("kits.kl_divergence_kit").KLDivergenceMixin,
        kl_div_thres=KL,
        kl_div_max_samples=8,
        kl_div_prefill_max_new_tokens=64,
        kl_div_decode_max_new_tokens=64,
    )
    getattr(asked, name)()
    record_property("kl", measured_kl(capsys))
    record_property("tokens_from_storage", from_storage(flushed_kl))
    assert from_storage(flushed_kl) >= 8 * 512


def measured_kl(capsys: pytest.CaptureFixture[str]) -> float:
    """What a KL kit printed last."""
    return float(capsys.readouterr().out.rsplit("avg_kl_div=", 1)[1].split()[0])


@runs("run_radix_attention_test")
def test_replies_to_a_tree_of_71_prompts_are_those_without_a_cache(
    name: str,
    served: Served,
    long: bool,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    kits, sent = kit("kits.radix_cache_server_kit"), Sent()
    tree = functools.partial(kits.gen_radix_tree, num_nodes=70, chunk_len=64 if long else 16)
    monkeypatch.setattr(kits, "gen_radix_tree", tree)
    monkeypatch.setattr(kits, "requests", sent)
    for _ in range(2):
        random.seed(3)
        getattr(kits, name)(served.server.url)
        served.server.flush_cache()
    first, second = sent.turns[:71], sent.turns[71:]
    assert len(second) == 71
    pairs = zip(first, second, strict=True)
    differ = sum(one.reply.output_ids != two.reply.output_ids for one, two in pairs)
    record_property("replies_that_differ", differ)
    record_property("tokens_from_storage", sum(turn.cached.storage for turn in second))
    assert any(turn.cached.storage for turn in second)
    if differ or long:
        assert_no_cache_replies_up_to_ties(served.model, sent.turns)


class Sent:
    """In the place of the module `requests`: keeps what was asked in a batch, and the replies."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def post(self, url: str, json: dict[str, Any]) -> requests.Response:
        answer = requests.post(url, json=json)
        for prompt, reply in zip(json["input_ids"], answer.json(), strict=True):
            self.turns.append(Turn(prompt, Reply(reply["output_ids"], reply["meta_info"]), 0))
        return answer


@runs("test_pause_resume_in_place")
def test_pause(name: str, served: Served, long: bool) -> None:
    asked = served.case(
        kit("kits.pause_generation_kit").PauseResumeInPlaceMixin,
        pause_num_requests=32 if long else 8,
        pause_max_new_tokens=256,
        pause_duration=5 if long else 1,
    )
    getattr(asked, name)()


@runs("test_abort_all")
def test_abort(name: str, served: Served, long: bool) -> None:
    asked = served.case(
        kit("kits.abort_timeout_kit").AbortAllMixin,
        abort_all_num_requests=32 if long else 8,
        abort_all_max_new_tokens=8000,
        abort_all_sleep=2 if long else 1,
    )
    getattr(asked, name)()


@runs(
    *("test_kv_cache_inheritance", "test_nth_mid_abort_recovery", "test_preabort_recovery"),
    long=[
        *("test_first_mid_abort_recovery", "test_leak_logprob_concurrent"),
        "test_stress_concurrent_sessions",
    ],
)
def test_streaming_sessions(name: str, served: Served, request: pytest.FixtureRequest) -> None:
    ends = served.l3 == "file" and name != "test_first_mid_abort_recovery"  # which keeps no node
    if ends:
        why = "SGLang asks its tree whether a session's node, which is in no tree, is backed up"
        # What a test says of a server that died depends on the test.
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    mixin = kit("kits.streaming_session_kit").StreamingSessionKitMixin
    # The last token of a reply is computed by the next pass only; the kit of 0.5.22 knows it.
    getattr(served.case(mixin, kv_inherit_offsets=(0, -1)), name)()
