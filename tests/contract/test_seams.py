"""Every place where we meet SGLang is there, as we use it, in every supported version; and what is
not there is found.

SGLang's sources are read, not imported, so that all versions can be asked in one run.
"""

import ast
import json
import shutil
from pathlib import Path

import pytest

from hcache_backend.contract.check import Contract, ContractResult
from hcache_backend.contract.source import Definition, Source
from hcache_backend.sglang import arguments, model_runner, radix_cache
from hcache_backend.sglang.compat import SUPPORTED
from tests.contract import seams
from tests.contract.needs import ENGINE, SEAMS, STAND_INS, needs_of, subclasses_of, uses_of
from tests.contract.versions import source

HINT = "either a mistake, or tests/contract/seams.py wants a word about it"
USES = uses_of(ENGINE)


@pytest.fixture(scope="module", params=SUPPORTED)
def sglang(request: pytest.FixtureRequest) -> Source:
    return source(request.param)


@pytest.fixture(scope="module")
def newest() -> Source:
    return source(SUPPORTED[-1])


def found(sglang: Source, dotted: str) -> Definition:
    definition = sglang.find(dotted)
    assert definition is not None, f"there is no {dotted}"
    return definition


def test_the_package_says_all_that_it_needs() -> None:
    """Otherwise: python -m tests.contract."""
    assert json.loads(SEAMS.read_text()) == json.loads(json.dumps(needs_of(ENGINE)))


def test_every_seam_is_there(sglang: Source) -> None:
    seams, problems = Contract(sglang).check()
    assert not problems, HINT
    assert seams > 400


def test_the_stand_ins_of_tests_meet_what_is_there(sglang: Source) -> None:
    needs = needs_of(STAND_INS) | {"attributes": {}}  # their names are other things
    assert not Contract(sglang, needs).check().problems


CONTROLLER = "srt/mem_cache/hybrid_cache/hybrid_cache_controller.py"
TREE = "srt/mem_cache/unified_radix_cache.py"


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        # of which our hook hears no more
        (TREE, "def _drain_storage_control_queues_impl(", "def _drain(", "there is no sglang.srt"),
        # that our override would not take
        (
            CONTROLLER,
            "def _page_transfer(self, ",
            "def _page_transfer(self, pages, ",
            "OwnPagesController._page_transfer: argument 0 is 'pages' there",
        ),
        (CONTROLLER, "-> PrefetchOperation:", "-> int:", "returns int, and not PrefetchOperation"),
        # that hooks read from a request
        (
            "srt/managers/schedule_batch.py",
            "last_host_node",
            "last_node_there",
            ".last_host_node is not there",
        ),
    ],
    ids=["a method renamed", "an argument added", "another type returned", "an attribute renamed"],
)
def test_what_another_version_has_not_is_named(
    file: str, before: str, after: str, said: str, newest: Source, tmp_path: Path
) -> None:
    problems = changed(newest, tmp_path, file, before, after).problems
    assert any(said in problem for problem in problems), problems
    assert len(problems) < 12, "the fault is named, not everything"


def changed(newest: Source, folder: Path, file: str, before: str, after: str) -> ContractResult:
    """The contract with a copy of the newest version in which a file differs."""
    shutil.copytree(newest.root / "sglang", folder / "sglang", copy_function=linked)
    path = folder / "sglang" / file
    text = path.read_text()
    assert before in text
    path.unlink()
    path.write_text(text.replace(before, after))
    return Contract(Source(folder)).check()


def linked(original: str, copy: str) -> None:
    Path(copy).hardlink_to(original) if original.endswith(".py") else None


def test_our_subclasses_override_what_is_written_down_and_nothing_else(sglang: Source) -> None:
    for ours in subclasses_of(USES).values():
        base = found(sglang, ours.base)
        if isinstance(base.node, ast.ClassDef):
            overridden = {name for name in ours.methods if sglang.method(base, name)}
            written_down = seams.OVERRIDDEN.get(ours.name, set())
            assert overridden - {"__init__"} == written_down, f"{ours.name}: {HINT}"
            assert seams.CALLED_BY_SGLANG.get(ours.name, set()) <= set(ours.methods)


