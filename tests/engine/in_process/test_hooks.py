"""Hooks are applied and verified; what cannot be hooked is named."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import LogCaptureFixture, MonkeyPatch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from bench.harness.options import hcache_config
from hcache_backend import metrics
from hcache_backend.config import ConfigError
from hcache_backend.contract.check import ContractResult
from hcache_backend.fingerprint import Weights
from hcache_backend.projection.attention import ProjectionBatch, ProjectionReached
from hcache_backend.sglang import (
    compat,
    groups,
    hook_registry,
    hooks,
    model_runner,
    radix_cache,
    scheduler,
    storage_threads,
)
from hcache_backend.sglang.compat import untested
from hcache_backend.sglang.disaggregation import SEND_PREFIX
from hcache_backend.sglang.hook_registry import Hook, OnError, hooks_on, install
from hcache_backend.sglang.model_runner import ATTENTION, RESET
from hcache_backend.sglang.runtime import Runtime, StartOptions, current
from hcache_backend.sglang.weights import LoadedWeights
from hcache_backend.start import attach, capabilities
from hcache_backend.start.attach import bootstrap
from hcache_backend.start.build import GRAPH_HOOKS
from tests.engine.in_process.storage_config import server_args


def every_hook() -> list[Hook]:
    always = [*hooks.OWN_PAGES, *hooks.WEIGHTS, *hooks.USES]
    always += [*hooks.PREFILL_SERVER, *hooks.DECODE_SERVER]
    always += [*hooks.HITS, *hooks.ADAPTERS, *hooks.LATE_WEIGHTS, *hooks.WHOLE_GRAPHS]
    return [*always, *hooks.HIDDEN, *hooks.RECOMPUTE[1:], *GRAPH_HOOKS]


@pytest.fixture(autouse=True)
def unhooked() -> Iterator[None]:
    ours = every_hook()
    targets = [hook.target for hook in ours]
    before = {target: resolve_name(target) for target in targets}
    yield
    HookRegistry.reset()
    for target, function in before.items():
        path, _, name = target.rpartition(".")
        setattr(resolve_name(path), name, function)


def test_every_seam_is_there_and_each_hook_is_applied_once() -> None:
    wanted = every_hook()
    assert install(wanted) is None
    assert install(wanted) is None
    for target in {hook.target for hook in wanted}:
        assert len(hooks_on(resolve_name(target))) == 1


def test_a_missing_seam_is_named() -> None:
    for target in ("sglang.srt.no.Such.thing", RESET.target + "_of_another_version"):
        hook = Hook(target, lambda original, *args: original(*args))
        assert install([hook]) == f"SGLang has no place for the hooks on {target}"


def test_a_target_that_another_plugin_patched_first_is_hooked_all_the_same() -> None:
    calls: list[str] = []

    def hook_of(name: str) -> Callable[..., Any]:
        def hook(original: Callable[..., Any], *args: Any) -> Any:
            calls.append(name)
            return original(*args)

        return hook

    HookRegistry.register(RESET.target, hook_of("theirs"), HookType.AROUND)
    HookRegistry.apply_hooks()
    assert install([Hook(RESET.target, hook_of("ours"))]) is None
    # The real function, on something that is no controller.
    with pytest.raises((AttributeError, TypeError)):
        HybridCacheController.reset(SimpleNamespace())
    assert calls == ["ours", "theirs"]


@pytest.mark.parametrize("by_name", [False, True])
def test_the_marker_stops_attention_however_it_is_passed(by_name: bool) -> None:
    assert install(hooks.HIDDEN) is None
    attention = RadixAttention(4, 8, 1.0, num_kv_heads=2, layer_id=0)
    q, k, v = torch.randn(3, 32), torch.randn(3, 16), torch.randn(3, 16)
    batch = ProjectionBatch(None)
    with pytest.raises(ProjectionReached) as reached:
        if by_name:
            attention(q=q, k=k, v=v, forward_batch=batch)
        else:
            attention(q, k, v, batch)
    got_k, got_v = reached.value.args
    assert torch.equal(got_k, k.view(3, 2, 8))
    assert torch.equal(got_v, v.view(3, 2, 8))


class Broken:
    """Whatever is asked of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError(f"broken: {name}")


