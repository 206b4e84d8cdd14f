"""Starts on machines, and of models, that servers of tests do not have: each refusal says why."""

import gc
import weakref
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import LogCaptureFixture, MonkeyPatch

from bench.harness.tracing import hcache_trace
from hcache_backend.capture.hooks import HiddenCapture, _InputHook
from hcache_backend.checks import round_trip, self_check
from hcache_backend.checks.self_check import Finding, LayerSpecs
from hcache_backend.config import ConfigError, HCacheConfig
from hcache_backend.host.index_keys import IndexKeys
from hcache_backend.plan.profile import Rate, preset_profile
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.ranks import Refused, all_or_none
from hcache_backend.sglang import compat, hook_registry, hooks, passes
from hcache_backend.start import attach, build, capabilities, machine, page_plan
from hcache_backend.start.capabilities import EAGER, refusal
from tests.engine.in_process.start.servers import server
from tests.engine.in_process.storage_config import server_args, storage_config
from tests.unit.partition.pipelines import public_model


def failing(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


NONE_LEFT = failing(torch.OutOfMemoryError("none left"))

# ---- CUDA graphs ----


def test_the_largest_graph_of_decode_and_prefill_counts(monkeypatch: MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    phases = SimpleNamespace(
        decode=SimpleNamespace(backend="full", max_bs=None, bs=[1, 8, 256]),
        prefill=SimpleNamespace(backend="breakable", max_bs=4096, bs=None),
    )
    execution = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=phases))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: execution)
    assert build._largest_recorded_tokens(2) == 4096
    assert capabilities._graphs() is phases
    phases.prefill.backend = "disabled"
    assert build._largest_recorded_tokens(2) == 512


@pytest.mark.parametrize("answer", [True, False])
def test_sglang_says_whether_graphs_are_recorded(answer: bool, monkeypatch: MonkeyPatch) -> None:
    from sglang.srt.model_executor import cuda_graph_config

    monkeypatch.setattr(cuda_graph_config, "cuda_graph_fully_disabled", lambda: answer)
    assert capabilities.graphs_are_off() is answer


@pytest.fixture
def on_gpu(runtime: Any, monkeypatch: MonkeyPatch) -> Any:
    """A process that records graphs of a model on a GPU."""
    monkeypatch.setattr(build, "graphs_are_off", lambda: False)
    runtime.options.config = HCacheConfig()
    runtime.runner = SimpleNamespace(device="cuda", is_draft_worker=False, token_to_kv_pool=None)
    return runtime


