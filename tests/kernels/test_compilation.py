"""Every configuration of every kernel compiles for every device: it fits, and nothing spills."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton

from hcache_kernels.codecs import KV, LATENT, Cut, make_codec, make_segment_codec
from hcache_kernels.digest import PROGRAMS, digest_launch
from hcache_kernels.launch import Launch
from hcache_kernels.pages import kernel as page_kernels
from hcache_kernels.pages.kernel import LayerTable
from hcache_kernels.project_kv import (
    KeyNorm,
    KVPool,
    KVProjection,
    ProjectionCall,
    Rotary,
    Rounding,
)
from hcache_kernels.project_kv.spec import kind_of
from hcache_kernels.project_kv.ways import (
    TileConfig,
    epilogue_launch,
    fused_configs,
    fused_launches,
    head_pairs,
)
from hcache_kernels.staging import (
    StagedRows,
    StepTargets,
    begin_launch,
    judge_launch,
    save_launch,
    stage_launch,
)
from tests.kernels.compiled import TOOLS, Job, Usage, compile_all, fused, source
from tests.ptx.test_opcodes import tested

# All of them are compiled before the first test, in two processes.
pytestmark = pytest.mark.timeout(1800)

SHARED_MEMORY = {(8, 0): 163, (8, 9): 99, (9, 0): 227}
"""Devices to compile for, by compute capability, and the KiB of shared memory of a program there
(CUDA programming guide)."""

if (TOOLS / "ptxas-blackwell").exists():
    SHARED_MEMORY[10, 0] = 227

IN_EVERY_RUN = ("sm_90 ", "sm_80 fused bfloat16 head 96 64 x 1 heads")
"""How the names of jobs begin that are compiled in every run: of one device, and of another what
leaves the fewest registers. The others are compiled in long runs only."""
LONG_ON_90 = ("16 head 64 ", "16 head 96 128", "32 head 128 ", "8 groups", "4 pieces", ", long")
"""Parts of the names of those that are not: they differ in a size from what every run compiles."""


def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor that has no memory: all that a compilation asks of it."""
    return torch.empty(*shape, dtype=dtype, device="meta")


Jobs = Iterator[tuple[str, Callable[[], Launch]]]
"""Names and launches for one device."""

N = 4096
"""Tokens, rows and pages."""


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ids(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int64)


# ---- project_kv ----

HIDDEN = 4096 + 16  # the last tile of the product is masked
KV_HEADS = 32

# Norm of K, style of RoPE, how much of a head it turns, type of the pool (None: the model's). All
# that can be rounded is where both are.
# In the order of the registers that they take, so that a configuration meets its worst one first.
EPILOGUES = {
    "norm and rope": ("head", "interleaved", 1.0, None),
    "rope": ("none", "interleaved", 1.0, None),
    "neox rope": ("none", "neox", 1.0, None),
    "partial rope to fp8": ("none", "neox", 0.25, torch.float8_e5m2),
    "norm to fp8": ("head", "none", 0.0, torch.float8_e5m2),
    "norm over all": ("all", "neox", 1.0, None),
}
MANY_ACCUMULATORS = 128
"""A thread's, in the tiles that leave few registers: these meet every epilogue."""


def make_projection(epilogue: str, head_dim: int, dtype: torch.dtype) -> KVProjection:
    over, style, turned, _ = EPILOGUES[epilogue]
    width = KV_HEADS * head_dim
    norm, rotary = None, None
    if over != "none":
        parameter = empty(width, dtype=dtype)
        norm = KeyNorm("layer", over, parameter, parameter, 1e-6)  # type: ignore[arg-type]
    if style != "none":
        rotary_dim = int(head_dim * turned)
        cos_sin = empty(N, rotary_dim, dtype=torch.float32)
        rotary = Rotary(cos_sin, style, rotary_dim)  # type: ignore[arg-type]
    weight, bias = empty(2 * width, HIDDEN, dtype=dtype), empty(2 * width, dtype=dtype)
    everywhere = norm is not None and rotary is not None
    rounding = Rounding(*[True] * 5) if everywhere else Rounding()
    return KVProjection(weight, bias, KV_HEADS, head_dim, norm, rotary, rounding)


