"""How copies over the bus are launched."""

from types import SimpleNamespace

import pytest
import torch

from hcache_kernels.codecs import Cut, make_segment_codec
from hcache_kernels.launch import COPY_PROGRAMS, Launch, alignment, copy_programs
from hcache_kernels.pages.kernel import LayerTable, gather_launch, gather_planes_launch
from hcache_kernels.staging import save_launch

N, ROW, PAGE = 64, 4096, 16


def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches() -> list[Launch]:
    ids, memory = empty(N, dtype=torch.int64), empty(N, 4096 + 2 * PAGE * ROW)
    plane = empty(N, PAGE, 1, ROW)
    staged, layers = empty(2, N, ROW), empty(2, dtype=torch.int64)
    return [
        gather_launch(memory, ids, 4096, empty(N, PAGE * ROW)),
        gather_planes_launch(memory, ids, 4096, [plane, plane], ids),
        gather_launch(memory, ids, 4096, empty(N, ROW), save=True),
        save_launch(staged, ids, ids, memory, layers, PAGE, range(PAGE)),
    ]


def test_a_copy_is_few_programs_of_few_warps() -> None:
    assert {launch.grid for launch in launches()} == {(COPY_PROGRAMS,)}
    assert all(launch.warps <= 4 for launch in launches())  # other kernels want threads, too


@pytest.mark.parametrize("name", ["exp3", "exp4", "int8"])
def test_a_backup_is_encoded_by_few_programs(name: str) -> None:
    """8,192 tokens of 32 layers: a program for each unit would hold every multiprocessor."""
    codec = make_segment_codec(name, Cut(1024, 64), 128, torch.bfloat16)
    plane = empty(N, 8, 128, dtype=torch.bfloat16)
    table = LayerTable((plane, plane), empty(32, 2, dtype=torch.int64), empty(32), 16)
    encoded, fits = empty(32, 128, codec.segment_bytes), empty(32, 128, codec.flags)
    slots = empty(128 * 64, dtype=torch.int64)
    launch = codec.encode_launch((plane, plane), slots, encoded, None, 0, fits, table)
    assert launch.grid == (2 * COPY_PROGRAMS,)
    assert launch.arguments["parts"] == fits.numel() >= 8192


@pytest.mark.parametrize("processors", [2, 4, 7, 40, 56, 108, 132, 142])
def test_a_copy_holds_at_most_a_quarter_of_the_multiprocessors(
    processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if each program has one of its own."""
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    copy_programs.cache_clear()
    try:
        found = copy_programs(torch.device("cuda", 0))
    finally:
        copy_programs.cache_clear()
    assert found == max(1, min(processors // 4, COPY_PROGRAMS))


def test_16_bytes_at_once_are_said_to_be_there_only_where_addresses_are() -> None:
    room = torch.zeros(4096, dtype=torch.uint8)
    ids, memory = torch.tensor([1]), torch.zeros(2, 4096, dtype=torch.uint8)
    start = -room.data_ptr() % 16
    for shift, aligned in ((0, 16), (8, 8)):
        out = room[start + shift :][:1024].view(1, 1024)
        assert gather_launch(memory, ids, 1024, out).arguments["ALIGNED"] == aligned
    assert alignment(48, 4096) == 16
