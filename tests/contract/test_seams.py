"""Every place where we meet SGLang is there, as we use it, in every supported version.

SGLang's sources are read, not imported, so that all versions can be asked in one run.
"""

import ast
from collections.abc import Iterator

import pytest

from hcache_backend.sglang import arguments, model_runner, radix_cache
from hcache_backend.sglang.compat import SUPPORTED
from tests.contract import seams
from tests.contract.source import Definition, Parameters, Source
from tests.contract.uses import Subclass, Uses
from tests.contract.versions import ROOT, source

ROOMS = ("checks", "host", "prefetch", "sglang", "start", "tiers")
ENGINE = [
    *sorted(path for room in ROOMS for path in (ROOT / "hcache_backend" / room).rglob("*.py")),
    ROOT / "hcache_backend" / "projection" / "paged_pool.py",
    ROOT / "hcache_backend" / "capture" / "hooks.py",
    *(ROOT / "hcache_backend" / "krul" / f"{name}.py" for name in ("plugin", "segments")),
]
STAND_INS = [
    *sorted((ROOT / "tests" / "cpu_engine" / "hcache_cpu_engine").glob("*.py")),
    ROOT / "tests" / "engine" / "faults" / "hcache_faults.py",
]
HINT = "either a mistake, or tests/contract/seams.py wants a word about it"
ALTERNATIVES = {name for names in seams.ONE_OF for name in names}


@pytest.fixture(scope="module", params=SUPPORTED)
def sglang(request: pytest.FixtureRequest) -> Source:
    return source(request.param)


USES = {path: Uses(path, ROOT) for path in [*ENGINE, *STAND_INS]}
OURS: dict[str, Subclass] = {}
for _ in range(2):  # subclasses of SGLang's classes, and then those of these
    known = [ours for file in USES.values() for ours in file.subclasses(OURS)]
    OURS |= {ours.name: ours for ours in known}


def short(dotted: str) -> str:
    """`Class.name` of a dotted name."""
    return ".".join(dotted.split(".")[-2:])


def is_module(definition: Definition) -> bool:
    return isinstance(definition.node, ast.Module)


def found(sglang: Source, dotted: str) -> Definition:
    definition = sglang.find(dotted)
    assert definition is not None, f"{sglang} has no {dotted}"
    return definition


def attributes_of(sglang: Source, dotted: str) -> set[str]:
    definition = found(sglang, dotted)
    if is_module(definition):
        return sglang.attributes_in(definition)
    return sglang.attributes(definition)


def subclasses(sglang: Source) -> Iterator[tuple[Subclass, Definition]]:
    """Classes of ours, and the class of SGLang's that each is on top of."""
    for ours in OURS.values():
        base = found(sglang, ours.base)
        if isinstance(base.node, ast.ClassDef):
            yield ours, base


def attributes_of_objects(sglang: Source) -> dict[str, set[str]]:
    return {
        name: set().union(*(attributes_of(sglang, cls) for cls in classes))
        for name, classes in seams.OBJECTS.items()
    }


def of_class(sglang: Source, dotted: str, name: str) -> bool:
    definition = found(sglang, dotted)
    if not isinstance(definition.node, ast.ClassDef):
        return True  # a variable or a module: whatever it holds is looked up as a name
    return name in sglang.attributes(definition)


def test_names_that_we_import_or_hook_are_there(sglang: Source) -> None:
    missing = [
        f"{file.path}: {name}"
        for file in USES.values()
        for name in sorted(file.imports() | file.texts())
        if sglang.find(name) is None and short(name) not in ALTERNATIVES
    ]
    assert not missing


def test_members_of_imported_classes_are_there(sglang: Source) -> None:
    missing = [
        use
        for file in USES.values()
        for use in file.members()
        if not of_class(sglang, use.owner, use.name)
    ]
    assert not missing


def test_calls_fit(sglang: Source) -> None:
    problems = []
    ours = {name: ours for name, ours in OURS.items() if "__init__" not in ours.defined}
    for file in USES.values():
        for call in file.calls(ours):
            target = found(sglang, call.target)
            if not isinstance(target.node, ast.ClassDef | ast.FunctionDef):
                continue
            owner = sglang.find(call.target.rpartition(".")[0])
            if isinstance(target.node, ast.FunctionDef) and owner and not is_module(owner):
                parameters = Parameters.of(target.node, bound=True)
            else:
                parameters = sglang.parameters(target)
            problem = parameters.problem_of_call(call.positional, call.keywords)
            if problem is not None:
                problems.append(f"{call.where}: {short(call.target)} {problem}")
    assert not problems


