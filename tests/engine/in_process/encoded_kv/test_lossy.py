"""K and V that are stored by a lossy codec: what comes back, and what is checked."""

import pytest
import torch

from tests.engine.in_process.encoded_kv.test_start import tried
from tests.kit.host import LAYERS, PAGE, Host, bits, checked, compare_all, kv_pool, slots_of

KINDS = [(codec, dtype) for codec in ("int8", "fp8") for dtype in (torch.bfloat16, torch.float16)]


def by_reference(server: Host, *pages: int) -> torch.Tensor:
    """K and V of pages as the codec's reference brings them back, as :func:`bits` has them."""
    buffers = zip(server.device.k_buffer, server.device.v_buffer, strict=True)
    held = [[plane[slots_of(*pages)] for plane in kv] for kv in buffers]
    back, _ = server.kv.through_codec(server.pool.page_layout, held)
    return torch.stack([kv[part].view(torch.int16) for part in (0, 1) for kv in back])


@pytest.mark.parametrize(("codec", "dtype"), KINDS)
def test_pages_come_back_as_the_reference_decodes_them(codec: str, dtype: torch.dtype) -> None:
    server = Host(codec=codec, dtype=dtype)
    for planes in (server.device.k_buffer, server.device.v_buffer):
        for plane in planes:
            plane.mul_(torch.randn(plane.shape[1:]).exp())
            plane.mul_(torch.randn(len(plane), 1, 1).exp())
    checks, lost = checked(server)
    want = by_reference(server, 1, 3)
    assert not torch.equal(want, bits(server.device, 1, 3))
    host = server.backed_up(1, 3)
    compare_all(checks)
    assert torch.equal(server.load(host, 7, 5), want)
    compare_all(checks)
    assert not checks._waiting
    assert lost == [] and server.lost(host) == [False, False]


@pytest.mark.parametrize(("codec", "used"), [("int8", "none"), ("fp8", "fp8"), ("exp4", "exp4")])
def test_a_change_that_is_too_large(
    codec: str, used: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One token stands out: int8 rounds away what the others have in its channels."""
    device = kv_pool()
    device.k_buffer[1][2 * PAGE + 3] *= 100
    with caplog.at_level("WARNING", "hcache"):
        assert tried(device, codec) == used
    said = "codec 'int8' is not used, K and V are stored as they are (codec 'none'): it changes K "
    assert (said + "of layer 1 by" in caplog.text) == (used == "none")
    assert bool(caplog.text) == (used == "none")


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_codec_that_cannot_hold_it_is_refused(
    codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = kv_pool()
    device.k_buffer[LAYERS - 1][2 * PAGE + 3, 1, 2] = float("inf")
    with caplog.at_level("WARNING", "hcache"):
        assert tried(device, codec) == "none"
    assert "(codec 'none'): it cannot hold K and V of layer 1" in caplog.text