@pytest.mark.parametrize(
    ("refusal", "reason", "logged"),
    [
        (lambda *_: "plain pages", "the log says why", False),
        (lambda *_: None, "the weights are loaded after the graphs", False),
        (failing(Refused("no room")), "no room", False),
        (failing(ValueError("a test's")), "the log says why", True),
    ],
)
def test_why_graphs_were_recorded_without_copies_is_told(
    refusal: Any, reason: str, logged: bool, on_gpu: Any, monkeypatch: MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(build, "refusal", refusal)
    on_gpu.weights.present = None
    build.record_copies(on_gpu, on_gpu.runner)
    with pytest.raises(Refused, match=f"without our copies: {reason}"):
        build.check_recording(on_gpu, torch.zeros(1, 8))
    assert ("recorded without copies of hidden states" in caplog.text) is logged


def test_graphs_that_copy_other_rows_are_refused(on_gpu: Any) -> None:
    staging = SimpleNamespace(width=8, dtype=torch.float32)
    on_gpu.forwards.capture = capture = SimpleNamespace(staging=staging)
    assert build.check_recording(on_gpu, torch.zeros(1, 8)) is capture
    with pytest.raises(Refused, match=r"copy 8 values of torch\.float32"):
        build.check_recording(on_gpu, torch.zeros(1, 8, dtype=torch.bfloat16))


# ---- capture ----


@pytest.mark.parametrize(
    ("changes", "said", "missing"),
    [
        ({"out_cache_loc": torch.arange(0)}, "", []),
        ({"positions": None}, "without token ids or positions", [2]),
        ({"positions": torch.zeros(3, 2)}, "positions of several dimensions", [2]),
        ({"positions": torch.arange(3)}, "one token id and position for each slot", [2]),
        ({}, "2 tokens in one step", []),
    ],
)
def test_steps_that_cannot_be_captured_are_told(
    changes: Any, said: str, missing: list[int], caplog: LogCaptureFixture
) -> None:
    lost = list[int]()
    ledger = SimpleNamespace(broken=None, note_not_captured=lambda slots: lost.append(len(slots)))
    capture: Any = SimpleNamespace(ledger=ledger, skip=lambda: None, begin=lambda *_: None)
    given = {name: torch.arange(2) for name in ("input_ids", "positions", "out_cache_loc")}
    assert HiddenCapture([])._begin_step(capture, SimpleNamespace(**given | changes)) is None
    assert said in caplog.text and lost == missing
    assert bool(caplog.text) is bool(said)


@pytest.mark.parametrize(
    ("replayed", "said"), [(True, "a CUDA graph of 3 tokens"), (False, "showed each layer [1, 0]")]
)
def test_steps_that_lost_rows_are_told(
    replayed: bool, said: str, caplog: LogCaptureFixture
) -> None:
    capture: Any = SimpleNamespace(end=lambda step, *, replayed: False)
    step: Any = SimpleNamespace(tokens=3, layers_seen=[1, 0])
    HiddenCapture([])._end(capture, step, replayed)
    assert said in caplog.text


def test_an_error_in_a_layer_is_told_and_the_layer_runs_on(caplog: LogCaptureFixture) -> None:
    hooks = HiddenCapture([])
    hooks.staging = SimpleNamespace(record=failing(ValueError("a test's")))
    hooks._take(0, torch.zeros(1))
    assert "not captured: ValueError: a test's" in caplog.text


def test_a_hook_leaves_a_module_as_it_was() -> None:
    module, seen = torch.nn.Identity(), []
    own = module.forward
    module.forward = own  # of the module's own, as another package leaves it
    hook = _InputHook(module, seen.append)
    module(1)
    hook.remove()
    assert seen == [1] and module.forward is own
    hook = _InputHook(module, seen.append)
    outer = module.forward = torch.nn.Linear(1, 1).forward
    hook.remove()
    assert module.forward is outer


# ---- projections ----


class Unproven(LayerSpecs):
    """Two layers, of which the second one has no spec."""

    def __init__(self) -> None:
        hidden = SimpleNamespace(is_cuda=True)
        layers = [SimpleNamespace(module=name) for name in ("one", "two")]
        self._observed = SimpleNamespace(hidden=[hidden], layers=layers)
        self._projector = SimpleNamespace(pool=SimpleNamespace(dtype=torch.bfloat16))
        spec = SimpleNamespace(fused=True, projection=lambda: "a kind")
        self._findings = [Finding(spec, "a spec", None), Finding(None, "none", None)]
        self._group, self._report = None, lambda: None
        self.lost: list[str] = []
        self._weights = SimpleNamespace(begin_quarantine=self.lost.append)


def test_modules_of_several_ranks_run_beside_no_forward_pass(monkeypatch: MonkeyPatch) -> None:
    called, ranks = list[Any](), SimpleNamespace(get_world_size=lambda group: 1)
    monkeypatch.setattr(self_check, "smallest", lambda group, *fine: fine)
    monkeypatch.setattr(self_check, "refuse_shared_workspaces", called.extend)
    monkeypatch.setattr(self_check, "dist", ranks)
    specs = Unproven()
    specs.use_agreed()
    assert called == ["two"]
    ranks.get_world_size = lambda group: 2
    with pytest.raises(Refused, match="layers 1 have no spec, and on a GPU"):
        specs.use_agreed()
    specs._stale, specs.find = True, lambda: None
    specs._renew()
    assert "after a weight update: layers 1" in specs.lost[0]


def test_on_a_gpu_each_kind_is_measured_once(
    monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(self_check, "kind_of", lambda projection: projection)
    monkeypatch.setattr(self_check, "measure_choice", lambda *given: measured.append(given))
    specs = Unproven()
    specs._findings *= 2
    specs.measure()
    assert measured == [("a kind", torch.bfloat16)]
    monkeypatch.setattr(self_check, "measure_choice", NONE_LEFT)
    specs.measure()
    assert "the ways to project could not be timed: none left" in caplog.text


def test_a_search_or_a_kernel_that_breaks_leaves_the_module(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "find_spec", failing(KeyError("a test's")))
    specs = Unproven()
    found = specs._find(None, SimpleNamespace(of_module="own", samples=[]))
    assert (found.spec, found.of_module) == (
        None,
        "own",
    ) and "the search broke: KeyError" in found.detail
    monkeypatch.setattr(self_check, "ways_in_use", lambda *_: [None])
    specs._observed = SimpleNamespace(write_exactness=failing(RuntimeError("no compiler")))
    written = specs._check_writing(SimpleNamespace(index=0), specs._findings[0])
    assert written.spec is None and "its kernel failed: RuntimeError: no compiler" in written.detail


# ---- memory, pools and models ----


def test_no_room_for_staging_is_a_refusal(monkeypatch: MonkeyPatch) -> None:
    staging = type("Staging", (), {"bytes_for": lambda *_: 1, "__init__": NONE_LEFT})
    monkeypatch.setattr(page_plan, "Staging", staging)
    monkeypatch.setattr(page_plan, "resolved", lambda args: args)
    args = SimpleNamespace(chunked_prefill_size=4, speculative_algorithm=None)
    runner = SimpleNamespace(server_args=args, max_running_requests=1, max_total_num_tokens=8)
    with pytest.raises(Refused, match="no device memory for staging: none left"):
        page_plan.take_staging(runner, 2, 8, torch.float32, "cpu")


def test_no_room_for_restores_is_a_refusal(monkeypatch: MonkeyPatch) -> None:
    layout: Any = SimpleNamespace(
        codec=None, page=None, ring_bytes=1, kvcache=SimpleNamespace(device="cpu")
    )
    memory = SimpleNamespace(hicache_size=1, hicache_ratio=2.0)
    monkeypatch.setattr(page_plan, "get_memory", lambda: memory)
    monkeypatch.setattr(page_plan, "host_memory_budget_bytes", lambda: 1)
    monkeypatch.setattr(page_plan, "plan_host_pages", lambda *_, with_shadows: None)
    monkeypatch.setattr(page_plan.torch, "empty", NONE_LEFT)
    with pytest.raises(Refused, match="no device memory for restores: none left"):
        page_plan.find_room(layout)


def test_projections_on_a_gpu_have_memory_of_their_own(monkeypatch: MonkeyPatch) -> None:
    """Rows and products of the longest projection, of the widest layer; encoded rows only."""
    taken: list[Any] = []

    def empty(shape: Any, **kinds: Any) -> Any:
        taken.append((shape, kinds))
        return shape

    monkeypatch.setattr(page_plan.torch, "empty", empty)
    projector: Any = SimpleNamespace(product_columns=12)

    def plan(device: str, *, is_view: bool = False, page_size: int = 4) -> Any:
        codec: Any = SimpleNamespace(dtype=torch.float16, hidden_size=8, is_view=is_view)
        layout: Any = SimpleNamespace(
            methods=SimpleNamespace(chunk_tokens=10),
            page=SimpleNamespace(page_size=page_size),
            kvcache=SimpleNamespace(device=device),
        )
        return page_plan.projection_memory(layout, codec, projector)

    assert plan("cpu") == (None, None) and not taken
    assert plan("cuda:1") == ((10, 8), 120)
    assert plan("cuda:1", is_view=True, page_size=16) == (None, 192)
    assert {(k["dtype"], k["device"].type) for _, k in taken} == {(torch.float16, "cuda")}
    monkeypatch.setattr(page_plan.torch, "empty", NONE_LEFT)
    with pytest.raises(Refused, match="no device memory for projections: none left"):
        plan("cuda:1")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([("broken", 1), (None, 1)], "broken"),
        ([(None, 1), (None, 2)], "hidden states differ between tensor-parallel ranks"),
        ([(None, 1), (None, 1)], None),
    ],
)
def test_ranks_whose_hidden_states_differ_share_none(
    monkeypatch: MonkeyPatch, said: Any, reason: str | None
) -> None:
    ranks: Any = SimpleNamespace(
        rank_in_group=0, world_size=2, ranks=[0, 1], all_gather_object=lambda own: said
    )
    exchange = SimpleNamespace(check=lambda device: None)
    monkeypatch.setattr(page_plan, "Exchange", SimpleNamespace(between=lambda *_: exchange))
    monkeypatch.setattr(page_plan, "attention_ranks", lambda: ranks)
    with pytest.raises(Refused, match=reason) if reason else nullcontext():
        assert page_plan.make_exchange("hidden states", [torch.zeros(2, 8)], 16) is exchange


