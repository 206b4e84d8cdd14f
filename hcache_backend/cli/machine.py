"""What SGLang needs in order to serve on this machine: a GPU, or the CPU engine of a checkout."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from hcache_backend.engine.startup.versions import sglang_version
from hcache_backend.partition.profile import processor_name

_CPU_ENGINE = Path("tests") / "cpu_engine"


class MachineError(RuntimeError):
    """SGLang cannot serve here; one line that says what is missing."""


@dataclass(frozen=True)
class Machine:
    """Where a command's servers run.

    Attributes:
        device: ``cuda`` or ``cpu``.
        name: The GPU's or the processor's name.
        sglang: Version of SGLang.
        arguments: What every ``sglang.launch_server`` needs here.
        environment: Variables that its process needs.
    """

    device: str
    name: str
    sglang: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def launch_command(self, model: Path) -> list[str]:
        """``sglang.launch_server`` for ``model`` on this machine, without other options."""
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        return [*command, *self.arguments]


def find_machine() -> Machine:
    """The GPU when there is one, else the CPU engine, ready to use.

    Raises:
        MachineError: SGLang is not installed, or there is neither a GPU nor a checkout.
    """
    if find_spec("sglang") is None:
        raise MachineError(
            "SGLang is not installed in this Python: run `make setup` in a checkout, or install "
            "sglang beside hcache-backend"
        )
    import torch

    if torch.cuda.is_available():
        return Machine(
            device="cuda",
            name=torch.cuda.get_device_name(),
            sglang=sglang_version(),
            arguments=(),
        )
    return _cpu_machine(Path(__file__).resolve().parents[2] / _CPU_ENGINE)


def _cpu_machine(engine: Path) -> Machine:
    if not (engine / "hcache_cpu_engine").is_dir():
        raise MachineError(
            "no GPU was found, and the CPU engine is only part of a checkout of the repository: "
            "clone it and run `make demo` there"
        )
    if str(engine) not in sys.path:
        sys.path.insert(0, str(engine))
    cpu_engine = importlib.import_module("hcache_cpu_engine")
    cpu_engine.stub_torchvision()
    cpu_engine.warm_extensions()
    return Machine(
        device="cpu",
        name=processor_name(),
        sglang=sglang_version(),
        arguments=(
            *("--device", "cpu", "--mem-fraction-static", "0.1"),
            *("--disable-cuda-graph", "--disable-overlap-schedule"),
        ),
        environment={**cpu_engine.cpu_engine_env(), "HCACHE_CPU_ENGINE_FORK": "1"},
    )