def test_methods_that_no_base_class_has_are_called(sglang: Source) -> None:
    """By duck typing, on a host pool or a storage backend."""
    folders = [sglang.root / "sglang" / "srt" / name for name in ("mem_cache", "managers")]
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    for name in set().union(*seams.CALLED_BY_SGLANG.values()):
        assert any(f".{name}(" in text for text in texts), name


def test_what_we_ask_for_in_case_it_is_there_is_there_in_some_version() -> None:
    """A misspelt name in a `getattr` would never be missed."""
    versions = [Contract(source(version)) for version in SUPPORTED]
    known = {
        name: {found for one in versions for cls in classes for found in one.attributes_of(cls)}
        for name, classes in seams.OBJECTS.items()
    }
    unknown = [
        use
        for file in USES
        for use in file.optional_attributes()
        if (use.owner, use.name) not in seams.OURS
        and use.name not in known.get(use.owner, {use.name})
    ]
    assert not unknown


def test_requests_say_what_their_token_ids_do_not(sglang: Source) -> None:
    """Without one of these no front of a hit would be recomputed."""
    request = Contract(sglang).attributes_of("sglang.srt.managers.schedule_batch.Req")
    assert set(arguments.NOT_IN_TOKEN_IDS) <= request


def test_the_hooks_on_weight_updates_have_their_places(sglang: Source) -> None:
    for name in model_runner._WEIGHT_UPDATES:
        found(sglang, model_runner._WEIGHTS + name)


def test_the_hook_on_prefetches_finds_its_arguments(sglang: Source) -> None:
    found = sglang.find(radix_cache.PREFETCH.target)
    assert found is not None and isinstance(found.node, ast.FunctionDef)
    names = {argument.arg for argument in found.node.args.args}
    assert {"last_host_node_id", "prefix_keys", "new_input_tokens"} <= names


def test_every_object_of_sglangs_is_named() -> None:
    known = seams.NOT_OBJECTS | set(seams.OBJECTS)
    unknown = [use for file in USES for use in file.untyped() if use[1] not in known]
    assert not unknown, HINT


def test_no_server_with_an_l3_has_draft_layers_in_its_own_pool(sglang: Source) -> None:
    """SGLang can fuse them with the model's pages since 0.5.22, but HiCache takes none of these
    pools, and later those of DFLASH if no L3 is named. Pages of ours would lack such layers."""
    cache = "sglang.srt.mem_cache."
    if sglang.find(cache + "unified_draft_pool") is None:
        return
    check = sglang.find(cache + "hybrid_cache.hybrid_pool_assembler.validate_fused_hicache_draft")
    if check is not None:
        assert "get_memory().hicache_storage_backend is None" in ast.unparse(check.node)
        return
    decision = cache + "kv_cache_configurator.KVCacheConfigurator._fused_draft_decision"
    refusal = "host_pool_flag = '--enable-hierarchical-cache'"
    assert refusal in ast.unparse(found(sglang, decision).node)