@pytest.mark.parametrize(
    ("arguments", "page", "exchanges"),
    [
        ({"tp_size": 2}, 16, True),
        ({"tp_size": 2}, 12, False),  # eight does not divide it: whole pages
        ({"tp_size": 4, "enable_dp_attention": True, "dp_size": 2}, 16, False),
        ({"tp_size": 4, "attn_dp_size": 2}, 16, False),
    ],
)
def test_latents_that_nobody_exchanges_are_restored_while_l3_is_read(
    arguments: Any, page: int, exchanges: bool, monkeypatch: MonkeyPatch
) -> None:
    asked = server(**arguments)
    pool = asked.kvcache
    vars(pool).update(page_size=page, layer_num=1, kv_lora_rank=8)
    pool.kv_buffer = [torch.zeros(64, 1, 8)]
    ranks: Any = SimpleNamespace(rank_in_group=0, world_size=2, ranks=[0, 1])
    ranks.all_gather_object = lambda own: [own, own]
    exchange = SimpleNamespace(check=lambda device: None)
    monkeypatch.setattr(page_plan, "Exchange", SimpleNamespace(between=lambda *_: exchange))
    monkeypatch.setattr(page_plan, "attention_ranks", lambda: ranks)
    monkeypatch.setattr(build, "install", lambda hooks: None)
    start: Any = SimpleNamespace(_kvcache=pool, server=asked)
    start.step, start._write_check_tokens = (
        lambda work, *given: work(*given),
        lambda: torch.arange(page),
    )
    found = build.Start._latent_exchange(start, ranks.world_size)
    assert (found is exchange, found is None) == (exchanges, not exchanges)
    reason = refusal(EAGER, replace(start.server, exchanges=found is not None))
    assert (reason is None) is not exchanges