def test_our_subclasses_override_what_sglang_calls_and_can_take_its_arguments(
    sglang: Source,
) -> None:
    problems = []
    for ours, base in subclasses(sglang):
        for name, method in ours.methods.items():
            original = sglang.method(base, name)
            if name == "__init__" or original is None:
                continue
            problem = Parameters.of(method, bound=True).problem_as_override(
                Parameters.of(original, bound=True)
            )
            if problem is not None:
                problems.append(f"{ours.name}.{name}: {problem}")
        missing = ours.inherited - sglang.attributes(base)
        problems += [f"{ours.name} uses {name}, {short(ours.base)} has none" for name in missing]
    assert not problems


def test_our_subclasses_override_what_is_written_down_and_nothing_else(sglang: Source) -> None:
    """A method that SGLang renames is one that it stops calling, without a word."""
    for ours, base in subclasses(sglang):
        overridden = {name for name in ours.methods if sglang.method(base, name)}
        written_down = seams.OVERRIDDEN.get(ours.name, set())
        assert overridden - {"__init__"} == written_down, f"{ours.name}: {HINT}"
        assert seams.CALLED_BY_SGLANG.get(ours.name, set()) <= set(ours.methods)


def test_methods_that_no_base_class_has_are_called(sglang: Source) -> None:
    """By duck typing, on a host pool or a storage backend."""
    folders = ("sglang/srt/mem_cache", "sglang/srt/managers")
    for name in set().union(*seams.CALLED_BY_SGLANG.values()):
        assert any(sglang.calls(name, folder) for folder in folders), name


def test_nothing_that_a_base_class_leaves_open_is_left_open_by_us(sglang: Source) -> None:
    for ours, base in subclasses(sglang):
        assert sglang.abstract(base) <= ours.defined, ours.name


def test_what_we_read_from_sglangs_objects_is_there(sglang: Source) -> None:
    attributes = attributes_of_objects(sglang)
    problems = []
    for path in ENGINE:
        for use in USES[path].attributes():
            classes = seams.OBJECTS.get(use.owner)
            if classes is None or (use.owner, use.name) in seams.OURS:
                continue
            alternatives = {f"{c.rpartition('.')[2]}.{use.name}" for c in classes}
            if use.name not in attributes[use.owner] and not alternatives & ALTERNATIVES:
                problems.append(f"{use.where}: {use.owner}.{use.name}")
    assert not problems, f"{sglang}: {HINT}"


def test_what_we_ask_for_in_case_it_is_there_is_there_in_some_version() -> None:
    """A misspelt name in a `getattr` would never be missed."""
    versions = [attributes_of_objects(source(version)) for version in SUPPORTED]
    unknown = [
        use
        for path in ENGINE
        for use in USES[path].optional_attributes()
        if use.owner in seams.OBJECTS
        and (use.owner, use.name) not in seams.OURS
        and not any(use.name in attributes[use.owner] for attributes in versions)
    ]
    assert not unknown


def test_requests_say_what_their_token_ids_do_not(sglang: Source) -> None:
    """Without one of these no front of a hit would be recomputed."""
    request = attributes_of(sglang, "sglang.srt.managers.schedule_batch.Req")
    assert set(arguments.NOT_IN_TOKEN_IDS) <= request


def test_the_hooks_on_weight_updates_have_their_places(sglang: Source) -> None:
    for name in model_runner._WEIGHT_UPDATES:
        found(sglang, model_runner._WEIGHTS + name)


def test_the_hook_on_prefetches_finds_its_arguments(sglang: Source) -> None:
    found = sglang.find(radix_cache.PREFETCH.target)
    assert found is not None and isinstance(found.node, ast.FunctionDef)
    names = {argument.arg for argument in found.node.args.args}
    assert {"last_host_node_id", "prefix_keys", "new_input_tokens"} <= names


def test_where_versions_differ_one_of_the_ways_is_there(sglang: Source) -> None:
    classes = {name.rpartition(".")[2]: name for names in seams.OBJECTS.values() for name in names}
    for members in seams.ONE_OF:
        ways = (member.split(".") for member in members)
        assert any(of_class(sglang, classes[cls], name) for cls, name in ways), members


def test_every_object_of_sglangs_is_named() -> None:
    known = seams.NOT_OBJECTS | set(seams.OBJECTS)
    unknown = [use for path in ENGINE for use in USES[path].untyped() if use[1] not in known]
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