BACKENDS = {
    "flashattention_backend.FlashAttentionBackend",
    "flashinfer_backend.FlashInferAttnBackend",
    "flashinfer_mla_backend.FlashInferMLAAttnBackend",
    "flashmla_backend.FlashMLABackend",
    "triton_backend.TritonAttnBackend",
    "trtllm_mha_backend.TRTLLMHAAttnBackend",
    "trtllm_mla_backend.TRTLLMMLABackend",
}
"""Those that SGLang chooses by itself."""
ABSENT = {
    "spec_info": "no drafts are verified",
    "encoder_lens": "no encoder",
    "cross_attention_custom_mask": "no encoder",
    "attn_dcp_metadata": "refused: recomputation with decode context parallelism",
}
"""Fields that a plan of attention reads and that stay None in a recomputation."""


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_recomputations_have_what_the_plans_of_attention_read(sglang: Source, backend: str) -> None:
    """Otherwise recomputation is refused, or reads other rows, on the GPUs of that backend."""
    path = f"sglang.srt.layers.attention.{backend}.init_forward_metadata"
    read = {
        node.attr
        for node in ast.walk(found(sglang, path).node)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and ast.unparse(node.value) == "forward_batch"
    }
    passes = ast.parse(Path(model_runner.__file__).with_name("passes.py").read_text())
    [made] = [
        node
        for node in ast.walk(passes)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "RecomputeBatch"
    ]
    given = {str(keyword.arg) for keyword in made.keywords} | ABSENT.keys()
    bind = sglang.find("sglang.srt.mem_cache.kv_loc_plan.KVLocPlan.bind")
    if bind is not None:
        nodes = [node for node in ast.walk(bind.node) if isinstance(node, ast.Attribute)]
        given |= {node.attr for node in nodes if ast.unparse(node.value) == "batch"}
    assert len(read) > 3 and read <= given


_REGISTRY = "sglang.srt.layers.attention.attention_registry."
_DEEPSEEK = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA."


def test_tritons_attention_can_be_made_anew(sglang: Source) -> None:
    """It recomputes in the place of backends that wait; MLA modules then choose its way."""
    made = found(sglang, _REGISTRY + "create_triton_backend").node
    assert isinstance(made, ast.FunctionDef) and len(made.args.args) == 1
    assert [*map(ast.unparse, made.decorator_list)] == ["register_attention_backend('triton')"]
    way = ast.unparse(found(sglang, _DEEPSEEK + "dispatch_attn_forward_method").node)
    assert "backend = get_attn_backend()" in way
    assert "prefill_backend_str = backend.prefill_attention_backend_str or default" in way


def waits(nodes: list[ast.stmt]) -> set[str]:
    """Calls that copy from the device, of what a recomputation runs of these statements: it says
    lengths to the host, has no context-parallel ranks, and is refused with sliding windows."""
    text: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.If):
            asked = ast.unparse(node.test)
            if "sliding_window" in asked or "dcp_size > 1" in asked:
                text |= waits(node.orelse)
            else:
                text |= waits(node.body if "_cpu is not None" in asked else node.body + node.orelse)
            continue
        for call in (call for call in ast.walk(node) if isinstance(call, ast.Call)):
            name = ast.unparse(call.func).rpartition(".")[2]
            if name in ("int", "item", "cpu", "tolist", "numpy", "nonzero", "synchronize"):
                text.add(ast.unparse(call))
    return text


def test_a_plan_of_tritons_attention_waits_for_no_gpu(sglang: Source) -> None:
    path = "sglang.srt.layers.attention.triton_backend."
    plan = found(sglang, path + "TritonAttnBackend.init_forward_metadata").node
    assert isinstance(plan, ast.FunctionDef)
    [modes] = [
        node
        for node in plan.body
        if isinstance(node, ast.If) and "is_decode_or_idle" in ast.unparse(node.test)
    ]
    while isinstance(modes.orelse[0], ast.If) and len(modes.orelse) == 1:
        modes = modes.orelse[0]
    assert "is_target_verify" in ast.unparse(modes.test)  # what is left extends sequences
    others = [node for node in plan.body if not isinstance(node, ast.If)]
    fill = found(sglang, path + "TritonAttnBackend._fill_kv_indptr_and_indices").node
    assert isinstance(fill, ast.FunctionDef)
    assert waits([*modes.orelse, *others, *fill.body]) == set()
    guarded = [node for node in ast.walk(plan) if isinstance(node, ast.If) and node.orelse]
    assert "int(forward_batch.extend_seq_lens.max())" in set().union(
        *(waits(node.orelse) for node in guarded)
    )
    windows = found(sglang, path + "update_sliding_window_buffer").node
    assert "torch.empty(window_kv_indptr[-1]" in ast.unparse(windows)  # it waits