def make_call(
    epilogue: str, head_dim: int, dtype: torch.dtype, pool_type: torch.dtype
) -> ProjectionCall:
    projection, indices = make_projection(epilogue, head_dim, dtype), ids(N)
    k = empty(N, KV_HEADS, head_dim, dtype=pool_type)
    return ProjectionCall(empty(N, HIDDEN, dtype=dtype), indices, indices, projection, KVPool(k, k))


def fused_launch(epilogue: str, head_dim: int, dtype: torch.dtype, config: TileConfig) -> Launch:
    pool_type = EPILOGUES[epilogue][-1] or dtype
    return fused_launches(make_call(epilogue, head_dim, dtype, pool_type), config)[0]


def library_epilogue(epilogue: str, head_dim: int, pool_type: torch.dtype) -> Launch:
    kv = empty(N, 2 * KV_HEADS * head_dim, dtype=torch.bfloat16)
    return epilogue_launch(kv, make_call(epilogue, head_dim, torch.bfloat16, pool_type))


def projection_jobs(capability: tuple[int, int]) -> Jobs:
    for dtype, head_dims in ((torch.bfloat16, (64, 96, 128, 256)), (torch.float32, (128, 256))):
        for head_dim in head_dims:
            seen = set()
            for epilogue in EPILOGUES:
                kind = kind_of(make_projection(epilogue, head_dim, dtype))
                for config in fused_configs(kind, capability):
                    tile = config.rows * config.heads * 2 * head_pairs(head_dim)
                    many = tile // (32 * config.warps) >= MANY_ACCUMULATORS
                    if config in seen and not many:
                        continue
                    seen.add(config)
                    yield (
                        f"fused {name(dtype)} head {head_dim} {config.rows} x {config.heads} "
                        f"heads, {config.stages} stages, {config.warps} warps, {epilogue}",
                        partial(fused_launch, epilogue, head_dim, dtype, config),
                    )
    for epilogue, head_dim, pool_type in (
        ("norm and rope", 96, torch.bfloat16),
        ("norm over all", 128, torch.float8_e5m2),
        ("norm over all", 256, torch.bfloat16),
    ):
        yield (
            f"library, heads of {head_dim} to {name(pool_type)}, {epilogue}",
            partial(library_epilogue, epilogue, head_dim, pool_type),
        )


# ---- codecs and pages ----

WIDTHS = (256, 4096, 7168)
"""One warp, the usual width, and one whose last block is masked."""

CUTS = {
    "one group": (Cut(1024, 64), 128),
    "8 groups": (Cut(128, 64, groups=8), 128),
    "heads of 96": (Cut(3 * 96, 64, groups=4), 96),
    "4 pieces": (Cut(4096, 16, pieces=4), 128),
    "narrow": (Cut(64, 16, groups=2), 32),
    "long": (Cut(256, 256), 256),
}
"""Units of K and V, and the values of a head."""

EXP3_CUTS = {what: cut for what, (cut, _) in CUTS.items() if cut.tokens >= 32} | {
    "2 pieces": Cut(2048, 32, pieces=2),
    "narrow": Cut(64, 32, groups=2),
}
"""Of ``exp3``, whose units have at least 32 tokens."""

SEGMENTS = (("exp4", torch.bfloat16), ("int8", torch.bfloat16), ("int8", torch.float16))
"""Their codecs, and the type of K and V."""


def codec_launch(codec: str, decode: bool, width: int, dtype: torch.dtype) -> Launch:
    made = make_codec(codec, width, dtype)
    rows, encoded = empty(N, width, dtype=dtype), empty(N, made.row_bytes)
    if decode:
        return made.decode_launch(encoded, (rows,), None)
    return made.encode_launch((rows,), None, encoded, None, 0, empty(N))