@pytest.mark.parametrize(
    ("tokens", "reason"), [(16, "too small to try copies"), (512, "cannot be copied: RuntimeError")]
)
def test_a_pool_that_is_too_small_or_cannot_be_copied_is_refused(tokens: int, reason: str) -> None:
    layout: Any = SimpleNamespace(
        page_size=16, page_bytes=64, stride=64, divide=lambda memory: None
    )
    kv: Any = SimpleNamespace(layers=(0,), codec="none", by_header=False, kept=lambda slots: slots)
    kv.planes = lambda layer: (torch.zeros(tokens, 1, 8),) * 2
    kv.keys = IndexKeys({}, 16, 1)
    kv.save = failing(RuntimeError("no"))
    with pytest.raises(Refused, match=reason):
        round_trip.check_copies(layout, kv)


def test_models_of_unusual_layers_are_refused() -> None:
    with pytest.raises(Refused, match=r"are numbered \[\]"):
        passes.attention_modules(torch.nn.Linear(2, 2), 1)
    two = torch.arange(2)
    passed = self_check.ForwardPass(None, two, two, two)
    seen: Any = SimpleNamespace(name="layer", calls=[], projection=None, hidden=None)
    with pytest.raises(Refused, match="called 0 times in one forward pass, and no projection"):
        self_check._describe(0, seen, passed, learn_call=True)
    seen.calls, seen.projection = [((), {})], "p"
    with pytest.raises(Refused, match="received no tensor for 2 tokens"):
        self_check._describe(0, seen, passed, learn_call=True)


# ---- the self-check's forward passes ----


@pytest.fixture
def stages(monkeypatch: MonkeyPatch) -> Any:
    """Runs ``run_pass(runner, batch)``, which a test sets, in place of a forward pass."""
    found = SimpleNamespace(run_pass=None)
    monkeypatch.setattr(passes, "_Stages", lambda *_: nullcontext(found))
    for name in ("prefill_batch", "forward_batch", "prepare_decode", "_empty_pools"):
        monkeypatch.setattr(passes, name, lambda *_: "batch")
    return found


RUNNER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=64))


def test_no_rank_takes_the_decode_step_when_another_failed_in_the_prefill(
    stages: Any, monkeypatch: MonkeyPatch
) -> None:
    """Its collectives would wait for that rank for ever."""
    seen = []

    def run(runner: object, batch: object) -> torch.Tensor:
        seen.append(batch)
        return torch.arange(3)

    stages.run_pass = run
    monkeypatch.setattr(passes, "smallest", lambda group, fine: [False])
    with pytest.raises(Refused, match="another tensor-parallel rank"):
        passes.prefill_and_decode(RUNNER, 4, "ranks", graphs=False)
    assert seen == ["batch"]


