"""What threads do together: memory, barriers, branches, products of tiles; and faults are found."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch

from hcache_kernels.codecs import make_codec
from hcache_kernels.launch import Launch
from hcache_kernels.pages.kernel import gather_launch
from hcache_kernels.project_kv.spec import kind_of
from hcache_kernels.project_kv.ways import fused_configs, fused_launches
from tests.kernels.projection_cases import make_call
from tests.ptx import launches, one_block
from tests.ptx.memory import Span
from tests.ptx.numbers import Array, narrow
from tests.ptx.program import Fault
from tests.ptx.watchers import Costs, Races

LANE = np.arange(32)
TID = "mov.u32 %r0, %tid.x; mul.lo.s32 %r1, %r0, 4; cvt.u64.u32 %rd1, %r1;"


# ---- lanes of a warp ----


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ("idx.b32 %r2, %r1, 5, 31", np.full(32, 5)),
        ("up.b32 %r2, %r1, 3, 0", np.where(LANE >= 3, LANE - 3, LANE)),
        ("down.b32 %r2, %r1, 3, 31", np.where(LANE < 29, LANE + 3, LANE)),
        ("bfly.b32 %r2, %r1, 9, 31", LANE ^ 9),
        ("idx.b32 %r2, %r1, 1, 6175", LANE // 8 * 8 + 1),  # segments of 8 lanes
    ],
)
def test_shuffles(how: str, want: Array) -> None:
    machine = one_block.run(f"shfl.sync.{how}, -1;", {"%r1": LANE.astype("u4")})
    assert (machine.registers["%r2"] == want).all()


def test_reductions_of_a_warp() -> None:
    values = (LANE - 20).astype("i4").view("u4")
    text = "redux.sync.add.s32 %r2, %r1, %r9; redux.sync.max.s32 %r3, %r1, %r9;"
    machine = one_block.run(text, {"%r1": values, "%r9": np.full(1, 2**32 - 1, "u4")})
    assert (machine.registers["%r2"].view("i4") == 496 - 640).all()
    assert (machine.registers["%r3"] == 11).all()


def test_threads_of_a_branch_meet_again_and_loops_end() -> None:
    text = f"""{TID}
