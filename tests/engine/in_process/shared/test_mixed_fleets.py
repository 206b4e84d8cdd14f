"""Servers that are not alike, over one L3: equal pages are shared, and no other one is read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hcache_backend.sglang import runtime as runtime_module
from hcache_backend.sglang.runtime import Runtime, Weights
from tests.engine.in_process.shared.machines import Machine
from tests.engine.in_process.storage_config import unconfigured_runtime
from tests.engine.in_process.test_storage import KEYS


def other_device(runtime: Runtime) -> None:
    """What SGLang's runner says of it."""
    runtime.runner.device, runtime.runner.gpu_id = "cuda", 3
    runtime.runner.model_config.model_path = "a path on another machine"


def other_format(runtime: Runtime) -> None:
    runtime_module.FORMAT_VERSION += 1


def other_dtype(runtime: Runtime) -> None:
    runtime.runner.dtype = torch.float16


def other_kv_dtype(runtime: Runtime) -> None:
    runtime.runner.kv_cache_dtype = torch.float8_e4m3fn


def other_page_size(runtime: Runtime) -> None:
    runtime.runner.server_args.page_size *= 2


def other_settings(runtime: Runtime) -> None:
    settings = {"hidden_size": 8, "rope_theta": 1e6}
    runtime.runner.model_config.hf_config.to_dict = lambda: settings


def other_weights(runtime: Runtime) -> None:
    runtime.weights = Weights(b"v" * 16)


@pytest.mark.parametrize(
    ("differs", "shared_pages"),
    [
        (other_device, 3),
        (other_format, 0),
        (other_dtype, 0),
        (other_kv_dtype, 0),
        (other_page_size, 0),
        (other_settings, 0),
        (other_weights, 0),
    ],
)
def test_equal_pages_are_shared_and_no_other_one_is_read(
    differs: Callable[[Runtime], None],
    shared_pages: int,
    machine: Callable[..., Machine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime_module, "FORMAT_VERSION", runtime_module.FORMAT_VERSION)
    given = machine("first").share(0, 1, 2)
    other: Any = unconfigured_runtime()
    differs(other)
    monkeypatch.setattr(runtime_module, "_runtime", other)
    second = machine("second")
    assert second.storage.batch_exists(KEYS[:3]) == shared_pages
    assert second.read(0, 1, 2) == [bool(shared_pages)] * 3
    assert torch.equal(second.pool.data[:, :3], given) == bool(shared_pages)