def test_a_forward_pass_that_failed_leaves_none_of_its_tensors(stages: Any) -> None:
    """SGLang may have stopped the collector of reference cycles by then."""
    left: list[weakref.ref[torch.Tensor]] = []

    def run(runner: object, batch: object) -> torch.Tensor:
        activations = torch.zeros(3)
        left.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("a test's")

    stages.run_pass = run
    gc.disable()
    try:
        with suppress(torch.OutOfMemoryError):
            passes.prefill_and_decode(RUNNER, 4, None, graphs=False)
        assert [tensor() for tensor in left] == [None]
    finally:
        gc.enable()


def test_a_stage_behind_one_that_failed_is_refused() -> None:
    with pytest.raises(Refused, match="the pipeline stage before this one failed"):
        passes._Stages.run_pass(SimpleNamespace(_received={}), None, None)


def test_a_check_that_breaks_is_a_refusal_of_all(caplog: LogCaptureFixture) -> None:
    with pytest.raises(Refused, match="the self-check raised an error: KeyError: 'x'"):
        all_or_none((), failing(KeyError("x")))
    assert "the self-check raised an error" in caplog.text


# ---- what is known of the machine ----


def test_a_profile_that_is_unusable_is_measured_anew(
    runtime: Any, tmp_path: Path, monkeypatch: MonkeyPatch, caplog: Any
) -> None:
    shape: Any = SimpleNamespace(model_dump_json=lambda **_: "{}")
    kvcache: Any = SimpleNamespace(device="cpu")
    runtime.runner = SimpleNamespace(dtype=torch.float32)
    monkeypatch.setattr(machine, "_measure", lambda *_: "a profile")
    config = HCacheConfig(dirs=(tmp_path,))
    find = partial(machine.find_profile, runtime, config, kvcache, shape)
    assert find() == "a profile"
    monkeypatch.setattr(machine, "_measure", failing(RuntimeError("no room")))
    assert find() == "a profile"  # kept
    file, runtime.options.kept_profile = runtime.options.kept_profile[0], None
    (tmp_path / file).write_text("{")
    monkeypatch.setattr(machine, "load_profile", failing(ConfigError("is no profile")))
    assert find() is None
    assert "is no profile" in caplog.text and "was not measured: no room" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