mov.b32 %r2, 0;
$L__loop:
add.s32 %r2, %r2, 1;
setp.lt.u32 %p1, %r2, %r0;
@%p1 bra $L__loop;
shfl.sync.idx.b32 %r3, %r2, 31, 31, -1;"""
    machine = one_block.run(text)
    assert (machine.registers["%r2"] == np.maximum(LANE, 1)).all()
    assert (machine.registers["%r3"] == 31).all()
    with pytest.raises(Fault, match="not all threads of a warp"):
        one_block.run(f"{TID}\nsetp.lt.u32 %p1, %r0, 7;\n@%p1 {text.splitlines()[-1]}")


# ---- products of tiles, by the formulas of the manual's figures ----


def halves(*shape: int) -> tuple[Array, Array]:
    """Small whole numbers, and their bits as bf16."""
    values = np.random.default_rng(1).integers(-8, 9, shape).astype("f4")
    return values.astype("f8"), narrow(values, "bf16").reshape(shape)


def packed(bits: Array) -> Array:
    """Registers of pairs of values ``[..., 2]``."""
    return bits[..., 0].astype("u4") | bits[..., 1].astype("u4") << 16


def test_products_of_a_warp() -> None:
    (a, a_bits), (b, b_bits) = halves(16, 16), halves(16, 8)
    group, tig = LANE[:, None] // 4, LANE[:, None] % 4
    pair = np.arange(2)
    held = {
        f"%r{i}": packed(a_bits[group + 8 * (i % 2), 2 * tig + pair + 8 * (i // 2)])
        for i in range(4)
    }
    held |= {f"%r{4 + i}": packed(b_bits[2 * tig + pair + 8 * i, group]) for i in range(2)}
    held |= {f"%r{6 + i}": np.full(1, i, "f4").view("u4") for i in range(4)}
    kind = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    operands = "{%r6, %r7, %r8, %r9}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r6, %r7, %r8, %r9}"
    machine = one_block.run(f"{kind} {operands};", held)
    for i in range(4):
        want = (a @ b)[LANE // 4 + 8 * (i // 2), 2 * (LANE % 4) + i % 2] + i
        assert (machine.registers[f"%r{6 + i}"].view("f4") == want).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_are_loaded_and_stored(count: int, trans: str) -> None:
    memory = np.arange(count * 64, dtype="u2").reshape(count, 8, 8)
    to = "{" + ", ".join(f"%r{10 + i}" for i in range(count)) + "}"
    kind = f"sync.aligned.m8n8.x{count}{trans}.shared.b16"
    space = np.concatenate([memory.ravel(), np.zeros(count * 64, "u2")])
    at = (16 * (LANE % (8 * count))).astype("u4")
    text = f"ldmatrix.{kind} {to}, [%r1];\nstmatrix.{kind} [%r1+{128 * count}], {to};"
    machine = one_block.run(text, {"%r1": at}, shared=space)
    for i in range(count):
        part = memory[i].T if trans else memory[i]
        want = packed(part[LANE[:, None] // 4, 2 * (LANE[:, None] % 4) + np.arange(2)])
        assert (machine.registers[f"%r{10 + i}"] == want).all()
    stored = machine.shared.read(machine.shared.start + 2 * np.arange(2 * count * 64), 2, 1)[0]
    assert (stored.reshape(2, -1) == memory.ravel()).all()


@pytest.mark.parametrize(("mode", "pitch"), [(1, 128), (2, 64), (3, 32), (0, 16)])
@pytest.mark.parametrize("columns", [8, 128])
def test_products_of_a_warpgroup(mode: int, pitch: int, columns: int) -> None:
    (a, a_bits), (b, b_bits) = halves(64, 16), halves(columns, 16)
    # Both matrices in parts of 8 rows. Swizzled: the 16 bytes of a row change places by the row.
    space = np.zeros((2, 16, 8 * 128 // 2), dtype="u2")
    for space_of, bits in zip(space, (a_bits, b_bits), strict=True):
        for row, chunk in np.ndindex(len(bits), 2):
            if mode:
                place = (row % 8) * pitch + 16 * (chunk ^ row % 8 * pitch // 128)
            else:
                place = 128 * chunk + row % 8 * 16
            part = space_of[row // 8, place // 2 : place // 2 + 8]
            part[:] = bits[row, 8 * chunk : 8 * chunk + 8]
    described = mode << 62 | (1024 >> 4) << 32 | (128 >> 4) << 16
    registers = [f"%r{i}" for i in range(columns // 2)]
    kind = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    held = {name: np.full(1, 1, "f4").view("u4") for name in registers}
    held |= {f"%rd{1 + i}": np.full(1, described + (i << 10), "u8") for i in range(2)}
    held["%p1"] = np.full(1, True)
    text = f"{kind} {{{','.join(registers)}}}, %rd1, %rd2, %p1, 1, 1, 0, 0;\nmov.b32 %r900, %r0;"
    wait = "\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
    machine = one_block.run(text + wait, held, threads=128, shared=space)
    assert (machine.registers["%r900"].view("f4") == 1).all()  # not before it is waited for
    thread = np.arange(128)
    for i in range(columns // 2):
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
        want = (a @ b.T)[row, 8 * (i // 4) + 2 * (thread % 4) + i % 2] + 1
        assert (machine.registers[f"%r{i}"].view("f4") == want).all()


# ---- faults ----

WORDS = np.zeros(64, dtype="u4")
SPANS = [Span(WORDS.ctypes.data, WORDS.ctypes.data + 256, "words")]
STORE = f"{TID}\nadd.s64 %rd2, %rd9, %rd1;\nst.global.b32 [%rd2], %r0;"


def store(text: str = STORE, start: int = 0, **how: object) -> None:
    held = {"%rd9": np.full(1, WORDS.ctypes.data + start, "u8")}
    one_block.run(text, held, spans=SPANS, **how)


def test_memory_of_nobody_is_neither_read_nor_written() -> None:
    store(threads=64)
    assert (np.arange(64) == WORDS).all()
    with pytest.raises(Fault, match=r"256 bytes from the start of words(.|\n)*PTX line 11, st"):
        store(threads=96)
    with pytest.raises(Fault, match="not aligned"):
        store(start=2)
    with pytest.raises(Fault, match="bytes of shared memory"):
        store(f"{TID}\nld.shared.b32 %r2, [%r1+64];", shared=np.zeros(64, "u1"))
    with pytest.raises(Fault, match="different values to one address"):
        store(STORE.replace("%rd9, %rd1", "%rd9, 0"))


def test_programs_that_meet_are_found() -> None:
    with pytest.raises(Fault, match="race: byte 0 of words, write"):
        store(watchers=[Races()], blocks=2)
    reads = STORE.replace("st.global.b32 [%rd2], %r0", "ld.global.b32 %r5, [%rd2]")
    store(reads, watchers=[Races()], blocks=2)
    mixed = "mov.u32 %r6, %ctaid.x; setp.eq.b32 %p1, %r6, 0;"
    with pytest.raises(Fault, match="race: byte 0 of words"):
        store(f"{mixed}{reads}\n@%p1 {STORE.splitlines()[-1]}", watchers=[Races()], blocks=2)


EXCHANGE = f"""{TID}
st.shared::cta.b32 [%r1], %r0;
bar.sync 0;
xor.b32 %r2, %r1, 252;
ld.shared.b32 %r3, [%r2];"""


def test_a_missing_barrier_gives_other_bytes_and_is_a_race() -> None:
    space, want = np.zeros(256, "u1"), np.arange(64) ^ 63
    for seed in range(3):
        whole = one_block.run(EXCHANGE, threads=64, shared=space, order=Random(seed))
        assert (whole.registers["%r3"] == want).all()
    one_block.run(EXCHANGE, threads=64, shared=space, watchers=[Races()])
    without = EXCHANGE.replace("bar.sync 0;", "")
    with pytest.raises(Fault, match="race: byte"):
        one_block.run(without, threads=64, shared=space, watchers=[Races()])


# ---- faults in our kernels ----


def projection() -> tuple[Launch, torch.Tensor]:
    norm, rope = ("rms", "head", "weight"), ("neox", None)
    call = make_call(n=130, head_dim=64, depth=256, rope=rope, norm=norm)
    config = fused_configs(kind_of(call.projection), (9, 0))[0]
    return fused_launches(call, config)[0], call.memory


def encoding() -> tuple[Launch, torch.Tensor]:
    rows = torch.randn(3, 4112, generator=torch.Generator().manual_seed(1)).bfloat16()
    codec = make_codec("exp4", 4112, torch.bfloat16)
    encoded = torch.zeros(3, codec.row_bytes, dtype=torch.uint8)
    return codec.encode_launch((rows,), None, encoded, None, 0, torch.zeros(3)), encoded


def copying() -> tuple[Launch, torch.Tensor]:
    pages, out = torch.ones(4, 40024, dtype=torch.uint8), torch.zeros(3, 40000, dtype=torch.uint8)
    return gather_launch(pages, torch.tensor([3, 0, 1]), 16, out), out


REMOVED = {
    "barriers": (r"\tbar\.sync.*", ""),
    "waits for copies": (r"\tcp\.async\.wait_group.*", ""),
    "waits for products": (r"wgmma\.wait_group\.sync\.aligned 0;", ""),
    "masks of stores": (r"@%p\d+ (st\.global)", r"\1"),
}


@pytest.mark.parametrize(
    ("make", "what"),
    [
        *((projection, what) for what in REMOVED),
        *((encoding, "barriers"), (encoding, "masks of stores"), (copying, "masks of stores")),
    ],
)
def test_what_is_removed_from_a_kernel_is_missed(
    make: Callable[[], tuple[Launch, torch.Tensor]], what: str
) -> None:
    """By other bytes, whatever the order of warps; barriers and masks also by a fault."""
    launch, written = make()
    launches.run(launch, 90, [Races()], Random(0))
    want = written.clone()

    def edit(text: str) -> str:
        return re.sub(*REMOVED[what], text)

    for seed in range(3):
        launch, written = make()
        try:
            launches.run(launch, 90, [], Random(seed), edit)
        except Fault:
            continue
        assert not torch.equal(written, want)
    if what in ("barriers", "masks of stores"):
        with pytest.raises(Fault, match=r"race: |in no tensor|different values"):
            launches.run(make()[0], 90, [Races()], None, edit)


def test_costs_are_counted() -> None:
    launch, out = copying()
    costs = Costs([Span.of("pages", launch.arguments["pages"])])
    launches.run(launch, 90, [costs])
    assert costs.bytes["host read"] == out.numel()
    assert costs.bytes["device write"] == out.numel()
    assert costs.sectors["device write"] == out.numel() // 32
    assert costs.narrowest["host read"] == 8
    assert costs.bank_conflicts == 0