def segments_launch(name: str, decode: bool, cut: Cut, dim: int, dtype: torch.dtype) -> Launch:
    codec = make_segment_codec(name, cut, dim, dtype)
    planes = [empty(N, cut.units * cut.values // dim, dim, dtype=dtype)] * 2
    length = codec.segment_bytes
    if decode:
        return codec.decode_launch(empty(N, length), planes, ids(N))
    fits = empty(N, codec.flags, dtype=torch.bool)
    memory = empty(N, 4096 + 4 * length)
    return codec.encode_launch(planes, ids(N), memory, ids(N), 4096, fits)


def layers_of(planes: Sequence[torch.Tensor], count: int = 32) -> LayerTable:
    """A table of so many layers, wherever it begins."""
    return LayerTable(tuple(planes), ids(4 * count)[2 * count :].view(-1, 2), ids(count), 16)


def layers_launch(
    name: str, decode: bool, cut: Cut, dim: int, dtype: torch.dtype, kind: str = KV
) -> Launch:
    codec, size = make_segment_codec(name, cut, dim, dtype, kind), cut.tokens * cut.pieces
    planes = [empty(N, cut.units * cut.values // dim, dim, dtype=dtype)] * len(kind)
    slots, length, table = ids(N * size), codec.segment_bytes, layers_of(planes)
    if decode:
        return codec.decode_launch(empty(32, N, length), planes, slots, table)
    fits = empty(32, N, codec.flags, dtype=torch.bool)
    return codec.encode_launch(planes, slots, empty(32, N, length), None, 0, fits, table)


def gather(length: int) -> Launch:
    return page_kernels.gather_launch(empty(N, 4096 + 4 * length), ids(N), 4096, empty(N, length))


def gather_planes(groups: int, row_bytes: int) -> Launch:
    memory, plane = empty(N, 4096 + 128 * groups * row_bytes), empty(N, 64, groups, row_bytes)
    return page_kernels.gather_planes_launch(memory, ids(N), 4096, [plane, plane], ids(N))


def copy_layers(groups: int, save: bool) -> Launch:
    memory, plane = empty(N, 4096 + 128 * groups * 256), empty(N, 64, groups, 256)
    pool, slots = [plane, plane], ids(64 * N)
    arguments = memory, ids(N), 0, pool, slots, layers_of(pool)
    return page_kernels.gather_planes_launch(*arguments, save=save)


def gather_layers(length: int) -> Launch:
    out, table = empty(32, N, length), layers_of([empty(N, 64)] * 2)
    return page_kernels.gather_launch(empty(N, 4096 + length), ids(N), 0, out, layers=table)


def scatter(row_bytes: int) -> Launch:
    memory = empty(N, 4096 + 64 * row_bytes)
    return page_kernels.gather_launch(memory, ids(N), 4096, empty(N, row_bytes), save=True)


def transfer_jobs(capability: tuple[int, int]) -> Jobs:
    codecs = [("exp4", torch.bfloat16, width) for width in WIDTHS]
    codecs += [("int8", torch.bfloat16, WIDTHS[-1]), ("int8", torch.float32, WIDTHS[-1])]
    for codec, dtype, width in codecs:
        for decode in (False, True):
            yield (
                f"{'decode' if decode else 'encode'} {codec} {name(dtype)}, {width}",
                partial(codec_launch, codec, decode, width, dtype),
            )
    for what, (cut, dim) in CUTS.items():
        for codec, dtype in SEGMENTS[: 3 if what in ("one group", "narrow") else 2]:
            for decode in (False, True):
                yield (
                    f"{'decode' if decode else 'encode'} segments, {codec} {name(dtype)}, {what}",
                    partial(segments_launch, codec, decode, cut, dim, dtype),
                )
    for what, cut in EXP3_CUTS.items():
        for decode in (False, True):
            yield (
                f"{'decode' if decode else 'encode'} segments, exp3, {what}",
                partial(segments_launch, "exp3", decode, cut, 64, torch.bfloat16),
            )
    cut, dim = CUTS["8 groups"]
    for codec, dtype in (*SEGMENTS, ("exp3", torch.bfloat16)):
        for decode in (False, True):
            yield (
                f"{'decode' if decode else 'encode'} layers, {codec} {name(dtype)}",
                partial(layers_launch, codec, decode, cut, dim, dtype),
            )
    for decode in (False, True):
        yield (
            f"{'decode' if decode else 'encode'} layers, exp4, latents of 8 ranks",
            partial(layers_launch, "exp4", decode, Cut(576, 8), 576, torch.bfloat16, LATENT),
        )
    for groups in (1, 4):
        for save in (False, True):
            way = "save" if save else "load"
            yield f"{way} layers, {groups} groups", partial(copy_layers, groups, save)
    yield "gather layers", partial(gather_layers, 64 * 392)
    for length in (64 * 8192, 64 * 392 + 8):
        yield f"gather {length}", partial(gather, length)
    for groups in (1, 4):
        yield f"gather planes, {groups} groups", partial(gather_planes, groups, 256)
    for row_bytes in (8192, 392):
        yield f"scatter {row_bytes}", partial(scatter, row_bytes)


# ---- staging ----

STAGED, LAYERS, PLACES, PAGE = 64, 4, 512, 64
ROW_BYTES = (8192, 6272, 392)
"""bfloat16 of a usual width, exp4 of it, and rows that are multiples of 8 bytes only."""


def stage(row_bytes: int) -> Launch:
    staged = StagedRows(empty(LAYERS, PLACES, row_bytes), ids(LAYERS, PLACES))
    return stage_launch(empty(STAGED, row_bytes), ids(STAGED), ids(1), staged, 0)


def save(row_bytes: int) -> Launch:
    staged = empty(LAYERS, PLACES, row_bytes)[:, :STAGED]
    arena, kept = empty(256, 4096 + LAYERS * PAGE * row_bytes), range(PAGE // 2, PAGE)
    return save_launch(staged, ids(STAGED), ids(128), arena, ids(LAYERS), PAGE, kept)


def begin(n: int) -> Launch:
    now = StepTargets(ids(PLACES), ids(1))
    return begin_launch((ids(n), ids(n), ids(n)), ids(3, n), ids(3 * n), now, n, range(n, 2 * n))


def judge() -> Launch:
    return judge_launch(ids(LAYERS, PLACES)[:, :STAGED], 17, empty(STAGED))


def staging_jobs(capability: tuple[int, int]) -> Jobs:
    for row_bytes in ROW_BYTES:
        yield f"stage {row_bytes}", partial(stage, row_bytes)
        yield f"save {row_bytes}", partial(save, row_bytes)
    yield "begin", partial(begin, STAGED)
    yield "judge", judge


def digest(width: int, dtype: torch.dtype) -> Launch:
    return digest_launch(torch.empty((8, width), dtype=dtype), 0, ids(PROGRAMS, 2))


def digest_jobs(capability: tuple[int, int]) -> Jobs:
    for width, dtype in ((1024, torch.int64), (1, torch.int16)):
        yield f"digest {width} {dtype}", partial(digest, width, dtype)


JOBS = {
    f"sm_{major}{minor} {what}": Job((major, minor), launch)
    for major, minor in SHARED_MEMORY
    for jobs in (projection_jobs, transfer_jobs, staging_jobs, digest_jobs)
    for what, launch in jobs((major, minor))
}


# ---- tests ----


def in_every_run(job: str) -> bool:
    return job.startswith(IN_EVERY_RUN) and not any(part in job for part in LONG_ON_90)


def cases(jobs: Mapping[str, Job]) -> list[Any]:
    return [
        pytest.param(name, marks=() if in_every_run(name) else pytest.mark.long) for name in jobs
    ]


KNOWN_SPILLS = {}
"""Bytes, by job."""
if triton.__version__.startswith("3.6."):  # 3.7 needs none
    one = "sm_80 fused bfloat16 head 96 64 x 1 heads, 3 stages, 4 warps, norm and rope"
    KNOWN_SPILLS[one] = 8


@pytest.fixture(scope="module")
def usages(request: pytest.FixtureRequest) -> dict[str, Usage]:
    """Results of the selected tests' jobs, all compiled before the first test."""
    tests = (item for item in request.session.items if isinstance(item, pytest.Function))
    asked = (test for test in tests if test.module is request.module and "job" in test.fixturenames)
    names = {test.callspec.params["job"] for test in asked}
    return compile_all({name: job for name, job in JOBS.items() if name in names})


@pytest.mark.parametrize("job", cases(JOBS))
def test_nothing_spills_and_shared_memory_suffices(job: str, usages: dict[str, Usage]) -> None:
    assert usages[job].stack == KNOWN_SPILLS.get(job, 0)
    assert usages[job].shared <= SHARED_MEMORY[JOBS[job].capability] * 1024


OF_EXP3 = {name: job for name, job in JOBS.items() if "encode" in name and "exp3" in name}


@pytest.mark.parametrize("job", cases(OF_EXP3))
def test_a_thread_that_encodes_has_at_most_128_registers(
    job: str, usages: dict[str, Usage]
) -> None:
    """With 255 a program of half as many threads had the same part of a multiprocessor."""
    assert usages[job].registers <= 128


def test_the_fusion_of_a_rounded_product_is_seen() -> None:
    product = "mov.b16 \t%rs9, 0x8000;\n\tfma.rn.bf16 \t%rs3, %rs1, %rs2, %rs9;\n"
    difference = "mov.b16 \t%rs8, 0xBF80;\n\tfma.rn.bf16 \t%rs4, %rs1, %rs8, %rs3;\n"
    assert fused(product + difference) == 0
    assert fused(product + "\tfma.rn.bf16 \t%rs5, %rs1, %rs2, %rs3;\n") == 1


@pytest.mark.parametrize("job", cases(JOBS))
def test_what_is_rounded_is_rounded_before_it_is_added(job: str, usages: dict[str, Usage]) -> None:
    assert usages[job].fused == 0


TENSOR_CORES_OF_100 = ".reg .pred complete"
"""How the wait for their product begins, which the emulator does not know."""


@pytest.mark.parametrize("job", cases(JOBS))
def test_the_emulator_knows_what_a_kernel_is_compiled_to(
    job: str, usages: dict[str, Usage]
) -> None:
    unknown = usages[job].opcodes - tested()
    if JOBS[job].capability == (10, 0) and any(TENSOR_CORES_OF_100 in one for one in unknown):
        pytest.skip("the tensor cores of 10.0")
    assert not unknown


COPIES = {
    "gather 524288": 16,
    "gather 25096": 8,
    "gather planes, 1 groups": 16,
    "gather planes, 4 groups": 16,
    "scatter 8192": 16,
    "scatter 392": 8,
    "save 8192": 16,
    "save 392": 8,
}
"""Bytes that copies move at once: 16 where everything is a multiple of that, else 8."""


@pytest.mark.parametrize("job", cases({f"sm_90 {copy}": JOBS[f"sm_90 {copy}"] for copy in COPIES}))
def test_copies_move_16_bytes_at_once_where_addresses_allow(
    job: str, usages: dict[str, Usage]
) -> None:
    expected = COPIES[job.removeprefix("sm_90 ")]
    assert (usages[job].loads, usages[job].stores) == (expected, expected)


def launches_of(n: int) -> dict[str, Launch]:
    """Launches that a server makes of ``n`` pages or tokens, of a segment that depends on it."""
    row, offset = 392, 4096 + 16 * n
    memory = empty(N, 8192 + 128 * row)
    pool, places = empty(N, 64, 1, row), ids(LAYERS, PLACES)
    call = make_call("rope", 128, torch.bfloat16, torch.bfloat16)
    tokens = {"hidden": call.hidden[:n], "positions": ids(n), "slots": ids(n)}
    config = fused_configs(kind_of(call.projection), (9, 0))[0]
    staged = StagedRows(empty(LAYERS, PLACES, row), places)
    exp4 = make_codec("exp4", 256, torch.bfloat16)
    some = ids(2 * n)[n:]  # part of a restore, at any address
    encoded, rows = empty(n, exp4.row_bytes), empty(n, 256, dtype=torch.bfloat16)
    int8 = make_segment_codec("int8", Cut(128, 64), 128, torch.bfloat16)
    planes, segments = [empty(N, 128, dtype=torch.bfloat16)] * 2, empty(n, int8.segment_bytes)
    flags = empty(n, int8.flags)
    slots, of_pool = ids((n + 1) * 64)[64:], [pool, pool]
    table, of_layers = layers_of(planes, n), layers_of(of_pool, n)
    return {
        "gather": page_kernels.gather_launch(memory, some, offset, empty(n, 64 * row)),
        "gather planes": page_kernels.gather_planes_launch(
            memory, some, offset, [pool, pool], some
        ),
        "scatter": page_kernels.gather_launch(memory, some, offset, empty(n, row), save=True),
        "begin": begin(n),
        "stage": stage_launch(empty(n, row), ids(n), ids(1), staged, 0),
        "save": save_launch(
            staged.rows[:, n : 2 * n], some, ids(N), memory, ids(LAYERS), PAGE, range(PAGE)
        ),
        "save a layer": save_launch(
            empty(1, n, row), ids(n), ids(N), memory, ids(1), PAGE, range(PAGE)
        ),
        "judge": judge_launch(places[:, n : 2 * n], n, empty(n)),
        "judge layer by layer": judge_launch(ids(LAYERS, n), n, empty(n)),
        "project": fused_launches(replace(call, **tokens), config)[0],
        "encode": exp4.encode_launch((rows,), None, encoded, None, 0, empty(n)),
        "decode": exp4.decode_launch(encoded, (rows,), None),
        "encode segments": int8.encode_launch(planes, some, memory, some, offset, flags),
        "decode segments": int8.decode_launch(segments, planes, some),
        "encode layers": int8.encode_launch(
            *(planes, slots, empty(n, n, int8.segment_bytes), None, 0, empty(n, n, int8.flags)),
            table,
        ),
        "decode layers": int8.decode_launch(empty(n, n, int8.segment_bytes), planes, slots, table),
        "gather layers": page_kernels.gather_launch(
            memory, some, 0, empty(n, n, 64 * row), layers=of_layers
        ),
        "save layers": page_kernels.gather_planes_launch(
            memory, some, 0, of_pool, slots, of_layers, save=True
        ),
    }


def kind_compiled(launch: Launch) -> tuple[Any, ...]:
    """What Triton compiles the kernel of a launch for."""
    one = source(launch.kernel, launch.arguments)
    return one.signature, one.constants, one.attrs


@pytest.mark.parametrize("what", launches_of(1))
def test_no_number_of_pages_or_tokens_compiles_a_kernel_again(what: str) -> None:
    first, *others = (kind_compiled(launches_of(n)[what]) for n in (1, 2, 3, 15, 16, 64))
    assert all(other == first for other in others)


def test_records_that_kernels_are_compiled_for_hold_no_others() -> None:
    """Triton 3.6 takes a record inside of another apart, and 3.8 knows of it only the fields."""
    launches = [*launches_of(1).values(), *(launch() for _, launch in transfer_jobs((9, 0)))]
    values = [value for launch in launches for value in launch.arguments.values()]
    records = [value for value in values if isinstance(value, tuple)]
    assert records
    assert not [record for record in records if any(isinstance(part, tuple) for part in record)]


@pytest.mark.parametrize("n", [15, 16])
def test_long_steps_use_the_kernels_that_short_ones_compiled(n: int) -> None:
    launches = launches_of(n)
    for short, long in (("save", "save a layer"), ("judge", "judge layer by layer")):
        assert kind_compiled(launches[short]) == kind_compiled(launches[long]), long