def test_measuring_leaves_no_memory_behind(
    fails: bool, runtime: Any, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """One rank measures, some starts do not: all must find as much memory."""
    weights = list[weakref.ref[torch.Tensor]]()

    def measure(*_: Any) -> str:
        made = torch.zeros(3)
        weights.append(weakref.ref(made))
        if fails:
            raise torch.OutOfMemoryError("no room")
        return "a profile"

    released = list[Any]()
    monkeypatch.setattr(machine, "_measure", measure)
    monkeypatch.setattr(machine.logger, "warning", lambda *_: None)  # pytest's keeps the error
    monkeypatch.setattr(
        machine, "release_memory", lambda device: released.append((device, weights[0]()))
    )
    runtime.runner = SimpleNamespace(dtype=torch.float32)
    shape: Any = SimpleNamespace(model_dump_json=lambda **_: "{}")
    kvcache: Any = SimpleNamespace(device="cpu")
    machine.find_profile(runtime, HCacheConfig(dirs=(tmp_path,)), kvcache, shape)
    assert released == [(torch.device("cpu"), None)]


@pytest.mark.parametrize(
    ("rank", "error", "found"),
    [(None, None, "rate"), (0, None, "rate"), (3, None, None), (0, OSError("an error"), None)],
)
def test_one_rank_measures_l3_if_it_can(
    rank: int | None, error: Any, found: Any, monkeypatch: MonkeyPatch, caplog: Any
) -> None:
    """All data-parallel groups measure at once: each would find its part of the disk's speed."""
    monkeypatch.setattr(machine.dist, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(machine.dist, "get_rank", lambda: rank)
    read = failing(error) if error else lambda *_: ("rate", True)
    monkeypatch.setattr(machine, "read_rate", read)
    monkeypatch.setattr(machine, "measure", lambda bench, l3, *_, **__: l3)
    args: Any = HCacheConfig(), None, torch.device("cpu"), torch.float32
    assert machine._measure(*args) == found
    assert ("L3 was not measured: an error" in caplog.text) is bool(error)


@pytest.mark.parametrize("l3", [None, Rate(per_second=1e9)])
def test_a_profile_without_l3_is_not_kept(
    l3: Rate | None, runtime: Any, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Later starts would not measure it either."""
    monkeypatch.setattr(attach, "write_report", lambda *_: None)
    monkeypatch.setattr(type(runtime), "report", lambda _: SimpleNamespace(model_copy=dict))
    runtime.options.kept_profile = (
        "profile.json",
        preset_profile("h100").model_copy(update={"l3": l3}),
    )
    joined: Any = SimpleNamespace(runtime=runtime, config=HCacheConfig(dirs=(tmp_path,)))
    attach.leave_report(joined, storage_config(tmp_path))
    assert (tmp_path / "profile.json").exists() is (l3 is not None)


@pytest.mark.parametrize("missing", [None, "a hook is missing"])
def test_which_servers_judge_hits(
    monkeypatch: MonkeyPatch, caplog: LogCaptureFixture, missing: str | None
) -> None:
    monkeypatch.setattr(machine.hooks, "install", lambda hooks: missing)
    asked = server()
    runtime: Any = SimpleNamespace(runner=asked.runner)
    assert machine.may_judge(runtime, asked.config) is (missing is None)
    said = "every L3 hit is read, even if L3 is slower than computing: a hook is missing"
    assert (said in caplog.text) is (missing is not None)


def test_a_measured_partition_knows_the_machine(runtime: Any, monkeypatch: MonkeyPatch) -> None:
    profile, shape = preset_profile("h100", 1), public_model("gpt2")
    runtime.pages.layer_methods = Restore(profile, shape, Partition(0, 12, 0))
    runtime.runner = SimpleNamespace(server_args=server_args(tp_size=2))
    monkeypatch.setattr(machine, "resolved", lambda args: args)
    known = machine._machine(runtime, HCacheConfig())
    assert known == replace(runtime.pages.layer_methods, ranks=2)


# ---- seams that are missing ----


@pytest.fixture
def a_hook_is_missing(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(hook_registry, "install", lambda hooks: "a hook is missing")
    monkeypatch.setattr(hooks, "install", lambda hooks: "a hook is missing")


def test_a_trace_that_cannot_be_made_stops_the_server(
    a_hook_is_missing: None, monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    runner = SimpleNamespace(is_draft_worker=False)
    assert hcache_trace.after_load_model("loaded", runner) == "loaded"  # without the variable
    monkeypatch.setenv(hcache_trace.VARIABLE, str(tmp_path / "none" / "trace"))
    with pytest.raises(OSError, match="No such file"):
        hcache_trace.after_load_model(None, runner)
    monkeypatch.setenv(hcache_trace.VARIABLE, str(tmp_path / "trace"))
    with pytest.raises(RuntimeError, match="is set, but a hook is missing"):
        hcache_trace.after_load_model(None, runner)


def test_a_server_whose_weight_updates_go_unnoticed_cannot_be_joined(
    runtime: Any, a_hook_is_missing: None, monkeypatch: MonkeyPatch
) -> None:
    runtime.runner = SimpleNamespace(server_args=SimpleNamespace())
    monkeypatch.setattr(attach, "resolved", lambda args: args)
    monkeypatch.setattr(attach, "serves_adapters", lambda args: False)
    with pytest.raises(ConfigError, match="a hook is missing; weight updates could not be noticed"):
        attach._check_late_start(runtime)


def test_unnoticed_uses_are_said(a_hook_is_missing: None, caplog: LogCaptureFixture) -> None:
    hooks.notice_uses()
    assert "eviction from L3 does not see uses on the GPU or in host memory" in caplog.text


def test_unreadable_weights_refuse_an_attach(runtime: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "from_all_ranks", lambda said: [said])
    monkeypatch.setattr(runtime.weights, "present", None)
    gone = failing(RuntimeError("weights are gone"))
    monkeypatch.setattr(runtime.weights, "read_model", gone)
    joined: Any = SimpleNamespace(runtime=runtime)
    config: Any = SimpleNamespace(tp_rank=0, pp_rank=0, pp_size=1)
    with pytest.raises(ConfigError, match="weights are gone"):
        attach._agree(config, joined, None)


def test_a_version_that_nobody_knows(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", failing(compat.PackageNotFoundError("sglang")))
    assert compat.sglang_version() == "unknown"