GO_ON = [hook for hook in every_hook() if hook.on_error is not OnError.RAISE]
WITHOUT_L3 = {SEND_PREFIX.target: (None, 0)}
"""Of the hooks that do not go on as without them: what they give, how often they ask SGLang."""


@pytest.fixture
def active(monkeypatch: MonkeyPatch) -> Any:
    """A process with a server, every part of which raises."""
    runtime = Runtime(None, StartOptions(None), LoadedWeights(None))
    hook_registry.guarded.cache_clear()  # each error is said once
    monkeypatch.setattr(runtime, "hit_gate", Broken())
    monkeypatch.setattr(runtime, "forwards", Broken())
    monkeypatch.setattr("hcache_backend.sglang.runtime._runtime", runtime)
    for module in (radix_cache, scheduler, storage_threads):
        monkeypatch.setattr(module, "gate_of", lambda cache: Broken())
    for module in (radix_cache, scheduler):
        monkeypatch.setattr(module, "our_l3", lambda cache: Broken())
    for name in ("begin_update", "end_update", "caches_were_flushed"):
        monkeypatch.setattr(runtime.weights, name, lambda: Broken().call)
    return runtime


class Calls:
    """SGLang's function behind a hook, which is called with things that raise.

    Attributes:
        given: The arguments of each call.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.given, self._error = list[tuple[Any, ...]](), error

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        assert kwargs == {}
        self.given.append(args)
        if self._error is not None:
            raise self._error
        return "SGLang's"


def broken_arguments(hook: Hook) -> list[Any]:
    return [Broken() for _ in list(signature(hook.function).parameters)[1:4]]


@pytest.mark.parametrize("hook", GO_ON, ids=lambda hook: hook.function.__qualname__)
def test_sglang_goes_on_if_a_hook_raises(
    hook: Hook, active: Any, caplog: LogCaptureFixture
) -> None:
    """Each hook of ours meets things that raise, before or after it has called SGLang."""
    original, arguments = Calls(), broken_arguments(hook)
    result = hook_registry.guarded(hook)(original, *arguments)
    wanted, times = WITHOUT_L3.get(hook.target, ("SGLang's", 1))
    assert (result, original.given) == (wanted, [tuple(arguments)] * times)
    ended = active.weights._reasons["not_restorable"]
    if hook.on_error is OnError.END_L3:
        assert hook.target in str(ended)
    else:
        assert ended is None
    assert caplog.records, "it went on without a word"


@pytest.mark.parametrize(
    "hook",
    [hook for hook in GO_ON if hook.target not in (SEND_PREFIX.target, scheduler.RECEIVED.target)],
    ids=lambda hook: hook.function.__qualname__,
)
def test_what_sglang_raises_is_raised_once(hook: Hook, active: Any) -> None:
    """No hook hides an error of SGLang, or asks it twice. (One does not ask here, one is below.)"""
    original = Calls(KeyError("SGLang's own"))
    with pytest.raises(KeyError, match="SGLang's own"):
        hook_registry.guarded(hook)(original, *broken_arguments(hook))
    assert len(original.given) == 1


def test_what_sglang_cannot_look_up_goes_without_l3(active: Any, caplog: LogCaptureFixture) -> None:
    """A streaming session's prefix is a virtual node: SGLang's look-up raises in every turn."""
    original = Calls(TypeError("'_VirtualNode' object cannot be interpreted as an integer"))
    before = metrics.PROBLEMS.family.labels("look_up")._value.get()
    for number in range(3):
        request = SimpleNamespace(rid=f"session-{number}", last_host_node=object())
        assert hook_registry.guarded(scheduler.RECEIVED)(original, Broken(), request) is None
    assert len(original.given) == 3
    assert metrics.PROBLEMS.family.labels("look_up")._value.get() == before + 3
    [said] = [line for line in caplog.messages if "cannot look up" in line]
    assert "All but the first turn of a streaming session" in said


def test_versions() -> None:
    for version in ("0.5.21", "0.5.21.post1", "0.5.23"):
        assert untested(version) is None
    for version, age in (
        ("0.5.20", "older"),
        ("0.5.24", "newer"),
        ("0.5.100", "newer"),
        ("1.0.0", "newer"),
        ("unknown", "of another kind"),
    ):
        assert f"SGLang {version} is {age} than the tested ones, 0.5.21 " in str(untested(version))


def runner(**arguments: Any) -> Any:
    """A ModelRunner as far as the bootstrap hook looks at it."""
    args = server_args(page_size=64, **arguments)
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]))
    model = torch.nn.Linear(2, 2)
    return SimpleNamespace(server_args=args, model=model, model_config=config, device="cpu")


@pytest.fixture(autouse=True)
def bootstrapped(monkeypatch: MonkeyPatch) -> None:
    """A server that is started for us, as far as the bootstrap hook goes without a model."""
    monkeypatch.setenv("HCACHE_ENABLE", "1")
    monkeypatch.setattr(attach, "resolved", lambda args: args)
    monkeypatch.setattr("hcache_backend.sglang.weights._stage_weights", lambda _: Weights(b"w"))
    monkeypatch.setattr(hybrid_pool_assembler, "register_stack_strategy", lambda strategy: None)


@pytest.mark.parametrize(
    ("option", "found", "reason"),
    [
        ("checked", ContractResult(9, ()), None),
        ("checked", ContractResult(9, ("Tree has no turn", "Pool.free: does not take 'x'")),
         "of 9 seams 2 are missing: Tree has no turn; Pool.free: does not take 'x'"),
        ("checked", OSError("gone"), "its sources could not be read: OSError('gone')"),
        ("tested", ContractResult(9, ()), "option 'sglang' is 'tested'"),
        ("tested", OSError("not to be asked"), "option 'sglang' is 'tested'"),
    ],
)  # fmt: skip
def test_a_version_that_nobody_tested_is_tried_if_all_seams_are_there(
    option: str,
    found: Any,
    reason: str | None,
    monkeypatch: MonkeyPatch,
    caplog: LogCaptureFixture,
) -> None:
    def check_installed() -> ContractResult:
        if isinstance(found, Exception):
            raise found
        return found

    reasons: list[str | None] = []
    before = hooks_on(resolve_name(ATTENTION.target))
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.5.99")
    monkeypatch.setattr(attach.contract, "check_installed", check_installed)
    monkeypatch.setenv("HCACHE_CONFIG", json.dumps({"sglang": option}))
    monkeypatch.setattr(
        "hcache_backend.start.build.OwnPagesStrategy",
        lambda runtime, plain, no_hidden: reasons.append(plain),
    )
    bootstrap(runner())
    said = "SGLang 0.5.99 is newer than the tested ones, 0.5.21 to 0.5.23"
    assert reasons == [reason and f"{said}, and {reason}"]
    assert (f"hcache: {said}; all 9 seams are there" in caplog.text) is (reason is None)
    assert (hooks_on(resolve_name(ATTENTION.target)) == before) is (reason is not None)


def test_without_hierarchical_cache_there_is_nothing_to_do(
    monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    bootstrap(runner(enable_hierarchical_cache=False))
    assert "configured, but inactive: add --enable-hierarchical-cache" in caplog.text
    assert current().options.config is None


@pytest.mark.parametrize(
    ("hooks_of", "arguments", "said"),
    [
        ("WEIGHTS", {}, "weight updates would go unnoticed"),
        ("ADAPTERS", {"enable_lora": True}, "pages of adapters would not be kept apart"),
        (
            "DECODE_SERVER",
            {"disaggregation_mode": "decode"},
            "K and V of other weights would go unnoticed",
        ),
    ],
)
def test_what_could_not_be_told_apart_means_no_l3_at_all(
    hooks_of: str, arguments: dict[str, Any], said: str, monkeypatch: MonkeyPatch
) -> None:
    gone = Hook(RESET.target + "_gone", lambda original, *given: original(*given))
    monkeypatch.setattr(hooks, hooks_of, [gone])
    bootstrap(runner(**arguments))
    weights = current().weights.present
    assert weights is not None and said in str(weights.suspended)
    current().weights.caches_were_flushed()
    assert current().weights.present == weights


@pytest.mark.parametrize(("full", "waits"), [(True, [3]), (False, [])])
def test_a_prefill_of_one_graph_waits_for_all_layers_of_a_load(
    full: bool, waits: list[int], active: Any
) -> None:
    """Otherwise it would read K and V that are not there: a replay calls no pool, whose waits are
    by layer. The wait comes before SGLang does anything for the replay."""
    done: list[Any] = []
    counter = SimpleNamespace(num_layers=4, wait_until=done.append)
    pool = SimpleNamespace(layer_transfer_counter=counter)
    graphs = SimpleNamespace(
        _is_full_backend=full, model_runner=SimpleNamespace(token_to_kv_pool=pool)
    )
    around = hook_registry.guarded(model_runner.REPLAY)
    assert around(lambda *given: done.append("replay") or given, graphs, 1) == (graphs, 1)
    pool.layer_transfer_counter = None  # no HiCache
    around(lambda *given: done.append("replay"), graphs, 1)
    assert done == [*waits, "replay", "replay"]


@pytest.mark.parametrize(
    ("device", "backend", "hooked"),
    [("cuda", "full", 1), ("cuda", "breakable", 0), ("cpu", "full", 0)],
)
def test_only_a_server_that_records_whole_prefills_has_that_wait(
    device: str, backend: str, hooked: int, monkeypatch: MonkeyPatch
) -> None:
    phases = SimpleNamespace(prefill=SimpleNamespace(backend=backend))
    monkeypatch.setattr(capabilities, "_graphs", lambda: phases)
    started = runner()
    started.device = device
    bootstrap(started)
    assert len(hooks_on(resolve_name(model_runner.REPLAY.target))) == hooked
    gone = Hook(RESET.target + "_gone", lambda original, *given: original(*given))
    monkeypatch.setattr(hooks, "WHOLE_GRAPHS", [gone])
    bootstrap(started)
    weights = current().weights.present
    assert weights is not None
    assert ("do not wait for loads" in str(weights.suspended)) is bool(hooked)


def test_an_sglang_without_a_place_for_pools_keeps_plain_pages(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delattr(hybrid_pool_assembler, "register_stack_strategy")
    bootstrap(runner())
    assert "this SGLang lacks a seam" in str(current().pages.reason)


def test_options_of_the_l3_win_over_the_environment(
    monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HCACHE_CONFIG", '{"mode": "kv", "quota_bytes": 5}')
    extra = hcache_config(tmp_path, quota_bytes=6)
    arguments = {"hicache_storage_backend_extra_config": json.dumps(extra)}
    bootstrap(runner(hicache_storage_backend="dynamic", **arguments))
    config, store = current().options.config, current().store
    assert config is not None
    assert store is not None
    store.close()
    assert (config.dirs, config.mode, config.quota_bytes) == ((tmp_path,), "kv", 6)


@pytest.mark.parametrize(
    ("own", "others", "logged"),
    [(None, ["disk"], []), ("option", [None], ["option"]), ("option", ["disk"], ["option"])],
    ids=["another rank", "this rank", "both"],
)
def test_a_wrong_option_stops_every_rank_and_is_told_once(
    own: str | None,
    others: list[str | None],
    logged: list[str],
    monkeypatch: MonkeyPatch,
    caplog: LogCaptureFixture,
) -> None:
    def work() -> None:
        if own is not None:
            raise ConfigError(own)

    signals: list[object] = []
    lines_by_meeting: list[int] = []

    def from_all_ranks(said: object) -> list[object]:
        lines_by_meeting.append(len(caplog.records))
        here = (socket.gethostname(), os.getppid())
        return [said, *((rank, here, what) for rank, what in enumerate(others, start=1))]

    monkeypatch.setattr(groups, "from_all_ranks", from_all_ranks)
    monkeypatch.setattr(groups.os, "kill", lambda *sent: signals.append(sent))
    with pytest.raises(SystemExit):
        groups.or_stop(work)
    assert [record.getMessage() for record in caplog.records] == logged
    assert lines_by_meeting == [0, len(logged)], "no rank ends all before the line is in the log"
    assert signals == [(os.getppid(), signal.SIGQUIT)]


@pytest.mark.parametrize("host", [socket.gethostname(), "another node"])
def test_each_launcher_gets_one_signal(host: str, monkeypatch: MonkeyPatch) -> None:
    """A second one while SGLang's handler logs the first adds a traceback."""
    first, happened = (0, (host, os.getppid()), "disk"), list[str]()
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(groups.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(groups, "from_all_ranks", lambda said: [first, said])
    monkeypatch.setattr(groups.os, "kill", lambda *sent: happened.append("signal"))
    monkeypatch.setattr(groups.time, "sleep", lambda seconds: happened.append("waits"))
    with pytest.raises(SystemExit):
        groups.or_stop(lambda: None)
    assert happened == ["waits" if host == socket.gethostname() else "signal"]


def test_an_l3_behind_another_is_warned_of(
    monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    monkeypatch.setenv("HCACHE_CONFIG", '{"shared": {"backend": "file"}}')
    bootstrap(runner(hicache_storage_backend="mooncake"))
    warning = "--hicache-storage-backend is mooncake"
    assert warning in caplog.text


@pytest.mark.parametrize("enabled", [None, "0"])
def test_options_without_the_variable_that_enables_them_are_warned_of(
    enabled: str | None, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    """Unless it says that somebody knows. Such a server is not ours: it gets no hooks."""
    monkeypatch.setenv("HCACHE_CONFIG", '{"mode": "hidden"}')
    monkeypatch.delenv("HCACHE_ENABLE")
    if enabled is not None:
        monkeypatch.setenv("HCACHE_ENABLE", enabled)
    before = [hooks_on(resolve_name(hook.target)) for hook in every_hook()]
    bootstrap(plain := runner())
    assert (current().runner, current().options.config, current().weights.present) == (
        plain,
        None,
        None,
    )
    assert [hooks_on(resolve_name(hook.target)) for hook in every_hook()] == before
    warning = "hcache: HCACHE_CONFIG is ignored; set HCACHE_ENABLE=1, too"
    assert caplog.messages.count(warning) == (enabled is None)


@pytest.mark.parametrize(
    ("version", "enabled", "preemption_off", "refused"),
    [
        ("0.5.21", True, False, True),
        ("0.5.21.post1", True, False, True),
        ("0.5.21", True, True, False),
        ("0.5.21", False, False, False),
        ("0.5.22", True, False, False),
    ],
)
def test_preemption_is_refused_where_sglang_forgets_requests(
    version: str, enabled: bool, preemption_off: bool, refused: bool, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "sglang_version", lambda: version)
    args = SimpleNamespace(
        kv_cache_dtype="auto",
        enable_priority_scheduling=enabled,
        disable_priority_preemption=preemption_off,
    )
    said = r"--enable-priority-scheduling .* 0\.5\.22 or later"
    with pytest.raises(ConfigError, match=said) if refused else nullcontext():
        attach.check_arguments(args)


@pytest.mark.parametrize(
    ("version", "kv", "model", "said"),
    [
        ("0.5.21", "auto", "Qwen4ExpForConditionalGeneration", "keeps no index of QSA"),
        ("0.5.22", "auto", "Qwen4ExpForConditionalGeneration", None),
        ("0.5.21", "auto", "Qwen3NextForCausalLM", None),
        ("0.5.21", "nvfp4", "LlamaForCausalLM", "nvfp4: SGLang 0.5.21 keeps no scales"),
        ("0.5.22.post1", "fp4_mx_block16", "LlamaForCausalLM", "SGLang 0.5.22.post1 keeps no sc"),
        ("0.5.23", "nvfp4", "LlamaForCausalLM", None),  # SGLang says so
    ],
)
def test_what_sglang_leaves_out_of_host_memory_is_refused(
    version: str, kv: str, model: str, said: str | None, monkeypatch: MonkeyPatch
) -> None:
    for module in (compat, attach):
        monkeypatch.setattr(module, "sglang_version", lambda: version)
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        attach.check_arguments(server_args(kv_cache_dtype=kv))
        attach.check_model(model)


def test_pools_that_hold_parts_of_pages_get_no_l3() -> None:
    """SGLang asks it at its start, and not at an attach."""
    with pytest.raises(
        ConfigError, match=r"--enable-kv-cache-sharding: .* start the server without"
    ):
        attach.check_arguments(SimpleNamespace(enable_kv_cache_sharding=True))
